"""Small simulations of everything: determinism, balances, invariants at every event, faults."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from sim.compare import RULES, Task, interval, ratios, simulate_all
from sim.faults import FaultSpec, agent_faults
from sim.run import Result, Simulation, simulate
from sim.scenario import AgentsSpec, PolicyShape, Scenario, load_scenario, shipped_scenarios
from sim.workload import Draws, Workload, make_items
from transport.errors import ConfigError
from transport.messages import LeaseOffer, RewardSpec

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


RICH = msgspec.structs.replace(
    SMALL,
    workload=msgspec.structs.replace(
        SMALL.workload, turns=(1, 3), tool_s=1.0, tool_cv=1.0, train_cv=0.3
    ),
    faults=FaultSpec(
        preempt_mtbf_s=50.0,
        preempt_notice_s=5.0,
        preempt_down_s=5.0,
        slow_mtbf_s=30.0,
        agent_mtbf_s=80.0,
        agent_wiped_share=0.5,
        link_mtbf_s=100.0,
        clock_skew_s=3.0,
    ),
)
"""A bit of everything."""


def changed(**changes: object) -> Scenario:
    return msgspec.structs.replace(SMALL, **changes)


def checked(scenario: Scenario, seed: int = 0, placement: str = "finish-time") -> Result:
    """Run with every core's invariants checked after each of its events."""
    result = Simulation(scenario, placement=placement, seed=seed, check=True).run()  # type: ignore[arg-type]
    assert result.finished
    assert result.problems == ()
    return result


def test_the_same_seed_gives_the_same_history_under_any_hash_seed() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests/unit'); from test_sim_run import RICH, SMALL;"
        "from sim.run import simulate;"
        "print(*(simulate(s, 'finish-time', 3, history=True).digest for s in (SMALL, RICH)))"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ".:tests/support"},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for hash_seed in ("0", "1")
    }
    small, rich = (
        simulate(scenario, "finish-time", 3, history=True).digest for scenario in (SMALL, RICH)
    )
    assert digests == {f"{small} {rich}"}
    assert len(small) == len(rich) == 32
    assert small != rich
    assert simulate(SMALL, "finish-time", 4, history=True).digest != small


@pytest.mark.parametrize("scenario", [SMALL, RICH], ids=["small", "rich"])
def test_polls_that_bring_no_news_are_left_out_and_nothing_else(scenario: Scenario) -> None:
    without = Simulation(scenario, seed=3, history=True)
    polling = Simulation(scenario, seed=3, history=True)
    for agent in polling.agents.values():
        agent._settings = msgspec.structs.replace(agent._settings, slot_poll_s=1.0)
    found, same = without.run(), polling.run()
    assert (found.digest, found.messages) == (same.digest, same.messages)
    assert found.events < same.events


def test_what_was_recorded_gives_the_same_effects_again() -> None:
    from random import Random

    from scheduler.core.machine import SchedulerCore

    simulation = Simulation(SMALL, seed=2)
    simulation.scheduler.recorded = recorded = []
    simulation.run()
    cores = [
        SchedulerCore(SMALL.core_settings("finish-time"), term=1, rng=Random(2), build="sim")
        for _ in range(2)
    ]
    for event, now in recorded:
        one, other = (core.handle(event, now) for core in cores)
        assert one == other
    assert cores[0].dump() == simulation.scheduler.core.dump()


@pytest.mark.parametrize("placement", RULES)
def test_every_rule_gets_to_the_end_with_all_invariants(placement: str) -> None:
    result = checked(SMALL, placement=placement)
    row = result.accounting[0]
    assert row.balance == 0
    assert row.trained + row.taken >= 6 * 4
    assert result.steps == {"sim/policy": 6}
    assert 0.0 < result.steps_hour < 3600 / 5.0
    assert result.lag_mean <= 2.0
    assert result.messages > 100
    assert result.lost_messages == 0


def test_tokens_and_groups_are_conserved() -> None:
    simulation = Simulation(changed(faults=FaultSpec(agent_mtbf_s=60.0, agent_down_s=10.0)), seed=1)
    result = simulation.run()
    ledger = simulation.ledger
    assert result.finished
    assert result.problems == ()
    running = sum(
        sum(group.lengths)
        - sum(s.tokens for s in group.running)
        - sum(s.tokens for s in agent.engine._waiting if s.group is group)
        for agent in simulation.agents.values()
        for group in agent.engine._groups.values()
    )
    spooling = ledger.drawn_tokens - ledger.aborted_tokens - ledger.made_tokens - running
    assert spooling >= 0
    assert spooling <= 20 * 16_384  # groups that are just being written to a spool
    held = [d for d in simulation.log.bodies if d not in ledger.trained]
    spooled = [d for a in simulation.agents.values() for d in a._spool.values()]
    undecided = ledger.made_groups - ledger.trained_groups - ledger.wasted_groups
    assert len(held) <= undecided <= len(held) + len(spooled)


def test_crashing_agents_lose_nothing() -> None:
    faults = FaultSpec(agent_mtbf_s=20.0, agent_down_s=8.0)
    simulation = Simulation(changed(faults=faults, steps=12), seed=6, check=True)
    result = simulation.run()
    assert result.finished
    assert result.problems == ()
    assert sum(agent.lives for agent in simulation.agents.values()) > 8
    assert simulation.ledger.aborted_attempts > 0
    assert result.lost_messages > 0


def test_a_trainer_that_comes_back_goes_on_from_its_checkpoint() -> None:
    faults = FaultSpec(dead_trainers=("policy",), trainer_dies_s=40.0, trainer_down_s=20.0)
    simulation = Simulation(changed(steps=14, faults=faults), seed=0, check=True)
    result = simulation.run()
    assert result.finished
    assert result.problems == ()
    steps = [step.step for step in simulation.ledger.steps["sim/policy"]]
    assert sorted(set(steps)) == list(range(1, max(steps) + 1))


