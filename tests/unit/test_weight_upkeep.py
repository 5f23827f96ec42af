"""What the weight store makes next and keeps: the decisions alone."""

import pytest

from scheduler.weight_upkeep import (
    Asked,
    CpuShare,
    aligned,
    kept_versions,
    next_bridge,
    next_composite,
)

PATH = list(range(0, 200))


def everything(path, asked, usable=None, made=(), choose=next_composite):
    """All composites (or bridges) in the order in which they would be made."""
    found, made = [], set(made)
    while (
        pair := choose(path, asked, made, range(1000) if usable is None else usable)
    ) is not None:
        found.append(pair)
        made.add(pair)
    return found


def test_nobody_lagging_means_no_composites():
    assert everything(PATH, []) == []
    assert everything(PATH, [Asked(198, 199), Asked(197, 198)]) == []


@pytest.mark.parametrize(
    ("gap", "expected"),
    [
        (2, [(192, 196), (196, 198)]),
        (3, [(192, 196), (196, 198)]),
        (4, [(184, 192), (192, 196), (196, 198)]),
        (60, [(128, 192), (160, 192), (176, 192), (184, 192), (192, 196), (196, 198)]),
        (16, [(160, 192), (176, 192), (184, 192), (192, 196), (196, 198)]),
    ],
)
def test_composites_up_to_twice_the_gap_that_somebody_lacked_largest_first(gap, expected):
    assert everything(PATH, [Asked(199 - gap, 199)]) == expected


def test_composites_start_from_versions_that_are_there():
    asked = [Asked(139, 199)]
    assert everything(PATH, asked, usable=range(170, 200))[0] == (176, 192)
    assert everything(PATH[:3], asked) == []
    assert everything(PATH[:3], [Asked(0, 2)]) == [(0, 2)]


def test_whoever_holds_an_abandoned_version_gets_one_bridge():
    path = [0, 1, 4, 5]
    asked = [Asked(3, 5), Asked(2, 5), Asked(3, 4), Asked(1, 5)]
    bridges = {"choose": next_bridge}
    assert everything(path, asked, usable={1, 2, 3, 4, 5}, **bridges) == [(3, 5), (2, 5)]
    # An old one is enough: the chain leads on from where it ends.
    assert everything([*path, 6], asked, usable={2, 3}, made=[(3, 5)], **bridges) == [(2, 6)]
    assert everything(path, [Asked(3, 5)], usable={4, 5}, **bridges) == []
    assert everything(path, [Asked(9, 5)], usable={9}, **bridges) == []
    assert everything(path, [Asked(3, 5)]) == []


def test_any_stretch_is_covered_by_few_of_what_is_made_as_versions_come():
    made = set()
    for head in range(1, 65):
        asked = [Asked(0, min(head, 32))]
        made.update(everything(list(range(head + 1)), asked, made=made))
    for start in range(64):
        at, legs = start, 0
        while at < 64:
            at = max([end for base, end in made if base == at], default=at + 1)
            legs += 1
        assert legs <= 7
    assert len(made) == 32 + 16 + 8 + 4 + 2 + 1


def test_the_newest_aligned_version_gets_the_cumulative():
    assert aligned([0], 4) is None
    assert aligned([0, 1, 2, 5], 4) is None
    assert aligned([0, 1, 2, 5, 9, 10], 4) == 9
    assert aligned([0, 1, 2], 1) == 2


def test_work_takes_its_share_of_a_core():
    share = CpuShare(0.25)
    assert share.may_start(0.0)
    share.spent(10.0, now_s=10.0)
    assert not share.may_start(39.0)
    assert share.may_start(40.0)
    share.spent(1.0, now_s=50.0)
    assert share.may_start(53.0)
    assert not CpuShare(0.0).may_start(1e9)
    whole = CpuShare(1.0)
    whole.spent(10.0, now_s=10.0)
    assert whole.may_start(10.0)


def test_versions_are_kept_for_who_lags_but_not_without_end():
    numbers = [*range(10), *range(20, 60)]
    assert kept_versions(numbers, [], keep=5, keep_max=20) == [55, 56, 57, 58, 59]
    assert kept_versions(numbers, [50, 58], keep=5, keep_max=20) == list(range(50, 60))
    assert kept_versions(numbers, [3, 58], keep=5, keep_max=20) == list(range(40, 60))
    assert kept_versions(numbers, [15, 59], keep=5, keep_max=20) == [55, 56, 57, 58, 59]
    assert kept_versions([0, 1], [0], keep=5, keep_max=5) == [0, 1]
