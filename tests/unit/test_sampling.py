"""Drawing tokens: the right distribution, repeatable, and exact log-probabilities."""

import math

import numpy as np
import pytest

from edge_agent.engines.sampling import choose, uniform_numbers

pytestmark = pytest.mark.slow
LOGITS = [2.0, 1.0, 0.5, 0.0, -3.0, -math.inf]


def softmax(logits, temperature=1.0):
    weights = np.exp(np.array(logits, np.float64) / temperature)
    return weights / weights.sum()


def draw(logits, uniform, *, temperature=1.0, top_p=None):
    """Tokens and log-probabilities of the same logits for many uniform numbers."""
    import torch

    rows = len(uniform)
    tokens, logprobs = choose(
        torch.tensor([logits]).repeat(rows, 1),
        torch.full((rows,), temperature),
        None if top_p is None else torch.full((rows,), top_p),
        torch.tensor(uniform, dtype=torch.float32),
    )
    return tokens.numpy(), logprobs.numpy()


GRID = (np.arange(50_000) + 0.5) / 50_000


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_grid_of_uniform_numbers_gives_the_softmax_at_the_temperature(temperature):
    tokens, logprobs = draw(LOGITS, GRID, temperature=temperature)
    expected = softmax(LOGITS, temperature)
    frequencies = np.bincount(tokens, minlength=len(LOGITS)) / len(GRID)
    assert frequencies == pytest.approx(expected, abs=4e-5)
    assert logprobs == pytest.approx(np.log(expected[tokens]), abs=1e-5)


def test_the_nucleus_is_the_fewest_tokens_that_reach_top_p_with_all_the_probability():
    probabilities = softmax(LOGITS)  # 0.55, 0.20, 0.12, ...
    tokens, logprobs = draw(LOGITS, GRID, top_p=0.7)
    kept = probabilities[:2] / probabilities[:2].sum()
    assert np.bincount(tokens) / len(GRID) == pytest.approx(kept, abs=4e-5)
    assert logprobs == pytest.approx(np.log(kept[tokens]), abs=1e-5)


def test_a_tiny_top_p_keeps_the_most_likely_token():
    tokens, logprobs = draw(LOGITS, GRID[::1000], top_p=1e-9)
    assert not tokens.any()
    assert not logprobs.any()


def test_top_p_of_another_row_changes_nothing():
    alone = draw(LOGITS, GRID[::1000])
    mixed = draw(LOGITS, GRID[::1000], top_p=1.0)
    assert (alone[0] == mixed[0]).all()
    assert (alone[1] == mixed[1]).all()


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-24, 1.0])
def test_the_edges_of_the_uniform_numbers_never_draw_an_impossible_token(uniform):
    tokens, logprobs = draw([-math.inf, 0.0, 1.0, -math.inf], [uniform])
    assert tokens[0] in (1, 2)
    assert np.isfinite(logprobs[0])


def test_greedy_takes_the_most_likely_and_reports_its_probability_at_temperature_one():
    tokens, logprobs = draw(LOGITS, [0.999], temperature=0.0, top_p=0.1)
    assert tokens.tolist() == [0]
    assert logprobs[0] == pytest.approx(math.log(softmax(LOGITS)[0]), abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_show_as_a_log_probability_that_is_not_a_number(bad):
    tokens, logprobs = draw([0.0, bad, 1.0], [0.5])
    assert 0 <= tokens[0] < 3
    assert np.isnan(logprobs[0])


def test_uniform_numbers_belong_to_seed_request_and_sibling():
    keys = [(0, "r1", 0), (1, "r1", 0), (0, "r2", 0), (0, "r1", 1), (0, "r11", 0)]
    rows = [uniform_numbers(*key, 4).tolist() for key in keys]
    assert rows == [uniform_numbers(*key, 4).tolist() for key in keys]
    assert len({tuple(row) for row in rows}) == len(keys)
    assert uniform_numbers(0, "r1", 0, 9).tolist()[:4] == rows[0]
    many = uniform_numbers(5, "r", 0, 20_000)
    assert many.min() >= 0
    assert many.max() < 1
    assert many.mean() == pytest.approx(0.5, abs=0.01)
