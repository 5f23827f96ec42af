"""Every message on the wire, one frozen Struct each; ``KINDS`` gives each its kind byte.

Rules: a new field has a default; a field or kind byte is never reused with a new meaning; unknown
fields are ignored. Messages are nouns. What a peer says of itself is bounded where it is decoded
(``Count``, ``Finite``, ``Id``), so that sums of it fit 64 bits and what is kept of it stays small;
of ``GroupSummary`` that is ``transport.trajectory.summary_fault``, because its sender is to hear
why. Peers' names are not in messages: the link's key says who speaks. ``fence`` is (scheduler term,
counter). Times are seconds, sizes bytes.

    control plane        agent, trainer, service, operator <-> rollout scheduler
    trajectories plane   agent, trainer                    <-> trajectory log
    weights plane        agent, trainer                    <-> weight store
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from transport.ids import Fence
from transport.runs import RunSpec
from transport.status import SchedulerStatus

PROTOCOL_VERSION = 1

MAX_COUNT = 2**53
MAX_ID_LENGTH = 200
"""Ids are made of names of up to 48 characters each (``transport.ids``)."""

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Finite = Annotated[float, Meta(ge=-1e15, le=1e15)]
"""Neither NaN nor infinite, and sums of it are not either."""
Id = Annotated[str, Meta(max_length=MAX_ID_LENGTH)]


class Plane(StrEnum):
    CONTROL = "control"
    TRAJECTORIES = "trajectories"
    WEIGHTS = "weights"


class Role(StrEnum):
    """What a key may do. ``SERVICE`` is the scheduler's own trajectory log and weight store."""

    AGENT = "agent"
    TRAINER = "trainer"
    SERVICE = "service"
    OPERATOR = "operator"
    VIEWER = "viewer"
    RELAY = "relay"
    SCHEDULER = "scheduler"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages."""


# ---- any plane ------------------------------------------------------------------------------


class VersionRef(msgspec.Struct, frozen=True, kw_only=True):
    """A policy version and the digest of its whole state."""

    version: Count
    digest: Id


class HeldAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that an agent holds: waiting or running, or finished and in its spool."""

    attempt: Id
    fence: Fence
    spooled: bool = False


