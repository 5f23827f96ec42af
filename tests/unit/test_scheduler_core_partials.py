"""Finished turns in the scheduler's core: kept, replaced, released, and gone on from."""

import hashlib
from typing import Any

import pytest
from core_builders import SOLVER, Scene, make_run, make_scene, released

from scheduler.core.events import FromService
from scheduler.core.settings import TRAJECTORY_LOG
from transport.messages import LeaseOffer, PartialRef, PartialStored, PartialSummary


def turns_of(scene: Scene, offer: LeaseOffer, turns: int = 2, **changes: Any) -> PartialSummary:
    values = {
        "attempt": offer.attempt,
        "fence": offer.fence,
        "job": offer.job,
        "turns": turns,
        "digest": hashlib.sha256(f"{offer.attempt} {turns}".encode()).hexdigest(),
        "size_bytes": 1000,
        "oldest": {SOLVER: 0},
        "agent": scene.offered_to[offer.attempt],
    }
    return PartialSummary(**{**values, **changes})


def announced(scene: Scene, *partials: PartialSummary) -> list[str]:
    """What is released because of these announcements."""
    return released(scene.feed(FromService(TRAJECTORY_LOG, PartialStored(partials=partials))))


@pytest.fixture
def scene() -> Scene:
    """Agent a holds the only group; b is there and has nothing."""
    scene = make_scene(run=make_run(max_groups=1, policy={"batch_groups": 1}))
    scene.joined("a")
    scene.joined("b")
    offer = scene.live_offers()[0]
    scene.accepted(offer)
    return scene


def first(scene: Scene) -> LeaseOffer:
    return next(iter(scene.offers.values()))


def second(scene: Scene) -> LeaseOffer:
    return list(scene.offers.values())[1]


def partial_of(scene: Scene) -> PartialSummary | None:
    [job] = scene.core._ctx.tables.jobs.values()
    return job.partial


@pytest.mark.parametrize("restart", [False, True])
def test_when_its_agent_dies_the_next_attempt_goes_on_from_the_newest_turns(scene, restart):
    offer = first(scene)
    newest = turns_of(scene, offer, 5)
    assert announced(scene, turns_of(scene, offer, 3), newest) == []
    dead = scene.offered_to[offer.attempt]
    if restart:
        scene.restart()
        assert partial_of(scene) == newest
        for name in "ab":
            scene.joined(name, incarnation=1 if name != dead else 2)
    else:
        scene.joined(dead, incarnation=2)
    again = second(scene)
    assert again.resume == PartialRef(digest=newest.digest, turns=5)
    assert scene.core._ctx.leases[again.attempt].resumed == {SOLVER: 0}
    assert scene.counter("partials.resumed") == 1


def test_turns_go_with_the_result_whoever_brings_it(scene):
    partial = turns_of(scene, first(scene))
    announced(scene, partial)
    assert released(scene.finished(first(scene))) == [partial.digest]
    assert partial_of(scene) is None


def test_turns_go_with_the_run(scene):
    partial = turns_of(scene, first(scene))
    announced(scene, partial)
    scene.commanded("stop")
    released_now = [
        release for release in scene.core._ctx.tables.releases if release == partial.digest
    ]
    assert released_now == [partial.digest]


@pytest.mark.parametrize(
    ("code", "resumes"),
    [("weights.timeout", True), ("spool.lost", True), ("workflow.error", False), ("engine", False)],
)
def test_only_what_was_not_the_jobs_own_fault_is_gone_on_from(scene, code, resumes):
    offer = first(scene)
    announced(scene, turns_of(scene, offer))
    scene.failed(offer, code)
    assert (second(scene).resume is not None) == resumes


def test_a_lost_agents_turns_count_until_another_has_come_as_far(scene):
    offer = first(scene)
    announced(scene, turns_of(scene, offer, 4))
    for _ in range(20):  # the other one goes on speaking
        scene.wait(1.0)
        for name in "ab":
            if name != scene.offered_to[offer.attempt]:
                scene.beats(name)
    again = second(scene)
    assert again.resume is not None
    mine, late = turns_of(scene, again, 5), turns_of(scene, offer, 5)
    assert announced(scene, mine) == [turns_of(scene, offer, 4).digest]
    assert announced(scene, late) == [late.digest]  # a stray attempt has to bring more
    assert partial_of(scene) == mine
    further = turns_of(scene, offer, 6)
    assert announced(scene, further) == [mine.digest]
    assert partial_of(scene) == further


@pytest.mark.parametrize(
    "changes",
    [
        {"fence": (1, 99)},
        {"agent": "mallory"},
        {"job": "r/t-000099", "attempt": "r/t-000099#1"},
        {"turns": 0},
        {"size_bytes": 2**40},
        {"oldest": {}},
        {"oldest": {"other/solver": 0}},
    ],
)
def test_turns_that_no_live_attempt_can_have_are_released(scene, changes):
    partial = turns_of(scene, first(scene), **changes)
    assert announced(scene, partial) == [partial.digest]
    assert partial_of(scene) is None


def test_what_is_announced_again_changes_nothing_and_older_turns_do_not_come_back(scene):
    newer, older = turns_of(scene, first(scene), 4), turns_of(scene, first(scene), 3)
    assert announced(scene, newer, newer) == []
    assert announced(scene, older) == [older.digest]
    assert partial_of(scene) == newer


def test_anothers_result_cannot_be_named_as_turns(scene):
    scene.finished(first(scene))
    [digest] = scene.core._ctx.bodies
    partial = turns_of(scene, first(scene), digest=digest)
    assert announced(scene, partial) == []
    assert digest in scene.core._ctx.bodies


def test_turns_whose_oldest_version_is_beyond_the_bound_are_begun_anew():
    scene = make_scene(run=make_run(max_groups=1, policy={"batch_groups": 1, "max_policy_lag": 1}))
    for name in "ab":
        scene.joined(name)
    offer = first(scene)
    scene.accepted(offer)
    announced(scene, turns_of(scene, offer))
    scene.trainer_joined()
    for version in (1, 2):
        scene.stepped(version)
        scene.version_stored(version)
        for name in "ab":
            scene.serving(version, name)
    scene.joined(scene.offered_to[offer.attempt], incarnation=2, versions={SOLVER: 2})
    scene.wait(1.0)
    assert second(scene).resume is None
    assert scene.counter("partials.stale") >= 1


def test_nothing_is_learnt_of_speed_from_turns_that_another_agent_drew(scene):
    offer = first(scene)
    announced(scene, turns_of(scene, offer))
    scene.joined(scene.offered_to[offer.attempt], incarnation=2)
    again = second(scene)
    agent = scene.core._ctx.agents[scene.offered_to[again.attempt]]
    scene.accepted(again)
    before = agent.estimate.token_time_s("", 0.5, scene.now)
    scene.finished(again, generating_s=1e-6)
    assert agent.estimate.token_time_s("", 0.5, scene.now) == before
