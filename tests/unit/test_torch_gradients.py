"""The gradient of a whole batch against loops over its tokens: advantages, first pass, micro
batches and loss together, on a model whose derivatives can be written down."""

import itertools
import random

import pytest
from bigram import VOCABULARY, gradient_of, gradients_of, log_probabilities
from reference_loss import Sibling, reference_step

from cloud_trainer.losses import fact_names
from cloud_trainer.presets import PRESETS, resolve_settings
from cloud_trainer.trainer import TrainingSequence

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def table_of(rng, spread=1.0):
    return [[rng.gauss(0, spread) for _ in range(VOCABULARY)] for _ in range(VOCABULARY)]


def groups_of(rng, table, *, groups=4, siblings=4, drift=0.4):
    """Short sequences, so that some are equal, with tokens of others and siblings without any."""
    made = []
    for number in range(groups):
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 3)))
        group = []
        for _ in range(siblings):
            tokens = tuple(rng.randrange(3) for _ in range(rng.randint(1, 5)))
            before = (prompt[-1], *tokens[:-1])
            group.append(
                TrainingSequence(
                    group=f"g{number}",
                    prompt_tokens=prompt,
                    tokens=tokens,
                    logprobs=tuple(
                        min(0.0, log_probabilities(table, b)[t] - rng.gauss(0, drift))
                        for b, t in zip(before, tokens, strict=True)
                    ),
                    versions=(0,) * len(tokens),
                    loss_mask=tuple(rng.random() < 0.8 for _ in tokens),
                    reward=rng.choice([0.0, 0.0, 1.0]),
                )
            )
        made.append(group)
    return made


def own_places(sequence):
    before = (sequence.prompt_tokens[-1], *sequence.tokens[:-1])
    places = zip(before, sequence.tokens, sequence.logprobs, sequence.loss_mask, strict=True)
    return [(b, t, drawn) for b, t, drawn, own in places if own]


def expected_step(groups, settings, table, reference, head=None):
    """The gradients by the table and the critic's head, and the means, by loops."""
    weights, offset = head or ([0.0] * VOCABULARY, 0.0)
    temperature = settings.temperature
    places = [[own_places(sequence) for sequence in group] for group in groups]
    siblings = [
        [
            Sibling(
                reward=sequence.reward,
                now=[log_probabilities(table, b, temperature)[t] for b, t, _ in own],
                behaviour=[drawn for _, _, drawn in own],
                reference=[log_probabilities(reference, b, temperature)[t] for b, t, _ in own],
                values=[weights[b] + offset for b, _, _ in own],
            )
            for sequence, own in zip(group, of_group, strict=True)
            if own
        ]
        for group, of_group in zip(groups, places, strict=True)
    ]
    step = reference_step(siblings, settings)
    gradient = [[0.0] * VOCABULARY for _ in range(VOCABULARY)]
    for slopes, of_group in zip(step.slopes, places, strict=True):
        with_tokens = [own for own in of_group if own]
        for token_slopes, own in zip(slopes, with_tokens, strict=True):
            for slope, (before, token, _) in zip(token_slopes, own, strict=True):
                chances = log_probabilities(table, before, temperature)
                for other, chance in enumerate(chances):
                    change = (other == token) - 2.718281828459045**chance
                    gradient[before][other] += slope * change / temperature
    by_head = [[[0.0] * VOCABULARY], [0.0]]
    for slopes, of_group in zip(step.value_slopes, places, strict=False):
        for token_slopes, own in zip(slopes, [own for own in of_group if own], strict=True):
            for slope, (before, _, _) in zip(token_slopes, own, strict=True):
                by_head[0][0][before] += slope
                by_head[1][0] += slope
    return step, gradient, by_head


def check(settings, seed):
    rng = random.Random(seed)
    table, reference = table_of(rng), table_of(rng, 0.5)
    groups = groups_of(rng, table)
    head = None
    if settings.critic is not None:
        head = ([rng.gauss(0, 1) for _ in range(VOCABULARY)], 0.3)
    frozen = reference if settings.kl_coefficient > 0 else None
    gradient, by_head, facts = gradients_of(groups, settings, table, frozen, head)
    step, expected, expected_by_head = expected_step(groups, settings, table, reference, head)
    assert facts["loss"] == pytest.approx(step.loss, rel=1e-4, abs=1e-5)
    for row, expected_row in zip(gradient, expected, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-3, abs=2e-5)
    names = fact_names(settings)
    if settings.critic is not None:
        names += ("value_loss", "explained_variance")
        (weights,), (offset,) = by_head
        assert weights == pytest.approx(expected_by_head[0][0], rel=1e-3, abs=1e-5)
        assert offset == pytest.approx(expected_by_head[1][0], rel=1e-3, abs=1e-5)
    for name in names:
        assert facts[name] == pytest.approx(step.facts[name], rel=1e-3, abs=1e-5), name
    assert facts.keys() == {"loss", "entropy", *names}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("micro_batch_tokens", [12, 1000])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_follows_the_formula(preset, micro_batch_tokens, seed):
    given = {"micro_batch_tokens": micro_batch_tokens, "max_tokens": 4, "temperature": 1.3}
    check(resolve_settings({"preset": preset, **given}), seed)


