"""Which tokens fit the budget of the second moment."""

import itertools

import numpy as np
import pytest

from cloud_trainer.second_moment import within_budget


@pytest.mark.parametrize("seed", range(20))
def test_no_larger_choice_fits_the_budget(seed):
    rng = np.random.default_rng(seed)
    log_ratios = rng.normal(0, 0.3, 7).round(2)
    budget = float(rng.choice([0.0, 0.01, 0.04, 0.2]))
    kept = within_budget(log_ratios, budget)
    best = max(
        (
            size
            for size in range(1, 8)
            for chosen in itertools.combinations(log_ratios**2, size)
            if np.mean(chosen) <= budget
        ),
        default=0,
    )
    assert kept.sum() == best
    if kept.any():
        assert np.mean(log_ratios[kept] ** 2) <= budget
        assert np.abs(log_ratios[kept]).max() <= np.abs(log_ratios[~kept]).min(initial=np.inf)


def test_everything_within_the_budget_takes_part():
    assert within_budget(np.array([0.1, -0.2, 0.0]), 0.04).all()


def test_tokens_of_the_same_probability_take_part_with_no_budget_at_all():
    assert within_budget(np.array([0.0, 0.5, 0.0]), 0.0).tolist() == [True, False, True]


def test_a_difference_that_is_not_a_number_takes_no_part():
    assert within_budget(np.array([np.nan, 0.1, np.inf]), 0.04).tolist() == [False, True, False]


def test_no_tokens_are_no_tokens():
    assert within_budget(np.zeros(0), 0.1).shape == (0,)
