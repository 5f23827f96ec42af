"""Every message type, spelled out: who may send it on which plane, and nobody else."""

import pytest

from transport.envelope import KIND_OF
from transport.messages import (
    KINDS,
    KNOWN_KINDS,
    Message,
    PartialPut,
    Plane,
    Role,
    RunSubmit,
)
from transport.permissions import HUB_ROLE, PERMISSIONS, may_send, may_send_at_relay, unknown_to

C, T, W = Plane.CONTROL, Plane.TRAJECTORIES, Plane.WEIGHTS
AGENT, TRAINER, SERVICE = Role.AGENT, Role.TRAINER, Role.SERVICE
OPERATOR, VIEWER, SCHEDULER = Role.OPERATOR, Role.VIEWER, Role.SCHEDULER
RELAY, SUBMITTER = Role.RELAY, Role.SUBMITTER

MEANT: dict[str, set[tuple[Role, Plane]]] = {
    "Hello": {(AGENT, C), (TRAINER, C), (SERVICE, C)},
    "Welcome": {(SCHEDULER, C)},
    "Refuse": {(SCHEDULER, C), (SCHEDULER, Plane.ENROLMENT), (SERVICE, T), (SERVICE, W)},
    "HelloRequired": {(SCHEDULER, C)},
    "Ping": {(TRAINER, C), (SERVICE, C)},
    "Pong": {(SCHEDULER, C)},
    "Goodbye": {(AGENT, C), (TRAINER, C), (SERVICE, C)},
    "Heartbeat": {(AGENT, C)},
    "HeartbeatReply": {(SCHEDULER, C)},
    "HostedPolicies": {(SCHEDULER, C)},
    "EnrolRequest": {(AGENT, Plane.ENROLMENT)},
    "EnrolReply": {(SCHEDULER, Plane.ENROLMENT)},
    "Probe": {(AGENT, C)},
    "ProbeReply": {(SCHEDULER, C)},
    "NextServerKey": {(SCHEDULER, C)},
    "LeaseOffer": {(SCHEDULER, C)},
    "LeaseReply": {(AGENT, C)},
    "LeaseRevoke": {(SCHEDULER, C)},
    "AttemptFailed": {(AGENT, C)},
    "VersionServing": {(AGENT, C)},
    "LeaseOffers": {(SCHEDULER, C)},
    "LeaseReplies": {(AGENT, C)},
    "LeaseRecall": {(SCHEDULER, C)},
    "DrainOrder": {(SCHEDULER, C)},
    "AgentLogRequest": {(SCHEDULER, C)},
    "AgentLog": {(AGENT, C)},
    "BatchRequest": {(TRAINER, C)},
    "BatchGrant": {(SCHEDULER, C)},
    "GroupUnusable": {(TRAINER, C)},
    "StepReport": {(TRAINER, C)},
    "CheckpointReport": {(TRAINER, C)},
    "RunState": {(SCHEDULER, C)},
    "TrajectoriesStored": {(SERVICE, C)},
    "SummariesAccepted": {(SCHEDULER, C)},
    "BodiesReleased": {(SCHEDULER, C)},
    "BodiesGone": {(SERVICE, C)},
    "VersionStored": {(SERVICE, C)},
    "VersionAccepted": {(SCHEDULER, C)},
    "RunSubmit": {(OPERATOR, C)},
    "RunCommand": {(OPERATOR, C)},
    "CommandReply": {(SCHEDULER, C)},
    "StatusRequest": {(OPERATOR, C), (VIEWER, C)},
    "StatusReply": {(SCHEDULER, C)},
    "JobSubmit": {(SUBMITTER, C)},
    "JobReceipts": {(SCHEDULER, C)},
    "JobCancel": {(SUBMITTER, C)},
    "ResultsRequest": {(SUBMITTER, C)},
    "Results": {(SCHEDULER, C)},
    "ExplainRequest": {(OPERATOR, C), (VIEWER, C)},
    "Explanation": {(SCHEDULER, C)},
    "EventsRequest": {(OPERATOR, C), (VIEWER, C)},
    "Events": {(SCHEDULER, C)},
    "AgentOrder": {(OPERATOR, C)},
    "DeadLettersRequest": {(OPERATOR, C)},
    "DeadLetters": {(SCHEDULER, C)},
    "JobReplay": {(OPERATOR, C)},
    "AgentLogsRequest": {(OPERATOR, C)},
    "AgentLogs": {(SCHEDULER, C)},
    "TrajectoryPut": {(AGENT, T)},
    "TrajectoryAck": {(SERVICE, T)},
    "TrajectoryAcks": {(SERVICE, T)},
    "TrajectoryOffer": {(AGENT, T)},
    "TrajectoryRefused": {(SERVICE, T)},
    "PartialPut": {(AGENT, T)},
    "PartialOffer": {(AGENT, T)},
    "PartialAck": {(SERVICE, T)},
    "PartialStored": {(SERVICE, C)},
    "BodyRequest": {(TRAINER, T), (SUBMITTER, T), (AGENT, T)},
    "Body": {(SERVICE, T)},
    "VersionOffer": {(TRAINER, W)},
    "VersionDurable": {(SERVICE, W)},
    "VersionRejected": {(SERVICE, W)},
    "WeightsRequest": {(AGENT, W)},
    "WeightsPlan": {(SERVICE, W)},
    "ChunkRequest": {(AGENT, W), (RELAY, W), (SERVICE, W), (SERVICE, T)},
    "Chunk": {(TRAINER, W), (SERVICE, W), (AGENT, T)},
}


