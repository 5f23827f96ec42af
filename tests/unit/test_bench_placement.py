"""The rows of the placement and scale benches: what they compare, and that they can fail."""

from dataclasses import replace

import pytest

from bench.placement import OURS, REFERENCE, gain_rows, oracle_rows, rule_rows
from bench.simulator_scale import Load, fleet_rows, fleet_scenario, load_of
from sim.run import Result, simulate
from sim.scenario import AgentsSpec, PolicyShape, Scenario
from sim.workload import Workload

SMALL = Scenario(
    name="small",
    sites={"near": 20.0, "far": 200.0},
    agents=AgentsSpec(slots=(2, 4), tokens_per_s=(25.0, 100.0), link_mbit=(100.0,)),
    policies={"policy": PolicyShape(batch_groups=4, max_policy_lag=2)},
    steps=3,
    limit_s=5000.0,
    workload=Workload(mean_tokens=200.0, train_s=5.0, delta_bytes=1_000_000),
)


@pytest.fixture(scope="module")
def result() -> Result:
    return simulate(SMALL, OURS, 0)


def results(result: Result, rule: str, rates: list[float], wasted: float) -> list[Result]:
    return [
        replace(result, placement=rule, seed=seed, steps_hour=rate, wasted_share=wasted)
        for seed, rate in enumerate(rates)
    ]


def test_gains_are_taken_seed_by_seed(result: Result) -> None:
    found = {
        OURS: results(result, OURS, [130.0, 260.0, 390.0], 0.1),
        REFERENCE: results(result, REFERENCE, [100.0, 200.0, 300.0], 0.4),
    }
    gain, wasted = gain_rows("x", found, targets=True)
    assert gain.value == pytest.approx(1.3)
    assert gain.reference is not None
    assert "[1.3, 1.3]" in gain.reference  # though the rates of the seeds differ threefold
    assert wasted.value == pytest.approx(0.25)
    assert gain.ok
    assert wasted.ok


def test_a_gain_that_scatters_or_wastes_too_much_is_missed(result: Result) -> None:
    found = {
        OURS: results(result, OURS, [200.0, 110.0, 100.0], 0.3),
        REFERENCE: results(result, REFERENCE, [100.0, 100.0, 100.0], 0.4),
    }
    assert [row.ok for row in gain_rows("x", found, targets=True)] == [False, False]
    assert [row.ok for row in gain_rows("x", found, targets=False)] == [True, True]


def test_a_run_that_did_not_end_is_missed(result: Result) -> None:
    found = {
        OURS: [replace(result, finished=False), result],
        REFERENCE: [result, replace(result, seed=1)],
    }
    rows = {row.metric: row for row in rule_rows(SMALL, found, targets=False)}
    assert not rows[f"small: {OURS}"].ok
    assert rows[f"small: {REFERENCE}"].ok


def test_no_rule_may_be_above_the_oracle(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.placement.cores", lambda: 1)  # no processes
    rows = {row.metric: row for row in oracle_rows(SMALL, {OURS: [result]})}
    oracle = rows["small: oracle, knows all lengths"]
    assert oracle.ok
    part = rows[f"small: {OURS}, of the oracle"]
    assert part.value == pytest.approx(result.steps_hour / oracle.value)
    assert 0.3 < part.value <= 1.0
    above = replace(result, steps_hour=1.01 * oracle.value)
    assert not oracle_rows(SMALL, {OURS: [above]})[0].ok


def test_a_fleet_that_was_stopped_is_extrapolated_from_the_later_half() -> None:
    # 10 s to build the world, a first half of 5 s per second, a later one of 1 s.
    cpu_s = (10.0, *(10.0 + 5.0 * n for n in range(1, 6)), *(35.0 + n for n in range(1, 6)))
    load = Load(120, cpu_s, events=4000, trained=7, problems=0, most_bytes=120 * 2**20)
    assert load.virtual_s == 10
    assert load.hour_s(10.0) == 40.0
    assert load.hour_s(110.0) == pytest.approx(140.0)
    took, events, memory = fleet_rows(load, 110.0, 139.0)
    assert not took.ok
    assert "from 10 virtual s, extrapolated" in (took.reference or "")
    assert events.value == 100.0
    assert memory.value == 120.0
    assert fleet_rows(load, 110.0, 141.0)[0].ok
    assert not fleet_rows(load._replace(problems=1), 110.0, 141.0)[0].ok


def test_a_fleet_is_simulated_until_its_time_or_its_budget_is_over() -> None:
    scenario = fleet_scenario(1, 20.0)
    assert len(scenario.fleet(0)) == 12
    load = load_of(1, 20.0, budget_s=60.0)
    assert load.virtual_s in (19, 20)
    assert load.events > 500
    assert load.problems == 0
    assert load.most_bytes > 2**24
    assert load_of(1, 20.0, budget_s=0.0).virtual_s == 1
