"""Work from files, turns with tools, spread of steps, sizes of deltas, unequal policies."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from recorded_log import recorded, write_log
from sim_worlds import SMALL, changed

from edge_agent.core.effects import RunAttempt
from sim.actors.engine import Engine
from sim.actors.names import STORE
from sim.actors.services import ModelledVersion, WeightStoreActor
from sim.fair_share import Pipe
from sim.faults import FaultSpec
from sim.kernel import Kernel
from sim.ledger import Ledger
from sim.network import Network
from sim.run import Result, Simulation, simulate
from sim.scenario import Scenario, load_scenario
from sim.topology import star
from sim.trace_files import read_deltas, read_lengths
from sim.workload import Draws, Steps, Turns, Workload, log_normal, make_items
from transport.errors import ConfigError
from transport.messages import LeaseOffer, Message, RewardSpec, VersionDurable, VersionOffer


def offer(group_size: int = 4, seed: int = 7) -> LeaseOffer:
    return LeaseOffer(
        attempt="sim/t-000001#1",
        fence=(1, 1),
        job="sim/t-000001",
        kind="train",
        items=make_items(1, 1),
        group_size=group_size,
        workflow="single_turn",
        settings={},
        policies={"policy": "sim/policy"},
        reward=RewardSpec(name="exact"),
        max_new_tokens=10**6,
        temperature=1.0,
        seed=seed,
        lease_s=120.0,
    )


def working(**changes: Any) -> Scenario:
    return changed(workload=msgspec.structs.replace(SMALL.workload, **changes))


def ended(scenario: Scenario, seed: int = 3) -> tuple[Simulation, Result]:
    simulation = Simulation(scenario, seed=seed, check=True, history=True)
    result = simulation.run()
    assert result.finished
    assert result.problems == ()
    return simulation, result


# ---- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", "100\n[200, 300]\n"),
        ("a.jsonl", '{"tokens": 100, "id": "x"}\n\n{"lengths": [200, 300.0]}\n'),
        ("a.csv", "id,tokens\nx,100\ny,200\nz,300\n"),
    ],
)
def test_lengths_are_read_in_order(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert read_lengths(str(path)) == (100, 200, 300)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no tokens; give a file"),
        ("100\n0\n", "line 2 has no whole number of at least 1; write"),
        ("100\ntrue\n", "line 2"),
        ('{"tokes": 100}\n', "line 1"),
        ("[1, null]\n", "line 1"),
        ("NaN\n", "line 1"),
        ("1e99\n", "line 1"),
    ],
)
def test_what_is_no_length_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"workload.lengths_file .*{says}"):
        read_lengths(str(path))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"workload\.deltas_file .*give a JSONL or CSV file"):
        simulate(working(deltas_file=str(tmp_path / "none.jsonl")), "finish-time", 0)
    with pytest.raises(ConfigError, match=r"no event log"):
        read_lengths(str(tmp_path))


def test_empirical_lengths_come_as_often_as_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("10\n" * 9 + "5000\n")
    draws = Draws(Workload(lengths_file=str(path), max_new_tokens=4000))
    lengths = draws.lengths(offer(group_size=10_000))
    assert set(lengths) == {10, 4000}
    assert lengths.count(4000) == pytest.approx(1000, rel=0.1)
    assert draws.lengths(offer(group_size=10_000)) == lengths


def test_an_event_log_is_a_file_of_lengths_and_deltas(tmp_path: Path) -> None:
    result, told = recorded(SMALL, seed=2)
    write_log(tmp_path, SMALL, told, seed=2)
    lengths = read_lengths(str(tmp_path))
    assert len(lengths) >= 2 * 4 * SMALL.steps
    sizes = read_deltas(str(tmp_path))
    assert set(sizes) == {SMALL.workload.delta_bytes}
    assert len(sizes) >= result.steps["sim/policy"]
    again, _ = ended(working(lengths_file=str(tmp_path), deltas_file=str(tmp_path)))
    drawn = {n for body in again.log.bodies.values() for n in body.summary.lengths}
    assert drawn <= set(lengths)


def test_deltas_have_the_sizes_of_their_steps(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("delta_bytes\n1000000\n30000000\n")
    steps = Steps(Workload(deltas_file=str(path), full_bytes=100_000_000))
    assert [steps.delta_bytes(step) for step in (1, 2, 3)] == [1_000_000, 30_000_000, 1_000_000]
    assert steps.gap_bytes(0, 1) == 1_000_000
    assert steps.gap_bytes(0, 2) == round(100_000_000 * (1 - 0.99 * 0.7))
    assert steps.gap_bytes(2, 2) == 0
    plain = Workload(delta_bytes=1000)
    assert Steps(plain).gap_bytes(3, 7) == plain.gap_bytes(4)
    simulation, _ = ended(working(deltas_file=str(path)))
    versions = simulation.store._versions["sim/policy"]
    sizes = [versions[n].announcement.delta_bytes for n in (1, 2, 3)]
    assert sizes == [1_000_000, 30_000_000, 1_000_000]


# ---- turns -------------------------------------------------------------------------------------


def engine(kernel: Kernel, done: list[float], *, slots: int, holds: bool) -> Engine:
    made = Engine(
        kernel,
        Ledger(),
        slots=slots,
        tokens_per_s=10.0,
        first_token_s=0.5,
        generated=lambda _: done.append(kernel.now),
        holds_slots=holds,
    )
    made.versions["sim/policy"] = 0
    return made


def begin(made: Engine, turns: list[Turns], number: int = 1) -> None:
    asked = msgspec.structs.replace(
        offer(group_size=len(turns)), attempt=f"sim/t-000001#{number}", fence=(1, number)
    )
    lengths = [sum(one.tokens) for one in turns]
    made.start(RunAttempt(offer=asked, queued_s=0.0), lengths, turns)


def test_slot_seconds_stand_still_in_a_pause_and_never_fall() -> None:
    kernel, done = Kernel(), []
    made = engine(kernel, done, slots=2, holds=False)
    begin(made, [Turns((15,), ())])  # two seconds
    seen: list[tuple[float, float]] = []
    for at_s in (0.5, 1.0, 1.5, 2.0, 3.0, 4.5):
        kernel.at(at_s, lambda _: seen.append((kernel.now, made.slot_seconds())))
    kernel.at(1.0, lambda _: made.pause(1.0))
    kernel.at(1.5, lambda _: begin(made, [Turns((15,), ())], number=2))
    kernel.run(10.0)
    assert done == pytest.approx([3.0, 4.0])
    assert [value for _, value in seen] == pytest.approx([0.5, 1.0, 1.0, 1.0, 3.0, 4.0])


@pytest.mark.parametrize(("holds", "other_s"), [(False, 2.5), (True, 8.0)])
def test_a_tool_leaves_the_slot_to_others_or_not(holds: bool, other_s: float) -> None:
    """Two turns of a second (and half a one before the first token), four seconds of a tool."""
    kernel, done = Kernel(), []
    made = engine(kernel, done, slots=1, holds=holds)
    begin(made, [Turns((10, 10), (4.0,))], 1)
    begin(made, [Turns((5,), ())], 2)
    kernel.run(100.0)
    assert sorted(done) == pytest.approx(sorted([7.0, other_s]))
    assert made.busy_s == pytest.approx(8.0 if holds else 4.0)
    assert made.tokens_generated == 25
    assert (made.running, made.waiting) == (0, 0)


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize(("at_s", "drawn"), [(1.0, 5), (3.0, 10), (6.0, 10), (6.65, 16)])
def test_what_is_stopped_between_turns_counts_what_was_drawn(
    holds: bool, at_s: float, drawn: int
) -> None:
    kernel, done = Kernel(), []
    made = engine(kernel, done, slots=1, holds=holds)
    begin(made, [Turns((10, 10), (4.0,))])
    kernel.at(at_s, lambda _: made.abort("sim/t-000001#1", (1, 1)))
    kernel.run(100.0)
    assert done == []
    assert made.tokens_generated == made._ledger.aborted_tokens == drawn
    assert (made.running, made.waiting) == (0, 0)


def test_speed_changes_in_the_middle_of_a_turn() -> None:
    kernel, done = Kernel(), []
    made = engine(kernel, done, slots=1, holds=False)
    begin(made, [Turns((95,), ())])  # ten seconds
    kernel.at(2.0, lambda _: made.slow_down(0.5))
    kernel.at(4.0, lambda _: made.pause(1.0))
    kernel.at(8.0, lambda _: made.slow_down(4.0))
    kernel.run(100.0)
    # 2 s, then (6 - 1) x 0.5, then the rest four times as fast.
    assert done == pytest.approx([8.0 + (10.0 - 2.0 - 2.5) / 4.0])
    assert made.busy_s == pytest.approx(done[0] - 1.0)


def test_turns_share_a_sequences_tokens() -> None:
    draws = Draws(Workload(turns=(1, 4), tool_s=2.0, tool_cv=1.0))
    lengths = draws.lengths(offer(group_size=4000))
    turns = draws.turns(offer(group_size=4000), lengths)
    assert turns is not None
    assert [sum(one.tokens) for one in turns] == lengths
    assert all(min(one.tokens) >= 1 for one in turns)
    assert all(len(one.tool_s) == len(one.tokens) - 1 for one in turns)
    several = [one for one in turns if len(one.tokens) > 1]
    assert len(several) == pytest.approx(2000, rel=0.1)
    tools = [tool for one in several for tool in one.tool_s]
    assert sum(tools) / len(tools) == pytest.approx(2.0, rel=0.1)
    assert draws.turns(offer(group_size=4000), lengths) == turns
    assert Draws(Workload()).turns(offer(), [1, 2, 3, 4]) is None


def test_held_slots_cost_throughput() -> None:
    several = {"turns": (4,), "tool_s": 8.0, "train_s": 0.5, "mean_tokens": 200.0}
    rates = {}
    for slot in ("free", "held"):
        _, result = ended(working(tool_slot=slot, **several))
        rates[slot] = result.steps_hour
    assert rates["held"] < 0.95 * rates["free"]


# ---- steps -------------------------------------------------------------------------------------


def test_steps_vary_the_same_under_every_rule() -> None:
    def took(placement: str) -> list[float]:
        simulation = Simulation(
            working(train_cv=0.5),
            placement=placement,
            seed=1,
            record=True,  # type: ignore[arg-type]
        )
        simulation.run()
        assert simulation.recording is not None
        return [round(s.ended_s - s.began_s, 6) for s in simulation.recording.steps][:6]

    found = took("finish-time")
    assert len(set(found)) == 6
    assert found == took("nearest")
    draws = [log_normal(5.0, 0.5, (n + 0.5) / 1000) for n in range(1000)]
    assert sum(draws) / 1000 == pytest.approx(5.0, rel=0.02)
    assert log_normal(5.0, 0.0, 0.9) == 5.0


def solver_rate(scenario: Scenario, steps: int) -> float:
    """Steps per hour of the solver up to a step."""
    simulation = Simulation(msgspec.structs.replace(scenario, steps=steps), seed=0)
    made = simulation.ledger.steps.setdefault("sim/solver", [])

    def look() -> None:
        if made and made[-1].step >= steps:
            simulation.kernel.stop()

    simulation.on_second = look
    assert simulation.run().problems == ()
    return 3600.0 * steps / next(step.at_s for step in made if step.step == steps)


def test_a_slow_or_dead_trainer_leaves_the_other_its_rate() -> None:
    slow = load_scenario("two-policies")
    shape = slow.policies["solver"]
    assert slow.policies["critic"].train_s == 5 * (shape.train_s or 0.0)
    equal = msgspec.structs.replace(slow, policies={"solver": shape, "critic": shape})
    dead = msgspec.structs.replace(
        slow, faults=FaultSpec(dead_trainers=("critic",), trainer_dies_s=30.0)
    )
    usual = solver_rate(equal, 16)
    assert solver_rate(slow, 16) >= 0.95 * usual
    assert solver_rate(dead, 16) >= 0.95 * usual


# ---- the weight store --------------------------------------------------------------------------


class Store:
    """A weight store and the messages that a trainer gets from it."""

    def __init__(self) -> None:
        self.kernel = Kernel()
        topology = star({"edge": 0.1}, centre="cloud")
        self.network = Network(self.kernel, topology, random.Random(0))
        self.heard: list[tuple[float, Message]] = []
        self.store = WeightStoreActor(
            kernel=self.kernel, network=self.network, workload=SMALL.workload
        )
        for name, site, receive in (
            ("scheduler", "cloud", lambda *_: None),
            (STORE, "cloud", self.store.receive),
            ("trainer", "edge", lambda _, m, __: self.heard.append((self.kernel.now, m))),
        ):
            pipes = (Pipe(f"{name}-up", 1e6), Pipe(name, 1e6))
            self.network.add(name, site, *pipes, receive)
        self.durable: list[int] = []
        self.store.on_durable = lambda _, version, __: self.durable.append(version)

    def offer(self, at_s: float) -> None:
        version = ModelledVersion("sim/policy", 1, 0, 1, "d" * 64, 10_000_000)
        message = VersionOffer(
            manifest=msgspec.msgpack.encode(version), signature=b"\0" * 64, key_id="sim"
        )
        self.kernel.at(at_s, lambda _: self.network.send("trainer", STORE, message))


def test_an_upload_that_died_with_its_trainer_begins_anew() -> None:
    world = Store()
    world.offer(0.0)  # ten seconds long
    world.kernel.at(5.0, lambda _: world.network.reset("trainer"))
    world.offer(6.0)
    world.offer(8.0)  # said again while it is being taken
    world.kernel.run(100.0)
    assert world.durable == [1]
    [(at_s, message)] = world.heard
    assert isinstance(message, VersionDurable)
    assert at_s == pytest.approx(6.0 + 10.0 + 3 * 0.05, abs=0.1)


def test_an_upload_that_was_on_its_way_counts_once() -> None:
    """Its last byte had left when the trainer died; the next life offers the version again."""
    world = Store()
    world.offer(0.0)
    world.kernel.at(10.06, lambda _: world.network.reset("trainer"))
    world.offer(10.061)
    world.kernel.run(100.0)
    assert world.durable == [1]
