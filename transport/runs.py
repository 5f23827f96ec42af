"""What a run is: the part of a TOML file that belongs to the scheduler once it is submitted.

These Structs are the TOML schema, the body of ``RunSubmit`` and a row in the scheduler's store.
In a file unknown keys are refused; on the wire they are ignored like everywhere else.

What always holds: every number has an upper bound, and a run fits the messages that carry it whole
(``RunSubmit``, ``Welcome``) or in part (``LeaseOffer``), as does the ``BatchGrant`` of a batch.
"""

import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from transport.errors import ConfigError

MAX_NUMBER = 10**9
MAX_TURNS = 64
"""How often a workflow of several turns may generate for one sequence."""

MAX_ROLLOUTS = 16
"""How many sequences a workflow may return for one sibling of a group."""

MAX_SETTINGS_BYTES = 16 * 1024
"""A workflow's settings travel with every lease."""

MAX_TEMPLATE_BYTES = 1024
"""A policy's arguments of its chat template travel with every lease, too."""

MAX_TEMPLATE_DEPTH = 4
"""Tables and lists within each other in such an argument."""

TEMPLATE_OWN = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    )
)
"""What a chat template is given otherwise, or the function that applies it."""

MAX_INSTRUCTION_BYTES = 4096

AnswerForm = Literal["whole", "tags", "boxed", "last-number"]

MAX_RUN_BYTES = 192 * 1024
"""A run travels in one control frame of 256 KiB."""

MAX_EVALUATIONS = 16
"""Tables ``[evaluations.NAME]`` of a run."""

MAX_SAMPLES = 128
"""Answers per item of an evaluation."""

HELD_OUT = "held-out"
"""The name of the evaluation that ``[evaluation]`` describes."""

Positive = Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
NotNegative = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]


class RunTooLarge(ConfigError, ValueError):
    """It fits no message. A ValueError as well: msgspec adds to those where in a file it is."""


def _check_settings(settings: dict[str, Any] | None) -> None:
    size_bytes = len(msgspec.msgpack.encode(settings))
    if size_bytes > MAX_SETTINGS_BYTES:
        raise RunTooLarge(
            f"settings: take {size_bytes} bytes, every lease has room for"
            f" {MAX_SETTINGS_BYTES}; make them shorter"
        )


def template_fault(arguments: dict[str, Any]) -> str:
    """What is wrong with a policy's arguments of its chat template, beginning with ``:`` or with
    the key's ``.NAME:``, or nothing."""
    for name, value in arguments.items():
        if not name.isidentifier():
            return f".{name}: is no name of a template's variable; use letters, digits and _"
        if name in TEMPLATE_OWN:
            return f".{name}: is given by the agent itself; remove it"
        if not _is_json(value, MAX_TEMPLATE_DEPTH):
            return (
                f".{name}: must be a truth value, number or text, or lists and tables of these, at"
                f" most {MAX_TEMPLATE_DEPTH} within each other"
            )
    size_bytes = len(msgspec.msgpack.encode(arguments))
    if size_bytes > MAX_TEMPLATE_BYTES:
        return f": takes {size_bytes} bytes, at most {MAX_TEMPLATE_BYTES}; make it shorter"
    return ""


