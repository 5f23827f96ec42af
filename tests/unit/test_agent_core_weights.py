"""The edge agent's decisions about weights, as stories."""

import random

import msgspec
import pytest
from agent_story import (
    POLICY,
    Story,
    asked,
    of,
    offer,
    one,
    plan,
    reason_for,
    said,
    summary,
    welcome,
)

from edge_agent.core.effects import (
    AbortAttempt,
    CancelFetch,
    DiscardCopy,
    FetchPlan,
    OpenCopy,
    RunAttempt,
    SwapWeights,
    ToTrajectoryLog,
    VerifyWeights,
)
from edge_agent.core.events import (
    CopyDiscarded,
    CopyOpened,
    FromWeightStore,
    GroupGenerated,
    GroupSpooled,
    PlanStaged,
    PolicyLost,
    StageFailed,
    SwapFailed,
    Tick,
    VerifyFailed,
    WeightsVerified,
)
from transport.messages import (
    AttemptFailed,
    Heartbeat,
    HeartbeatReply,
    HostedPolicies,
    LeaseRevoke,
    VersionServing,
)


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


def checks_of(story: Story, versions: range) -> list[tuple[int, bool, bool]]:
    """Which swaps are followed by a check (that succeeds), with (rescan, read_back)."""
    found = []
    for version in versions:
        for check in of(VerifyWeights, story.serve(version)):
            found.append((version, check.rescan, check.read_back))
            assert story.feed(WeightsVerified(policy=POLICY, ticket=check.ticket)) == []
    return found


def test_copy_and_engine_are_checked_on_schedule() -> None:
    story = Story(verify_every_swaps=6, read_back_every_swaps=4).up(version=None)
    assert checks_of(story, range(1, 13)) == [
        (1, False, True), (2, False, True), (4, False, True), (6, True, False), (8, False, True),
        (12, True, True),
    ]  # fmt: skip
    assert checks_of(Story(verify_every_swaps=0, read_back_every_swaps=0).up(), range(1, 40)) == []


def test_a_version_with_a_signed_full_digest_is_compared_with_it_after_the_swap() -> None:
    story = Story(read_back_every_swaps=0).up(version=None)
    assert of(VerifyWeights, story.serve(1)) == []
    check = one(VerifyWeights, story.serve(2, full_digest=True))
    assert (check.rescan, check.read_back) == (True, False)
    never = Story(verify_every_swaps=0, read_back_every_swaps=0).up()
    assert of(VerifyWeights, never.serve(2, full_digest=True)) == []


def test_a_failed_check_discards_the_copy_and_no_job_is_taken_until_it_is_healed() -> None:
    story = Story().up(version=None)
    story.scheduler(offer(1))
    check = one(VerifyWeights, story.serve(1))
    failed = VerifyFailed(policy=POLICY, ticket=check.ticket, code="engine.weights")
    effects = story.feed(failed)
    assert not one(DiscardCopy, effects).unload
    assert one(AbortAttempt, effects).attempt == offer(1).attempt
    assert [failure.code for failure in said(AttemptFailed, effects)] == ["weights.unverified"]
    assert story.feed(failed) == []
    assert reason_for(story.scheduler(offer(2))) == "weights_unavailable"
    story.feed(CopyDiscarded(policy=POLICY))
    (request, *_) = asked(story.wait(1.0))
    assert request.have_version is None
    assert one(VerifyWeights, story.serve(2)).read_back, "the first swap after it is looked at"
    assert reason_for(story.scheduler(offer(3))) == ""


def test_a_check_that_fails_late_stops_the_fetch_and_the_swap_after_it() -> None:
    for staged in (False, True):
        story = Story().up(version=None)
        check = one(VerifyWeights, story.serve(1))
        fetched = one(FetchPlan, story.feed(FromWeightStore(message=plan(2))))
        if staged:
            story.feed(PlanStaged(policy=POLICY, ticket=fetched.ticket))
        failed = VerifyFailed(policy=POLICY, ticket=check.ticket, code="integrity.copy")
        effects = story.feed(failed)
        assert one(DiscardCopy, effects)
        assert [c.ticket for c in of(CancelFetch, effects)] == [fetched.ticket] * (not staged)
        assert story.feed(story.swapped(2, fetched.ticket)) == []
        assert not story.core.status().policies[POLICY][1]


