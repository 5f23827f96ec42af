"""The edge agent's decisions as stories: being known, attempts, leaving."""

import random
from typing import Any

import pytest
from agent_story import (
    POLICY,
    Story,
    asked,
    of,
    offer,
    one,
    reason_for,
    said,
    summary,
    welcome,
)

from edge_agent.core.effects import (
    AbortAttempt,
    DropSpooled,
    Exit,
    RemakeLink,
    RunAttempt,
    ToScheduler,
    ToTrajectoryLog,
)
from edge_agent.core.events import (
    AttemptCrashed,
    CopyOpened,
    DrainRequested,
    Event,
    FromTrajectoryLog,
    FromWeightStore,
    GroupSpooled,
    LinkDown,
    LinkUp,
    Measured,
    SendFailed,
    Tick,
)
from transport.errors import InvariantViolation
from transport.messages import (
    AttemptFailed,
    BatchGrant,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    HeldAttempt,
    Hello,
    HelloRequired,
    HostedPolicies,
    LeaseReply,
    LeaseRevoke,
    Plane,
    Refuse,
    RewardSpec,
    TrajectoryAck,
    VersionRef,
    WeightsPlan,
)

# ---- being known ---------------------------------------------------------------------------


def test_hello_is_repeated_until_it_is_answered_and_heartbeats_follow() -> None:
    story = Story()
    (hello,) = said(Hello, story.feed(Tick()))
    assert hello.incarnation == 3
    assert hello.agent is not None
    assert hello.agent.slots == 8
    assert len(said(Hello, story.wait(4.0))) == 2
    story.scheduler(welcome(heartbeat_s=0.5))
    later = story.wait(5.0)
    assert said(Hello, later) == []
    assert [beat.sequence for beat in said(Heartbeat, later)] == list(range(2, 12))


def test_agents_welcomed_together_are_not_heard_together_for_ever() -> None:
    beats = [0] * 20
    for seed in range(200):
        story = Story(rng=random.Random(seed)).up()
        story.wait(10.0)
        start_s = story.now
        while story.now < start_s + 2.0:
            beats[int((story.now - start_s) * 10.0)] += len(said(Heartbeat, story.wait(0.1)))
    assert sum(beats) == 200
    assert max(beats) < 30


def test_a_silent_scheduler_gets_a_new_link_and_a_hello_with_what_is_held() -> None:
    story = Story().up()
    story.scheduler(offer(1), offer(2))
    story.spool(offer(1))
    effects = story.wait(12.5)
    assert of(RemakeLink, effects) == [RemakeLink(plane=Plane.CONTROL)]
    hello = said(Hello, effects)[0]
    assert hello.agent is not None
    assert hello.agent.held == (
        HeldAttempt(attempt=offer(2).attempt, fence=(1, 2), started=True),
        HeldAttempt(attempt=offer(1).attempt, fence=(1, 1), spooled=True),
    )
    assert hello.agent.versions == {POLICY: VersionRef(version=0, digest="d0")}
    assert of(AbortAttempt, story.wait(600.0)) == []


def test_hello_required_is_answered_at_once_but_not_in_a_loop() -> None:
    story = Story().up()
    story.now += 1.5
    assert len(said(Hello, story.scheduler(HelloRequired()))) == 1
    assert said(Hello, story.scheduler(HelloRequired(), HelloRequired())) == []
    assert len(said(Hello, story.wait(1.0))) == 1


def test_a_refusal_with_a_time_is_retried_and_one_without_ends_the_agent() -> None:
    story = Story()
    story.feed(Tick())
    story.scheduler(Refuse(code="agent.twice", message="already here", retry_s=7.0))
    assert said(Hello, story.wait(6.9)) == []
    assert len(said(Hello, story.wait(0.2))) == 1
    effects = story.scheduler(Refuse(code="agent.unknown", message="enrol first"))
    assert one(Exit, effects).status == 1
    assert story.core.next_deadline() is None
    assert story.feed(Tick()) == []


