"""The learning benches' loops with the real engine and trainer, a few steps long."""

import asyncio

import pytest

from bench.data_algorithms import ALGORITHMS, SETTINGS, Attempt, Size, attempt
from bench.learning_core import CoreRun, run_spec
from bench.learning_lag import MAIN_LOSS, Loop, learn
from bench.learning_loop import GROUPS, SIBLINGS, Learner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SMALL = Size(seeds=1, every=512, items=16, budget=1024)


def test_the_core_filters_replays_and_curates_what_the_engine_draws() -> None:
    setting, algorithm = SETTINGS["mixture"], ALGORITHMS["all three"]
    again: list[int] = []

    async def run() -> CoreRun:
        async with Learner(setting.task, 0, {}) as learner:
            spec = run_spec(setting.task, 0, algorithm.data, setting.curators)
            made = CoreRun(learner, spec)
            for _ in range(3):
                await made.step()
                again.append(made.replayed)
            return made

    made = asyncio.run(run())
    counters = made.counters()
    assert counters["filtered.zero_advantage"] > 0
    assert counters["curated.difficulty_band"] > 0
    assert again == [0, GROUPS // 2, GROUPS]
    filtered = counters["filtered.zero_advantage"]
    assert made.rollouts >= (3 * GROUPS - made.replayed + filtered) * SIBLINGS


def test_an_unreachable_target_is_given_up_at_the_budget() -> None:
    found = attempt(Attempt("arithmetic", "plain", 0, 1.0, SMALL))
    assert not found.ok
    assert found.rollouts == SMALL.budget
    assert found.steps == SMALL.budget // (GROUPS * SIBLINGS)


def test_groups_are_drawn_by_the_version_of_their_lag() -> None:
    every_lag = [((lag,) * GROUPS,) * 4 for lag in (0, 2)]
    fresh, late = (learn(Loop(MAIN_LOSS, 0, lags, every=2, items=16)) for lags in every_lag)
    assert len(fresh.accuracies) == 3
    assert late.kl_behaviour > 2 * fresh.kl_behaviour
