"""Mixtures: shares by weight, at any index, however the requests are cut."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.task_items import Kind
from scheduler.task_mixture import MixtureSource, Turns, counts_before
from transport.errors import TaskError
from transport.messages import Item

WEIGHTS = st.lists(
    st.floats(0.01, 1000.0, allow_nan=False).map(lambda w: round(w, 3)), min_size=1, max_size=6
)


class Numbers:
    """A source whose items are numbered; ``end`` of its evaluation items are distinct."""

    def __init__(self, name: str, end: int = 10**9, shared: bool = False) -> None:
        self.name = name
        self.end = end
        self.shared = shared
        self.asked: list[tuple[int, int]] = []

    def items(self, kind: Kind, start: int, count: int) -> list[Item]:
        self.asked.append((start, count))
        last = start + count if kind == "train" else min(start + count, self.end)
        name = "both" if self.shared else self.name
        return [Item(index=n, prompt=f"{kind} {name} {n}", answer="") for n in range(start, last)]

    def held_out_end(self) -> int | None:
        return self.end


def mixture(weights: list[float], **options: dict[str, int]) -> MixtureSource:
    return MixtureSource(
        [(f"p{n}", weight, Numbers(f"p{n}", **options)) for n, weight in enumerate(weights)]
    )


def one_by_one(weights: list[Fraction], count: int) -> list[list[int]]:
    """Counts before every index up to ``count``."""
    turns = Turns(weights, [0] * len(weights))
    found = [list(turns.done)]
    for _ in range(count):
        turns.advance()
        found.append(list(turns.done))
    return found


@settings(max_examples=80, deadline=None)
@given(weights=WEIGHTS, count=st.integers(0, 300))
def test_every_part_has_its_share_at_every_moment(weights: list[float], count: int):
    exact = [Fraction(w) for w in weights]
    parts, total = len(weights), sum(exact)
    for index, done in enumerate(one_by_one(exact, count)):
        assert sum(done) == index
        for weight, given_ in zip(exact, done, strict=True):
            share = weight / total
            assert abs(given_ - index * share) <= Fraction(1, 2) + share * Fraction(parts, 2)


@settings(max_examples=80, deadline=None)
@given(weights=WEIGHTS, count=st.integers(1, 200))
def test_the_counts_at_an_index_follow_from_the_index_alone(weights: list[float], count: int):
    exact = [Fraction(w) for w in weights]
    for index, done in enumerate(one_by_one(exact, count)):
        assert counts_before(index, exact) == done


@pytest.mark.parametrize("index", [10**6 + 1, 10**12 + 7])
def test_far_out_it_is_found_without_going_there(index: int):
    exact = [Fraction(w) for w in (0.5, 0.3, 0.2)]
    done = counts_before(index, exact)
    assert sum(done) == index
    assert [round(n / index, 5) for n in done] == [0.5, 0.3, 0.2]
    turns = Turns(exact, done)
    turns.advance()
    assert turns.done == counts_before(index + 1, exact)


@settings(max_examples=60, deadline=None)
@given(
    weights=WEIGHTS,
    cuts=st.lists(st.integers(0, 200), min_size=1, max_size=6),
    kind=st.sampled_from(["train", "eval"]),
)
def test_items_are_the_same_from_any_index_on(weights: list[float], cuts: list[int], kind: Kind):
    whole = mixture(weights).items(kind, 0, 220)
    assert [item.index for item in whole] == list(range(220))
    again = mixture(weights)
    for start in cuts:
        assert again.items(kind, start, 20) == whole[start : start + 20]


def test_an_item_has_the_family_of_its_part_and_each_item_of_a_part_comes_once():
    found = mixture([3.0, 1.0]).items("train", 0, 8)
    assert [item.family for item in found] == ["p0", "p0", "p1", "p0", "p0", "p0", "p1", "p0"]
    assert [item.prompt for item in found if item.family == "p1"] == ["train p1 0", "train p1 1"]


def test_a_request_asks_each_part_once_and_for_no_more_than_it_gives():
    parts = [
        (name, weight, Numbers(name)) for name, weight in (("a", 2.0), ("b", 1.0), ("c", 1e-6))
    ]
    MixtureSource(parts).items("train", 100, 30)
    asked = [source.asked for _, _, source in parts]
    assert [len(one) for one in asked] == [1, 1, 0]
    assert sum(count for one in asked for _, count in one) == 30


def test_where_a_part_has_no_more_held_out_items_the_others_go_on():
    source = MixtureSource([("few", 1.0, Numbers("few", 2)), ("many", 1.0, Numbers("many", 6))])
    found = source.items("eval", 0, 100)
    assert [item.family for item in found] == ["few", "many", "few", "many", *["many"] * 4]
    assert [item.index for item in found] == list(range(8)) == list(range(source.held_out_end()))
    assert source.items("eval", 8, 4) == []


def test_a_prompt_that_two_parts_have_is_evaluated_once():
    parts = [(name, 1.0, Numbers(name, 5, shared=True)) for name in "ab"]
    source = MixtureSource(parts)
    found = source.items("eval", 0, 100)
    assert sorted(item.prompt for item in found) == [f"eval both {n}" for n in range(5)]


def test_a_part_that_still_searches_ends_the_answer_but_not_the_space():
    class Searching(Numbers):
        def items(self, kind: Kind, start: int, count: int) -> list[Item]:
            return [] if start >= 1 else super().items(kind, start, count)

        def held_out_end(self) -> int | None:
            return None

    source = MixtureSource([("slow", 1.0, Searching("slow")), ("b", 1.0, Numbers("b"))])
    assert [item.family for item in source.items("eval", 0, 10)] == ["slow", "b"]
    assert source.held_out_end() is None


def test_an_error_names_the_part():
    class Broken(Numbers):
        def items(self, kind: Kind, start: int, count: int) -> list[Item]:
            raise TaskError("no such line")

    source = MixtureSource([("b", 1.0, Broken("b"))])
    for kind in ("train", "eval"):
        with pytest.raises(TaskError, match="part b: no such line"):
            source.items(kind, 0, 1)
