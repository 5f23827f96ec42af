"""The edge agent's decisions as stories: events in, effects out, time by hand."""

import random
from typing import Any, TypeVar

import pytest

from edge_agent.core.effects import (
    AbortAttempt,
    CancelFetch,
    DiscardCopy,
    DropSpooled,
    Effect,
    Exit,
    FetchPlan,
    OpenCopy,
    RemakeLink,
    RunAttempt,
    SwapWeights,
    ToScheduler,
    ToTrajectoryLog,
    ToWeightStore,
)
from edge_agent.core.events import (
    AttemptCrashed,
    BodyLost,
    CopyDiscarded,
    CopyOpened,
    DrainRequested,
    Event,
    FromScheduler,
    FromTrajectoryLog,
    FromWeightStore,
    GroupGenerated,
    GroupSpooled,
    LinkDown,
    LinkUp,
    Measured,
    PlanStaged,
    SendFailed,
    StageFailed,
    SwapFailed,
    Tick,
    WeightsSwapped,
)
from edge_agent.core.machine import AgentCore
from edge_agent.core.settings import AgentSettings
from transport.errors import InvariantViolation
from transport.messages import (
    AttemptFailed,
    BatchGrant,
    Goodbye,
    GroupSummary,
    Heartbeat,
    HeartbeatReply,
    HeldAttempt,
    Hello,
    HelloRequired,
    HostedPolicies,
    Item,
    LeaseOffer,
    LeaseReply,
    LeaseRevoke,
    Message,
    Plane,
    PlanStep,
    Refuse,
    RewardSpec,
    TrajectoryAck,
    TrajectoryPut,
    TrajectoryRefused,
    VersionRef,
    VersionServing,
    WeightsPlan,
    WeightsRequest,
    Welcome,
)

POLICY = "arithmetic/solver"
E = TypeVar("E", bound=Effect)
M = TypeVar("M", bound=Message)


def offer(number: int = 1, **changes: Any) -> LeaseOffer:
    values: dict[str, Any] = {
        "attempt": f"arithmetic/t-{number:06d}#1",
        "fence": (1, number),
        "job": f"arithmetic/t-{number:06d}",
        "kind": "train",
        "items": (Item(index=number, prompt="1+1", answer="2"),),
        "group_size": 4,
        "workflow": "single_turn",
        "settings": {},
        "policies": {"solver": POLICY},
        "reward": RewardSpec(name="exact"),
        "max_new_tokens": 8,
        "temperature": 1.0,
        "seed": number,
        "lease_s": 120.0,
    }
    return LeaseOffer(**{**values, **changes})


def summary(of: LeaseOffer, size_bytes: int = 1000) -> GroupSummary:
    return GroupSummary(
        attempt=of.attempt,
        fence=of.fence,
        job=of.job,
        digest=f"digest of {of.attempt}",
        size_bytes=size_bytes,
        rewards=(1.0,) * 4,
        lengths=(3,) * 4,
        versions={POLICY: (0, 0)},
        prompt_tokens=3,
        queued_s=0.0,
        generating_s=1.0,
    )


def welcome(**changes: Any) -> Welcome:
    values: dict[str, Any] = {
        "term": 1,
        "heartbeat_s": 2.0,
        "lost_after_s": 12.0,
        "policies": (POLICY,),
    }
    return Welcome(**{**values, **changes})


def plan(version: int, steps: int = 1) -> WeightsPlan:
    step = PlanStep(manifest=b"m", signature=b"s", key_id="k", files=("delta",))
    return WeightsPlan(policy=POLICY, version=version, steps=(step,) * steps)


