"""pass@k is what one gets by going through all choices of k answers."""

from fractions import Fraction
from itertools import combinations
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.core.pass_at import pass_at
from transport.runs import EvaluationSpec


def enumerated(items: list[list[bool]], k: int) -> Fraction:
    """The mean over items of the share of choices of k answers with a right one."""
    shares = []
    for answers in items:
        chosen = list(combinations(answers, k))
        shares.append(Fraction(sum(any(one) for one in chosen), len(chosen)))
    return sum(shares, Fraction(0)) / len(items)


def counts_of(items: list[list[bool]]) -> list[int]:
    counts = [0] * (len(items[0]) + 1)
    for answers in items:
        counts[sum(answers)] += 1
    return counts


@st.composite
def answered(draw: st.DrawFn) -> list[list[bool]]:
    samples = draw(st.integers(1, 7))
    answers = st.lists(st.booleans(), min_size=samples, max_size=samples)
    return draw(st.lists(answers, min_size=1, max_size=5))


@settings(max_examples=150, deadline=None)
@given(items=answered(), data=st.data())
def test_it_equals_the_enumeration_of_all_choices(items: list[list[bool]], data: st.DataObject):
    k = data.draw(st.integers(1, len(items[0])))
    assert pass_at(counts_of(items), k) == pytest.approx(float(enumerated(items, k)), abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(items=answered())
def test_it_begins_at_the_accuracy_grows_with_k_and_ends_at_any_right(items: list[list[bool]]):
    counts, samples = counts_of(items), len(items[0])
    values = [pass_at(counts, k) for k in range(1, samples + 1)]
    right = sum(sum(answers) for answers in items)
    assert values[0] == pytest.approx(right / samples / len(items), abs=1e-12)
    assert values == sorted(values)
    assert values[-1] == pytest.approx(sum(map(any, items)) / len(items), abs=1e-12)


def test_the_mean_over_samples_has_no_bias_where_the_plug_in_has_one():
    """Of answers that are right with probability p, pass@k is 1 - (1 - p)^k whatever n is."""
    p, n, k = 0.2, 6, 4
    chances = [comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    one_item = [[int(c == right) for c in range(n + 1)] for right in range(n + 1)]
    mean = sum(chance * pass_at(one_item[c], k) for c, chance in enumerate(chances))
    assert mean == pytest.approx(1 - (1 - p) ** k) == pytest.approx(0.590, abs=5e-4)
    plug_in = sum(chance * (1 - (1 - c / n) ** k) for c, chance in enumerate(chances))
    assert plug_in == pytest.approx(0.494, abs=5e-4)


def test_the_example_of_the_documents():
    counts = [1, 1, 0, 0, 1]
    assert [round(pass_at(counts, k), 3) for k in (1, 2, 4)] == [0.417, 0.5, 0.667]
    assert pass_at([0, 0], 1) == 0.0


def test_powers_of_two_are_reported_unless_others_are_named():
    assert EvaluationSpec(samples=1).reported_k() == ()
    assert EvaluationSpec(samples=6, temperature=1.0).reported_k() == (1, 2, 4)
    assert EvaluationSpec(samples=6, temperature=1.0, pass_at=(5, 1)).reported_k() == (1, 5)