@pytest.mark.parametrize("normalisation", ["none", "group_std", "batch_std"])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_every_way_to_advantages_follows_the_formula(baseline, normalisation):
    for penalty, kl, place, estimator in itertools.product(
        [0.0, 0.7], [0.0, 0.2], ["reward", "loss"], ["k1", "k2", "k3"]
    ):
        settings = {
            "baseline": baseline,
            "normalisation": normalisation,
            "overlong_penalty": penalty,
            "overlong_share": 0.5,
            "max_tokens": 4,
            "kl_coefficient": kl,
            "kl_in": place,
            "kl_estimator": estimator,
        }
        check(resolve_settings(settings), seed=5)


@pytest.mark.parametrize("normalisation", ["none", "batch_std"])
@pytest.mark.parametrize("kl", [0.0, 0.2])
def test_every_way_of_a_critic_follows_the_formula(kl, normalisation):
    for gamma, lam, value_lam, error_clip, budget in itertools.product(
        [1.0, 0.7], [0.0, 0.9], [0.5, 1.0], [0.0, 0.4], [0.0, 0.1]
    ):
        table = {"gamma": gamma, "lam": lam, "value_lam": value_lam, "error_clip": error_clip}
        settings = {
            "preset": "ppo",
            "normalisation": normalisation,
            "critic": table,
            "kl_coefficient": kl,
            "kl_in": "reward" if lam else "loss",
            "overlong_penalty": 0.5,
            "max_tokens": 4,
            "second_moment_budget": budget,
            "micro_batch_tokens": 12,
        }
        check(resolve_settings(settings), seed=7)


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
@pytest.mark.parametrize("cap", [0.0, 1.2])
def test_what_the_first_pass_decides_goes_together(kl_in, cap):
    for ratio, budget, size in itertools.product(["token", "sequence"], [0.01, 0.1], [1, 1000]):
        settings = {
            "ratio": ratio,
            "second_moment_budget": budget,
            "importance_cap": cap,
            "kl_coefficient": 0.3,
            "kl_in": kl_in,
            "micro_batch_tokens": size,
            "aggregation": "sequence",
        }
        check(resolve_settings(settings), seed=6)


def test_at_the_reference_itself_a_kl_changes_nothing():
    rng = random.Random(9)
    table = table_of(rng)
    groups = groups_of(rng, table)
    plain, _ = gradient_of(groups, resolve_settings({}), table)
    for place in ("reward", "loss"):
        settings = resolve_settings({"kl_coefficient": 5.0, "kl_in": place})
        gradient, facts = gradient_of(groups, settings, table, table)
        assert facts["kl_reference"] == 0.0
        for row, other in zip(gradient, plain, strict=True):
            assert row == pytest.approx(other, abs=1e-6)


def test_a_batch_without_signal_has_no_gradient_and_all_metrics():
    settings = resolve_settings({"second_moment_budget": 0.1, "importance_cap": 2.0})
    _, facts = gradient_of([], settings, table_of(random.Random(1)))
    assert set(facts.values()) == {0.0}
    assert facts.keys() == {"loss", "entropy", *fact_names(settings)}


def expected_reward(table):
    """Chance of token 0 behind token 1, where every prompt ends."""
    return 2.718281828459045 ** log_probabilities(table, 1)[0]


def drawn_groups(rng, table, *, groups=6, siblings=6):
    """Answers of one token, drawn by the policy of ``table``; token 0 is right."""
    chances = [2.718281828459045**value for value in log_probabilities(table, 1)]

    def sequence():
        (token,) = rng.choices(range(VOCABULARY), chances)
        return TrainingSequence(
            group="g",
            prompt_tokens=(1,),
            tokens=(token,),
            logprobs=(log_probabilities(table, 1)[token],),
            versions=(0,),
            loss_mask=(True,),
            reward=float(token == 0),
        )

    return [[sequence() for _ in range(siblings)] for _ in range(groups)]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_learns_from_answers_of_older_weights(preset):
    rng = random.Random(preset)
    start = table_of(rng, 0.1)
    settings = resolve_settings({"preset": preset, "max_tokens": 4})
    table, older = start, [start] * 3
    for _ in range(40):
        groups = drawn_groups(rng, older[0])
        gradient, _ = gradient_of(groups, settings, table, start)
        norm = sum(value * value for row in gradient for value in row) ** 0.5
        rate = 0.2 / max(norm, 1e-9)
        table = [
            [value - rate * slope for value, slope in zip(values, slopes, strict=True)]
            for values, slopes in zip(table, gradient, strict=True)
        ]
        older = [*older[1:], table]
    assert expected_reward(start) < 0.3
    assert expected_reward(table) > 0.6
