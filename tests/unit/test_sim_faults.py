"""What goes wrong in a simulation: preemption, lost disks, slow machines, wrong clocks."""

import msgspec
import pytest
from sim_worlds import SMALL, changed

from sim.faults import (
    Fault,
    FaultSpec,
    Partition,
    PlannedCrash,
    PlannedPreemption,
    PlannedSkew,
    PlannedSlowness,
    agent_faults,
    all_faults,
)
from sim.run import Result, Simulation
from sim.scenario import AgentsSpec, Scenario
from transport.errors import ConfigError

GONE_S = 20.0
"""When agents that are nearby run something, left alone."""

AGENTS = [("near-0", "near"), ("near-1", "near"), ("far-0", "far"), ("far-1", "far")]


def world(spec: FaultSpec, **changes: object) -> Simulation:
    return Simulation(changed(faults=spec, **changes), seed=3, check=True)


def ended(simulation: Simulation) -> Result:
    result = simulation.run()
    assert result.finished
    assert result.problems == ()
    return result


# ---- the plan ----------------------------------------------------------------------------------


def test_one_kind_of_fault_does_not_move_another() -> None:
    crashes = FaultSpec(agent_mtbf_s=300.0, agent_down_s=10.0)
    alone = agent_faults(crashes, AGENTS, 1, 2000.0)
    more = msgspec.structs.replace(crashes, slow_mtbf_s=100.0, clock_skew_s=5.0)
    found = agent_faults(more, AGENTS, 1, 2000.0)
    assert {fault.what for fault in alone} == {"crash", "return"}
    assert [fault for fault in found if fault.what in ("crash", "return")] == alone
    assert found == sorted(found)
    assert found != agent_faults(more, AGENTS, 2, 2000.0)


def test_a_notice_comes_before_its_end_and_a_replacement_after() -> None:
    spec = FaultSpec(preempt_mtbf_s=500.0, preempt_notice_s=20.0, preempt_down_s=60.0)
    found = [f for f in agent_faults(spec, AGENTS, 1, 5000.0) if f.host == "near-0"]
    assert [fault.what for fault in found[:3]] == ["notice", "crash", "return"]
    for notice, crash, back in zip(found[::3], found[1::3], found[2::3], strict=True):
        assert crash.at_s - notice.at_s == pytest.approx(20.0)
        assert back.at_s - crash.at_s == pytest.approx(60.0)
        assert crash.wiped
        assert notice.amount == 20.0


def test_a_machine_that_is_taken_away_is_not_started_again_by_an_earlier_crash() -> None:
    spec = FaultSpec(
        planned=(
            PlannedCrash(where="near-0", at_s=10.0, down_s=30.0),
            PlannedPreemption(where="near", at_s=5.0, notice_s=10.0, down_s=100.0),
        )
    )
    found = agent_faults(spec, AGENTS, 0, 1000.0)
    assert [f for f in found if f.host == "near-0"] == [
        Fault(5.0, "near-0", "notice", 10.0),
        Fault(10.0, "near-0", "crash", wiped=True),
        Fault(115.0, "near-0", "return"),
    ]
    assert [f.host for f in found if f.what == "notice"] == ["near-0", "near-1"]
    gone = FaultSpec(planned=(PlannedCrash(where="far-1", at_s=1.0, down_s=0.0),))
    assert [f.what for f in agent_faults(gone, AGENTS, 0, 1000.0)] == ["crash"]


def test_faults_of_nobody_are_refused() -> None:
    nowhere = FaultSpec(planned=(PlannedSkew(where="moon", ahead_s=1.0),))
    with pytest.raises(ConfigError, match=r"faults\.planned\[0\]\.where: 'moon' .* near, far"):
        agent_faults(nowhere, AGENTS, 0, 1.0)
    with pytest.raises(ConfigError, match=r"dead_trainers: 'x' is no policy; there are policy"):
        all_faults(FaultSpec(dead_trainers=("x",)), AGENTS, ["policy"], 0, 1.0)


