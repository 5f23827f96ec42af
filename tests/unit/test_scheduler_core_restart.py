"""A restart is loading rows; and the same events always give the same effects."""

import subprocess
import sys
from pathlib import Path

import pytest
from core_builders import (
    SOLVER,
    Scene,
    grants,
    make_run,
    make_scene,
    messages,
    of_type,
)

from scheduler.core.effects import ProduceItems, StartTaskSource
from scheduler.core.events import Tick
from transport.errors import InvariantViolation
from transport.messages import HelloRequired, LeaseOffer, LeaseRevoke, Welcome

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def scene() -> Scene:
    """Two groups buffered, two accepted and running on a, nothing queued."""
    scene = make_scene()
    scene.joined("a", slots=8)
    for offer in scene.live_offers():
        scene.accepted(offer)
    for offer in scene.live_offers()[:2]:
        scene.finished(offer)
    return scene


def test_a_new_core_wants_a_tick_at_once_and_starts_the_task_sources_of_live_runs(scene):
    scene.term += 1
    core = scene._new_core()
    assert core.next_deadline() == scene.now
    effects = core.handle(Tick(), scene.now)
    assert of_type(effects, StartTaskSource) == [StartTaskSource(make_run())]


def test_nothing_is_lost_and_nothing_is_sent_twice(scene):
    before = scene.books()
    effects = scene.restart()
    assert scene.books() == before
    assert not messages(effects, LeaseOffer)
    assert scene.policy().buffered_groups == 2
    assert [o.attempt for o in scene.live_offers("a")] == ["r/t-000002#1", "r/t-000003#1"]


def test_attempts_of_an_earlier_term_stay_valid(scene):
    offer = scene.live_offers()[0]
    scene.restart()
    scene.finished(offer)
    assert scene.books().buffered == 3


def test_agents_are_reconnecting_and_lose_nothing_within_the_grace(scene):
    scene.restart()
    assert scene.agent().state == "reconnecting"
    assert messages(scene.beats(), HelloRequired, "a")
    scene.wait(29.0)
    assert scene.books().in_flight == 2
    scene.joined("a", slots=8, held=scene.held_by("a"))
    assert (scene.agent().state, scene.books().in_flight) == ("ready", 2)
    assert scene.counter("agents.lost.not_back") == 0


def test_an_agent_that_does_not_come_back_is_lost_after_the_grace(scene):
    scene.restart()
    scene.wait(29.0)
    scene.joined("b", slots=8)
    effects = scene.wait(1.5)
    assert scene.counter("agents.lost.not_back") == 1
    assert len(messages(effects, LeaseOffer, "b")) == 2


def test_an_offer_that_never_left_is_made_again_when_the_agent_says_hello(scene):
    scene.restart()
    scene.joined("a", slots=8, held=())
    for _ in range(8):
        scene.heard("a", versions={})
        scene.wait(2.0)
    assert len(scene.live_offers("a")) >= 2
    assert scene.counter("attempts.stray.lapsed") == 2


def test_fences_grow_over_restarts(scene):
    scene.restart()
    scene.joined("b", slots=8)
    scene.failed(scene.live_offers("a")[0])
    fences = [offer.fence for offer in scene.live_offers()]
    assert max(fences) == (2, 1)


def test_a_live_trainer_goes_on_without_losing_its_batch(scene):
    [grant] = grants(scene.requested(1))
    scene.restart()
    [again] = grants(scene.requested(1))
    assert again == grant
    scene.stepped(1)
    assert scene.policy().head_version == 1
    effects = scene.trainer_joined()
    assert messages(effects, Welcome, "t")
    assert (scene.policy().step, scene.books().abandoned) == (1, 0)


def test_a_standing_request_survives(scene):
    scene.finished(scene.live_offers()[0])
    scene.requested(1)
    scene.stepped(1)
    scene.requested(2)
    scene.restart()
    scene.trainer_joined()
    scene.version_stored(1)
    assert grants(scene.finished(scene.live_offers()[0]))[0].step == 2


def test_items_on_their_way_are_asked_for_again():
    scene = Scene()
    scene.submitted()
    effects = scene.restart()
    [asked] = of_type(effects, ProduceItems)
    assert (asked.start, asked.count) == (0, 6)


def test_evaluations_go_on_where_they_were():
    scene = make_scene(run=make_run(evaluation={"items": 6, "items_per_job": 2}))
    scene.joined("a", slots=64)
    first, *rest = [offer for offer in scene.live_offers() if offer.kind == "eval"]
    scene.finished(first, rewards=(1.0, 0.0))
    scene.restart()
    for offer in rest:
        scene.finished(offer)
    [status] = scene.policy().evaluations
    assert (status.scored, status.accuracy, status.done) == (6, 5 / 6, True)


