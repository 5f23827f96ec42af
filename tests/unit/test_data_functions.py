"""The data functions that ship, as what they are: functions of a view and settings."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.kept import Kept
from scheduler.core.replay_pool import _rank
from scheduler.data.curators import CURATORS
from scheduler.data.filters import FILTERS
from scheduler.data.registry import AlgorithmSettings, bind, load_modules
from scheduler.data.selectors import SELECTORS
from scheduler.data.views import GroupView, HistoryView, ItemView
from transport.errors import ConfigError
from transport.runs import AlgorithmSpec


def view(rewards=(0.0, 1.0), lengths=(4, 9), **changes) -> GroupView:
    facts = {
        "run": "r",
        "policy": "solver",
        "index": 3,
        "family": "sums",
        "rewards": tuple(rewards),
        "lengths": tuple(lengths),
        "sequences": len(lengths),
        "truncated": 0,
        "prompt_tokens": 5,
        "oldest": 1,
        "newest": 2,
    }
    return GroupView(**{**facts, **changes})


def objects(name: str, group: GroupView, **settings) -> bool:
    bound = bind(AlgorithmSpec(name=name, settings=settings), "filter", FILTERS, {}, "filters[0]")
    assert bound is not None
    return bound(group)


@pytest.mark.parametrize(
    ("name", "settings", "group", "expected"),
    [
        ("zero_advantage", {}, view((1.0, 1.0)), True),
        ("zero_advantage", {}, view((1.0, 1.0 + 1e-9)), False),
        ("zero_advantage", {"tolerance": 0.1}, view((0.95, 1.0)), True),
        ("zero_advantage", {}, view((1.0,), (4,)), False),
        ("overlong", {"tokens": 8}, view(lengths=(4, 9)), True),
        ("overlong", {"tokens": 9}, view(lengths=(4, 9)), False),
        ("overlong", {"tokens": 8, "sequences": "all"}, view(lengths=(4, 9)), False),
        ("overlong", {"tokens": 3, "sequences": "all"}, view(lengths=(4, 9)), True),
        ("truncated", {}, view(truncated=0), False),
        ("truncated", {}, view(truncated=1), True),
        ("truncated", {"share": 0.5}, view(truncated=1), False),
        ("truncated", {"share": 0.5}, view(truncated=2), True),
        ("reward_band", {"low": 0.5}, view((0.0, 0.9)), True),
        ("reward_band", {"low": 0.5}, view((0.1, 0.9)), False),
        ("reward_band", {"high": 0.5}, view((0.2, 0.9)), True),
        ("reward_band", {}, view((-1e9, 1e9)), False),
    ],
)
def test_what_a_filter_objects_to(name, settings, group, expected):
    assert objects(name, group, **settings) is expected


GROUPS = st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 50)), min_size=1, max_size=8)


@given(GROUPS, st.randoms(use_true_random=False))
def test_no_filter_or_selector_looks_at_the_order_of_siblings(siblings, random):
    shuffled = siblings[:]
    random.shuffle(shuffled)
    one, other = (view(*zip(*each, strict=True)) for each in (siblings, shuffled))
    assert objects("zero_advantage", one) == objects("zero_advantage", other)
    assert objects("overlong", one, tokens=25) == objects("overlong", other, tokens=25)
    assert one.reward_spread == pytest.approx(other.reward_spread, abs=1e-9)


@given(GROUPS)
def test_what_has_an_advantage_has_a_weight(siblings):
    group = view(*zip(*siblings, strict=True))
    for name, settings in (("latest", {}), ("uniform", {}), ("prioritised", {"exponent": 0.5})):
        spec = AlgorithmSpec(name=name, settings=settings)
        bound = bind(spec, "replay selector", SELECTORS, {}, "select")
        assert bound is not None
        assert math.isfinite(bound(group))
        assert bound(group) >= 0.0
    spread = max(group.rewards) - min(group.rewards)
    if spread > 1e-6:
        assert bound(group) > 0.0


def test_groups_are_drawn_in_proportion_to_their_weights():
    def entry(job: str, weight: float) -> Kept:
        return Kept(
            policy="r/p",
            job=job,
            index=0,
            digest=job,
            size_bytes=1,
            oldest=0,
            reward_mean=0.0,
            response_tokens=1,
            step=1,
            score=weight,
            drawn=True,
        )

    light, heavy = entry("light", 1.0), entry("heavy", 3.0)
    wins = sum(
        _rank(heavy, f"0/r/p/{step}/heavy") > _rank(light, f"0/r/p/{step}/light")
        for step in range(4000)
    )
    assert wins / 4000 == pytest.approx(0.75, abs=0.03)


def item(chance=0.5, own=None, of_family=None) -> ItemView:
    return ItemView(
        run="r",
        index=1,
        family="sums",
        prompt="1 + 1 =",
        chance=chance,
        own=HistoryView(**(own or {})),
        of_family=HistoryView(**(of_family or {})),
    )


def history(*groups: tuple[float, float], reward: float = 0.5) -> dict:
    means, spreads = zip(*groups, strict=True) if groups else ((), ())
    return {"groups": len(groups), "reward": reward, "means": means, "spreads": spreads}


SOLVED, FAILED, MIXED = (1.0, 0.0), (0.0, 0.0), (0.5, 1.0)


@pytest.mark.parametrize(
    ("name", "settings", "seen", "expected"),
    [
        ("solved_out", {}, item(), False),
        ("solved_out", {}, item(own=history(MIXED, SOLVED)), False),
        ("solved_out", {}, item(own=history(MIXED, SOLVED, SOLVED)), True),
        ("solved_out", {"groups": 1}, item(own=history(SOLVED)), True),
        ("solved_out", {"groups": 1, "explore": 0.6}, item(own=history(SOLVED)), False),
        ("greso", {}, item(own=history(MIXED)), False),
        ("greso", {}, item(0.4, own=history(MIXED, SOLVED)), False),
        ("greso", {}, item(0.6, own=history(MIXED, SOLVED)), True),
        ("greso", {}, item(0.3, own=history(SOLVED, FAILED)), True),
        ("greso", {"hard": 0.9}, item(0.8, own=history(SOLVED, FAILED)), False),
        ("greso", {"easy": 0.9}, item(0.3, own=history(SOLVED, FAILED)), True),
        ("difficulty_band", {}, item(own=history(MIXED, reward=0.0)), False),
        ("difficulty_band", {}, item(own=history(FAILED, FAILED, reward=0.0)), True),
        ("difficulty_band", {}, item(0.01, own=history(FAILED, FAILED, reward=0.0)), False),
        ("difficulty_band", {}, item(own=history(SOLVED, SOLVED, reward=0.5)), False),
        (
            "difficulty_band",
            {"by": "family"},
            item(of_family=history(FAILED, FAILED, reward=0.0)),
            True,
        ),
        ("difficulty_band", {"by": "family"}, item(own=history(FAILED, FAILED, reward=0.0)), False),
    ],
)
def test_what_a_curator_skips(name, settings, seen, expected):
    bound = bind(AlgorithmSpec(name=name, settings=settings), "curator", CURATORS, {}, "curators")
    assert bound is not None
    assert bound(seen) is expected


@pytest.mark.parametrize(
    ("name", "table"), [("reward_band", FILTERS), ("difficulty_band", CURATORS)]
)
def test_an_empty_band_is_refused(name, table):
    kind = "filter" if table is FILTERS else "curator"
    spec = AlgorithmSpec(name=name, settings={"low": 2.0, "high": 1.0})
    with pytest.raises(ConfigError, match=r"where\.settings.*low = 2 is above high = 1"):
        bind(spec, kind, table, {}, "where")


def test_settings_of_ones_own_refuse_unknown_keys_without_being_told_to():
    class Own(AlgorithmSettings):
        size: int = 1

    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"sise": 2}, Own)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("no_such_module_of_anybody",), r"data_modules\[0\]: .*cannot be imported.*PYTHONPATH"),
        (("json", "a b"), r"data_modules\[1\]: 'a b' is not the name of a Python module"),
    ],
)
def test_a_module_that_is_not_there_is_told_at_the_start(names, message):
    with pytest.raises(ConfigError, match=message):
        load_modules(names)
