"""What a recording tells is what happened, and recording changes nothing."""

import itertools
from collections import Counter

import msgspec
import pytest
from sim_worlds import SMALL, changed

from sim.faults import FaultSpec
from sim.kernel import Kernel
from sim.recording import MAX_SAMPLES, AgentFacts, Recorder, Recording
from sim.run import Result, Simulation


def recorded(**changes: object) -> tuple[Result, Recording, Simulation]:
    simulation = Simulation(changed(**changes), seed=3, record=True)
    result = simulation.run()
    recording = simulation.recording
    assert recording is not None
    return result, recording, simulation


def test_recording_changes_nothing_of_what_is_simulated() -> None:
    digests = [
        Simulation(SMALL, seed=3, history=True, record=record).run().digest
        for record in (False, True)
    ]
    assert digests[0] == digests[1]
    assert Simulation(SMALL, seed=3).recording is None


def test_attempts_and_their_outcomes_agree_with_the_ledger() -> None:
    result, recording, simulation = recorded()
    ledger = simulation.ledger
    outcomes = Counter(span.outcome for span in recording.attempts)
    assert outcomes["trained"] == ledger.trained_groups
    assert outcomes["wasted"] == ledger.wasted_groups
    assert outcomes["stopped"] >= ledger.aborted_attempts
    for span in recording.attempts:
        times = [span.accepted_s, span.began_s, span.generated_s, span.ended_s]
        known = [at_s for at_s in times if at_s is not None]
        assert known == sorted(known)
        if span.outcome == "trained":
            assert None not in times
    drawn = sum(span.tokens for span in recording.attempts if span.generated_s is not None)
    assert drawn == ledger.made_tokens
    assert result.finished


def test_steps_weights_and_lags_agree_with_the_result() -> None:
    result, recording, simulation = recorded()
    [policy] = recording.bounds
    assert [step.step for step in recording.steps] == list(range(1, len(recording.steps) + 1))
    lags = recording.lags()[policy]
    mean = sum(lag * count for lag, count in lags.items()) / sum(lags.values())
    assert mean == pytest.approx(result.lag_mean)
    published = {one.version: one.at_s for one in recording.publications}
    assert set(published) >= set(range(1, result.steps[policy]))
    for fetch in recording.fetches:
        assert fetch.began_s >= published[fetch.version]
        if fetch.arrived_s is not None and fetch.swapped_s is not None:
            assert fetch.began_s < fetch.arrived_s <= fetch.swapped_s
    swapped = {f.agent: f.version for f in recording.fetches if f.swapped_s is not None}
    for name, agent in simulation.agents.items():
        assert agent.engine.versions[policy] == swapped[name]


def test_samples_are_totals_that_end_with_the_run() -> None:
    _, recording, simulation = recorded()
    last = recording.samples[-1]
    assert last.at_s == recording.ends_s == simulation.kernel.now
    assert last.drawn_tokens == simulation.ledger.drawn_tokens
    for one, other in zip(recording.samples, recording.samples[1:], strict=False):
        assert one.at_s < other.at_s
        seconds = other.at_s - one.at_s
        for before, after, slots in zip(one.busy_s, other.busy_s, recording.row_slots, strict=True):
            assert -1e-6 <= after - before <= seconds * slots + 1e-6
    up, down = (sum(both) for both in zip(*recording.link_bytes.values(), strict=True))
    assert (last.up_bytes, last.down_bytes) == (up, down)


def test_what_dies_with_its_agent_is_lost() -> None:
    _, recording, simulation = recorded(faults=FaultSpec(agent_mtbf_s=20.0, agent_down_s=3.0))
    assert any(agent.lives > 1 for agent in simulation.agents.values())
    assert any(span.outcome == "lost" for span in recording.attempts)


def test_a_recording_comes_back_from_json() -> None:
    _, recording, _ = recorded()
    again = msgspec.json.decode(msgspec.json.encode(recording), type=Recording)
    assert again == recording


class StandingEngine:
    def slot_seconds(self) -> float:
        return 0.0


class StandingAgent:
    engine = StandingEngine()


def recorder(kernel: Kernel, agents: int) -> Recorder:
    return Recorder(
        kernel,
        cloud="cloud",
        agents=[AgentFacts(f"a{n}", f"s{n % 3}", 2, 1.0, 1.0, 1.0, 0.0) for n in range(agents)],
        bounds={},
        link_bytes=lambda _: (0, 0),
        tokens=lambda: (0, 0, 0),
    )


def test_samples_stay_bounded_and_evenly_spaced() -> None:
    kernel = Kernel()
    made = recorder(kernel, 1)
    made.watch({"a0": StandingAgent()})  # type: ignore[dict-item]
    kernel.run(5000.0)
    samples = made.result({"a0": StandingAgent()}).samples  # type: ignore[dict-item]
    assert MAX_SAMPLES / 2 - 2 <= len(samples) <= MAX_SAMPLES
    gaps = {b.at_s - a.at_s for a, b in itertools.pairwise(samples[:-1])}
    assert len(gaps) == 1
    assert samples[-1].at_s == 5000.0


def test_a_large_fleet_is_sampled_by_site(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    agents = {f"a{n}": StandingAgent() for n in range(100)}
    found = recorder(kernel, 100).result(agents)  # type: ignore[arg-type]
    assert (found.rows, found.row_slots) == (["s0", "s1", "s2"], [68, 66, 66])


def test_what_no_longer_fits_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.recording.MAX_SPANS", 5)
    result, recording, _ = recorded()
    assert len(recording.attempts) == len(recording.fetches) == 5
    assert recording.left_out["attempts"] > 0
    assert recording.left_out["steps"] == result.steps["sim/policy"] - 5
