"""What a run is: the part of a TOML file that belongs to the scheduler once it is submitted.

These Structs are the TOML schema, the body of ``RunSubmit`` and a row in the scheduler's store.
In a file unknown keys are refused; on the wire they are ignored like everywhere else.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True):
    """One policy of a run. ``model`` is a folder on the trainer's host; ``settings`` belong to
    the named trainer, which validates them."""

    model: str
    trained: bool = True
    trainer: Literal["torch", "numpy"] = "torch"
    steps: Positive = 100
    batch_groups: Positive = 32
    max_policy_lag: NotNegative = 4
    checkpoint_every: Positive = 20
    settings: dict[str, Any] = {}


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A source of items. ``reasoning-gym`` takes ``dataset`` and ``settings`` and brings its own
    verifier; ``jsonl`` takes ``path`` and scores with ``reward``. One item in ``held_out_one_in``
    (by a hash of its prompt) is never trained on, so both parts are disjoint by construction."""

    source: Literal["reasoning-gym", "jsonl"]
    dataset: str = ""
    settings: dict[str, Any] = {}
    path: str = ""
    reward: Literal["verifier", "exact", "math-verify"] = "verifier"
    held_out_one_in: Annotated[int, Meta(ge=2)] = 5


class WorkflowSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How an item becomes sequences. ``reference`` names a shipped workflow or
    ``module:function``; ``policies`` are the names it generates with."""

    reference: str = "single_turn"
    policies: tuple[str, ...]
    group_size: Positive = 8
    max_new_tokens: Positive = 64
    temperature: Annotated[float, Meta(ge=0.0)] = 1.0
    settings: dict[str, Any] = {}


class EvaluationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Greedy accuracy on held-out items, pinned to one version: before training, every so many
    versions (0 = never in between) and after the last step."""

    items: Positive = 1024
    every_versions: NotNegative = 0
    items_between: Positive = 256
    items_per_job: Annotated[int, Meta(ge=1, le=256)] = 64


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One training effort."""

    name: str
    seed: NotNegative = 0
    policies: dict[str, PolicySpec]
    task: TaskSpec
    workflow: WorkflowSpec
    evaluation: EvaluationSpec | None = None
    max_attempts: Annotated[int, Meta(ge=1, le=100)] = 5
    max_groups: NotNegative = 0