def test_planned_faults_are_tables_of_a_scenario() -> None:
    text = """
    name = "x"
    [[faults.planned]]
    what = "preempt"
    where = "near"
    at_s = 60
    [[faults.planned]]
    what = "slow"
    where = "near"
    at_s = 60
    duration_s = 10
    speed = 0.25
    """
    found = msgspec.toml.decode(text, type=Scenario).faults.planned
    assert found == (
        PlannedPreemption(where="near", at_s=60.0),
        PlannedSlowness(where="near", at_s=60.0, duration_s=10.0, speed=0.25),
    )


# ---- what agents do ----------------------------------------------------------------------------


def test_an_agent_with_notice_is_empty_when_its_machine_goes() -> None:
    def at_the_end(notice_s: float) -> tuple[int, int]:
        """Sequences in the engines of two agents whose machines go, and messages lost by then."""
        planned = PlannedPreemption(
            where="near", at_s=GONE_S - notice_s, notice_s=notice_s, down_s=10.0
        )
        simulation = world(FaultSpec(planned=(planned,)), steps=10)
        near = [agent for name, agent in simulation.agents.items() if name.startswith("near")]
        running: list[int] = []
        lost: list[int] = []

        def look(_: object) -> None:
            running.append(sum(agent.engine.running for agent in near))

        simulation.kernel.at(GONE_S - 0.01, look)
        simulation.kernel.at(GONE_S + 2.0, lambda _: lost.append(simulation.network.lost))
        ended(simulation)
        assert [agent.lives for agent in near] == [2, 2]
        return running[0], lost[0]

    assert at_the_end(0.0)[0] > 0
    # All that it said on its way out was heard.
    assert at_the_end(18.0) == (0, 0)


def test_the_last_words_of_a_leaving_agent_arrive() -> None:
    spec = FaultSpec(
        planned=(PlannedPreemption(where="far-0", at_s=25.5, notice_s=8.0, down_s=500.0),)
    )
    simulation = world(spec, steps=10)
    states: dict[float, str] = {}

    def look() -> None:
        status = simulation.scheduler.core.status(simulation.kernel.now)
        found = [agent.state for agent in status.agents if agent.name == "far-0"]
        states[simulation.kernel.now] = found[0] if found else "gone"

    simulation.on_second = look
    ended(simulation)
    assert states[25.0] == "ready"
    assert states[28.0] == "draining"
    # It left by itself before its end: nobody had to miss its heartbeats.
    assert states[33.0] == "gone"


def test_a_wiped_agent_has_neither_bodies_nor_newer_weights() -> None:
    def life(wiped: bool) -> tuple[int, int]:
        spec = FaultSpec(
            planned=(PlannedCrash(where="far", at_s=40.0, down_s=5.0, wiped=wiped),),
            # Cut off before, so that there is something in the spool.
            partitions=(Partition(where="far-0", start_s=30.0, duration_s=14.0),),
        )
        simulation = world(spec, steps=10)
        found: list[tuple[int, int]] = []

        def look(_: object) -> None:
            agent = simulation.agents["far-0"]
            copies = agent._weights._copies
            found.append((len(agent._spool), max(ref.version for ref in copies.values())))

        simulation.kernel.at(40.5, look)
        ended(simulation)
        return found[0]

    spooled, version = life(wiped=False)
    assert spooled > 0
    assert version > 0
    assert life(wiped=True) == (0, 0)


def test_preempted_and_wiped_agents_lose_nothing_that_counts() -> None:
    spec = FaultSpec(
        preempt_mtbf_s=60.0,
        preempt_notice_s=6.0,
        preempt_down_s=5.0,
        agent_mtbf_s=60.0,
        agent_down_s=4.0,
        agent_wiped_share=0.5,
        slow_mtbf_s=40.0,
        slow_speed=0.3,
        clock_skew_s=100.0,
    )
    simulation = world(spec, steps=12)
    ended(simulation)
    assert sum(agent.lives for agent in simulation.agents.values()) > 12


# ---- slow machines -----------------------------------------------------------------------------


