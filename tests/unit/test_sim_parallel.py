"""Many simulations at a time: in order, and what is done is kept."""

import pytest
from sim_worlds import changed

from sim.compare import compare, parse_rules, ratios
from sim.parallel import map_some
from sim.sweep import sweep
from transport.errors import ConfigError


def double(number: int) -> int:
    if number == 99:
        raise KeyboardInterrupt
    return 2 * number


def fail(number: int) -> int:
    raise ValueError(f"{number} failed")


@pytest.mark.parametrize("processes", [1, 2])
def test_results_come_in_the_order_of_the_tasks(processes: int) -> None:
    shown: list[tuple[int, int]] = []
    found = map_some(double, [3, 1, 2], processes, lambda *done: shown.append(done))
    assert found == [6, 2, 4]
    assert shown == [(1, 3), (2, 3), (3, 3)]


def test_an_interruption_keeps_what_is_done() -> None:
    assert map_some(double, [1, 2, 99, 3], 1) == [2, 4, None, None]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_failure_ends_the_rest(processes: int) -> None:
    with pytest.raises(ValueError, match="failed"):
        map_some(fail, [1, 2], processes)


def test_an_interrupted_comparison_has_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    from sim import parallel

    before, count = parallel.simulate, [0]

    def simulate(*task: object) -> object:
        count[0] += 1
        if count[0] == 4:
            raise KeyboardInterrupt
        return before(*task)  # type: ignore[arg-type]

    monkeypatch.setattr(parallel, "simulate", simulate)
    found = compare(changed(steps=1), ["finish-time", "nearest"], range(4))
    assert (len(found.results), found.asked) == (3, 8)
    assert [one.seeds for one in found.measures] == [(0, 1), (0,)]
    assert found.measures[1].ratio is not None


def test_an_interrupted_sweep_has_its_first_points(monkeypatch: pytest.MonkeyPatch) -> None:
    from sim import parallel

    before, count = parallel.simulate, [0]

    def simulate(*task: object) -> object:
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt
        return before(*task)  # type: ignore[arg-type]

    monkeypatch.setattr(parallel, "simulate", simulate)
    axes = {"workload.train_s": [1, 2, 3]}
    found = sweep(changed(steps=1), axes, placement="nearest", seeds=range(2))
    counts = [len(p.measure.seeds) if p.measure else 0 for p in found.points]
    assert counts == [2, 0, 0]


def test_ratios_are_over_the_seeds_that_both_finished() -> None:
    found = compare(changed(steps=1), ["finish-time", "nearest"], range(2))
    by_rule = [[r for r in found.results if r.placement == one.name] for one in found.measures]
    assert len(ratios(by_rule[1], by_rule[0][:1])) == 1
    assert ratios(by_rule[0], by_rule[0]) == [1.0, 1.0]


def test_rules_are_parsed() -> None:
    assert parse_rules("nearest, finish-time,nearest") == ["nearest", "finish-time"]
    assert len(parse_rules("all")) == 5
    with pytest.raises(ConfigError, match="no rule 'best'"):
        parse_rules("best")
