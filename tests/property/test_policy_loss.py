"""What must hold for any batch and any switches: order, masks, equal rewards, scale."""

import random

import msgspec
import pytest
from bigram import VOCABULARY, gradient_of, log_probabilities
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloud_trainer.torch_settings import TorchSettings
from cloud_trainer.trainer import TrainingSequence

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
LOSSES = settings(
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)
RNG = random.Random(0)
TABLE = [[RNG.gauss(0, 1) for _ in range(VOCABULARY)] for _ in range(VOCABULARY)]
REFERENCE = [[RNG.gauss(0, 1) for _ in range(VOCABULARY)] for _ in range(VOCABULARY)]
TOKENS = st.integers(0, VOCABULARY - 1)


@st.composite
def sequence(draw):
    prompt = tuple(draw(st.lists(TOKENS, min_size=1, max_size=3)))
    tokens = tuple(draw(st.lists(TOKENS, min_size=1, max_size=5)))
    befores = (prompt[-1], *tokens[:-1])
    drifts = draw(st.lists(st.floats(-0.5, 0.5, width=16), min_size=5, max_size=5))
    return TrainingSequence(
        group="g",
        prompt_tokens=prompt,
        tokens=tokens,
        logprobs=tuple(
            min(0.0, log_probabilities(TABLE, before)[token] - drift)
            for before, token, drift in zip(befores, tokens, drifts, strict=False)
        ),
        versions=(0,) * len(tokens),
        loss_mask=tuple(draw(st.booleans()) for _ in tokens),
        reward=float(draw(st.integers(0, 2))),
    )


GROUPS = st.lists(st.lists(sequence(), min_size=1, max_size=4), min_size=1, max_size=4)
SWITCHES = st.fixed_dictionaries(
    {
        "ratio": st.sampled_from(["token", "sequence"]),
        "clip": st.sampled_from(["ppo", "cispo", "none"]),
        "ratio_max": st.sampled_from([0.0, 3.0]),
        "aggregation": st.sampled_from(["token", "sequence", "constant"]),
        "max_tokens": st.just(4),
        "baseline": st.sampled_from(["group_mean", "leave_one_out"]),
        "normalisation": st.sampled_from(["none", "group_std", "batch_std"]),
        "importance_cap": st.sampled_from([0.0, 1.1]),
        "second_moment_budget": st.sampled_from([0.0, 1e-3, 0.05]),
        "micro_batch_tokens": st.sampled_from([1, 12, 1000]),
    }
)
WITH_KL = st.fixed_dictionaries(
    {
        "kl_coefficient": st.sampled_from([0.0, 0.1]),
        "kl_in": st.sampled_from(["loss", "reward"]),
        "kl_estimator": st.sampled_from(["k1", "k2", "k3"]),
        "overlong_penalty": st.sampled_from([0.0, 0.5]),
    }
)


def gradient(groups, switches):
    values, facts = gradient_of(groups, TorchSettings(**switches), TABLE, REFERENCE)
    return [value for row in values for value in row], facts


def close(values, scale=1.0):
    return pytest.approx([value * scale for value in values], rel=1e-3, abs=2e-5)


@LOSSES
@given(GROUPS, SWITCHES, WITH_KL, st.randoms(use_true_random=False))
def test_the_order_of_siblings_and_groups_does_not_matter(groups, switches, kl, rng):
    # Which of two tokens of one distance the budget leaves out is a matter of order.
    switches = {**switches, **kl, "second_moment_budget": 0.0}
    expected, facts = gradient(groups, switches)
    shuffled = [rng.sample(group, len(group)) for group in groups]
    found, other_facts = gradient(rng.sample(shuffled, len(shuffled)), switches)
    assert found == close(expected)
    assert other_facts == pytest.approx(facts, rel=1e-3, abs=1e-5)


@LOSSES
@given(GROUPS, SWITCHES, WITH_KL, st.data())
def test_what_was_recorded_at_masked_tokens_has_no_influence(groups, switches, kl, data):
    def other(one):
        return msgspec.structs.replace(
            one,
            logprobs=tuple(
                value if own else data.draw(st.floats(-9, 0))
                for value, own in zip(one.logprobs, one.loss_mask, strict=True)
            ),
        )

    changed = [[other(one) for one in group] for group in groups]
    assert gradient(changed, {**switches, **kl}) == gradient(groups, {**switches, **kl})


@LOSSES
@given(GROUPS, SWITCHES)
def test_equal_rewards_teach_nothing(groups, switches):
    equal = [[msgspec.structs.replace(one, reward=0.7) for one in group] for group in groups]
    values, facts = gradient(equal, switches)
    assert not any(values)
    assert facts["loss"] == 0.0


@LOSSES
@given(GROUPS, SWITCHES, st.sampled_from([0.25, 2.0, 8.0]))
def test_the_gradient_grows_with_the_rewards_unless_their_scale_is_divided_out(
    groups, switches, factor
):
    scaled = [
        [msgspec.structs.replace(one, reward=one.reward * factor) for one in group]
        for group in groups
    ]
    expected, _ = gradient(groups, switches)
    found, _ = gradient(scaled, switches)
    assert found == close(expected, factor if switches["normalisation"] == "none" else 1.0)


@LOSSES
@given(GROUPS, SWITCHES, WITH_KL)
def test_micro_batches_change_only_rounding(groups, switches, kl):
    whole, facts = gradient(groups, {**switches, **kl, "micro_batch_tokens": 10_000})
    parts, other_facts = gradient(groups, {**switches, **kl, "micro_batch_tokens": 1})
    assert parts == close(whole)
    assert other_facts == pytest.approx(facts, rel=1e-3, abs=1e-5)


@LOSSES
@given(GROUPS, SWITCHES)
def test_what_takes_part_is_within_the_budget(groups, switches):
    budget = switches["second_moment_budget"] or 0.02
    _, facts = gradient(groups, {**switches, "second_moment_budget": budget})
    assert 0.0 <= facts["masked_fraction"] <= 1.0
    assert (facts["masked_fraction"] == 0.0) == (facts["second_moment"] <= budget)
