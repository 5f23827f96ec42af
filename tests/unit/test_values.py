"""The arithmetic of a critic against sums written out."""

import numpy as np
import pytest

from cloud_trainer.values import clipped_value_losses, gae


@pytest.mark.parametrize(("discount", "decay"), [(1.0, 1.0), (0.9, 0.0), (0.97, 0.8)])
@pytest.mark.parametrize("length", [0, 1, 6])
def test_advantages_are_the_discounted_sum_of_what_values_missed(discount, decay, length):
    rng = np.random.default_rng(length)
    rewards, values = rng.normal(size=length), rng.normal(size=length)
    advantages, returns = gae(rewards, values, discount=discount, decay=decay)
    following = [*values[1:], 0.0]
    missed = [rewards[t] + discount * following[t] - values[t] for t in range(length)]
    for t in range(length):
        expected = sum((discount * decay) ** (u - t) * missed[u] for u in range(t, length))
        assert advantages[t] == pytest.approx(expected)
    assert returns == pytest.approx(advantages + values)


def test_without_decay_and_discount_returns_are_the_rewards_that_follow():
    rewards, values = np.array([1.0, 0.0, 2.0]), np.array([5.0, -3.0, 0.5])
    _, returns = gae(rewards, values, discount=1.0, decay=1.0)
    assert returns == pytest.approx([3.0, 2.0, 2.0])


@pytest.mark.slow
def test_a_value_gains_nothing_from_moving_further_than_allowed():
    import torch

    now = torch.tensor([0.1, 0.5, 2.0, -2.0], dtype=torch.float64, requires_grad=True)
    before = torch.zeros(4, dtype=torch.float64)
    returns = torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    loss = clipped_value_losses(now, before, returns, clip=0.2)
    expected = [0.9**2, 0.8**2, 1.0, 9.0]  # the third passed 1 and is as far from it as 0 was
    assert loss.item() == pytest.approx(sum(expected) / 2)
    loss.backward()
    assert now.grad.tolist() == pytest.approx([-0.9, 0.0, 1.0, -3.0])
