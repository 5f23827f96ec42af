"""The policy loss against loops that follow the formula term by term."""

import itertools
import math
import random

import msgspec
import pytest
from reference_loss import Sibling, masked_by_second_moment, reference_step

from cloud_trainer.losses import fact_names, kl_terms, policy_losses
from cloud_trainer.torch_settings import TorchSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
CLIP = {"clip_low": 0.2, "clip_high": 0.3, "ratio_max": 3.0}


def groups_of(rng, *, spread, groups=3, siblings=4):
    def sibling():
        now = [-rng.expovariate(1.0) for _ in range(rng.randint(1, 7))]
        return Sibling(
            reward=0.0,
            now=now,
            behaviour=[value - rng.gauss(0.0, spread) for value in now],
            reference=[value - rng.gauss(0.0, 0.5) for value in now],
        )

    return [[sibling() for _ in range(siblings)] for _ in range(groups)]


def advantages_for(rng, groups):
    return [[rng.choice([0.0, rng.gauss(0.0, 1.0)]) for _ in group] for group in groups]


def tensor_of(values, **options):
    import torch

    return torch.tensor(values, dtype=torch.float64, **options)


def losses_of(groups, advantages, settings):
    """Loss, slopes of all tokens, and mean facts by ``policy_losses``, in double precision."""
    import torch

    kept = masked_by_second_moment(groups, advantages, settings)
    now, behaviour, reference, advantage, takes_part, lengths = [], [], [], [], [], []
    for g, group in enumerate(groups):
        for s, sibling in enumerate(group):
            if advantages[g][s] == 0 and not settings.kl_coefficient:
                continue
            now += sibling.now
            behaviour += sibling.behaviour
            reference += sibling.reference
            advantage += [advantages[g][s]] * len(sibling.now)
            takes_part += [(g, s, t) in kept for t in range(len(sibling.now))]
            lengths.append(len(sibling.now))
    variable = tensor_of(now, requires_grad=True)
    in_loss = settings.kl_coefficient > 0 and settings.kl_in == "loss"
    result = policy_losses(
        variable,
        tensor_of(behaviour),
        tensor_of(advantage),
        settings,
        lengths=torch.tensor(lengths),
        kept=torch.tensor(takes_part) if settings.second_moment_budget else None,
        reference=tensor_of(reference) if in_loss else None,
    )
    every = [sibling for group in groups for sibling in group]
    divisor = {
        "token": sum(len(sibling.now) for sibling in every),
        "sequence": len(every),
        "constant": len(every) * settings.max_tokens,
    }[settings.aggregation]
    (result.loss / divisor).backward()
    facts = {name: value / len(now) for name, value in result.facts.items()}
    return result.loss.item() / divisor, variable.grad.tolist(), facts


def check(groups, advantages, settings):
    loss, slopes, facts = losses_of(groups, advantages, settings)
    expected = reference_step(groups, settings, advantages)
    flat = [
        slope
        for values, group in zip(advantages, expected.slopes, strict=True)
        for value, sibling in zip(values, group, strict=True)
        if value or settings.kl_coefficient
        for slope in sibling
    ]
    assert loss == pytest.approx(expected.loss, rel=1e-9, abs=1e-12)
    assert slopes == pytest.approx(flat, rel=1e-9, abs=1e-12)
    assert set(facts) == set(fact_names(settings))
    for name, value in facts.items():
        assert value == pytest.approx(expected.facts[name], rel=1e-9, abs=1e-12), name


FORMS = list(itertools.product(["token", "sequence"], ["ppo", "cispo", "none"]))
AGGREGATIONS = ["token", "sequence", "constant"]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("ratio", "clip"), FORMS)
def test_every_combination_follows_the_formula(ratio, clip, aggregation):
    rng = random.Random(f"{ratio} {clip} {aggregation}")
    for ratio_max, cap, budget, kl in itertools.product(
        [0.0, 1.6], [0.0, 1.1], [0.0, 0.05], ["", "k1", "k2", "k3"]
    ):
        settings = TorchSettings(
            ratio=ratio,
            clip=clip,
            aggregation=aggregation,
            clip_low=0.2,
            clip_high=0.3,
            ratio_max=ratio_max,
            max_tokens=9,
            importance_cap=cap,
            second_moment_budget=budget,
            kl_coefficient=0.1 if kl else 0.0,
            kl_estimator=kl or "k3",
        )
        groups = groups_of(rng, spread=0.4)
        check(groups, advantages_for(rng, groups), settings)


