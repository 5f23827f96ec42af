"""Control plane: trainers and the scheduler."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from transport.messages.base import Count, Finite, Id, Message

MAX_DRIFTS = 1024
"""In one report: a batch has no more groups."""


class BatchRequest(Message, frozen=True, kw_only=True):
    """The trainer wants ``groups`` groups for ``step``; it now holds ``head_version`` of step
    ``step - 1``. Standing until granted; asking again is harmless."""

    policy: Id
    step: Count
    groups: Count
    head_version: Count


class GroupRef(msgspec.Struct, frozen=True, kw_only=True):
    """A granted group: where its body is and how old its oldest token is. ``replay``: the lineage
    was trained on it before, and is to be again."""

    job: str
    digest: str
    size_bytes: int
    policy_lag: int
    replay: bool = False


class BatchGrant(Message, frozen=True, kw_only=True):
    """The groups of ``step``. Asking again for the same step gives the same groups."""

    policy: str
    step: int
    groups: tuple[GroupRef, ...]


class GroupUnusable(Message, frozen=True, kw_only=True):
    """A granted group cannot be trained on (body missing, or other than its summary); the
    scheduler grants the step again without it."""

    policy: Id
    step: Count
    job: Id
    code: str


class GroupDrift(msgspec.Struct, frozen=True, kw_only=True):
    """How far the recorded log-probabilities of a group are from those that the trainer's weights
    give, over ``tokens`` of which ``version`` drew the oldest: the mean absolute ``difference`` and
    the mean ``kl``, in nats a token. ``moved`` of the difference may be the trainer's own doing: so
    far the policy has come since."""

    job: Id
    version: Count
    tokens: Count
    difference: Finite
    kl: Finite
    moved: Finite = 0.0


class StepReport(Message, frozen=True, kw_only=True):
    """A step is done. ``version`` is the number under which its weights are being published;
    busy and waiting time are apart so that the scheduler can tell starvation from slowness.
    ``drifts`` are of groups drawn by the version that the trainer held before the step, ``older``
    of those that have tokens of an older one."""

    policy: Id
    step: Count
    version: Count
    busy_s: Finite
    waiting_s: Finite
    metrics: dict[str, float] = {}
    drifts: Annotated[tuple[GroupDrift, ...], Meta(max_length=MAX_DRIFTS)] = ()
    older: Annotated[tuple[GroupDrift, ...], Meta(max_length=MAX_DRIFTS)] = ()


class CheckpointReport(Message, frozen=True, kw_only=True):
    """State of ``step`` is durable: groups taken up to it are never asked for again. ``final``
    says that the trainer has made its last step and exported the model."""

    policy: Id
    step: Count
    version: Count
    final: bool = False


class RunState(Message, frozen=True, kw_only=True):
    """Told to trainers when a run is paused, resumed or stopped."""

    run: str
    state: Literal["running", "paused", "stopping", "finished"]