def test_a_slow_machine_takes_as_much_longer() -> None:
    lone = changed(
        sites={"near": 0.0},
        agents=AgentsSpec(per_site=1, slots=(4,), tokens_per_s=(100.0,), link_mbit=(1e6,)),
        steps=6,
    )
    work = msgspec.structs.replace(lone.workload, train_s=0.1, swap_s=0.0, delta_bytes=1000)
    lone = msgspec.structs.replace(lone, workload=work)

    def took_s(*planned: PlannedSlowness) -> float:
        scenario = msgspec.structs.replace(lone, faults=FaultSpec(planned=planned))
        simulation = Simulation(scenario, seed=1, check=True)
        ended(simulation)
        return next(s.at_s for s in simulation.ledger.steps["sim/policy"] if s.step == 6)

    usual_s = took_s()
    always = PlannedSlowness(where="near", at_s=0.0, duration_s=1e6, speed=0.5)
    # All that counts is drawing tokens.
    assert took_s(always) == pytest.approx(2.0 * usual_s, rel=0.05)
    for_a_while = PlannedSlowness(where="near", at_s=5.0, duration_s=10.0, speed=0.1)
    assert took_s(for_a_while) == pytest.approx(usual_s + 9.0, rel=0.1)


# ---- wrong clocks ------------------------------------------------------------------------------


def test_wrong_clocks_are_seen_and_change_nothing() -> None:
    def told(spec: FaultSpec) -> tuple[Result, dict[str, float], list[tuple[str, float]]]:
        simulation = world(spec)
        result = ended(simulation)
        agents = simulation.scheduler.core.status(simulation.kernel.now).agents
        offsets = {a.name: a.clock_offset_s for a in agents if a.clock_offset_s is not None}
        steps = [(s.policy, s.at_s) for s in simulation.scheduler.steps]
        return result, offsets, steps

    right, offsets, steps = told(FaultSpec())
    assert offsets
    assert all(abs(offset) < 0.2 for offset in offsets.values())
    planned = (PlannedSkew(where="far-0", ahead_s=-3600.0), PlannedSkew(where="near", ahead_s=40.0))
    wrong, skewed, same_steps = told(FaultSpec(planned=planned))
    assert same_steps == steps
    assert wrong == right
    assert skewed["far-0"] == pytest.approx(3600.0, abs=0.2)
    assert skewed["near-0"] == pytest.approx(-40.0, abs=0.2)
    drawn = told(FaultSpec(clock_skew_s=5.0))[1]
    assert len({round(offset) for offset in drawn.values()}) > 1
    assert all(abs(offset) < 5.2 for offset in drawn.values())


def test_a_clock_can_jump() -> None:
    spec = FaultSpec(planned=(PlannedSkew(where="far-0", ahead_s=60.0, at_s=20.0),))
    simulation = world(spec)
    ended(simulation)
    agents = simulation.scheduler.core.status(simulation.kernel.now).agents
    offset = next(agent.clock_offset_s for agent in agents if agent.name == "far-0")
    assert offset == pytest.approx(-60.0, abs=0.2)


@pytest.mark.parametrize(("wiped", "comes_back"), [(False, True), (True, False)])
def test_a_replacement_whose_clock_is_behind_is_taken_for_an_older_life(
    wiped: bool, comes_back: bool
) -> None:
    """The one thing that depends on a wall clock: lives are numbered by it where the disk that had
    the last number is lost."""
    spec = FaultSpec(
        planned=(
            PlannedSkew(where="far-0", ahead_s=-3600.0, at_s=20.0),
            PlannedCrash(where="far-0", at_s=21.0, down_s=5.0, wiped=wiped),
        )
    )
    simulation = world(spec, steps=10)
    ended(simulation)
    assert simulation.agents["far-0"].lives == 2
    assert simulation.agents["far-0"].alive is comes_back


def test_faults_are_the_same_under_every_rule() -> None:
    spec = FaultSpec(preempt_mtbf_s=50.0, slow_mtbf_s=50.0, clock_skew_s=1.0)
    plans = []
    for placement in ("finish-time", "nearest"):
        simulation = Simulation(
            msgspec.structs.replace(SMALL, faults=spec), placement=placement, seed=2
        )
        plans.append(simulation._faults())
    assert plans[0] == plans[1]
    assert len({fault.what for fault in plans[0]}) == 5
