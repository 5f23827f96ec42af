"""The oracle that placement is compared with: above every rule, no better than the trainer, and
keeping the rules that it is said to keep."""

from itertools import pairwise

import msgspec
import pytest

from bench.oracle import ORDERS, ListSchedule, Schedule, clairvoyant, fresh_capacity, trainer_bound
from bench.oracle_world import Work, fleet
from sim.compare import RULES
from sim.run import Simulation, simulate
from sim.scenario import AgentsSpec, PolicyShape, Scenario
from sim.workload import Workload
from transport.errors import ConfigError

SMALL = Scenario(
    name="small",
    sites={"near": 20.0, "far": 200.0},
    agents=AgentsSpec(
        per_site=2, slots=(2, 4), tokens_per_s=(25.0, 100.0), link_mbit=(20.0, 1000.0)
    ),
    policies={"policy": PolicyShape(batch_groups=4, max_policy_lag=2)},
    group_size=2,
    steps=6,
    limit_s=5000.0,
    workload=Workload(mean_tokens=300.0, train_s=5.0, delta_bytes=10_000_000),
)
SCENARIOS: dict[str, dict[str, object]] = {
    "pairs": {},
    "alone": {"group_size": 1},
    "bound 0": {"policies": {"policy": PolicyShape(batch_groups=4, max_policy_lag=0)}},
    "bound 5": {"policies": {"policy": PolicyShape(batch_groups=8, max_policy_lag=5)}},
}


def changed(**changes: object) -> Scenario:
    return msgspec.structs.replace(SMALL, **changes)


def equal_agents(**changes: object) -> Scenario:
    """Lengths that do not scatter, agents that are the same, links that take no time."""
    base: dict[str, object] = {
        "sites": {"here": 0.0},
        "agents": AgentsSpec(per_site=2, slots=(2,), tokens_per_s=(100.0,), link_mbit=(1e6,)),
        "group_size": 1,
        "steps": 4,
        "policies": {"policy": PolicyShape(batch_groups=4, max_policy_lag=1)},
        "workload": Workload(
            mean_tokens=1000.0, cv_tokens=0.0, train_s=5.0, delta_bytes=0, store_s=0.0
        ),
    }
    return changed(**{**base, **changes})


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("pairs", 1),
        ("alone", 1),
        ("bound 0", 1),
        *(pytest.param(name, 0, marks=pytest.mark.slow) for name in SCENARIOS),
    ],
)
def test_it_is_above_every_rule_and_not_above_the_trainer(name: str, seed: int) -> None:
    scenario = changed(**SCENARIOS[name])
    schedule = clairvoyant(scenario, seed)
    assert schedule.finished
    assert schedule.steps_hour <= trainer_bound(scenario, seed) + 1e-9
    for rule in RULES:
        result = simulate(scenario, rule, seed)
        assert result.finished
        assert result.steps_hour <= schedule.steps_hour, rule


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("changes", SCENARIOS.values(), ids=SCENARIOS)
def test_a_schedule_keeps_slots_lag_quota_and_wastes_nothing(
    changes: dict[str, object], order: str
) -> None:
    scenario = changed(**changes)
    shape = scenario.policies["policy"]
    schedule = ListSchedule(scenario, 2, 12.0, order)
    assert schedule.run().finished
    begun = {entry.group.item: entry for entry in schedule.begun}
    assert len(begun) == len(schedule.begun)
    used = [item for step in schedule.used for item in step]
    assert len(set(used)) == len(used) == scenario.steps * shape.batch_groups
    begins_s = [end_s - 5.0 for end_s in schedule.ends_s]
    for number, (items, begin_s) in enumerate(zip(schedule.used, begins_s, strict=True), 1):
        assert begin_s >= (schedule.ends_s[number - 2] if number > 1 else 0.0) - 1e-9
        for item in items:
            assert begun[item].back_s <= begin_s + 1e-6
            assert 0 <= number - 1 - begun[item].version <= shape.max_policy_lag
    # What is still open could be used later: nothing was begun in vain.
    for item, entry in begun.items():
        assert item in used or entry.version + shape.max_policy_lag + 1 > scenario.steps
    # No agent has a version before the step that makes it has ended, nor more work than slots.
    for number, plan in enumerate(scenario.fleet(2)):
        mine = [entry for entry in schedule.begun if entry.agent == number]
        for entry in mine:
            assert not entry.version or entry.at_s > schedule.ends_s[entry.version - 1]
        tokens = sum(sum(entry.group.lengths) for entry in mine)
        last_s = max((entry.back_s for entry in mine), default=0.0)
        assert tokens <= plan.slots * plan.tokens_per_s * last_s
        if scenario.group_size == 1:
            # A body is back a way and an upload after its slot is free, never before.
            moments = [(entry.at_s, 1) for entry in mine]
            moments += [
                (entry.at_s + entry.group.longest / plan.tokens_per_s, -1) for entry in mine
            ]
            held = 0
            for _, change in sorted((round(at_s, 6), change) for at_s, change in moments):
                held += change
                assert held <= plan.slots
    quota = shape.batch_groups * (shape.max_policy_lag + 1)
    for begin_s in begins_s:
        out = sum(entry.at_s < begin_s for entry in schedule.begun)
        gone = sum(shape.batch_groups for sooner_s in begins_s if sooner_s < begin_s)
        assert out - gone <= quota