def test_senseless_intervals_from_the_wire_are_bounded() -> None:
    story = Story()
    story.feed(Tick())
    story.scheduler(welcome(heartbeat_s=float("nan"), lost_after_s=-5.0))
    assert len(said(Heartbeat, story.wait(0.015))) <= 3
    story.scheduler(welcome(heartbeat_s=float("inf"), lost_after_s=float("inf")))
    assert len(said(Heartbeat, story.wait(3000.0))) <= 1


def test_heartbeats_carry_the_latest_measurements() -> None:
    story = Story().up()
    story.feed(
        Measured(
            tokens_generated=5, running_sequences=2, waiting_sequences=1, bytes_up=7, bytes_down=9
        )
    )
    beat = said(Heartbeat, story.wait(2.0))[0]
    assert (beat.tokens_generated, beat.running_sequences, beat.waiting_sequences) == (5, 2, 1)
    assert (beat.bytes_up, beat.bytes_down, beat.draining) == (7, 9, False)


def test_unexpected_messages_are_counted_and_nothing_else() -> None:
    story = Story().up()
    story.scheduler(BatchGrant(policy=POLICY, step=1, groups=()))
    story.feed(FromTrajectoryLog(message=HelloRequired()), FromWeightStore(message=HelloRequired()))
    story.feed(FromWeightStore(message=WeightsPlan(policy="x/y", version=1, steps=())))
    counters = story.core.status().counters
    assert counters["unexpected.BatchGrant"] == 1
    assert counters["unexpected.HelloRequired"] == 2
    assert counters["weights.unknown_plan"] == 1


def test_a_link_that_comes_up_says_again_what_may_be_lost() -> None:
    story = Story(spooled=(summary(offer(1)), summary(offer(2)))).up(version=4)
    story.wait(1.2)
    effects = story.feed(LinkUp(plane=Plane.TRAJECTORIES))
    assert [e.summary for e in of(ToTrajectoryLog, effects)] == [
        summary(offer(1)),
        summary(offer(2)),
    ]
    story.feed(LinkDown(plane=Plane.TRAJECTORIES), LinkDown(plane=Plane.CONTROL))
    assert of(ToTrajectoryLog, story.wait(100.0)) == []
    assert len(of(ToTrajectoryLog, story.feed(LinkUp(plane=Plane.TRAJECTORIES)))) == 2
    (request,) = asked(story.feed(LinkUp(plane=Plane.WEIGHTS)))
    assert request.have_version == 4
    (hello,) = said(Hello, story.feed(LinkUp(plane=Plane.CONTROL)))
    assert hello.incarnation == 3
    story.scheduler(Refuse(code="agent.twice", message="", retry_s=60.0))
    assert said(Hello, story.feed(LinkUp(plane=Plane.CONTROL))) == []


# ---- attempts ------------------------------------------------------------------------------


def test_an_accepted_offer_runs_spools_uploads_and_is_forgotten_after_the_ack() -> None:
    story = Story().up()
    effects = story.scheduler(offer())
    assert reason_for(effects) == ""
    assert one(RunAttempt, effects) == RunAttempt(offer=offer(), queued_s=0.0)
    assert one(ToTrajectoryLog, story.spool(offer())).summary == summary(offer())
    ack = TrajectoryAck(attempt=offer().attempt, digest=summary(offer()).digest)
    dropped = one(DropSpooled, story.feed(FromTrajectoryLog(message=ack)))
    assert dropped.digest == summary(offer()).digest
    assert story.core.status().spooled == 0
    assert story.feed(FromTrajectoryLog(message=ack)) == []
    assert story.core.story(offer().attempt) == [
        "accepted",
        "started",
        "generated",
        "spooled",
        "acknowledged",
    ]


def test_the_same_offer_again_is_accepted_again_and_runs_once() -> None:
    story = Story().up()
    effects = story.scheduler(offer(), offer())
    assert [reply.accepted for reply in said(LeaseReply, effects)] == [True, True]
    assert len(of(RunAttempt, effects)) == 1
    story.spool(offer())
    assert reason_for(story.scheduler(offer())) == ""
    ack = TrajectoryAck(attempt=offer().attempt, digest=summary(offer()).digest)
    story.feed(FromTrajectoryLog(message=ack))
    assert reason_for(story.scheduler(offer())) == "finished"