class Story:
    """Feeds a core, moves its clock, and looks at what came out since the last look."""

    def __init__(self, spooled: tuple[GroupSummary, ...] = (), **settings: Any) -> None:
        values: dict[str, Any] = {
            "slots": 8,
            "workflows": {"single_turn": "f"},
            "rewards": ("exact",),
            "engine": "fake",
        }
        self.now = 100.0
        self.core = AgentCore(
            AgentSettings(**{**values, **settings}),
            incarnation=3,
            build="b",
            rng=random.Random(0),
            spooled=spooled,
            now=self.now,
        )

    def feed(self, *events: Event) -> list[Effect]:
        effects: list[Effect] = []
        for event in events:
            effects += self.core.handle(event, self.now)
            self.core.check()
            due = self.core.next_deadline()
            assert due is None or due > self.now, "a deadline that is over would spin"
        return effects

    def scheduler(self, *messages: Message) -> list[Effect]:
        return self.feed(*(FromScheduler(message=message) for message in messages))

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass from deadline to deadline, as the shell would."""
        end, effects = self.now + seconds, []
        for _ in range(10_000):
            due = self.core.next_deadline()
            if due is None or due > end:
                break
            self.now = max(due, self.now)
            effects += self.feed(Tick())
        self.now = end
        return effects

    def up(self, version: int | None = 0) -> "Story":
        """Welcomed, hosting the policy at ``version``."""
        self.feed(Tick())
        self.scheduler(welcome())
        self.feed(CopyOpened(policy=POLICY, version=version, digest=f"d{version}"))
        return self

    def serve(self, version: int) -> list[Effect]:
        """The whole way to a new version."""
        fetched = one(FetchPlan, self.feed(FromWeightStore(message=plan(version))))
        self.feed(PlanStaged(policy=POLICY, ticket=fetched.ticket))
        return self.feed(self.swapped(version, fetched.ticket))

    @staticmethod
    def swapped(version: int, ticket: int) -> WeightsSwapped:
        return WeightsSwapped(
            policy=POLICY, ticket=ticket, version=version, digest=f"d{version}", pause_s=0.01
        )

    def spool(self, of: LeaseOffer, size_bytes: int = 1000) -> list[Effect]:
        return self.feed(
            GroupGenerated(attempt=of.attempt, fence=of.fence),
            GroupSpooled(summary=summary(of, size_bytes)),
        )


def of(kind: type[E], effects: list[Effect]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def one(kind: type[E], effects: list[Effect]) -> E:
    (found,) = of(kind, effects)
    return found


def said(kind: type[M], effects: list[Effect]) -> list[M]:
    """Messages of a kind to the scheduler."""
    return [e.message for e in of(ToScheduler, effects) if isinstance(e.message, kind)]


def asked(effects: list[Effect]) -> list[WeightsRequest]:
    return [e.message for e in of(ToWeightStore, effects) if isinstance(e.message, WeightsRequest)]


def reason_for(effects: list[Effect]) -> str:
    (reply,) = said(LeaseReply, effects)
    assert reply.accepted is (reply.reason == "")
    return reply.reason


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


def test_round_trip_time_is_smoothed_over_answered_heartbeats_only() -> None:
    story = Story().up()
    story.now += 0.1
    story.scheduler(HeartbeatReply(sequence=1, sent_s=-1e9))
    assert story.core.status().rtt_s == pytest.approx(0.1)
    (beat,) = said(Heartbeat, story.wait(2.0))
    assert beat.rtt_s == pytest.approx(0.1)
    story.now = beat.sent_s + 0.18
    story.scheduler(HeartbeatReply(sequence=beat.sequence, sent_s=0.0))
    assert story.core.status().rtt_s == pytest.approx(0.11)
    story.scheduler(HeartbeatReply(sequence=77, sent_s=0.0))
    assert story.core.status().rtt_s == pytest.approx(0.11)
    assert story.core.status().counters["heartbeat.unknown_reply"] == 1


def test_a_silent_scheduler_gets_a_new_link_and_a_hello_with_what_is_held() -> None:
    story = Story().up()
    story.scheduler(offer(1), offer(2))
    story.spool(offer(1))
    effects = story.wait(12.5)
    assert of(RemakeLink, effects) == [RemakeLink(plane=Plane.CONTROL)]
    hello = said(Hello, effects)[0]
    assert hello.agent is not None
    assert hello.agent.held == (
        HeldAttempt(attempt=offer(2).attempt, fence=(1, 2)),
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


# ---- outbox --------------------------------------------------------------------------------


def test_what_was_spooled_before_a_restart_is_offered_again_and_sent_at_once() -> None:
    story = Story(spooled=(summary(offer(1)),))
    effects = story.feed(Tick())
    (hello,) = said(Hello, effects)
    assert hello.agent is not None
    assert hello.agent.held == (HeldAttempt(attempt=offer(1).attempt, fence=(1, 1), spooled=True),)
    assert one(ToTrajectoryLog, effects).summary == summary(offer(1))


def test_the_window_bounds_bytes_and_messages_under_way() -> None:
    spooled = tuple(summary(offer(n)) for n in range(6))
    story = Story(spooled=spooled, upload_window_bytes=2500)
    assert len(of(ToTrajectoryLog, story.feed(Tick()))) == 2
    ack = TrajectoryAck(attempt=spooled[0].attempt, digest=spooled[0].digest)
    (sent,) = of(ToTrajectoryLog, story.feed(FromTrajectoryLog(message=ack)))
    assert sent.summary == spooled[2]
    assert len(of(ToTrajectoryLog, Story(spooled, upload_window_messages=3).feed(Tick()))) == 3
    assert len(of(ToTrajectoryLog, Story(spooled, upload_window_bytes=10).feed(Tick()))) == 1


def test_a_silent_log_gets_everything_again_over_a_new_link_ever_more_slowly() -> None:
    story = Story(spooled=(summary(offer(1)), summary(offer(2)))).up()
    times = []
    for _ in range(1200):
        if RemakeLink(plane=Plane.TRAJECTORIES) in (effects := story.wait(0.5)):
            times.append(story.now - 100.0)
            assert len(of(ToTrajectoryLog, effects)) == 2
    assert times == pytest.approx([30.0, 90.0, 210.0, 450.0], abs=0.6)
    ack = TrajectoryAck(attempt=offer(1).attempt, digest=summary(offer(1)).digest)
    story.feed(FromTrajectoryLog(message=ack))
    assert RemakeLink(plane=Plane.TRAJECTORIES) in story.wait(31.0)


def test_a_body_that_the_link_did_not_take_is_sent_a_little_later() -> None:
    story = Story(spooled=(summary(offer(1)),)).up()
    put = TrajectoryPut(summary=summary(offer(1)))
    assert of(ToTrajectoryLog, story.feed(SendFailed(plane=Plane.TRAJECTORIES, message=put))) == []
    assert one(ToTrajectoryLog, story.wait(0.2)).summary == summary(offer(1))


def test_a_refused_body_is_dropped_and_its_attempt_fails() -> None:
    story = Story(spooled=(summary(offer(1)),)).up()
    refused = TrajectoryRefused(
        attempt=offer(1).attempt, digest=summary(offer(1)).digest, code="log.size", message="big"
    )
    effects = story.feed(FromTrajectoryLog(message=refused))
    assert len(of(DropSpooled, effects)) == 1
    assert said(AttemptFailed, effects)[0].code == "log.size"
    other = TrajectoryAck(attempt=offer(1).attempt, digest="another digest")
    story.feed(FromTrajectoryLog(message=other))
    assert story.core.status().counters["ack.unknown"] == 1


def test_a_body_lost_on_disk_fails_its_attempt() -> None:
    story = Story(spooled=(summary(offer(1)),)).up()
    digest = summary(offer(1)).digest
    other = BodyLost(attempt=offer(1).attempt, digest="other", code="store")
    assert story.feed(other) == []
    lost = BodyLost(attempt=offer(1).attempt, digest=digest, code="integrity.checksum")
    effects = story.feed(lost)
    assert one(DropSpooled, effects).digest == digest
    assert said(AttemptFailed, effects)[0].code == "integrity.checksum"


# ---- weights -------------------------------------------------------------------------------


def test_a_policy_is_opened_fetched_staged_swapped_and_announced() -> None:
    story = Story()
    story.feed(Tick())
    assert one(OpenCopy, story.scheduler(welcome())).policy == POLICY
    (request,) = asked(story.feed(CopyOpened(policy=POLICY, version=None)))
    assert (request.have_version, request.upto) == (None, None)
    assert story.core.status().policies == {POLICY: ("idle", None)}
    fetched = one(FetchPlan, story.feed(FromWeightStore(message=plan(0))))
    assert story.feed(FromWeightStore(message=plan(0))) == []
    assert one(SwapWeights, story.feed(PlanStaged(policy=POLICY, ticket=fetched.ticket)))
    effects = story.feed(story.swapped(0, fetched.ticket))
    (serving,) = said(VersionServing, effects)
    assert (serving.version, serving.digest, serving.pause_s) == (0, "d0", 0.01)
    assert asked(effects)[0].have_version == 0


def test_a_copy_on_disk_serves_before_anything_is_fetched() -> None:
    story = Story()
    story.feed(Tick())
    story.scheduler(welcome())
    effects = story.feed(CopyOpened(policy=POLICY, version=7, digest="d7"))
    assert said(VersionServing, effects)[0].version == 7
    assert asked(effects)[0].have_digest == "d7"


def test_the_request_stands_and_is_repeated() -> None:
    story = Story().up(version=2)
    assert [request.have_version for request in asked(story.wait(15.1))] == [2, 2, 2]
    assert story.feed(FromWeightStore(message=plan(2))) == []
    assert story.feed(FromWeightStore(message=plan(3, steps=0))) == []
    one(FetchPlan, story.feed(FromWeightStore(message=plan(3))))
    assert asked(story.wait(60.0)) == []


def test_work_waits_for_its_first_weights_and_goes_on_through_later_swaps() -> None:
    story = Story().up(version=None)
    effects = story.scheduler(offer())
    assert reason_for(effects) == ""
    assert of(RunAttempt, effects) == []
    story.now += 3.0
    assert one(RunAttempt, story.serve(0)).queued_s == pytest.approx(3.0)
    assert of(AbortAttempt, story.serve(1)) == []


def test_network_trouble_backs_off_and_keeps_serving() -> None:
    story = Story().up(version=1)
    fetched = one(FetchPlan, story.feed(FromWeightStore(message=plan(2))))
    story.feed(StageFailed(policy=POLICY, ticket=fetched.ticket, code="link.unreachable"))
    assert one(RunAttempt, story.scheduler(offer()))
    (request, *_) = asked(story.wait(1.0))
    assert request.have_version == 1


def test_a_wrong_base_discards_the_copy_and_no_job_is_taken_until_it_is_healed() -> None:
    story = Story().up(version=1)
    story.scheduler(offer(1))
    fetched = one(FetchPlan, story.feed(FromWeightStore(message=plan(2))))
    effects = story.feed(
        StageFailed(policy=POLICY, ticket=fetched.ticket, code="integrity.base", detail="x")
    )
    assert one(DiscardCopy, effects).policy == POLICY
    assert of(AbortAttempt, effects) == []
    assert reason_for(story.scheduler(offer(2))) == "weights_unavailable"
    story.feed(CopyDiscarded(policy=POLICY))
    (request, *_) = asked(story.wait(1.0))
    assert request.have_version is None
    story.serve(2)
    assert reason_for(story.scheduler(offer(3))) == ""


def test_two_failed_verifications_in_a_row_discard_the_copy() -> None:
    story = Story().up(version=1)
    for last in (False, True):
        fetched = one(FetchPlan, story.feed(FromWeightStore(message=plan(2))))
        failed = StageFailed(policy=POLICY, ticket=fetched.ticket, code="integrity.checksum")
        assert bool(of(DiscardCopy, story.feed(failed))) is last
        story.wait(1.0)


def test_a_failed_swap_aborts_what_runs_on_the_unknown_weights() -> None:
    story = Story().up(version=1)
    story.scheduler(offer(1), offer(2))
    story.feed(GroupGenerated(attempt=offer(1).attempt, fence=(1, 1)))
    fetched = one(FetchPlan, story.feed(FromWeightStore(message=plan(2))))
    story.feed(PlanStaged(policy=POLICY, ticket=fetched.ticket))
    effects = story.feed(SwapFailed(policy=POLICY, ticket=fetched.ticket, code="engine.apply"))
    assert one(DiscardCopy, effects)
    assert one(AbortAttempt, effects).attempt == offer(2).attempt
    assert [failed.code for failed in said(AttemptFailed, effects)] == ["weights.unverified"]
    assert one(ToTrajectoryLog, story.feed(GroupSpooled(summary=summary(offer(1)))))


def test_back_off_grows_and_is_bounded() -> None:
    story = Story(backoff_max_s=4.0).up(version=None)
    waits = []
    for _ in range(40):
        fetched = one(FetchPlan, story.feed(FromWeightStore(message=plan(1))))
        story.feed(StageFailed(policy=POLICY, ticket=fetched.ticket, code="link"))
        began = story.now
        while not asked(story.wait(0.05)):
            pass
        waits.append(story.now - began)
    assert max(waits) <= 4.1
    assert max(waits[:2]) <= 2.1
    assert max(waits) > 2.5


def test_pinned_work_waits_for_its_version_and_holds_the_copy_there() -> None:
    story = Story().up(version=1)
    effects = story.scheduler(offer(1, pinned={POLICY: 3}))
    assert of(RunAttempt, effects) == []
    assert [request.upto for request in asked(effects)] == [3]
    story.serve(2)
    assert of(FetchPlan, story.feed(FromWeightStore(message=plan(4)))) == []
    assert one(RunAttempt, story.serve(3)).offer == offer(1, pinned={POLICY: 3})
    assert of(FetchPlan, story.feed(FromWeightStore(message=plan(4)))) == []
    effects = story.feed(GroupGenerated(attempt=offer(1).attempt, fence=(1, 1)))
    assert [request.upto for request in asked(effects)] == [None]
    one(FetchPlan, story.feed(FromWeightStore(message=plan(4))))


def test_pinned_work_stops_a_fetch_that_would_go_beyond() -> None:
    story = Story().up(version=1)
    fetched = one(FetchPlan, story.feed(FromWeightStore(message=plan(5))))
    effects = story.scheduler(offer(1, pinned={"solver": 2}))
    assert one(CancelFetch, effects).ticket == fetched.ticket
    assert asked(effects)[0].upto == 2
    assert story.feed(PlanStaged(policy=POLICY, ticket=fetched.ticket)) == []
    assert one(RunAttempt, story.serve(2))


def test_pinned_work_is_declined_once_a_swap_beyond_it_has_begun() -> None:
    story = Story().up(version=1)
    fetched = one(FetchPlan, story.feed(FromWeightStore(message=plan(5))))
    story.feed(PlanStaged(policy=POLICY, ticket=fetched.ticket))
    assert reason_for(story.scheduler(offer(1, pinned={POLICY: 2}))) == "version_passed"
    assert reason_for(story.scheduler(offer(2, pinned={POLICY: 5}))) == ""
    assert one(RunAttempt, story.feed(story.swapped(5, fetched.ticket)))


def test_the_oldest_of_several_pins_holds_the_copy() -> None:
    story = Story().up(version=1)
    story.scheduler(offer(1, pinned={POLICY: 3}), offer(2, pinned={POLICY: 2}))
    assert of(FetchPlan, story.feed(FromWeightStore(message=plan(3)))) == []
    assert one(RunAttempt, story.serve(2)).offer.attempt == offer(2).attempt
    revoke = LeaseRevoke(attempt=offer(2).attempt, fence=(1, 2), reason="done")
    assert asked(story.scheduler(revoke))[0].upto == 3
    assert one(RunAttempt, story.serve(3)).offer.attempt == offer(1).attempt


def test_work_that_waits_too_long_for_weights_is_handed_back() -> None:
    story = Story(attempt_timeout_s=50.0).up(version=1)
    story.scheduler(offer(1, pinned={POLICY: 9}))
    (failure,) = said(AttemptFailed, story.wait(50.5))
    assert failure.code == "weights.timeout"


def test_a_policy_no_longer_hosted_gets_its_last_version_and_is_dropped_later() -> None:
    story = Story(linger_s=60.0).up(version=1)
    story.scheduler(offer(1), offer(2, pinned={POLICY: 9}))
    effects = story.scheduler(HostedPolicies(policies=("new/solver",)))
    assert [failed.attempt for failed in said(AttemptFailed, effects)] == [offer(2).attempt]
    assert reason_for(story.scheduler(offer(3))) == "policy_unknown"
    assert said(VersionServing, story.serve(2))[0].version == 2
    assert of(DiscardCopy, story.wait(70.0)) == []
    assert one(DiscardCopy, story.spool(offer(1))).policy == POLICY
    story.feed(CopyDiscarded(policy=POLICY))
    assert set(story.core.status().policies) == {"new/solver"}


def test_a_policy_hosted_again_within_its_time_is_kept() -> None:
    story = Story(linger_s=60.0).up(version=1)
    story.scheduler(HostedPolicies(policies=()))
    story.wait(59.0)
    story.scheduler(HostedPolicies(policies=(POLICY,)))
    assert of(DiscardCopy, story.wait(100.0)) == []
    assert reason_for(story.scheduler(offer(1))) == ""


def test_a_policy_hosted_again_while_its_copy_is_dropped_starts_from_nothing() -> None:
    story = Story(linger_s=60.0).up(version=1)
    story.scheduler(HostedPolicies(policies=()))
    assert one(DiscardCopy, story.wait(60.5)).policy == POLICY
    story.scheduler(HostedPolicies(policies=(POLICY,)))
    (request,) = asked(story.feed(CopyDiscarded(policy=POLICY)))
    assert request.have_version is None


def test_late_reports_about_weights_change_nothing() -> None:
    story = Story().up(version=1)
    before = story.core.dump()
    story.feed(
        CopyOpened(policy=POLICY, version=9, digest="d9"),
        PlanStaged(policy=POLICY, ticket=4),
        story.swapped(9, 4),
        SwapFailed(policy=POLICY, ticket=4, code="engine.apply"),
        StageFailed(policy=POLICY, ticket=4, code="link"),
        CopyDiscarded(policy=POLICY),
        CopyDiscarded(policy="un/known"),
        PlanStaged(policy="un/known", ticket=1),
    )
    after = story.core.dump()
    after["status"]["counters"] = before["status"]["counters"]
    assert after == before


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