def _is_json(value: object, depth: int) -> bool:
    match value:
        case dict():
            keys = all(isinstance(key, str) for key in value)
            return depth > 0 and keys and all(_is_json(each, depth - 1) for each in value.values())
        case list() | tuple():
            return depth > 0 and all(_is_json(each, depth - 1) for each in value)
        case float():
            return math.isfinite(value)
        case int():
            return -(2**63) <= value < 2**64  # what MessagePack takes
        case _:
            return value is None or isinstance(value, str)


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
    the named trainer, which validates them. ``chat_template_kwargs`` are further arguments of its
    chat template, wherever agents apply it: with ``{ enable_thinking = false }`` Qwen3 answers
    without thinking first."""

    model: str
    trained: bool = True
    trainer: Literal["torch", "numpy", "emulated"] = "torch"
    steps: Positive = 100
    batch_groups: Annotated[int, Meta(ge=1, le=1024)] = 32
    max_policy_lag: Annotated[int, Meta(ge=0, le=10_000)] = 4
    checkpoint_every: Positive = 20
    settings: dict[str, Any] = {}
    data: DataSpec = DataSpec()
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def publishes_adapter(self) -> bool:
        """Whether its versions are adapters, which only agents can have that have ``model``; its
        trainer has the last word on whether the settings are right."""
        lora = self.settings.get("lora")
        adapter = isinstance(lora, dict) and lora.get("publish") == "adapter"
        return adapter and self.trainer == "torch"


class CodeReward(msgspec.Struct, frozen=True, kw_only=True):
    """How the reward ``code`` runs an item's tests: ``share`` gives the part of them that is passed
    instead of 1 for all and 0 otherwise; ``time_limit_s`` is for each test whose item says none,
    ``memory_bytes`` for a process of the program."""

    share: bool = False
    time_limit_s: Annotated[float, Meta(gt=0.0, le=60.0)] = 5.0
    memory_bytes: Annotated[int, Meta(ge=64 * 2**20, le=64 * 2**30)] = 512 * 2**20


class SourceFields(msgspec.Struct, frozen=True, kw_only=True):
    """What any source of items has; see ``TaskSpec``. ``answer`` is the part of a response that the
    rewards ``verifier`` and ``exact`` look at: all of it (``whole``), what is in the last
    ``<answer>`` tags, in the last ``\\boxed{}``, or the last number; a response without one gets 0.
    ``instruction`` is put behind each prompt, after an empty line, to ask for that form."""

    dataset: str = ""
    path: str = ""
    function: Annotated[str, Meta(max_length=200)] = ""
    settings: dict[str, Any] = {}
    reward: Literal["verifier", "exact", "math-verify", "code"] = "verifier"
    code: CodeReward = CodeReward()
    answer: AnswerForm = "whole"
    instruction: str = ""


class PartSpec(SourceFields, frozen=True, kw_only=True):
    """One part of a mixture: a source, and its ``weight`` beside those of the other parts. Its
    items belong to the task ``family`` of that name (empty: the data set, the file's name without
    its ending, or the function); statistics and estimates are kept by family."""

    source: Literal["reasoning-gym", "jsonl", "python"]
    weight: Annotated[float, Meta(gt=0.0, le=1e6)] = 1.0
    family: Annotated[str, Meta(max_length=80)] = ""

    @property
    def name(self) -> str:
        """The family of its items."""
        if self.family or self.source == "reasoning-gym":
            return self.family or self.dataset
        if self.source == "jsonl":
            return self.path.rpartition("/")[2].rpartition(".")[0] or self.path
        return self.function.rpartition(":")[2]


class TaskSpec(SourceFields, frozen=True, kw_only=True):
    """A source of items. ``reasoning-gym`` takes ``dataset`` and ``settings`` and brings its own
    verifier; ``jsonl`` takes ``path``; ``python`` takes ``function`` (``module:function`` on the
    scheduler's host, of a module in ``scheduler.task_modules``) and calls it with a seed and
    ``settings``; the last two are scored with ``reward``. ``instruction`` is put behind each
    prompt, and ``answer`` says where in a response the verifier looks (docs/evaluation.md).
    ``mixture`` takes items from its ``parts`` in proportion to their weights. One item in
    ``held_out_one_in`` (by a hash of its prompt, the same for all parts) is never trained on, so
    both kinds of items are disjoint by construction."""

    source: Literal["reasoning-gym", "jsonl", "python", "mixture"]
    parts: Annotated[tuple[PartSpec, ...], Meta(max_length=32)] = ()
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
        _check_settings(self.settings)

    @property
    def max_sequence_tokens(self) -> int:
        """More tokens than this no sequence can have."""
        turns = 1 if self.reference == "single_turn" else MAX_TURNS
        return turns * self.max_new_tokens


class EvaluationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How good pinned versions are on items that are not trained on: before training, every
    ``every_versions`` versions (0: never in between, then with ``items_between`` items) and after
    the last step.

    Each item gets ``samples`` answers at ``temperature`` (0: greedy), of which those are right
    whose reward is at least ``accuracy_threshold``. The result is their share, avg@``samples``, and
    for the numbers k in ``pass_at`` (empty: powers of two) the probability that one of k answers is
    right. ``task`` is a data set of its own, all of it or only its held-out part (``split``);
    without it the run's held-out items are used. ``workflow`` with its ``settings``, and
    ``max_new_tokens``, are the run's where they are empty or 0. A job has ``items_per_job``
    sequences: with more ``samples`` it has fewer items."""

    items: Positive = 1024
    every_versions: NotNegative = 0
    items_between: Positive = 256
    items_per_job: Annotated[int, Meta(ge=1, le=256)] = 64
    at_start: bool = True
    at_end: bool = True
    task: TaskSpec | None = None
    split: Literal["all", "held-out"] = "all"
    workflow: Annotated[str, Meta(max_length=200)] = ""
    settings: dict[str, Any] | None = None
    max_new_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    samples: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] = 1
    pass_at: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=MAX_SAMPLES)], ...], Meta(max_length=8)
    ] = ()
    accuracy_threshold: Annotated[float, Meta(ge=-1e9, le=1e9)] = 1.0

    def __post_init__(self) -> None:
        """Raises RunTooLarge for settings that no lease has room for."""
        _check_settings(self.settings)

    def workflow_of(self, run: WorkflowSpec) -> WorkflowSpec:
        """How its items become sequences; a workflow of its own does not get the run's settings."""
        settings = run.settings if self.workflow in ("", run.reference) else {}
        return msgspec.structs.replace(
            run,
            reference=self.workflow or run.reference,
            group_size=self.samples,
            max_new_tokens=self.max_new_tokens or run.max_new_tokens,
            temperature=self.temperature,
            settings=settings if self.settings is None else self.settings,
        )

    def items_of_job(self) -> int:
        """How many items one job has at most."""
        return max(1, self.items_per_job // self.samples)

    def reported_k(self) -> tuple[int, ...]:
        """The k of the pass@k that are reported, ascending; none where every item has one answer,
        because pass@1 is the accuracy."""
        if self.samples == 1:
            return ()
        powers = (1 << n for n in range(self.samples.bit_length()))
        return tuple(sorted(set(self.pass_at or powers)))


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One training effort. Runs of equal ``priority`` get sequences in flight in proportion to
    their tenants' shares, and within a tenant to their own ``share``; a higher priority goes first.
    0 stands for no limit. ``budget_usd`` stops the run once boxes and egress have cost so much;
    ``hedge_share`` of the tokens may be spent on second attempts for the last groups of a batch;
    ``require`` maps labels of agents to the values that are allowed (all must match), for example
    ``region = ["eu-west-1"]`` for data that must stay there. ``mode`` sync is the loop that the
    others are compared with: one barrier per step (see ``scheduler.core.admission``). ``curators``
    are asked in order for each training item; the first one that objects has it skipped.
    Log-probabilities that an agent recorded for ``drift_tokens`` tokens may differ from the
    trainer's by ``max_drift`` nats a token (``scheduler.core.honesty``); of ``recheck_rewards`` of
    the training groups another agent finds the rewards again (``scheduler.core.rechecks``), one of
    ``recheck_by`` where agents are named there: their word decides."""

    name: str
    mode: Literal["async", "sync"] = "async"
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    policies: Annotated[dict[str, PolicySpec], Meta(max_length=32)]
    task: TaskSpec
    workflow: WorkflowSpec
    evaluation: EvaluationSpec | None = None
    evaluations: Annotated[dict[str, EvaluationSpec], Meta(max_length=MAX_EVALUATIONS)] = {}
    curators: Annotated[tuple[AlgorithmSpec, ...], Meta(max_length=16)] = ()
    max_attempts: Annotated[int, Meta(ge=1, le=100)] = 5
    max_groups: NotNegative = 0
    tenant: str = "default"
    share: Annotated[float, Meta(gt=0.0, le=1e6)] = 1.0
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    max_sequences_in_flight: NotNegative = 0
    tokens_per_minute: NotNegative = 0
    budget_usd: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    hedge_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.03
    max_drift: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.1
    drift_tokens: Positive = 1000
    recheck_rewards: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    recheck_by: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    require: Annotated[dict[str, tuple[str, ...]], Meta(max_length=64)] = {}

    def __post_init__(self) -> None:
        """Raises RunTooLarge for a run that is too large for one message."""
        size_bytes = len(msgspec.msgpack.encode(self))
        if size_bytes > MAX_RUN_BYTES:
            raise RunTooLarge(
                f"the run takes {size_bytes} bytes, a message has room for {MAX_RUN_BYTES};"
                " make settings and texts shorter"
            )

    def all_evaluations(self) -> dict[str, EvaluationSpec]:
        """Every evaluation by name."""
        first = {} if self.evaluation is None else {HELD_OUT: self.evaluation}
        return {**first, **self.evaluations}