class AgentInventory(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent can do and what it still holds from before."""

    slots: Count
    hardware: str
    engine: str
    workflows: dict[str, str]
    rewards: tuple[str, ...]
    held: tuple[HeldAttempt, ...] = ()
    versions: dict[str, VersionRef] = {}
    labels: dict[str, str] = {}


class TrainerInventory(msgspec.Struct, frozen=True, kw_only=True):
    """Where a trainer stands: its last durable checkpoint. ``checkpoint_step`` 0 with version 0
    is the initial model."""

    policy: Id
    checkpoint_step: Count
    checkpoint_version: Count


class Hello(Message, frozen=True, kw_only=True):
    """First message on the control plane. ``incarnation`` grows with every start of the peer."""

    role: Role
    incarnation: Count
    build: str
    protocol: Count = PROTOCOL_VERSION
    features: tuple[str, ...] = ()
    agent: AgentInventory | None = None
    trainer: TrainerInventory | None = None


class Welcome(Message, frozen=True, kw_only=True):
    """Answer to ``Hello``. ``policies`` are the policy ids that an agent is to host;
    a trainer gets its run, the highest version number ever published and whether to go on."""

    term: int
    heartbeat_s: float
    lost_after_s: float
    features: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    run: RunSpec | None = None
    highest_version: int = 0
    stopping: bool = False


class Refuse(Message, frozen=True, kw_only=True):
    """The peer may not join (now, when ``retry_s`` is set)."""

    code: str
    message: str
    retry_s: float | None = None


class HelloRequired(Message, frozen=True, kw_only=True):
    """We do not know who this is (we restarted): say ``Hello`` again."""


class Ping(Message, frozen=True, kw_only=True):
    """Sign of life of a trainer or service; ``sent_s`` is the sender's monotonic clock."""

    sequence: Count
    sent_s: Finite


class Pong(Message, frozen=True, kw_only=True):
    sequence: int
    sent_s: float


class Goodbye(Message, frozen=True, kw_only=True):
    """The peer leaves on purpose."""

    reason: str


# ---- control: agents -------------------------------------------------------------------------


class Heartbeat(Message, frozen=True, kw_only=True):
    """Sign of life of an agent; renews the lease of every attempt in ``held``. ``rtt_s`` is the
    agent's smoothed round trip as measured from earlier replies."""

    sequence: Count
    sent_s: Finite
    held: tuple[HeldAttempt, ...] = ()
    running_sequences: Count = 0
    waiting_sequences: Count = 0
    tokens_generated: Count = 0
    versions: dict[str, VersionRef] = {}
    rtt_s: Finite | None = None
    spool_bytes: Count = 0
    bytes_up: Count = 0
    bytes_down: Count = 0
    draining: bool = False


class HeartbeatReply(Message, frozen=True, kw_only=True):
    """Echo of ``sequence`` and ``sent_s``. ``unknown`` are held attempts that the scheduler wants
    no more: the agent aborts them and drops their spool."""

    sequence: int
    sent_s: float
    unknown: tuple[str, ...] = ()


class HostedPolicies(Message, frozen=True, kw_only=True):
    """The policies an agent is to host from now on."""

    policies: tuple[str, ...]


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One task entry. ``meta`` is JSON that its verifier wants to see again."""

    index: int
    prompt: str
    answer: str
    meta: str = ""


class RewardSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a response is scored: a verifier of the data set, exact match or math-verify."""

    name: Literal["reasoning-gym", "exact", "math-verify"]
    dataset: str = ""


class LeaseOffer(Message, frozen=True, kw_only=True):
    """One attempt of a job. Training jobs hold one item and ``group_size`` siblings, evaluations
    several items with one sequence each. ``pinned`` policies must be used at exactly that version,
    ``at_least`` at that or a descendant."""

    attempt: str
    fence: Fence
    job: str
    kind: Literal["train", "eval"]
    items: tuple[Item, ...]
    group_size: int
    workflow: str
    settings: dict[str, Any]
    policies: dict[str, str]
    reward: RewardSpec
    max_new_tokens: int
    temperature: float
    seed: int
    lease_s: float
    pinned: dict[str, int] = {}


class LeaseReply(Message, frozen=True, kw_only=True):
    """``accepted`` false gives the reason (``draining``, ``full``, ``spool_full``,
    ``workflow_unknown``, ``version_passed`` ...)."""

    attempt: Id
    fence: Fence
    accepted: bool
    reason: str = ""


class LeaseRevoke(Message, frozen=True, kw_only=True):
    """Stop this attempt and forget it."""

    attempt: str
    fence: Fence
    reason: str


class AttemptFailed(Message, frozen=True, kw_only=True):
    """The attempt is over without a result; ``code`` is stable, ``detail`` is for people."""

    attempt: Id
    fence: Fence
    code: str
    detail: str = ""


class VersionServing(Message, frozen=True, kw_only=True):
    """The agent now generates with this version: how it got there, for the estimators."""

    policy: Id
    version: Count
    digest: Id
    pause_s: Finite
    fetched_bytes: Count = 0
    fetch_s: Finite = 0.0


# ---- control: trainers -----------------------------------------------------------------------


class BatchRequest(Message, frozen=True, kw_only=True):
    """The trainer wants ``groups`` groups for ``step``; it now holds ``head_version`` of step
    ``step - 1``. Standing until granted; asking again is harmless."""

    policy: Id
    step: Count
    groups: Count
    head_version: Count


class GroupRef(msgspec.Struct, frozen=True, kw_only=True):
    """A granted group: where its body is and how old its oldest token is."""

    job: str
    digest: str
    size_bytes: int
    policy_lag: int


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


class StepReport(Message, frozen=True, kw_only=True):
    """A step is done. ``version`` is the number under which its weights are being published;
    busy and waiting time are apart so that the scheduler can tell starvation from slowness."""

    policy: Id
    step: Count
    version: Count
    busy_s: Finite
    waiting_s: Finite
    metrics: dict[str, float] = {}


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


# ---- control: services -----------------------------------------------------------------------


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All that the scheduler sees of a group's result. ``versions`` gives per policy id the
    oldest and newest version that drew a token; ``agent`` is filled in by the trajectory log
    from the key of the link."""

    attempt: str
    fence: Fence
    job: str
    digest: str
    size_bytes: int
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    versions: dict[str, tuple[int, int]]
    prompt_tokens: int
    queued_s: float
    generating_s: float
    agent: str = ""


class TrajectoriesStored(Message, frozen=True, kw_only=True):
    """Durable bodies, announced until the scheduler has accepted each digest."""

    summaries: tuple[GroupSummary, ...]


class SummariesAccepted(Message, frozen=True, kw_only=True):
    """The scheduler has these summaries in its own store."""

    digests: tuple[str, ...]


class BodiesReleased(Message, frozen=True, kw_only=True):
    """No policy needs these bodies any more. Repeated until ``BodiesGone``."""

    digests: tuple[str, ...]


class BodiesGone(Message, frozen=True, kw_only=True):
    digests: tuple[Id, ...]


class VersionStored(Message, frozen=True, kw_only=True):
    """A version is durable in the weight store; announced until ``VersionAccepted``."""

    policy: Id
    version: Count
    parent: Count | None
    step: Count
    digest: Id
    delta_bytes: Count
    full_bytes: Count


class VersionAccepted(Message, frozen=True, kw_only=True):
    policy: str
    version: int


# ---- control: operators ----------------------------------------------------------------------


class RunSubmit(Message, frozen=True, kw_only=True):
    """Submitting the same run again is harmless; another one under the same name is refused."""

    run: RunSpec


class RunCommand(Message, frozen=True, kw_only=True):
    run: str
    command: Literal["pause", "resume", "stop"]


class CommandReply(Message, frozen=True, kw_only=True):
    ok: bool
    code: str = ""
    message: str = ""


class StatusRequest(Message, frozen=True, kw_only=True):
    pass


class StatusReply(Message, frozen=True, kw_only=True):
    status: SchedulerStatus


# ---- trajectories plane ----------------------------------------------------------------------


class TrajectoryPut(Message, frozen=True, kw_only=True):
    """Payload: one frame, the packed trajectory whose digest is in the summary."""

    summary: GroupSummary


class TrajectoryAck(Message, frozen=True, kw_only=True):
    """The body is durable; the agent may forget it."""

    attempt: str
    digest: str


class TrajectoryRefused(Message, frozen=True, kw_only=True):
    """The body will never be taken; the agent drops it and fails the attempt with ``code``."""

    attempt: str
    digest: str
    code: str
    message: str


class BodyRequest(Message, frozen=True, kw_only=True):
    digests: tuple[Id, ...]


class Body(Message, frozen=True, kw_only=True):
    """Payload: one frame, or none when ``found`` is false."""

    digest: str
    found: bool = True


# ---- weights plane ---------------------------------------------------------------------------


class VersionOffer(Message, frozen=True, kw_only=True):
    """A trainer has a new version; ``manifest`` is signed MessagePack (``transport.weights``).
    The store asks for the chunks that it lacks. Offered again until durable or refused."""

    manifest: bytes
    signature: bytes
    key_id: str


class VersionDurable(Message, frozen=True, kw_only=True):
    policy: str
    version: int


class VersionRejected(Message, frozen=True, kw_only=True):
    policy: str
    version: int
    code: str
    message: str


class WeightsRequest(Message, frozen=True, kw_only=True):
    """Standing request: send a plan as soon as there is anything beyond what the agent has.
    ``upto`` bounds the version (pinned work); None means the newest. With ``rate_bytes_s`` (what
    its link brings in, 0: unknown) and ``decode_cells_s`` the plan is the quickest one, else the
    one of fewest bytes."""

    policy: Id
    have_version: Count | None
    have_digest: Id = ""
    upto: Count | None = None
    rate_bytes_s: Finite = 0.0
    decode_cells_s: Finite = 0.0


class PlanStep(msgspec.Struct, frozen=True, kw_only=True):
    """One version on the way: its signed manifest and which of its files to fetch.

    A snapshot or composite that the weight store made itself comes as two steps: the trainer's
    signed manifest without files, then an unsigned one (empty ``signature`` and ``key_id``) that
    lists the store's files, for a composite with its base as parent. What they add up to is proved
    by the signed state digest.
    """

    manifest: bytes
    signature: bytes
    key_id: str
    files: tuple[str, ...]


class WeightsPlan(Message, frozen=True, kw_only=True):
    """The cheapest way from what the agent has to ``version``."""

    policy: str
    version: int
    steps: tuple[PlanStep, ...]


class ChunkRequest(Message, frozen=True, kw_only=True):
    """Chunks of a hash-addressed file; asked for by whoever receives the file. With
    ``part_bytes`` (64 KiB to the chunk size, which it divides) an index is of such a part of the
    file. A relay, which knows no manifest, is also told what the chunk of each index must hash to
    and the file's measures; everybody else ignores these."""

    digest: Id
    indices: tuple[Count, ...]
    part_bytes: Count = 0
    chunk_digests: tuple[Annotated[bytes, Meta(max_length=32)], ...] = ()
    chunk_bytes: Count = 0
    file_bytes: Count = 0


class Chunk(Message, frozen=True, kw_only=True):
    """Payload: one frame with the bytes of the chunk, or of the part where the request had
    ``part_bytes``; none when ``found`` is false."""

    digest: Id
    index: Count
    found: bool = True
    part_bytes: Count = 0


KINDS: dict[int, type[Message]] = {
    0x01: Hello,
    0x02: Welcome,
    0x03: Refuse,
    0x04: HelloRequired,
    0x05: Ping,
    0x06: Pong,
    0x07: Goodbye,
    0x10: Heartbeat,
    0x11: HeartbeatReply,
    0x12: HostedPolicies,
    0x13: LeaseOffer,
    0x14: LeaseReply,
    0x15: LeaseRevoke,
    0x16: AttemptFailed,
    0x17: VersionServing,
    0x20: BatchRequest,
    0x21: BatchGrant,
    0x22: GroupUnusable,
    0x23: StepReport,
    0x24: CheckpointReport,
    0x25: RunState,
    0x30: TrajectoriesStored,
    0x31: SummariesAccepted,
    0x32: BodiesReleased,
    0x33: BodiesGone,
    0x34: VersionStored,
    0x35: VersionAccepted,
    0x40: RunSubmit,
    0x41: RunCommand,
    0x42: CommandReply,
    0x43: StatusRequest,
    0x44: StatusReply,
    0x50: TrajectoryPut,
    0x51: TrajectoryAck,
    0x52: TrajectoryRefused,
    0x53: BodyRequest,
    0x54: Body,
    0x60: VersionOffer,
    0x61: VersionDurable,
    0x62: VersionRejected,
    0x63: WeightsRequest,
    0x64: WeightsPlan,
    0x65: ChunkRequest,
    0x66: Chunk,
}
