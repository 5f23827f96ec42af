"""The rows of the learning benches: what they compare, and that they can fail."""

import pytest

from bench.data_algorithms import FULL, Reached, rows_of
from bench.learning_lag import QUICK, compared
from bench.learning_loop import ARITHMETIC, Learnt, finished, task
from bench.learning_orders import Ordered, ordered, per_drawn
from scheduler.tasks import open_source


def reached(rollouts: int, *, ok: bool = True, **counters: int) -> Reached:
    return Reached(rollouts, rollouts // 256, ok, counters)


def test_rollouts_are_medians_against_plain() -> None:
    found = {
        "plain": [reached(1024), reached(2048), reached(8192)],
        "replay": [reached(512), reached(1024), reached(1024)],
    }
    plain, _, replay, steps = rows_of("x", 0.9, FULL, found)
    assert (plain.value, plain.ratio) == (2048, 1.0)
    assert (replay.value, replay.ratio) == (1024, 0.5)
    assert (steps.value, steps.ratio) == (4, 0.5)
    assert plain.ok
    assert replay.ok


def test_a_seed_that_never_reaches_the_target_is_a_miss() -> None:
    found = {"plain": [reached(1024), reached(16_384, ok=False)]}
    rollouts, _ = rows_of("x", 0.9, FULL, found)
    assert not rollouts.ok
    assert "1024 to 16384" in rollouts.metric


def test_what_functions_took_out_stands_beside_the_steps() -> None:
    counters = {"filtered.zero_advantage": 30, "curated.kept_anyway": 2, "offers": 9}
    _, steps = rows_of("x", 0.9, FULL, {"plain": [reached(1024, **counters)]})
    assert steps.metric.endswith(", filtered.zero_advantage 30")


def test_a_mixture_has_families_and_one_part_has_none() -> None:
    mixed = open_source(task({"easy": (2, 1), "hard": (3, 2)}), 0).items("train", 0, 8)
    assert {item.family for item in mixed} == {"easy", "hard"}
    assert {item.family for item in open_source(ARITHMETIC, 0).items("train", 0, 8)} == {""}


def test_accuracy_per_drawn_sample_counts_what_was_wasted() -> None:
    learnt = (0.0, 1.0, 1.0)  # after 0, 10 and 20 steps of training
    assert per_drawn(learnt, 10, 0.0, 20) == 1.0
    # After drawing 10 batches 8 were trained on: the line between 0 and 1 is at 0.8 there.
    assert per_drawn(learnt, 10, 0.2, 20) == pytest.approx(0.9)


def test_an_order_that_wastes_more_is_a_miss() -> None:
    def one(wasted: float) -> tuple[Ordered, Learnt]:
        return Ordered(((1, 2),), wasted, 7), Learnt((0.4, 0.6, 0.8), 0.0)

    waste, fifo, edf = compared("x", [one(0.2)], [one(0.1)], QUICK)
    assert (waste.value, waste.ratio, waste.ok) == (0.1, 0.5, True)
    assert fifo.ratio == 1.0
    assert edf.value > fifo.value  # the same curve, less drawn for it
    assert not compared("x", [one(0.1)], [one(0.2)], QUICK)[0].ok


def test_the_scenario_gives_lags_within_the_bound_and_old_ones() -> None:
    found = ordered("edf", 2, 4, 0)
    assert [len(lags) for lags in found.lags] == [32] * 4
    assert max(map(max, found.lags)) == 2


def test_a_part_of_a_table_is_none() -> None:
    assert finished([1, 2]) == [1, 2]
    with pytest.raises(KeyboardInterrupt):
        finished([1, None])
