"""Whatever fails, in virtual time, through the production cores and the production store: nothing
is lost, nothing is trained on twice, and in the end nothing is left over.

The worlds and their faults are those of ``bench.virtual_chaos``; what is checked is in its
``World.settle``. Here are also the checks of the checks: a world that is tampered with must say so.
"""

from pathlib import Path

import pytest

from bench.virtual_chaos import MOST_S, chaos, losses
from bench.virtual_chaos_faults import strike_many
from bench.virtual_chaos_world import DEATHS, World
from scheduler.store import SchedulerStore

pytestmark = pytest.mark.timeout(120)  # for a machine that is busy; alone the longest takes 5 s


def test_a_hundred_and_fifty_faults(tmp_path: Path) -> None:
    world = chaos(tmp_path, faults=150, seed=1, check_every=25)
    assert world.problems == []
    assert world.faults.total() >= 150
    assert world.scheduler.lives > 5
    assert min(len(trainer.lineage()) for trainer in world.trainers) > 20
    assert len(world.submitter.results) == len(world.submitter.wanted) > 5


def test_invariants_hold_at_every_event(tmp_path: Path) -> None:
    world = chaos(tmp_path, faults=15, seed=2, check_every=1)
    assert world.problems == []
    assert world.scheduler.checked == world.scheduler.handled > 100


def test_a_lost_agents_work_is_placed_again_in_time(tmp_path: Path) -> None:
    world = losses(tmp_path, kills=8, seed=1)
    assert world.problems == []
    assert world.replaced_s
    assert max(world.replaced_s) <= MOST_S


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [11, 12, 13])
def test_a_thousand_faults(tmp_path: Path, seed: int) -> None:
    world = chaos(tmp_path, faults=1000, seed=seed, check_every=50)
    assert world.problems == []
    assert world.faults.total() >= 1000


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_many_losses_one_after_another(tmp_path: Path) -> None:
    world = losses(tmp_path, kills=60, seed=3)
    assert world.problems == []
    assert max(world.replaced_s) <= MOST_S


# ---- the checks can fail -------------------------------------------------------------------------


def started(folder: Path, *, check_every: int = 50) -> World:
    world = World(folder, seed=5, check_every=check_every)
    world.begin()
    return world


@pytest.mark.parametrize("how", DEATHS)
def test_a_scheduler_that_dies_in_a_commit_goes_on_from_its_rows(tmp_path: Path, how) -> None:
    world = started(tmp_path)
    for _ in range(3):
        world.kill_scheduler(how, 1.0)
        world.run(8.0)
    assert world.scheduler.lives == 4
    assert world.scheduler.torn == (3 if how == "torn commit" else 0)
    world.settle()
    assert world.problems == []


def test_a_row_that_is_not_what_was_committed_is_noticed(tmp_path: Path) -> None:
    world = started(tmp_path, check_every=10**9)
    world.kill_scheduler("before commit", 1.0)
    world.run(0.5)
    assert not world.scheduler.alive
    store = SchedulerStore.open(tmp_path / "life-2", "process-crash")
    table, key, _ = next(row for row in store.rows() if row[0] == "job")
    store.commit([(table, key, None)], store.now)
    store.close()
    world.run(5.0)
    assert any("rows on disk differs" in problem for problem in world.scheduler.problems)


def test_a_job_that_is_trained_on_twice_is_noticed(tmp_path: Path) -> None:
    world = started(tmp_path)
    strike_many(world, 1)
    world.run(60.0)
    trainer = world.trainers[0]
    trainer._lineage += trainer._lineage[:1]
    world.settle()
    assert any("trained on twice" in problem for problem in world.problems)


def test_a_body_that_vanishes_is_noticed(tmp_path: Path) -> None:
    """A log that forgets what it acknowledged: the submitter finds its result without a body."""
    world = started(tmp_path)
    world.submitter.submit()
    world.submitter._has_body = lambda _: False
    world.run(60.0)
    assert any("its body is gone" in problem for problem in world.submitter.problems)
