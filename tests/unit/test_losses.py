"""The policy loss against a loop that follows the formula term by term."""

import math
import random

import pytest

from cloud_trainer.losses import clipped_token_losses, token_log_probabilities

pytestmark = pytest.mark.slow
CLIP = {"clip_low": 0.2, "clip_high": 0.3, "ratio_max": 3.0}


def reference(now, behaviour, advantage, *, clip_low, clip_high, ratio_max):
    """Loss, its derivative by ``now``, KL, and how many tokens a bound cut off."""
    loss = kl = 0.0
    slopes = []
    clipped = 0
    for n, b, a in zip(now, behaviour, advantage, strict=True):
        ratio = math.exp(max(-20.0, min(20.0, n - b)))
        inside = -20.0 < n - b < 20.0
        if a >= 0:
            cut = ratio > 1 + clip_high
            value = min(ratio, 1 + clip_high) * a
        else:
            cut = ratio < 1 - clip_low or ratio > ratio_max
            value = max(1 - clip_low, min(ratio, ratio_max)) * a
        loss -= value
        slopes.append(0.0 if cut or not inside else -ratio * a)
        clipped += cut and a != 0
        kl += ratio - 1 - math.log(ratio)
    return loss, slopes, kl, clipped


@pytest.mark.parametrize("spread", [0.05, 0.5, 3.0, 30.0])
def test_loss_gradient_and_facts_follow_the_formula(spread):
    import torch

    rng = random.Random(1)
    now = [-rng.expovariate(1.0) for _ in range(500)]
    behaviour = [value - rng.gauss(0.0, spread) for value in now]
    advantage = [rng.choice([0.0, rng.gauss(0.0, 1.0)]) for _ in range(500)]
    tensor = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    result = clipped_token_losses(
        tensor,
        torch.tensor(behaviour, dtype=torch.float64),
        torch.tensor(advantage, dtype=torch.float64),
        **CLIP,
    )
    result.loss.backward()
    loss, slopes, kl, clipped = reference(now, behaviour, advantage, **CLIP)
    assert result.loss.item() == pytest.approx(loss, rel=1e-9)
    assert tensor.grad.tolist() == pytest.approx(slopes, rel=1e-9, abs=1e-12)
    assert result.kl == pytest.approx(kl, rel=1e-9)
    assert result.clipped == clipped


def test_on_policy_the_gradient_is_that_of_the_plain_policy_gradient():
    import torch

    now = torch.tensor([-1.0, -2.0, -0.1], requires_grad=True)
    advantage = torch.tensor([1.0, -0.5, 2.0])
    result = clipped_token_losses(now, now.detach(), advantage, **CLIP)
    result.loss.backward()
    assert now.grad.tolist() == (-advantage).tolist()
    assert (result.kl, result.clipped, result.ratio) == (0.0, 0.0, 3.0)


def test_one_token_that_became_likely_has_a_bounded_loss():
    import torch

    now = torch.tensor([-0.01], requires_grad=True)
    result = clipped_token_losses(now, torch.tensor([-60.0]), torch.tensor([-1.0]), **CLIP)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(3.0)
    assert now.grad.item() == 0.0


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_and_entropy_are_those_of_the_softmax_at_the_temperature(temperature):
    import torch

    rng = random.Random(2)
    logits = [[[rng.gauss(0, 3) for _ in range(7)] for _ in range(4)] for _ in range(3)]
    targets = [[rng.randrange(7) for _ in range(4)] for _ in range(3)]
    chosen, entropy = token_log_probabilities(
        torch.tensor(logits, requires_grad=True), torch.tensor(targets), temperature=temperature
    )
    assert chosen.requires_grad
    assert not entropy.requires_grad
    for row in range(3):
        for column in range(4):
            scaled = [value / temperature for value in logits[row][column]]
            total = math.log(sum(map(math.exp, scaled)))
            logs = [value - total for value in scaled]
            assert chosen[row, column].item() == pytest.approx(logs[targets[row][column]], abs=1e-5)
            expected = -sum(math.exp(value) * value for value in logs)
            assert entropy[row, column].item() == pytest.approx(expected, abs=1e-5)
