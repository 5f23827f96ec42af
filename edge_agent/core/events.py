"""What the edge agent's core is told: past tense, frozen, small."""

import msgspec

from transport.ids import Fence
from transport.messages import GroupSummary, Message, Plane
from transport.status import GpuReading


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all events."""


class FromScheduler(Event, frozen=True, kw_only=True):
    """A message came over the control plane."""

    message: Message


class FromTrajectoryLog(Event, frozen=True, kw_only=True):
    """A message came over the trajectories plane."""

    message: Message


class FromWeightStore(Event, frozen=True, kw_only=True):
    """A message (other than a chunk) came over the weights plane."""

    message: Message


class SendFailed(Event, frozen=True, kw_only=True):
    """The link did not take this message (window full, nobody there): it was not sent."""

    plane: Plane
    message: Message


class LinkUp(Event, frozen=True, kw_only=True):
    """A link's connection is up: what was on the way over the last one may be lost, and the other
    end may be another process."""

    plane: Plane


class LinkDown(Event, frozen=True, kw_only=True):
    """A link is not connected (any more); it tries by itself, and ``LinkUp`` follows."""

    plane: Plane


class GroupGenerated(Event, frozen=True, kw_only=True):
    """The attempt drew its last token; scoring and packing go on, the weights are free to move."""

    attempt: str
    fence: Fence


class GroupSpooled(Event, frozen=True, kw_only=True):
    """The attempt's result is durable in the spool."""

    summary: GroupSummary


class BodyLost(Event, frozen=True, kw_only=True):
    """A spooled body cannot be read any more."""

    attempt: str
    digest: str
    code: str
    detail: str = ""


class AttemptCrashed(Event, frozen=True, kw_only=True):
    """The attempt ended without a result. ``code`` is stable, ``detail`` is for people."""

    attempt: str
    fence: Fence
    code: str
    detail: str = ""


class CopyOpened(Event, frozen=True, kw_only=True):
    """The copy of a policy found on disk is verified and in the engine; ``version`` None: there
    was none."""

    policy: str
    version: int | None
    digest: str = ""


class PlanStaged(Event, frozen=True, kw_only=True):
    """The plan that was fetched under ``ticket`` is complete and verified beside the copy."""

    policy: str
    ticket: int


class StageFailed(Event, frozen=True, kw_only=True):
    """Fetching or verifying the plan under ``ticket`` failed with an error's ``code``."""

    policy: str
    ticket: int
    code: str
    detail: str = ""


class PolicyLost(Event, frozen=True, kw_only=True):
    """What generated for a policy died, and its weights with it; the copy is on the disk."""

    policy: str


class WeightsSwapped(Event, frozen=True, kw_only=True):
    """The engine generates with the staged version and the copy is committed. ``rate_bytes_s`` and
    ``decode_cells_s`` are what this agent fetches and decodes in a second by now, 0 where that was
    not measured; ``full_digest`` says that the trainer signed the version's full digest, which the
    copy can be compared with."""

    policy: str
    ticket: int
    version: int
    digest: str
    pause_s: float
    fetched_bytes: int = 0
    fetch_s: float = 0.0
    rate_bytes_s: float = 0.0
    decode_cells_s: float = 0.0
    full_digest: bool = False


class SwapFailed(Event, frozen=True, kw_only=True):
    """The engine or the disk did not take the staged version: nobody knows what is in use."""

    policy: str
    ticket: int
    code: str
    detail: str = ""


class WeightsVerified(Event, frozen=True, kw_only=True):
    """Copy and engine are what they should be, as far as ``ticket`` asked."""

    policy: str
    ticket: int


class VerifyFailed(Event, frozen=True, kw_only=True):
    """Copy or engine hold other bits than they should, or could not be read."""

    policy: str
    ticket: int
    code: str
    detail: str = ""


class CopyDiscarded(Event, frozen=True, kw_only=True):
    """The copy of a policy is gone from the disk."""

    policy: str


class Measured(Event, frozen=True, kw_only=True):
    """Counters of the engine and the links since the start, for the next heartbeat, and what the
    wall clock shows now."""

    tokens_generated: int
    running_sequences: int
    waiting_sequences: int
    bytes_up: int
    bytes_down: int
    wall_s: float | None = None
    gpus: tuple[GpuReading, ...] = ()


class DrainRequested(Event, frozen=True, kw_only=True):
    """Finish or hand back what is held within ``deadline_s`` (None: the agent's own setting), then
    leave. A later request can only bring the end forward; 0 leaves at once."""

    reason: str
    deadline_s: float | None = None


class Tick(Event, frozen=True, kw_only=True):
    """``next_deadline`` has passed."""