def test_a_newer_fence_supersedes_and_an_older_one_is_stale() -> None:
    story = Story().up()
    story.scheduler(offer(fence=(1, 5)))
    effects = story.scheduler(offer(fence=(2, 1)))
    assert one(AbortAttempt, effects).fence == (1, 5)
    assert one(RunAttempt, effects).offer.fence == (2, 1)
    assert reason_for(story.scheduler(offer(fence=(1, 5)))) == "stale_fence"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"workflow": "unheard_of"}, "workflow_unknown"),
        ({"reward": RewardSpec(name="math-verify")}, "reward_unknown"),
        ({"policies": {"solver": "other/solver"}}, "policy_unknown"),
        ({"pinned": {POLICY: 3}}, "version_passed"),
        ({"pinned": {"judge": 3}}, "malformed"),
        ({"items": ()}, "malformed"),
        ({"group_size": 0}, "malformed"),
        ({"temperature": float("nan")}, "malformed"),
        ({"max_new_tokens": 0}, "malformed"),
        ({"policies": {}}, "malformed"),
        ({"group_size": 5000}, "too_large"),
    ],
)
def test_offers_that_cannot_be_served_are_declined_with_a_reason(
    changes: dict[str, Any], reason: str
) -> None:
    story = Story().up(version=4)
    assert reason_for(story.scheduler(offer(**changes))) == reason
    assert story.core.status().counters[f"declined.{reason}"] == 1


def test_sequences_beyond_slots_and_prefetch_are_declined_but_a_large_group_runs_alone() -> None:
    story = Story(slots=2, prefetch_sequences=6).up()
    assert reason_for(story.scheduler(offer(1, group_size=30))) == ""
    assert reason_for(story.scheduler(offer(2))) == "full"
    story.spool(offer(1))
    assert [reason_for(story.scheduler(offer(n))) for n in (3, 4, 5)] == ["", "", "full"]


def test_the_number_of_held_attempts_is_bounded() -> None:
    story = Story(max_held=2).up()
    story.scheduler(offer(1), offer(2))
    story.spool(offer(1))
    assert reason_for(story.scheduler(offer(3))) == "full"


def test_a_full_spool_declines_new_work_and_reserves_for_what_is_under_way() -> None:
    story = Story(spool_bytes=2500).up()
    story.scheduler(offer(1), offer(2))
    story.spool(offer(1))
    assert reason_for(story.scheduler(offer(3))) == "spool_full"
    ack = TrajectoryAck(attempt=offer(1).attempt, digest=summary(offer(1)).digest)
    story.feed(FromTrajectoryLog(message=ack))
    assert reason_for(story.scheduler(offer(3))) == ""


def test_a_crash_is_reported_with_its_code_until_a_later_heartbeat_is_answered() -> None:
    story = Story().up()
    story.scheduler(offer())
    crash = AttemptCrashed(attempt=offer().attempt, fence=(1, 1), code="reward.timeout", detail="x")
    (failure,) = said(AttemptFailed, story.feed(crash))
    assert (failure.code, failure.fence) == ("reward.timeout", (1, 1))
    # Before it is confirmed a reconnection repeats it, afterwards nothing does.
    assert said(AttemptFailed, story.scheduler(HelloRequired(), welcome())) == [failure]
    (beat, *_) = said(Heartbeat, story.wait(2.0))
    story.scheduler(HeartbeatReply(sequence=beat.sequence, sent_s=0.0))
    assert said(AttemptFailed, story.scheduler(welcome())) == []


def test_a_failure_report_that_the_link_did_not_take_leaves_again() -> None:
    story = Story().up()
    story.scheduler(offer())
    crash = AttemptCrashed(attempt=offer().attempt, fence=(1, 1), code="workflow.error")
    (failure,) = said(AttemptFailed, story.feed(crash))
    story.feed(SendFailed(plane=Plane.CONTROL, message=failure))
    effects = story.wait(2.0)
    assert said(AttemptFailed, effects) == [failure]
    assert said(AttemptFailed, story.wait(2.0)) == []