def test_a_dead_trainer_holds_up_no_other_policy() -> None:
    policies = {name: PolicyShape(batch_groups=4, max_policy_lag=2) for name in ("a", "b")}
    faults = FaultSpec(dead_trainers=("b",), trainer_dies_s=15.0)
    result = checked(changed(policies=policies, faults=faults, steps=12))
    assert result.steps == {"sim/a": 12}


def test_slow_agents_and_bound_0_do_not_deadlock() -> None:
    policies = {"policy": PolicyShape(batch_groups=4, max_policy_lag=0)}
    agents = AgentsSpec(per_site=1, slots=(2,), tokens_per_s=(10.0,), link_mbit=(20.0,))
    assert checked(changed(policies=policies, agents=agents, steps=4)).lag_mean == 0.0


def test_a_cut_agent_comes_back() -> None:
    from sim.faults import Fault

    simulation = Simulation(SMALL, seed=0, check=True)
    simulation.kernel.at(20.0, simulation._fault, Fault(20.0, "far-0", "cut"))
    simulation.kernel.at(60.0, simulation._fault, Fault(60.0, "far-0", "restore"))
    result = simulation.run()
    assert result.finished
    assert result.problems == ()
    assert result.lost_messages > 0


def test_nothing_is_decided_in_the_simulator() -> None:
    """It feeds the cores and carries out what they want; their insides are not its matter."""
    doors = {"machine", "events", "effects", "settings", "trained_jobs"}
    used = {
        (package, module)
        for path in Path("sim").rglob("*.py")
        for package, module in re.findall(
            r"from (scheduler|edge_agent|cloud_trainer)\.core(?:\.(\w+)| import \w+)",
            path.read_text(),
        )
    }
    assert used
    assert {module for _, module in used if module} <= doors


def test_seeds_give_rules_the_same_fleet_and_work() -> None:
    scenario = load_scenario("aws12-mixed")
    fleet = scenario.fleet(7)
    assert fleet == scenario.fleet(7) != scenario.fleet(8)
    assert len(fleet) == 24
    assert {plan.slots for seed in range(4) for plan in scenario.fleet(seed)} == {4, 8, 16}
    spec = FaultSpec(agent_mtbf_s=100.0)
    names = [(plan.name, plan.site) for plan in fleet]
    assert agent_faults(spec, names, 1, 1000.0) == agent_faults(spec, names, 1, 1000.0)


def test_lengths_have_the_mean_and_spread_asked_for() -> None:
    draws = Draws(Workload(mean_tokens=1200.0, cv_tokens=1.2))
    offer = LeaseOffer(
        attempt="sim/t-000001#1",
        fence=(1, 1),
        job="sim/t-000001",
        kind="train",
        items=make_items(1, 1),
        group_size=20_000,
        workflow="single_turn",
        settings={},
        policies={"policy": "sim/policy"},
        reward=RewardSpec(name="exact"),
        max_new_tokens=10**6,
        temperature=1.0,
        seed=12345,
        lease_s=120.0,
    )
    lengths = draws.lengths(offer)
    mean = sum(lengths) / len(lengths)
    deviation = (sum((n - mean) ** 2 for n in lengths) / len(lengths)) ** 0.5
    assert mean == pytest.approx(1200.0, rel=0.05)
    assert deviation / mean == pytest.approx(1.2, rel=0.2)
    assert draws.lengths(offer) == lengths


def test_versions_that_were_missed_cost_less_together() -> None:
    work = Workload(delta_bytes=125, full_bytes=1000)
    assert work.gap_bytes(1) == 125
    assert work.gap_bytes(2) == 234
    assert work.gap_bytes(0) == 0
    assert 900 < work.gap_bytes(30) <= 1000


def test_processes_give_what_one_process_gives() -> None:
    tasks = [Task(SMALL, rule, 0) for rule in ("finish-time", "nearest")]
    assert simulate_all(tasks, 2) == simulate_all(tasks, 1)


def test_intervals_are_students() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert (found.mean, found.low) == (2.0, pytest.approx(2.0 - 4.303 / 3**0.5))
    assert interval([5.0]).low == 5.0
    result = simulate(SMALL, "nearest", 0)
    assert ratios([result], [result]) == [1.0]


def test_scenarios_say_what_is_wrong(tmp_path) -> None:
    assert "aws12-mixed" in shipped_scenarios()
    with pytest.raises(ConfigError, match="is not shipped; there are"):
        load_scenario("nowhere")
    path = tmp_path / "bad.toml"
    path.write_text('name = "x"\nsteps = 0\n')
    with pytest.raises(ConfigError, match="steps"):
        load_scenario(path)
    with pytest.raises(ConfigError, match="missing"):
        load_scenario(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="shortlist"):
        changed(scheduler={"shortlist": "many"}).core_settings("nearest")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("step = 3", r"`step`; did you mean steps"),
        ("[faults]\nagent_mtbf = 3", r"at `\$\.faults`; did you mean agent_mtbf_s"),
        ("[policies.a]\ntrain_time = 3", r"did you mean train_s"),
        ("[[faults.planned]]\nwhat = 'slow'\nwhere = 'x'\nspeeed = 3", r"did you mean speed"),
        ("[[faults.partitions]]\nzzz = 3", r"did you mean duration_s, start_s, where\?"),
        ("[[faults.planned]]\nwhat = 'explode'", r"Invalid value 'explode'"),
    ],
)
def test_keys_that_there_are_not_come_with_a_remedy(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(f'name = "x"\n{text}\n')
    with pytest.raises(ConfigError, match=says):
        load_scenario(path)