@pytest.mark.parametrize("kind_type", KINDS.values(), ids=lambda kind_type: kind_type.__name__)
def test_a_message_is_allowed_to_exactly_the_roles_and_planes_meant(kind_type):
    allowed = {
        (role, plane) for role in Role for plane in Plane if may_send(role, plane, kind_type)
    }
    assert allowed == MEANT[kind_type.__name__]


def test_the_table_names_every_message_and_no_other():
    assert set(MEANT) == {kind_type.__name__ for kind_type in KINDS.values()}
    assert {kind for kinds in PERMISSIONS.values() for kind in kinds} == set(KINDS.values())


def test_at_a_relay_agents_ask_for_chunks_and_it_gives_them_and_nothing_else_is_said():
    allowed = {
        (role, plane, kind.__name__)
        for role in Role
        for plane in Plane
        for kind in KINDS.values()
        if may_send_at_relay(role, plane, kind)
    }
    assert allowed == {(AGENT, W, "ChunkRequest"), (RELAY, W, "Chunk"), (RELAY, W, "Refuse")}


def test_a_type_without_kind_byte_is_allowed_to_nobody():
    assert not any(may_send(role, plane, Message) for role in Role for plane in Plane)


def test_what_a_hub_says_no_client_may_say_except_chunks():
    for plane, hub_role in HUB_ROLE.items():
        for (role, where), kinds in PERMISSIONS.items():
            if where is plane and role is not hub_role:
                shared = {kind.__name__ for kind in kinds & PERMISSIONS[hub_role, plane]}
                assert shared <= {"Chunk", "ChunkRequest"}, (role, plane)


def test_nobody_but_its_own_hub_role_speaks_for_the_scheduler():
    assert {key for key in PERMISSIONS if key[0] is SCHEDULER} == {
        (SCHEDULER, C),
        (SCHEDULER, Plane.ENROLMENT),
    }
    assert all((OPERATOR, plane) not in PERMISSIONS for plane in (T, W))
    assert all((VIEWER, plane) not in PERMISSIONS for plane in (T, W))


def test_what_a_peer_does_not_know_is_named_by_its_kinds() -> None:
    assert unknown_to(KNOWN_KINDS, AGENT) == []
    assert unknown_to(b"", AGENT) == [], "it does not say"
    partials = bytes(set(KNOWN_KINDS) - {KIND_OF[PartialPut], KIND_OF[RunSubmit]})
    assert unknown_to(partials, AGENT) == ["PartialPut"]
