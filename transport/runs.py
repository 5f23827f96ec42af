"""What a run is: the part of a TOML file that belongs to the scheduler once it is submitted.

These Structs are the TOML schema, the body of ``RunSubmit`` and a row in the scheduler's store.
In a file unknown keys are refused; on the wire they are ignored like everywhere else.

What always holds: every number has an upper bound, and a run fits the messages that carry it whole
(``RunSubmit``, ``Welcome``) or in part (``LeaseOffer``), as does the ``BatchGrant`` of a batch.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from transport.errors import ConfigError

MAX_NUMBER = 10**9
MAX_TURNS = 64
"""How often a workflow of several turns may generate for one sequence."""

MAX_SETTINGS_BYTES = 16 * 1024
"""A workflow's settings travel with every lease."""

MAX_RUN_BYTES = 192 * 1024
"""A run travels in one control frame of 256 KiB."""

Positive = Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
NotNegative = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]


class RunTooLarge(ConfigError, ValueError):
    """It fits no message. A ValueError as well: msgspec adds to those where in a file it is."""


class AlgorithmSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A registered data function by ``name`` (shipped), or as ``module:function`` where the
    scheduler's configuration allows the module; ``settings`` belong to the function."""

    name: Annotated[str, Meta(max_length=200)]
    settings: dict[str, Any] = {}


class ReplaySpec(msgspec.Struct, frozen=True, kw_only=True):
    """Groups that are trained on again. ``ratio`` of a batch may be such groups, as far as there
    are any; the newest ``keep`` trained groups are kept for it, each used at most ``max_uses``
    times more; ``select`` names the function that chooses among them. A group older than
    ``max_policy_lag`` is never used again."""

    ratio: Annotated[float, Meta(ge=0.0, le=0.9)] = 0.0
    keep: Annotated[int, Meta(ge=1, le=4096)] = 256
    max_uses: Annotated[int, Meta(ge=1, le=100)] = 1
    select: AlgorithmSpec = AlgorithmSpec(name="latest")


class DataSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of a policy's groups before they are trained on. ``filters`` are asked in order,
    the first one that objects ends the group's copy; ``order`` is which buffered groups go first:
    those that become unusable soonest (``edf``), or those that came first (``fifo``)."""

    filters: Annotated[tuple[AlgorithmSpec, ...], Meta(max_length=16)] = ()
    order: Literal["edf", "fifo"] = "edf"
    replay: ReplaySpec = ReplaySpec()


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True):
    """One policy of a run. ``model`` is a folder on the trainer's host; ``settings`` belong to
    the named trainer, which validates them."""

    model: str
    trained: bool = True
    trainer: Literal["torch", "numpy", "emulated"] = "torch"
    steps: Positive = 100
    batch_groups: Annotated[int, Meta(ge=1, le=1024)] = 32
    max_policy_lag: Annotated[int, Meta(ge=0, le=10_000)] = 4
    checkpoint_every: Positive = 20
    settings: dict[str, Any] = {}
    data: DataSpec = DataSpec()


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A source of items. ``reasoning-gym`` takes ``dataset`` and ``settings`` and brings its own
    verifier; ``jsonl`` takes ``path`` and scores with ``reward``. One item in ``held_out_one_in``
    (by a hash of its prompt) is never trained on, so both parts are disjoint by construction."""

    source: Literal["reasoning-gym", "jsonl"]
    dataset: str = ""
    settings: dict[str, Any] = {}
    path: str = ""
    reward: Literal["verifier", "exact", "math-verify"] = "verifier"
    held_out_one_in: Annotated[int, Meta(ge=2, le=1000)] = 5


class WorkflowSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How an item becomes sequences. ``reference`` names a shipped workflow or
    ``module:function``; ``policies`` are the names it generates with."""

    reference: str = "single_turn"
    policies: Annotated[tuple[str, ...], Meta(max_length=32)]
    group_size: Annotated[int, Meta(ge=1, le=1024)] = 8
    max_new_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 64
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    settings: dict[str, Any] = {}

    def __post_init__(self) -> None:
        """Raises RunTooLarge for settings that no lease has room for."""
        size_bytes = len(msgspec.msgpack.encode(self.settings))
        if size_bytes > MAX_SETTINGS_BYTES:
            raise RunTooLarge(
                f"settings: take {size_bytes} bytes, every lease has room for"
                f" {MAX_SETTINGS_BYTES}; make them shorter"
            )

    @property
    def max_sequence_tokens(self) -> int:
        """More tokens than this no sequence can have."""
        turns = 1 if self.reference == "single_turn" else MAX_TURNS
        return turns * self.max_new_tokens


class EvaluationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Greedy accuracy on held-out items, pinned to one version: before training, every so many
    versions (0 = never in between) and after the last step."""

    items: Positive = 1024
    every_versions: NotNegative = 0
    items_between: Positive = 256
    items_per_job: Annotated[int, Meta(ge=1, le=256)] = 64


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One training effort. Runs of equal ``priority`` get sequences in flight in proportion to
    their tenants' shares, and within a tenant to their own ``share``; a higher priority goes first.
    0 stands for no limit. ``budget_usd`` stops the run once boxes and egress have cost so much;
    ``hedge_share`` of the tokens may be spent on second attempts for the last groups of a batch;
    ``require`` maps labels of agents to the values that are allowed (all must match), for example
    ``region = ["eu-west-1"]`` for data that must stay there."""

    name: str
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    policies: Annotated[dict[str, PolicySpec], Meta(max_length=32)]
    task: TaskSpec
    workflow: WorkflowSpec
    evaluation: EvaluationSpec | None = None
    max_attempts: Annotated[int, Meta(ge=1, le=100)] = 5
    max_groups: NotNegative = 0
    tenant: str = "default"
    share: Annotated[float, Meta(gt=0.0, le=1e6)] = 1.0
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    max_sequences_in_flight: NotNegative = 0
    tokens_per_minute: NotNegative = 0
    budget_usd: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    hedge_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.03
    require: Annotated[dict[str, tuple[str, ...]], Meta(max_length=64)] = {}

    def __post_init__(self) -> None:
        """Raises RunTooLarge for a run that is too large for one message."""
        size_bytes = len(msgspec.msgpack.encode(self))
        if size_bytes > MAX_RUN_BYTES:
            raise RunTooLarge(
                f"the run takes {size_bytes} bytes, a message has room for {MAX_RUN_BYTES};"
                " make settings and texts shorter"
            )
