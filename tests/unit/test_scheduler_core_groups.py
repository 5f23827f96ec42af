"""The life of a group: offered, leased, generated, stored, accepted; and what can go wrong."""

import pytest
from core_builders import (
    SOLVER,
    Scene,
    make_agent_hello,
    make_run,
    make_scene,
    make_summary,
    messages,
    released,
)

from scheduler.core.events import FromAgent, FromService
from scheduler.core.settings import TRAJECTORY_LOG
from transport.messages import (
    BodiesReleased,
    HeartbeatReply,
    HeldAttempt,
    Hello,
    HelloRequired,
    LeaseOffer,
    LeaseReply,
    LeaseRevoke,
    Role,
    SummariesAccepted,
    Welcome,
)


@pytest.fixture
def scene() -> Scene:
    """One agent with room for two groups beside a prefetched one, holding three offers."""
    scene = make_scene()
    scene.joined("a")
    return scene


def test_an_offer_says_everything_that_the_agent_needs(scene):
    offer = scene.live_offers()[0]
    assert (offer.job, offer.attempt, offer.fence) == ("r/t-000000", "r/t-000000#1", (1, 1))
    assert offer.policies == {"solver": SOLVER}
    assert (offer.kind, offer.group_size, len(offer.items)) == ("train", 2, 1)
    assert (offer.reward.name, offer.reward.dataset) == ("reasoning-gym", "chain_sum")
    assert (offer.temperature, offer.lease_s, offer.pinned) == (1.0, 120.0, {})


def test_an_agent_gets_work_for_its_slots_and_one_prefetched_group(scene):
    assert len(scene.live_offers("a")) == 3
    assert scene.books().queued == 1


def test_a_group_larger_than_the_agent_still_runs_there_in_waves():
    scene = make_scene(run=make_run(workflow={"group_size": 8}), prefetch_groups=0)
    scene.joined("a", slots=2)
    assert len(scene.live_offers("a")) == 1


def test_a_spooled_group_makes_room_for_the_next_one(scene):
    offers = scene.live_offers()
    held = [HeldAttempt(attempt=o.attempt, fence=o.fence) for o in offers]
    held[0] = HeldAttempt(attempt=offers[0].attempt, fence=offers[0].fence, spooled=True)
    effects = scene.heard(held=tuple(held), versions=make_agent_hello().agent.versions)
    assert len(messages(effects, LeaseOffer)) == 1


def test_the_first_result_is_accepted_and_buffered(scene):
    offer = scene.live_offers()[0]
    scene.accepted(offer)
    effects = scene.finished(offer)
    [answer] = messages(effects, SummariesAccepted, TRAJECTORY_LOG)
    assert len(answer.digests) == 1
    assert scene.books().buffered == 1
    assert scene.agent().groups_done == 1


def test_a_summary_announced_again_is_answered_again_and_changes_nothing(scene):
    offer = scene.live_offers()[0]
    scene.finished(offer)
    effects = scene.finished(offer)
    assert messages(effects, SummariesAccepted)
    assert not released(effects)
    assert scene.books().buffered == 1


def test_a_result_for_an_unknown_job_is_answered_and_its_body_released(scene):
    offer = scene.live_offers()[0]
    summary = make_summary(offer, "a", versions={SOLVER: (0, 0)}, job="r/t-000099", digest="d")
    effects = scene.stored(summary)
    assert messages(effects, SummariesAccepted)[0].digests == ("d",)
    assert released(effects) == ["d"]


@pytest.mark.parametrize(
    "fault",
    [
        {"rewards": (1.0,)},
        {"lengths": (1, 2, 3)},
        {"rewards": (1.0, float("nan"))},
        {"lengths": (-1, 4)},
        {"generating_s": float("inf")},
        {"size_bytes": 0},
        {"versions": {SOLVER: (2, 1)}},
        {"versions": {"other/solver": (0, 0)}},
    ],
)
def test_a_summary_that_does_not_add_up_fails_the_attempt_and_is_released(scene, fault):
    offer = scene.live_offers()[0]
    effects = scene.finished(offer, **fault)
    assert len(released(effects)) == 1
    assert scene.counter("results.invalid") == 1
    assert scene.books().buffered == 0
    assert scene.books().balance == 0


def test_another_agent_cannot_deliver_for_an_attempt(scene):
    offer = scene.live_offers()[0]
    effects = scene.finished(offer, agent="mallory")
    assert released(effects)
    assert scene.books().buffered == 0


def test_a_foreign_fence_does_not_deliver(scene):
    offer = scene.live_offers()[0]
    scene.finished(offer, fence=(1, 99))
    assert scene.counter("results.late") == 1
    assert scene.books().buffered == 0