@pytest.mark.parametrize(("ratio", "clip"), FORMS)
@pytest.mark.parametrize("spread", [0.01, 3.0, 30.0])
def test_drift_of_any_size_follows_the_formula(ratio, clip, spread):
    rng = random.Random(1)
    groups = groups_of(rng, spread=spread, groups=40)
    check(groups, advantages_for(rng, groups), TorchSettings(ratio=ratio, clip=clip, **CLIP))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("clip", ["ppo", "none"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_the_gradient_is_the_slope_of_the_loss_itself(ratio, clip, aggregation):
    """Finite differences know nothing of constants in the formula: a sequence's ratio moves with
    each of its tokens."""
    settings = TorchSettings(
        ratio=ratio, clip=clip, aggregation=aggregation, max_tokens=5, kl_coefficient=0.05, **CLIP
    )
    rng = random.Random(7)
    groups = groups_of(rng, spread=0.3)
    advantages = advantages_for(rng, groups)
    _, slopes, _ = losses_of(groups, advantages, settings)
    measured = []
    for g, group in enumerate(groups):
        for s, sibling in enumerate(group):
            for t in range(len(sibling.now)):
                values = []
                for change in (1e-6, -1e-6):
                    moved = msgspec.msgpack.decode(
                        msgspec.msgpack.encode(groups), type=list[list[Sibling]]
                    )
                    moved[g][s].now[t] += change
                    values.append(reference_step(moved, settings, advantages).loss)
                measured.append((values[0] - values[1]) / 2e-6)
    assert slopes == pytest.approx(measured, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize(("ratio", "clip"), FORMS)
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_on_policy_the_gradient_is_that_of_the_plain_policy_gradient(ratio, clip, cap):
    import torch

    now = tensor_of([-1.0, -2.0, -0.1], requires_grad=True)
    advantage = tensor_of([-0.5, -0.5, 2.0])
    settings = TorchSettings(ratio=ratio, clip=clip, importance_cap=cap, **CLIP)
    result = policy_losses(now, now.detach(), advantage, settings, lengths=torch.tensor([2, 1]))
    result.loss.backward()
    assert now.grad.tolist() == (-advantage).tolist()
    facts = result.facts
    assert (facts["kl_behaviour"], facts["clip_fraction"], facts["ratio_mean"]) == (0.0, 0.0, 3.0)


def test_one_token_that_became_likely_has_a_bounded_loss():
    import torch

    now = torch.tensor([-0.01], requires_grad=True)
    result = policy_losses(
        now,
        torch.tensor([-60.0]),
        torch.tensor([-1.0]),
        TorchSettings(**CLIP),
        lengths=torch.tensor([1]),
    )
    result.loss.backward()
    assert result.loss.item() == pytest.approx(3.0)
    assert now.grad.item() == 0.0


def test_clipped_weights_leave_every_token_its_gradient_where_clipping_drops_some():
    import torch

    now = [-0.1, -0.2, -0.3]
    settings = {"clip_low": 1.0, "clip_high": 1.0, "ratio_max": 0.0}
    gradients = {}
    for clip in ("ppo", "cispo"):
        variable = tensor_of(now, requires_grad=True)
        policy_losses(
            variable,
            tensor_of([-2.0, -0.2, -0.1]),
            tensor_of([1.0, 1.0, 1.0]),
            TorchSettings(clip=clip, **settings),
            lengths=torch.tensor([3]),
        ).loss.backward()
        gradients[clip] = variable.grad.tolist()
    assert gradients["ppo"] == pytest.approx([0.0, -1.0, -math.exp(-0.2)])
    assert gradients["cispo"] == pytest.approx([-2.0, -1.0, -math.exp(-0.2)])


def test_work_without_tokens_has_a_loss_of_zero_and_a_gradient():
    import torch

    for ratio in ("token", "sequence"):
        nothing = torch.zeros(0, requires_grad=True)
        result = policy_losses(
            nothing,
            torch.zeros(0),
            torch.zeros(0),
            TorchSettings(ratio=ratio, aggregation="sequence"),
            lengths=torch.zeros(0, dtype=torch.int64),
        )
        result.loss.backward()
        assert result.loss.item() == 0.0
        assert set(result.facts.values()) == {0.0}


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimates_of_the_kl_are_zero_for_equal_policies_and_right_on_average(estimator):
    import torch

    logits = torch.tensor([0.3, -0.7, 1.1, 0.0], dtype=torch.float64)
    other = torch.tensor([0.1, -0.4, 1.0, 0.2], dtype=torch.float64)
    now, reference = logits.log_softmax(-1), other.log_softmax(-1)
    assert not kl_terms(now, now, estimator).any()
    exact = (now.exp() * (now - reference)).sum().item()
    mean = (now.exp() * kl_terms(now, reference, estimator)).sum().item()
    # k2 is right to second order only.
    assert mean == pytest.approx(exact, rel=0.1 if estimator == "k2" else 1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_in_the_loss_each_estimate_has_the_gradient_that_the_page_says(estimator):
    import torch

    logits = torch.tensor([0.3, -0.7, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
    reference = tensor_of([0.1, -0.4, 1.0, 0.2]).log_softmax(-1)
    now = logits.log_softmax(-1)
    chances = now.detach().exp()
    (chances * kl_terms(now, reference, estimator)).sum().backward()
    measured = logits.grad.tolist()
    logits.grad = None
    now = logits.log_softmax(-1)
    exact = {
        "k1": 0.0 * now.sum(),
        "k2": (now.exp() * (now - reference)).sum(),
        "k3": (reference.exp() * (reference - now)).sum(),
    }
    exact[estimator].backward()
    assert measured == pytest.approx(logits.grad.tolist(), abs=1e-12)