def test_revoked_and_unknown_attempts_are_dropped_wherever_they_stand() -> None:
    story = Story().up()
    story.scheduler(offer(1), offer(2), offer(3))
    story.spool(offer(3))
    revoke = LeaseRevoke(attempt=offer(1).attempt, fence=(1, 1), reason="duplicate")
    assert one(AbortAttempt, story.scheduler(revoke)).attempt == offer(1).attempt
    assert story.scheduler(revoke) == []
    stale = LeaseRevoke(attempt=offer(2).attempt, fence=(0, 9), reason="old")
    assert story.scheduler(stale) == []
    unknown = (offer(2).attempt, offer(3).attempt, "never/t-000001#1")
    effects = story.scheduler(HeartbeatReply(sequence=1, sent_s=0.0, unknown=unknown))
    assert one(AbortAttempt, effects).attempt == offer(2).attempt
    assert one(DropSpooled, effects).attempt == offer(3).attempt
    late = story.feed(GroupSpooled(summary=summary(offer(2))))
    assert one(DropSpooled, late).attempt == offer(2).attempt


# ---- leaving -------------------------------------------------------------------------------


def test_draining_finishes_what_runs_hands_back_what_waits_and_leaves() -> None:
    story = Story().up(version=1)
    story.scheduler(offer(1), offer(2, pinned={POLICY: 5}))
    effects = story.feed(DrainRequested(reason="SIGTERM"))
    assert [failed.attempt for failed in said(AttemptFailed, effects)] == [offer(2).attempt]
    assert reason_for(story.scheduler(offer(3))) == "draining"
    assert said(Heartbeat, story.wait(2.0))[0].draining
    assert of(Exit, story.spool(offer(1))) == []
    ack = TrajectoryAck(attempt=offer(1).attempt, digest=summary(offer(1)).digest)
    effects = story.feed(FromTrajectoryLog(message=ack))
    assert [type(effect) for effect in effects] == [DropSpooled, ToScheduler, Exit]
    assert said(Goodbye, effects)
    assert one(Exit, effects).status == 0


def test_draining_ends_at_its_deadline_with_the_spool_kept() -> None:
    story = Story(drain_s=10.0).up(version=1)
    story.scheduler(offer(1), offer(2))
    story.spool(offer(2))
    story.feed(DrainRequested(reason="SIGTERM"), DrainRequested(reason="again"))
    effects = story.wait(10.1)
    assert one(AbortAttempt, effects).attempt == offer(1).attempt
    assert said(AttemptFailed, effects)[0].code == "agent.draining"
    assert one(Exit, effects).status == 0
    assert of(DropSpooled, effects) == []


def test_an_idle_agent_leaves_at_once() -> None:
    assert one(Exit, Story().up().feed(DrainRequested(reason="SIGTERM"))).status == 0


def test_two_cores_fed_alike_dump_alike() -> None:
    dumps = []
    for _ in range(2):
        story = Story().up(version=1)
        story.scheduler(offer(1), offer(2, pinned={POLICY: 5}))
        story.wait(33.0)
        dumps.append(story.core.dump())
    assert dumps[0] == dumps[1]


def test_check_tells_the_story_of_a_contradiction() -> None:
    story = Story().up()
    story.scheduler(offer())
    story.core._work.outbox.add(summary(offer()))
    with pytest.raises(InvariantViolation, match="held and spooled: accepted; started"):
        story.core.check()
    with pytest.raises(InvariantViolation, match="unknown event Event"):
        story.core.handle(Event(), story.now)


def test_standing_requests_are_repeated_no_more_often_than_heartbeats() -> None:
    story = Story()
    story.feed(Tick())
    story.scheduler(welcome(heartbeat_s=20.0))  # of a fleet of ten thousand
    story.feed(CopyOpened(policy=POLICY, version=0, digest="d0"))
    for _ in range(4):  # something is heard, so that the link is not made anew
        story.scheduler(HostedPolicies(policies=(POLICY,)))
        assert asked(story.wait(4.9)) == []
    assert len(asked(story.wait(0.5))) == 1
    story.scheduler(welcome(heartbeat_s=2.0))
    story.wait(20.0)
    assert len(asked(story.wait(10.0))) == 2