def test_a_body_that_is_a_live_result_is_not_released_by_a_forged_summary(scene):
    first, second = scene.live_offers()[:2]
    scene.finished(first, digest="d" * 64)
    assert not released(scene.finished(second, digest="d" * 64))
    assert scene.counter("results.foreign_body") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": (2**64 - 1, 2**64 - 1)},
        {"lengths": (8, 17)},  # the run allows 16
        {"prompt_tokens": 2**64 - 1},
        {"versions": {SOLVER: (0, 2**64 - 1)}},
        {"rewards": (1e300, 1e300)},
        {"generating_s": float("inf")},
        {"size_bytes": 2**64 - 1},
    ],
)
def test_numbers_that_no_run_can_make_fail_the_attempt_and_nothing_else(scene, changes):
    scene.finished(scene.live_offers()[0], **changes)
    assert scene.counter("results.invalid") == 1
    assert scene.books().buffered == 0
    scene.finished(scene.live_offers()[0])
    assert scene.books().buffered == 1


def test_a_failed_attempt_is_tried_again_elsewhere_if_there_is_an_elsewhere(scene):
    scene.joined("b")
    offer = next(offer for offer in scene.live_offers("a"))
    scene.accepted(offer)
    effects = scene.failed(offer)
    [retry] = [o for o in messages(effects, LeaseOffer) if o.job == offer.job]
    assert scene.offered_to[retry.attempt] == "b"
    assert retry.attempt == "r/t-000000#2"
    assert retry.fence > offer.fence


def test_a_retry_waits_for_its_back_off():
    scene = make_scene(retry_backoff_s=4.0)
    scene.joined("a")
    offer = scene.live_offers()[0]
    effects = scene.failed(offer)
    assert offer.job not in [o.job for o in messages(effects, LeaseOffer)]
    scene.failed(scene.live_offers()[1])
    effects = scene.wait(4.0)
    assert offer.job in [o.job for o in messages(effects, LeaseOffer)]


def test_a_group_that_keeps_failing_is_given_up_and_its_place_is_refilled():
    scene = make_scene(run=make_run(max_attempts=2))
    scene.joined("a")
    for _ in range(2):
        offer = next(o for o in scene.live_offers() if o.job == "r/t-000000")
        scene.failed(offer)
    scene.produced(scene.effects)
    row = scene.books()
    assert (row.failed, row.submitted, row.balance) == (1, 5, 0)
    assert scene.counter("failed.attempts") == 1


def test_draining_agents_hand_work_back_without_blame():
    scene = make_scene(run=make_run(max_attempts=1))
    scene.joined("a")
    scene.joined("b", slots=8)
    scene.failed(scene.live_offers("a")[0], code="agent.draining")
    assert scene.books().failed == 0
    assert scene.books().in_flight + scene.books().queued == 4


def test_an_unanswered_offer_is_withdrawn_and_placed_again(scene):
    scene.wait(9.0)
    scene.joined("b")
    scene.heard("a", held=scene.held_by("a")[1:], versions=make_agent_hello().agent.versions)
    effects = scene.wait(1.5)
    [revoke] = messages(effects, LeaseRevoke, "a")
    assert (revoke.attempt, revoke.reason) == ("r/t-000000#1", "offer_timeout")
    assert "r/t-000000#2" in [o.attempt for o in messages(effects, LeaseOffer, "b")]


def test_accepting_a_withdrawn_offer_is_answered_with_a_revocation(scene):
    offer = scene.live_offers()[0]
    scene.failed(offer)
    effects = scene.accepted(offer)
    assert messages(effects, LeaseRevoke, "a")[0].attempt == offer.attempt


def test_declining_is_no_failure_but_gives_the_agent_a_break(scene):
    offer = scene.live_offers()[0]
    effects = scene.declined(offer, "spool_full")
    assert not messages(effects, LeaseOffer)
    assert scene.counter("attempts.declined.spool_full") == 1
    effects = scene.wait(2.1)
    assert offer.job in [o.job for o in messages(effects, LeaseOffer, "a")]
    assert scene.books().failed == 0


def test_a_peers_code_becomes_a_counter_only_if_it_is_short_and_plain(scene):
    scene.declined(scene.live_offers()[0], "x" * 200)
    assert scene.counter("attempts.declined.other") == 1


def test_a_lost_agent_gets_a_sibling_attempt_and_may_still_win(scene):
    offer = scene.live_offers()[0]
    scene.accepted(offer)
    scene.wait(11.0)
    scene.joined("b", slots=16)
    effects = scene.wait(1.5)
    assert scene.agent().state == "lost"
    [sibling] = [o for o in messages(effects, LeaseOffer, "b") if o.job == offer.job]
    assert not messages(effects, LeaseRevoke)
    effects = scene.finished(offer)
    assert scene.books().buffered == 1
    assert messages(effects, LeaseRevoke, "b")[0].attempt == sibling.attempt


def test_the_loser_of_two_attempts_is_released(scene):
    offer = scene.live_offers()[0]
    scene.accepted(offer)
    scene.wait(11.0)
    scene.joined("b", slots=16)
    scene.wait(1.5)
    sibling = next(o for o in scene.live_offers("b") if o.job == offer.job)
    scene.finished(sibling)
    effects = scene.finished(offer)
    assert len(released(effects)) == 1
    assert scene.books().buffered == 1


