"""Groups that have missed their last batch are stopped when it goes out, not a step later."""

import pytest
from core_builders import SOLVER, Scene, grants, make_ref, make_run, make_scene, messages

from transport.messages import HeldAttempt, LeaseOffer, LeaseRevoke


def told(scene: Scene, *started: LeaseOffer) -> None:
    """A heartbeat of the agent, which still has version 0, that says what has begun."""
    held = tuple(
        HeldAttempt(attempt=o.attempt, fence=o.fence, started=o in started)
        for o in scene.live_offers("a")
    )
    scene.heard("a", held=held, versions={SOLVER: make_ref(SOLVER, 0)}, rtt_s=0.02)


def one_behind(
    placement: str = "finish-time", *, begun: bool = True, lag: int = 1
) -> tuple[Scene, LeaseOffer, LeaseOffer]:
    """Step 1 is done; a group that began before it (or has not yet), and one that can be next."""
    scene = make_scene(
        placement=placement,
        run=make_run(policy={"max_policy_lag": lag, "batch_groups": 1}),
    )
    scene.joined("a", slots=16)
    first, slow, *_ = scene.live_offers()
    scene.accepted(first)
    scene.accepted(slow)
    told(scene, first, *[slow] * begun)
    scene.finished(first)
    scene.requested(1, groups=1)
    assert slow in scene.live_offers()  # it could be used by step 2 yet
    scene.produced(scene.stepped(1))
    scene.serving(1)
    fresh = next(o for o in scene.live_offers() if o not in (first, slow))
    scene.accepted(fresh)
    return scene, slow, fresh


def granted(scene: Scene, offer: LeaseOffer) -> list[str]:
    """Step 2, which waits for a group, gets that one; which attempts are stopped at that."""
    effects = [*scene.requested(2, groups=1), *scene.finished(offer)]
    assert len(grants(effects)) == 1
    return [m.attempt for m in messages(effects, LeaseRevoke, "a")]


def test_a_group_that_has_missed_its_last_batch_is_stopped_when_that_goes_out():
    scene, slow, fresh = one_behind()
    assert granted(scene, fresh) == [slow.attempt]
    assert scene.books().expired == 1
    assert scene.counter("expired.overtaken") == 1


def test_when_the_batch_was_complete_before_it_is_stopped_with_the_next_heartbeat():
    scene, slow, fresh = one_behind()
    scene.finished(fresh)
    assert len(grants(scene.requested(2, groups=1))) == 1
    assert [m.attempt for m in messages(scene.wait(2.0), LeaseRevoke, "a")] == [slow.attempt]


def test_a_group_that_another_batch_can_use_goes_on():
    scene, slow, fresh = one_behind(lag=2)
    assert granted(scene, fresh) == []
    assert slow in scene.live_offers()


def test_what_has_not_begun_goes_on_it_will_begin_with_newer_weights():
    scene, slow, fresh = one_behind(begun=False)
    assert granted(scene, fresh) == []
    assert slow in scene.live_offers()


@pytest.mark.parametrize("placement", ["least-outstanding", "round-robin"])
def test_the_baselines_do_not_look_ahead(placement):
    scene, slow, fresh = one_behind(placement)
    assert granted(scene, fresh) == []
    assert messages(scene.stepped(2), LeaseRevoke, "a")[0].attempt == slow.attempt
