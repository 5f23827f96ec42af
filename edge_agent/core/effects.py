"""What the edge agent's core wants done: imperative, frozen; the order in a list is meaningful.

An effect that takes time reports back as an event: ``RunAttempt`` by ``GroupGenerated`` and
``GroupSpooled`` or by ``AttemptCrashed``; ``OpenCopy`` by ``CopyOpened``; ``FetchPlan`` by
``PlanStaged`` or ``StageFailed``; ``SwapWeights`` by ``WeightsSwapped`` or ``SwapFailed``;
``VerifyWeights`` by ``WeightsVerified`` or ``VerifyFailed``; ``DiscardCopy`` by ``CopyDiscarded``.
"""

import msgspec

from transport.ids import Fence
from transport.messages import GroupSummary, LeaseOffer, Message, Plane, WeightsPlan


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all effects."""


class ToScheduler(Effect, frozen=True, kw_only=True):
    message: Message


class ToTrajectoryLog(Effect, frozen=True, kw_only=True):
    """Send the spooled body of ``summary`` as a ``TrajectoryPut``."""

    summary: GroupSummary


class OfferBodies(Effect, frozen=True, kw_only=True):
    """Tell the log of these spooled bodies in a ``TrajectoryOffer``; it asks for their chunks."""

    summaries: tuple[GroupSummary, ...]


class ToWeightStore(Effect, frozen=True, kw_only=True):
    message: Message


class RemakeLink(Effect, frozen=True, kw_only=True):
    """Close this plane's link, with whatever is queued in it, and open a new one."""

    plane: Plane


class RunAttempt(Effect, frozen=True, kw_only=True):
    """Start generating; the attempt waited ``queued_s`` since it was accepted."""

    offer: LeaseOffer
    queued_s: float


class AbortAttempt(Effect, frozen=True, kw_only=True):
    """Stop a running attempt; nothing is reported back. Only ``attempt`` under ``fence``."""

    attempt: str
    fence: Fence


class DropSpooled(Effect, frozen=True, kw_only=True):
    """Delete this body from the spool."""

    attempt: str
    digest: str


class OpenCopy(Effect, frozen=True, kw_only=True):
    """Verify the copy on disk, if any, and load it into the engine."""

    policy: str


class FetchPlan(Effect, frozen=True, kw_only=True):
    """Fetch, verify and stage this plan beside the copy."""

    policy: str
    ticket: int
    plan: WeightsPlan


class CancelFetch(Effect, frozen=True, kw_only=True):
    """Stop the fetch under ``ticket`` and drop what it staged; nothing is reported back."""

    policy: str
    ticket: int


class SwapWeights(Effect, frozen=True, kw_only=True):
    """Bring the staged version into the engine and commit the copy."""

    policy: str
    ticket: int


class VerifyWeights(Effect, frozen=True, kw_only=True):
    """Look whether copy and engine still are what they should be, before anything else is done
    with the policy. ``rescan``: the whole copy against its digests. ``read_back``: some cells of
    the engine against the copy."""

    policy: str
    ticket: int
    rescan: bool
    read_back: bool


class DiscardCopy(Effect, frozen=True, kw_only=True):
    """Delete the copy of this policy and everything staged for it. ``unload``: free the engine's
    memory as well; nothing that runs uses the policy."""

    policy: str
    unload: bool = False


class SendLog(Effect, frozen=True, kw_only=True):
    """Answer an ``AgentLogRequest`` with the last ``lines`` lines of the log, those about attempts
    of ``run`` only unless it is empty."""

    request: int
    run: str
    lines: int


class Exit(Effect, frozen=True, kw_only=True):
    """The agent is done: close the links and end the process with this status."""

    reason: str
    status: int
