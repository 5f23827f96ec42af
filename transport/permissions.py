"""Who may say what, where: role x plane x message type.

What always holds: what is not written here is forbidden; every message type of ``KINDS`` appears
on at least one plane (tested). The hub of a plane checks each message of a peer against the role
of the peer's key; a peer checks what it hears against the hub's role, ``HUB_ROLE[plane]``.

A relay's hub has a table of its own, ``AT_RELAY``: what it may say to agents it must not say to the
weight store.

Being allowed to send a kind is not being allowed to speak for others: which policy or attempt a
message is about is checked against the key's own policy or leases by whoever handles it.
"""

from transport.envelope import KIND_OF
from transport.messages import (
    AgentLog,
    AgentLogRequest,
    AgentLogs,
    AgentLogsRequest,
    AgentOrder,
    AttemptFailed,
    BatchGrant,
    BatchRequest,
    BodiesGone,
    BodiesReleased,
    Body,
    BodyRequest,
    CheckpointReport,
    Chunk,
    ChunkRequest,
    CommandReply,
    DeadLetters,
    DeadLettersRequest,
    DrainOrder,
    EnrolReply,
    EnrolRequest,
    Events,
    EventsRequest,
    ExplainRequest,
    Explanation,
    Goodbye,
    GroupUnusable,
    Heartbeat,
    HeartbeatReply,
    Hello,
    HelloRequired,
    HostedPolicies,
    JobCancel,
    JobReceipts,
    JobReplay,
    JobSubmit,
    LeaseOffer,
    LeaseOffers,
    LeaseRecall,
    LeaseReplies,
    LeaseReply,
    LeaseRevoke,
    Message,
    NextServerKey,
    PartialAck,
    PartialOffer,
    PartialPut,
    PartialStored,
    Ping,
    Plane,
    Pong,
    Probe,
    ProbeReply,
    Refuse,
    Results,
    ResultsRequest,
    Role,
    RunCommand,
    RunState,
    RunSubmit,
    StatusReply,
    StatusRequest,
    StepReport,
    SummariesAccepted,
    TrajectoriesStored,
    TrajectoryAck,
    TrajectoryAcks,
    TrajectoryOffer,
    TrajectoryPut,
    TrajectoryRefused,
    VersionAccepted,
    VersionDurable,
    VersionOffer,
    VersionRejected,
    VersionServing,
    VersionStored,
    WeightsPlan,
    WeightsRequest,
    Welcome,
)

HUB_ROLE: dict[Plane, Role] = {
    Plane.CONTROL: Role.SCHEDULER,
    Plane.TRAJECTORIES: Role.SERVICE,
    Plane.WEIGHTS: Role.SERVICE,
    Plane.ENROLMENT: Role.SCHEDULER,
}
"""Whose messages the hub end of a plane sends."""

PERMISSIONS: dict[tuple[Role, Plane], frozenset[type[Message]]] = {
    (Role.AGENT, Plane.CONTROL): frozenset(
        {
            Hello,
            Goodbye,
            Heartbeat,
            LeaseReply,
            LeaseReplies,
            AttemptFailed,
            VersionServing,
            AgentLog,
            Probe,
        }
    ),
    (Role.TRAINER, Plane.CONTROL): frozenset(
        {Hello, Goodbye, Ping, BatchRequest, GroupUnusable, StepReport, CheckpointReport}
    ),
    (Role.SERVICE, Plane.CONTROL): frozenset(
        {Hello, Goodbye, Ping, TrajectoriesStored, PartialStored, BodiesGone, VersionStored}
    ),
    (Role.OPERATOR, Plane.CONTROL): frozenset(
        {
            RunSubmit,
            RunCommand,
            StatusRequest,
            ExplainRequest,
            EventsRequest,
            AgentOrder,
            AgentLogsRequest,
            DeadLettersRequest,
            JobReplay,
        }
    ),
    (Role.VIEWER, Plane.CONTROL): frozenset({ExplainRequest, EventsRequest, StatusRequest}),
    (Role.SUBMITTER, Plane.CONTROL): frozenset({JobSubmit, JobCancel, ResultsRequest}),
    (Role.SCHEDULER, Plane.CONTROL): frozenset(
        {
            Welcome,
            Refuse,
            HelloRequired,
            Pong,
            HeartbeatReply,
            HostedPolicies,
            LeaseOffer,
            LeaseOffers,
            LeaseRecall,
            LeaseRevoke,
            DrainOrder,
            AgentLogRequest,
            BatchGrant,
            RunState,
            SummariesAccepted,
            BodiesReleased,
            VersionAccepted,
            CommandReply,
            StatusReply,
            JobReceipts,
            Results,
            Explanation,
            Events,
            DeadLetters,
            AgentLogs,
            ProbeReply,
            NextServerKey,
        }
    ),
    # Whoever enrols has no role yet, only a token for that of an agent.
    (Role.AGENT, Plane.ENROLMENT): frozenset({EnrolRequest}),
    (Role.SCHEDULER, Plane.ENROLMENT): frozenset({EnrolReply, Refuse}),
    # An agent's request is answered with finished turns, and with results that are rechecked
    # (``scheduler.partials``).
    (Role.AGENT, Plane.TRAJECTORIES): frozenset(
        {TrajectoryPut, TrajectoryOffer, PartialPut, PartialOffer, Chunk, BodyRequest}
    ),
    (Role.TRAINER, Plane.TRAJECTORIES): frozenset({BodyRequest}),
    (Role.SUBMITTER, Plane.TRAJECTORIES): frozenset({BodyRequest}),
    (Role.SERVICE, Plane.TRAJECTORIES): frozenset(
        {
            TrajectoryAck,
            TrajectoryAcks,
            TrajectoryRefused,
            PartialAck,
            ChunkRequest,
            Body,
            Refuse,
        }
    ),
    (Role.AGENT, Plane.WEIGHTS): frozenset({WeightsRequest, ChunkRequest}),
    (Role.TRAINER, Plane.WEIGHTS): frozenset({VersionOffer, Chunk}),
    (Role.RELAY, Plane.WEIGHTS): frozenset({ChunkRequest}),
    (Role.SERVICE, Plane.WEIGHTS): frozenset(
        {VersionDurable, VersionRejected, WeightsPlan, ChunkRequest, Chunk, Refuse}
    ),
}

AT_RELAY: dict[Role, frozenset[type[Message]]] = {
    Role.AGENT: frozenset({ChunkRequest}),
    Role.RELAY: frozenset({Chunk, Refuse}),
}
"""Who may say what on the connections between agents and a relay, where the relay is the hub."""

_NOTHING: frozenset[type[Message]] = frozenset()


def may_send(role: Role, plane: Plane, message_type: type[Message]) -> bool:
    """Whether a key of ``role`` may send ``message_type`` on ``plane``."""
    return message_type in PERMISSIONS.get((role, plane), _NOTHING)


def unknown_to(kinds: bytes, role: Role) -> list[str]:
    """Messages of ``role`` that a peer does not know, by its ``Welcome.kinds``; nothing when that
    does not say."""
    allowed = (may for (sender, _), may in PERMISSIONS.items() if sender is role)
    said = frozenset[type[Message]]().union(*allowed)
    return sorted(kind.__name__ for kind in said if kinds and KIND_OF[kind] not in kinds)


def may_send_at_relay(role: Role, plane: Plane, message_type: type[Message]) -> bool:
    """The same for the connections of a relay's own hub."""
    return plane is Plane.WEIGHTS and message_type in AT_RELAY.get(role, _NOTHING)
