"""Group-relative advantages."""

import numpy as np
import pytest

from cloud_trainer.advantages import group_advantages


def test_rewards_are_centred_and_divided_by_the_deviation_of_their_group():
    values = group_advantages([1.0, 0.0, 0.0, 0.0], "group_std")
    deviation = np.sqrt(3) / 4
    assert values == pytest.approx([0.75 / deviation] + [-0.25 / deviation] * 3, rel=1e-5)
    assert values.sum() == pytest.approx(0)


def test_group_mean_only_centres():
    assert group_advantages([2.0, 0.0, 1.0], "group_mean").tolist() == [1.0, -1.0, 0.0]


@pytest.mark.parametrize("method", ["group_std", "group_mean"])
@pytest.mark.parametrize("rewards", [[], [0.3], [0.1] * 3, [0.7] * 8, [1e9 + 0.1] * 7])
def test_equal_rewards_give_exactly_zero_whatever_the_rounding(method, rewards):
    assert not group_advantages(rewards, method).any()


def test_scale_and_offset_of_the_rewards_do_not_matter_with_the_deviation_divided_out():
    rewards = np.array([0.0, 1.0, 0.25, 1.0])
    plain = group_advantages(rewards.tolist(), "group_std")
    scaled = group_advantages((rewards * 50 - 7).tolist(), "group_std")
    assert scaled == pytest.approx(plain, abs=1e-5)