def test_requests_state_what_was_measured_for_all_policies() -> None:
    story = Story().up(version=1)
    fetched = one(FetchPlan, story.feed(FromWeightStore(message=plan(2))))
    story.feed(PlanStaged(policy=POLICY, ticket=fetched.ticket))
    swapped = story.swapped(2, fetched.ticket)
    measured = msgspec.structs.replace(swapped, rate_bytes_s=3e6, decode_cells_s=5e8)
    (request,) = asked(story.feed(measured))
    assert (request.rate_bytes_s, request.decode_cells_s) == (3e6, 5e8)
    (request,) = asked(story.serve(3))
    assert (request.rate_bytes_s, request.decode_cells_s) == (3e6, 5e8)
    story.scheduler(HostedPolicies(policies=(POLICY, "other/solver")))
    (request,) = asked(story.feed(CopyOpened(policy="other/solver", version=None)))
    assert request.rate_bytes_s == 3e6


def test_back_off_grows_and_is_bounded() -> None:
    story = Story(rng=random.Random(0), backoff_max_s=4.0).up(version=None)
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


def test_a_policy_that_its_engine_lost_is_loaded_again_from_the_copy_on_disk() -> None:
    story = Story().up(version=4)
    story.scheduler(offer(1))
    fetched = one(FetchPlan, story.feed(FromWeightStore(message=plan(5))))
    lost = story.feed(PolicyLost(policy=POLICY))
    assert one(CancelFetch, lost).ticket == fetched.ticket
    assert one(OpenCopy, lost).policy == POLICY
    assert not of(RunAttempt, story.scheduler(offer(2)))
    assert story.feed(PolicyLost(policy=POLICY)) == []  # it is under way
    assert story.feed(story.swapped(5, fetched.ticket)) == []
    back = story.feed(CopyOpened(policy=POLICY, version=4, digest="d4"))
    assert said(VersionServing, back)[0].version == 4
    assert one(RunAttempt, back).offer == offer(2)


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


def test_a_version_that_the_scheduler_wants_kept_is_not_passed_until_it_says_otherwise() -> None:
    story = Story().up(version=1)
    (beat,) = said(Heartbeat, story.wait(2.0))
    reply = HeartbeatReply(sequence=beat.sequence, sent_s=0.0, upto={POLICY: 2, "other": 7})
    assert [request.upto for request in asked(story.scheduler(reply))] == [2]
    assert of(FetchPlan, story.feed(FromWeightStore(message=plan(4)))) == []
    story.scheduler(offer(1, pinned={POLICY: 5}))  # a newer pin does not loosen it
    assert of(FetchPlan, story.feed(FromWeightStore(message=plan(4)))) == []
    story.serve(2)
    story.scheduler(HeartbeatReply(sequence=77, sent_s=0.0))  # of a heartbeat that never was
    assert of(FetchPlan, story.feed(FromWeightStore(message=plan(4)))) == []
    beat = said(Heartbeat, story.wait(2.0))[-1]
    effects = story.scheduler(HeartbeatReply(sequence=beat.sequence, sent_s=0.0))
    assert [request.upto for request in asked(effects)] == [5]
    one(FetchPlan, story.feed(FromWeightStore(message=plan(4))))


def test_a_welcome_says_which_versions_are_kept() -> None:
    story = Story().up(version=1)
    kept = msgspec.structs.replace(welcome(), upto={POLICY: 1})
    assert [request.upto for request in asked(story.scheduler(kept))] == [1]
    assert of(FetchPlan, story.feed(FromWeightStore(message=plan(2)))) == []


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
    dropped = one(DiscardCopy, story.spool(offer(1)))
    assert (dropped.policy, dropped.unload) == (POLICY, True)
    story.feed(CopyDiscarded(policy=POLICY))
    assert set(story.core.status().policies) == {"new/solver"}


def test_a_copy_in_doubt_leaves_the_engine_to_its_work_until_nobody_wants_it() -> None:
    story = Story(linger_s=60.0).up(version=1)
    story.scheduler(offer(1))
    fetched = one(FetchPlan, story.feed(FromWeightStore(message=plan(2))))
    failed = StageFailed(policy=POLICY, ticket=fetched.ticket, code="integrity.base")
    assert not one(DiscardCopy, story.feed(failed)).unload
    story.scheduler(HostedPolicies(policies=()))
    assert of(DiscardCopy, story.wait(70.0)) == []
    assert one(DiscardCopy, story.spool(offer(1))).unload
    story.feed(CopyDiscarded(policy=POLICY), CopyDiscarded(policy=POLICY))
    assert story.core.status().policies == {}


def test_a_policy_that_lingers_gets_a_new_copy_for_one_that_was_in_doubt() -> None:
    story = Story(linger_s=60.0).up(version=1)
    story.scheduler(HostedPolicies(policies=()))
    fetched = one(FetchPlan, story.feed(FromWeightStore(message=plan(2))))
    story.feed(StageFailed(policy=POLICY, ticket=fetched.ticket, code="integrity.base"))
    story.feed(CopyDiscarded(policy=POLICY))
    assert asked(story.wait(59.0))[0].have_version is None
    assert one(DiscardCopy, story.wait(2.0)).unload


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