def test_releases_are_repeated_until_they_are_confirmed(scene):
    scene.requested(1)
    scene.stepped(1)
    scene.checkpointed(1)
    scene.restart()
    digests = [key for table, key in scene.rows if table == "release"]
    assert len(digests) == 2
    effects = scene.wait(16.0)
    assert {d for m in messages(effects, object) for d in getattr(m, "digests", ())} == set(digests)


def test_revoked_attempts_stay_revoked(scene):
    offer = scene.live_offers()[0]
    scene.failed(offer)
    scene.restart()
    scene.finished(offer)
    assert scene.counter("results.late") == 1
    assert scene.books().buffered == 2


def test_a_finished_run_keeps_its_name_its_books_and_its_end():
    scene = make_scene()
    scene.commanded("stop")
    scene.checkpointed(0, final=True)
    scene.restart()
    assert (scene.run().state, scene.run().reason) == ("finished", "stopped")
    assert scene.books().cancelled == 4
    assert "has finished before" in scene.submitted().message
    assert not of_type(scene.effects[-5:], StartTaskSource)


def test_only_changed_rows_are_taken(scene):
    offer = scene.live_offers()[0]
    core = scene.core
    scene.checks = False
    assert core.take_changes() == []
    scene.now += 1.0
    scene.beats()
    assert core.take_changes() == []
    core.handle(Tick(), scene.now)
    assert core.take_changes() == []
    assert offer.attempt in {o.attempt for o in scene.live_offers()}


def test_state_stays_bounded_over_a_long_run():
    scene = make_scene(run=make_run(policy={"steps": 400}))
    scene.checks = False
    scene.joined("a", slots=8)
    sizes = []
    for step in range(1, 301):
        scene.produced(scene.effects)
        for offer in scene.live_offers():
            scene.finished(offer, step - 1)
        scene.requested(step)
        scene.stepped(step)
        scene.version_stored(step)
        scene.checkpointed(step)
        scene.serving(step)
        scene.gone(*[key for table, key in scene.rows if table == "release"])
        sizes.append(len(scene.rows))
        scene.effects = scene.effects[-12:]
        scene.offers = {o.attempt: o for o in scene.live_offers()}
    assert scene.policy().step == 300
    assert max(sizes[100:]) <= max(sizes[:100])
    assert max(sizes) < 40


def test_time_never_runs_backwards(scene):
    scene.now = 50.0
    scene.feed(Tick())
    scene.core.handle(Tick(), 10.0)
    assert scene.core._ctx.now == 50.0


def test_a_contradiction_in_the_state_is_found_and_told_with_its_story(scene):
    job = scene.core._ctx.tables.jobs["r/t-000002"]
    job.copies[SOLVER].state = "queued"
    with pytest.raises(InvariantViolation, match="queued: books 0, copies 1"):
        scene.core.check()


def test_a_lost_revocation_is_made_up_for_by_the_next_heartbeat(scene):
    held = scene.held_by("a")
    effects = scene.commanded("stop")
    assert effects.ok
    assert len(messages(scene.effects, LeaseRevoke, "a")) == 2
    [reply] = [
        message
        for message in messages(scene.heard(held=held), object, "a")
        if hasattr(message, "unknown")
    ]
    assert set(reply.unknown) == {entry.attempt for entry in held}


WALK = """
import hashlib, random, sys
sys.path[:0] = [{root!r}, {support!r}]
from core_builders import make_run
from core_world import World

digest = hashlib.sha256()
for seed in range(3):
    rng = random.Random(seed)
    spec = make_run(
        policies=("judge", "solver"), policy={{"steps": 4, "max_policy_lag": 2}},
        evaluation={{"items": 5, "items_per_job": 2, "every_versions": 2}}, max_attempts=50,
    )
    world = World(spec, agents=6, seed=seed, shortlist=2, placement="two-choices", check=False)
    for _ in range(30):
        world.round()
        name = rng.choice(list(world.agents))
        rng.choice([world.agent_dies, world.agent_returns, world.agent_beats])(name)
        if rng.random() < 0.1:
            world.restart_core()
    digest.update(repr(world.scene.effects).encode())
    digest.update(repr(sorted(world.scene.rows.items())).encode())
print(digest.hexdigest())
"""


def test_the_same_events_give_the_same_effects_under_any_hash_seed():
    script = WALK.format(root=str(ROOT), support=str(ROOT / "tests" / "support"))
    digests = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "4242")
    ]
    assert digests[0] == digests[1]
    assert len(digests[0].strip()) == 64
