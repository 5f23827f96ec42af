"""Advantages against loops over siblings."""

import itertools
import math
import random

import numpy as np
import pytest

from cloud_trainer.advantages import (
    batch_advantages,
    generalised_advantages,
    group_advantages,
    overlong_reward,
    whitened,
)

NORMALISATIONS = ["none", "group_std", "batch_std"]
BASELINES = ["group_mean", "leave_one_out"]


def reference(groups, normalisation, baseline):
    """Sibling by sibling."""
    result = []
    for rewards in groups:
        for place, reward in enumerate(rewards):
            others = rewards[:place] + rewards[place + 1 :]
            compared = rewards if baseline == "group_mean" else others
            value = 0.0 if not others else reward - math.fsum(compared) / len(compared)
            if normalisation == "group_std":
                centre = math.fsum(rewards) / len(rewards)
                squares = [(r - centre) ** 2 for r in rewards]
                value /= math.sqrt(math.fsum(squares) / len(squares)) + 1e-6
            result.append(value)
    if normalisation == "batch_std":
        scale = math.sqrt(math.fsum(v * v for v in result) / len(result)) + 1e-6
        result = [value / scale for value in result]
    return result


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
@pytest.mark.parametrize("baseline", BASELINES)
def test_every_combination_follows_the_formula(normalisation, baseline):
    rng = random.Random(3)
    for _ in range(50):
        groups = [
            [rng.choice([0.0, 0.5, 1.0, rng.gauss(0, 3)]) for _ in range(rng.randint(1, 6))]
            for _ in range(rng.randint(1, 5))
        ]
        values = batch_advantages(groups, normalisation, baseline)
        expected = reference(groups, normalisation, baseline)
        assert values == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_rewards_are_centred_and_divided_by_the_deviation_of_their_group():
    values = group_advantages([1.0, 0.0, 0.0, 0.0], "group_std")
    deviation = np.sqrt(3) / 4
    assert values == pytest.approx([0.75 / deviation] + [-0.25 / deviation] * 3, rel=1e-5)
    assert values.sum() == pytest.approx(0)


def test_without_normalisation_they_are_only_centred():
    assert group_advantages([2.0, 0.0, 1.0], "none").tolist() == [1.0, -1.0, 0.0]


def test_a_sibling_left_out_of_its_own_baseline_is_compared_with_the_others():
    values = group_advantages([3.0, 0.0, 0.0], "none", "leave_one_out")
    assert values == pytest.approx([3.0, -1.5, -1.5])


@pytest.mark.parametrize(
    ("normalisation", "baseline"), list(itertools.product(NORMALISATIONS, BASELINES))
)
@pytest.mark.parametrize("rewards", [[], [0.3], [0.1] * 3, [0.7] * 8, [1e9 + 0.1] * 7])
def test_equal_rewards_give_exactly_zero_whatever_the_rounding(normalisation, baseline, rewards):
    assert not batch_advantages([rewards], normalisation, baseline).any()


def test_no_groups_have_no_advantages():
    assert batch_advantages([], "batch_std").shape == (0,)


def test_scale_and_offset_of_the_rewards_do_not_matter_with_the_deviation_divided_out():
    rewards = np.array([0.0, 1.0, 0.25, 1.0])
    plain = group_advantages(rewards.tolist(), "group_std")
    scaled = group_advantages((rewards * 50 - 7).tolist(), "group_std")
    assert scaled == pytest.approx(plain, abs=1e-5)


def test_the_penalty_grows_over_the_last_part_and_stops_at_one():
    lengths = [0, 80, 85, 90, 95, 100, 500]
    values = [overlong_reward(length, max_tokens=100, share=0.2) for length in lengths]
    assert values == pytest.approx([0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0])
    assert overlong_reward(50, max_tokens=100, share=1.0) == -0.5


def estimate(rewards, values, t, gamma, lam):
    """The exponential mean of the n-step estimates: arXiv:1506.02438, before it is summed up."""
    ahead = len(values) - t

    def steps(n):
        known = math.fsum(gamma**k * rewards[t + k] for k in range(n))
        return known + (gamma**n * values[t + n] if n < ahead else 0.0) - values[t]

    # All estimates of more steps than there are tokens are that of all of them.
    mean = math.fsum((1 - lam) * lam ** (n - 1) * steps(n) for n in range(1, ahead))
    return mean + lam ** (ahead - 1) * steps(ahead)


@pytest.mark.parametrize("gamma", [1.0, 0.8])
@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_generalised_advantages_follow_the_definition(gamma, lam):
    rng = random.Random(8)
    lengths = [rng.randint(1, 7) for _ in range(20)]
    rewards = [[rng.gauss(0, 1) for _ in range(length)] for length in lengths]
    values = [[rng.gauss(0, 1) for _ in range(length)] for length in lengths]
    found = generalised_advantages(
        np.concatenate(rewards), np.concatenate(values), lengths, gamma=gamma, lam=lam
    )
    expected = [
        estimate(r, v, t, gamma, lam)
        for r, v in zip(rewards, values, strict=True)
        for t in range(len(r))
    ]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_with_lam_one_an_advantage_is_what_came_less_what_was_expected():
    rewards, values = np.array([0.0, 0.0, 1.0, 0.5]), np.array([0.3, 0.6, 0.9, 0.1])
    found = generalised_advantages(rewards, values, [3, 1], gamma=1.0, lam=1.0)
    assert found == pytest.approx([0.7, 0.4, 0.1, 0.4])
    nothing = generalised_advantages(np.zeros(0), np.zeros(0), [], gamma=1.0, lam=1.0)
    assert nothing.size == 0


def test_whitened_values_have_mean_zero_and_deviation_one():
    found = whitened(np.array([1.0, 2.0, 6.0]))
    assert found.mean() == pytest.approx(0.0, abs=1e-12)
    assert found.std() == pytest.approx(1.0, rel=1e-5)
    assert whitened(np.full(3, 7.0)).tolist() == [0.0, 0.0, 0.0]
    assert whitened(np.zeros(0)).size == 0
