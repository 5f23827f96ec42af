"""Planning: what binds is found where it is known, and additions are tried fairly."""

import msgspec
import pytest
from sim_worlds import changed

from sim.compare import interval
from sim.plan import Addition, Kind, candidates, classes, costs, make_plan
from sim.run import Simulation
from sim.scenario import AgentsSpec, PolicyShape, Scenario
from sim.workload import Workload

AGENTS = AgentsSpec(per_site=1, slots=(4,), tokens_per_s=(50.0,), link_mbit=(1000.0,))


def world(**changes: object) -> Scenario:
    """One agent 20 ms away that is as fast as its trainer needs or faster, over no distance."""
    base = Scenario(
        name="world",
        sites={"near": 20.0},
        agents=AGENTS,
        policies={"policy": PolicyShape(batch_groups=4, max_policy_lag=4)},
        group_size=2,
        steps=12,
        limit_s=20_000.0,
        workload=Workload(mean_tokens=200.0, cv_tokens=0.2, train_s=2.0, delta_bytes=1_000_000),
    )
    return msgspec.structs.replace(base, **changes)


def best_of(kind: Kind, additions: list[Addition]) -> float:
    return max(one.ratio.mean for one in additions if one.kind == kind)


def test_too_few_slots_are_found_by_both() -> None:
    plan = make_plan(world(), placement="finish-time", seeds=range(2))
    assert not plan.stays_busy
    assert plan.binds_by_formula == plan.binds_by_experiment == "generation"
    assert plan.best.startswith("one more agent like near-0")
    assert best_of("agent", plan.additions) > 1.5
    assert best_of("trainer", plan.additions) < 1.1
    assert plan.problems == []


def test_a_slow_trainer_is_found_by_both() -> None:
    slow = world(workload=Workload(mean_tokens=50.0, cv_tokens=0.2, train_s=30.0, delta_bytes=1000))
    plan = make_plan(slow, placement="finish-time", seeds=range(2))
    assert plan.stays_busy
    assert plan.binds_by_formula == plan.binds_by_experiment == "training"
    assert best_of("trainer", plan.additions) > 1.5


def test_large_deltas_over_thin_links_are_found() -> None:
    heavy = world(
        agents=AgentsSpec(per_site=2, slots=(8,), tokens_per_s=(100.0,), link_mbit=(20.0,)),
        policies={"policy": PolicyShape(batch_groups=4, max_policy_lag=1)},
        workload=Workload(
            mean_tokens=100.0,
            cv_tokens=0.2,
            train_s=2.0,
            delta_bytes=40_000_000,
            full_bytes=400_000_000,
        ),
    )
    plan = make_plan(heavy, placement="finish-time", seeds=range(2))
    assert plan.binds_by_formula == plan.binds_by_experiment == "links"
    assert best_of("links", plan.additions) > 1.2
    assert best_of("agent", plan.additions) < 1.1


def test_an_addition_leaves_all_else_as_it_was() -> None:
    """Common random numbers: the fleet of the seed comes first, unchanged, then the new agent."""
    scenario = changed(agents=AgentsSpec(per_site=3, slots=(2, 4), tokens_per_s=(25.0, 100.0)))
    for variant in candidates(scenario, seed=5):
        if variant.kind == "agent":
            [added] = variant.added
            assert added.name not in {plan.name for plan in scenario.fleet(5)}
            assert variant.scenario == scenario
        elif variant.kind == "links":
            assert variant.scenario == scenario
        else:
            assert variant.scenario.fleet(5) == scenario.fleet(5)


def test_one_class_per_kind_of_hardware_fastest_first() -> None:
    fleet = changed(agents=AgentsSpec(per_site=20, tokens_per_s=(25.0, 100.0, 50.0))).fleet(0)
    assert [plan.tokens_per_s for plan in classes(fleet)] == [100.0, 50.0, 25.0]


def test_costs_are_time_and_bytes_at_their_prices() -> None:
    scenario = changed(
        regions="aws12-2022", sites={}, agents=AgentsSpec(per_site=1, usd_hour=(3.6,)), steps=2
    )
    simulation = Simulation(scenario)
    simulation.run()
    found = costs(simulation)
    assert found.agents_usd == pytest.approx(12 * 3.6 * simulation.kernel.now / 3600)
    topology = scenario.topology()
    down = sum(
        simulation.link_bytes(plan.name)[1] / 1e9 * topology.egress_usd_gb("us-east-1", plan.site)
        for plan in simulation.plans
    )
    assert found.weights_usd == pytest.approx(down)
    assert found.weights_usd > found.results_usd > 0
    assert found.total_usd == pytest.approx(
        found.agents_usd + found.weights_usd + found.results_usd
    )


def test_equal_calls_give_equal_plans() -> None:
    plans = [make_plan(changed(steps=2), placement="finish-time", seeds=range(1)) for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0].steps_hour == interval([plans[0].steps_hour.mean])
