"""A scenario as a deployment's files, and what is measured of both rungs."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from edge_agent.config import FakeEngineTable
from edge_agent.engine import GenerationRequest, SamplingParams
from edge_agent.engines.fake import FakeEngine
from farflow.emulate_files import make_model, write_emulation
from farflow.emulate_times import service_times, with_service
from farflow.run_file import run_spec
from farflow.up_config import check_workflow, up_config
from sim.faults import FaultSpec, PlannedCrash
from sim.run import Simulation
from sim.scenario import PolicyShape, Scenario, load_scenario
from sim.workload import Draws
from transport.errors import ConfigError
from transport.ids import item_seed
from transport.messages import Item, LeaseOffer, RewardSpec
from transport.runtime.config import collect


def small(**changes: Any) -> Scenario:
    scenario = load_scenario("calibration-mixed")
    workload = msgspec.structs.replace(scenario.workload, full_bytes=200_000, delta_bytes=10_000)
    return msgspec.structs.replace(scenario, workload=workload, **changes)


def test_the_files_are_a_deployment_with_the_scenarios_fleet(tmp_path: Path) -> None:
    scenario = small()
    file = write_emulation(scenario, tmp_path / "out", seed=3, placement="nearest", engine="fake")
    data, _ = collect([file], ())
    spec = run_spec(data, file.parent)
    config, agents = up_config(data)
    check_workflow(spec, config, agents)
    plans = {plan.name: plan for plan in scenario.fleet(3)}
    assert {agent.name for agent in agents} == set(plans)
    for agent in agents:
        plan, fake = plans[agent.name], agent.settings["fake"]
        assert agent.settings["slots"] == plan.slots
        assert fake["tokens_per_s"] == plan.tokens_per_s
        assert fake["lengths_by"] == "place"
        assert config.links[agent.link]["rate_up"] == f"{plan.up / 125_000:g}Mbit/s"
    policy, simulated = spec.policies["policy"], scenario.run_spec(3).policies["policy"]
    for field in ("steps", "batch_groups", "max_policy_lag", "checkpoint_every"):
        assert getattr(policy, field) == getattr(simulated, field)
    assert (spec.name, spec.seed) == (scenario.run_spec(3).name, scenario.run_spec(3).seed)
    assert config.scheduler.placement == "nearest"


def test_sites_with_a_profile_get_its_link(tmp_path: Path) -> None:
    scenario = small(sites={}, profiles={"home": "home-cable"})
    file = write_emulation(
        scenario, tmp_path / "out", seed=0, placement="finish-time", engine="fake"
    )
    data, _ = collect([file], ())
    config, agents = up_config(data)
    profile = scenario.link_profiles()["home"]
    link = config.links[agents[0].link]
    assert link["jitter"] == profile.jitter_s
    assert link["delay_up"] == profile.delay_up_s


def test_without_delay_and_rate_there_is_no_link(tmp_path: Path) -> None:
    scenario = small(sites={"here": 0.0})
    agents = msgspec.structs.replace(scenario.agents, link_mbit=(1e6,))
    scenario = msgspec.structs.replace(scenario, agents=agents)
    file = write_emulation(
        scenario, tmp_path / "out", seed=0, placement="finish-time", engine="fake"
    )
    data, _ = collect([file], ())
    assert {agent.link for agent in up_config(data)[1]} == {"local"}


def test_a_model_without_room_for_a_sequence_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", 2_000)
    (model / "config.json").write_text('{"max_position_embeddings": 512}')
    with pytest.raises(ConfigError, match=r"has 512 positions; .* is 700, lower"):
        write_emulation(
            small(),
            tmp_path / "out",
            seed=0,
            placement="finish-time",
            engine="torch",
            model=model,
        )


def test_what_the_links_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"loss: .* leave it out"):
        write_emulation(
            small(loss={"far": 0.01}),
            tmp_path / "out",
            seed=0,
            placement="finish-time",
            engine="fake",
        )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"link_model": "tcp"}, r"link_model: .*no slow start.*--set link_model=proxy"),
        ({"faults": FaultSpec(preempt_mtbf_s=9.0)}, r"faults\.preempt_mtbf_s: is simulated only"),
        ({"faults": FaultSpec(slow_mtbf_s=9.0)}, r"faults\.slow_mtbf_s: "),
        ({"faults": FaultSpec(clock_skew_s=9.0)}, r"faults\.clock_skew_s: "),
        ({"faults": FaultSpec(agent_wiped_share=0.5)}, r"faults\.agent_wiped_share: "),
        (
            {"faults": FaultSpec(planned=(PlannedCrash(where="far", at_s=1.0),))},
            r"faults\.planned: ",
        ),
        ({"policies": {"policy": PolicyShape(train_cv=0.1)}}, r"policies\.policy\.train_cv: "),
    ],
)
def test_what_is_only_simulated_is_refused(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        write_emulation(
            small(**changes),
            tmp_path / "out",
            seed=0,
            placement="finish-time",
            engine="fake",
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes",
    [{"lengths_file": "x"}, {"deltas_file": "x"}, {"turns": (2,)}, {"train_cv": 0.1}],
)
def test_work_that_is_only_simulated_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    scenario = small()
    scenario = msgspec.structs.replace(
        scenario, workload=msgspec.structs.replace(scenario.workload, **changes)
    )
    with pytest.raises(ConfigError, match=rf"workload\.{next(iter(changes))}: is simulated only"):
        write_emulation(scenario, tmp_path / "out", seed=0, placement="finish-time", engine="fake")


@pytest.mark.asyncio
async def test_the_fake_engine_draws_the_simulators_lengths(tmp_path: Path) -> None:
    workload = small().workload
    offer = LeaseOffer(
        job="sim/t-000007",
        attempt="a",
        fence=(1, 1),
        kind="train",
        items=(Item(index=7, prompt="p", answer="1"),),
        group_size=16,
        workflow="single_turn",
        settings={},
        policies={"policy": "sim/policy"},
        reward=RewardSpec(name="exact"),
        max_new_tokens=workload.max_new_tokens,
        temperature=1.0,
        seed=item_seed(0, "train", 7),
        lease_s=10.0,
    )
    table = FakeEngineTable(
        lengths_by="place", mean_tokens=workload.mean_tokens, cv_tokens=workload.cv_tokens
    )
    engine = FakeEngine(16, table, sleep=_no_time)
    await engine.start()
    await engine.load_policy("sim/policy", make_model(tmp_path / "model", 2_000), 0)
    request = GenerationRequest(
        request_id="any",
        policy="sim/policy",
        prompt_tokens=(1, 2, 3),
        n=16,
        sampling=SamplingParams(max_new_tokens=workload.max_new_tokens, seed=offer.seed),
    )
    lengths = [len(completion.tokens) for completion in await engine.generate(request)]
    await engine.close()
    assert lengths == Draws(workload).lengths(offer)


async def _no_time(seconds: float) -> None:
    """Everything is generated at once."""


def test_service_times_of_a_simulation_are_those_it_was_given() -> None:
    """So what the emulator measures of the daemons is what the simulator takes."""
    scenario = msgspec.structs.replace(load_scenario("calibration-delta"), steps=30)
    simulation = Simulation(scenario, seed=2)
    events = simulation.scheduler.recorded = []
    simulation.run()
    topology = scenario.topology()
    rtt_s = {plan.name: topology.rtt_s(scenario.cloud, plan.site) for plan in scenario.fleet(2)}
    found = service_times(events, rtt_s, scenario.workload)
    given = scenario.workload
    assert found.train_s == pytest.approx(given.train_s)
    assert found.publish_s == pytest.approx(given.publish_s, abs=0.005)
    assert found.apply_s == pytest.approx(given.apply_s, abs=0.01)
    assert found.swap_s == pytest.approx(given.swap_s)
    assert found.store_s == pytest.approx(given.store_s, abs=0.005)
    assert found.delta_bytes == given.delta_bytes
    assert found.body_bytes_per_token == pytest.approx(given.body_bytes_per_token, rel=0.01)
    again = Simulation(with_service(scenario, found), seed=2)
    again.run()
    first, second = simulation.measures(), again.measures()
    assert second.steps_hour == pytest.approx(first.steps_hour, rel=0.03)