def test_a_schedule_worked_out_by_hand() -> None:
    # Four slots, sequences of 10 s, batches of four: one batch every 10 s, whatever the trainer's
    # 5 s; the fourth step ends at 45 s. Bodies of 6 kB at 125 GB/s and half of no round trip.
    scenario = equal_agents()
    schedule = clairvoyant(scenario, 0)
    assert schedule.steps_hour == pytest.approx(3600 * 4 / 45, rel=1e-3)
    assert schedule.dropped_share == 0.0
    assert trainer_bound(scenario, 0) == pytest.approx(3600 * 4 / (10 + 4 * 5), rel=1e-3)
    assert fresh_capacity(scenario, 0) == pytest.approx(3600 / 10, rel=1e-3)


def test_groups_that_no_agent_has_back_in_time_are_given_up() -> None:
    # Bound 0 and steps of 5 s: at a pace of 8 s a group has 3 s, which is 300 tokens.
    workload = Workload(mean_tokens=200.0, cv_tokens=1.0, train_s=5.0, delta_bytes=0, store_s=0.0)
    policies = {"policy": PolicyShape(batch_groups=4, max_policy_lag=0)}
    scenario = equal_agents(policies=policies, workload=workload)
    fast = clairvoyant(scenario, 0, paces=(1.6,), orders=("longest",))
    work = Work(scenario, 0)
    longer = sum(work[n].longest > 300 for n in range(40)) / 40
    assert 0.0 < longer < 0.5
    assert fast.dropped_share == pytest.approx(longer, abs=0.2)
    none = clairvoyant(scenario, 0, most_dropped=0.0)
    assert none.finished
    assert none.dropped_share == 0.0
    assert none.steps_hour <= clairvoyant(scenario, 0).steps_hour


def test_a_wider_bound_is_never_worse() -> None:
    found: list[Schedule] = []
    for lag in (0, 1, 2, 4):
        policies = {"policy": PolicyShape(batch_groups=4, max_policy_lag=lag)}
        found.append(clairvoyant(changed(policies=policies), 1))
    rates = [schedule.steps_hour for schedule in found]
    assert all(later >= 0.97 * sooner for sooner, later in pairwise(rates))
    assert rates[-1] > 1.5 * rates[0]


def test_it_knows_the_lengths_and_agents_of_the_simulation() -> None:
    seed = 3
    simulation = Simulation(SMALL, seed=seed, record=True)
    simulation.run()
    work = Work(SMALL, seed)
    known = {tuple(work[n].lengths) for n in range(60)}
    made = {tuple(body.summary.lengths) for body in [*simulation.log.bodies.values()]}
    assert made
    assert made <= known
    plans = [agent.plan for agent in fleet(SMALL, seed)]
    assert plans == SMALL.fleet(seed)


def test_what_it_does_not_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="policies: the oracle knows one"):
        clairvoyant(changed(policies={"a": PolicyShape(), "b": PolicyShape()}), 0)
    work = msgspec.structs.replace(SMALL.workload, turns=(1, 3))
    with pytest.raises(ConfigError, match=r"workload\.turns: the oracle does not model it"):
        trainer_bound(changed(workload=work), 0)
    shape = PolicyShape(batch_groups=4, train_cv=0.5)
    with pytest.raises(ConfigError, match="train_cv: the oracle does not model it"):
        clairvoyant(changed(policies={"policy": shape}), 0)
    with pytest.raises(ConfigError, match="give at least one of each"):
        clairvoyant(SMALL, 0, paces=())