def test_a_lost_agent_that_comes_back_keeps_what_it_holds(scene):
    for offer in scene.live_offers():
        scene.accepted(offer)
    held = scene.held_by("a")
    scene.wait(13.0)
    assert (scene.books().in_flight, scene.agent().state) == (0, "lost")
    scene.joined("a", held=held)
    assert (scene.books().in_flight, scene.agent().state) == (3, "ready")
    assert [o.attempt for o in scene.live_offers("a")] == [entry.attempt for entry in held]


def test_a_lost_agent_is_asked_to_say_hello_again(scene):
    scene.wait(13.0)
    assert messages(scene.beats("a"), HelloRequired, "a")


def test_a_restarted_agent_fails_what_it_no_longer_holds_at_once(scene):
    scene.joined("b", slots=8)
    first, second = scene.live_offers("a")[:2]
    held = (HeldAttempt(attempt=first.attempt, fence=first.fence, spooled=True),)
    scene.joined("a", incarnation=2, held=held)
    assert second.attempt not in [o.attempt for o in scene.live_offers()]
    assert scene.counter("attempts.failed.agent.restarted") == 2
    scene.finished(first)
    assert scene.books().buffered == 1


def test_a_lease_that_the_agent_no_longer_lists_lapses(scene):
    for offer in scene.live_offers():
        scene.accepted(offer)
    for _ in range(7):
        scene.heard(held=scene.held_by("a")[1:], versions=make_agent_hello().agent.versions)
        scene.wait(2.0)
    assert scene.counter("attempts.stray.lapsed") == 1
    assert "r/t-000000#2" in scene.offers
    scene.finished(scene.offers["r/t-000000#1"])
    assert scene.books().buffered == 1


def test_heartbeats_keep_leases_for_ever(scene):
    for offer in scene.live_offers():
        scene.accepted(offer)
    for _ in range(80):
        scene.beats("a")
        scene.wait(2.0)
    assert len(scene.live_offers()) == 3
    assert scene.now > scene.settings.lease_s


def test_held_attempts_that_are_not_wanted_are_named_in_the_reply(scene):
    offer = scene.live_offers()[0]
    held = (
        HeldAttempt(attempt=offer.attempt, fence=offer.fence),
        HeldAttempt(attempt="r/t-000000#9", fence=(1, 9)),
        HeldAttempt(attempt=scene.live_offers()[1].attempt, fence=(0, 1)),
    )
    [reply] = messages(scene.heard(held=held), HeartbeatReply)
    assert reply.unknown == ("r/t-000000#9", "r/t-000001#1")


def test_an_offer_that_a_reconnecting_agent_does_not_list_was_not_received(scene):
    effects = scene.joined("a")
    assert [m.reason for m in messages(effects, LeaseRevoke)] == ["not_received"] * 3
    assert len(scene.live_offers("a")) == 3
    assert scene.books().failed == 0


def test_released_bodies_are_named_until_the_log_says_that_they_are_gone(scene):
    offer = scene.live_offers()[0]
    summary = make_summary(offer, "a", versions={SOLVER: (0, 0)}, job="r/t-000099", digest="d")
    scene.stored(summary)
    hello = Hello(role=Role.SERVICE, incarnation=1, build="b")
    effects = scene.feed(FromService(TRAJECTORY_LOG, hello))
    assert messages(effects, Welcome, TRAJECTORY_LOG)
    assert released(effects) == ["d"]
    assert "d" in released(scene.wait(16.0))
    scene.gone("d")
    assert not released(scene.wait(40.0))


def test_many_releases_go_out_in_bounded_batches(scene):
    offer = scene.live_offers()[0]
    summaries = tuple(
        make_summary(offer, "a", versions={}, job="r/t-000099", digest=f"d{n:04d}")
        for n in range(2500)
    )
    effects = scene.stored(*summaries)
    assert [len(m.digests) for m in messages(effects, BodiesReleased)] == [1000, 1000, 500]
    hello = Hello(role=Role.SERVICE, incarnation=1, build="b")
    effects = scene.feed(FromService(TRAJECTORY_LOG, hello))
    total = 0
    while batches := messages(effects, BodiesReleased):
        assert [len(m.digests) <= 1000 for m in batches] == [True]
        total += len(batches[0].digests)
        effects = scene.gone(*batches[0].digests)
    assert total == 2500


def test_a_reply_from_nobody_we_know_is_harmless(scene):
    reply = LeaseReply(attempt="r/t-000000#1", fence=(1, 1), accepted=True)
    effects = scene.feed(FromAgent("stranger", reply))
    assert messages(effects, HelloRequired, "stranger")


def test_the_story_of_a_job_tells_where_it_went_and_why(scene):
    offer = scene.live_offers()[0]
    scene.accepted(offer)
    scene.finished(offer)
    story = "\n".join(scene.core.story("r/t-000000"))
    assert "offered agent=a why=best score=a cost=" in story
    assert "leased" in story
    assert "buffered policy=r/solver" in story
