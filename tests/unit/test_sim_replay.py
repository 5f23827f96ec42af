"""Replay: bit-equal where nothing changed, the first difference where something did."""

from pathlib import Path

import msgspec
import pytest
from recorded_log import BATCH, recorded, write_log
from sim_worlds import SMALL, changed

from scheduler.core.events import FromAgent, FromOperator
from scheduler.core.machine import SchedulerCore
from scheduler.event_log import recorded_terms
from sim.counterfactual import TraceDraws, counterfactual
from sim.faults import FaultSpec
from sim.replay import replay, term_folder
from sim.trace import place_of, read_trace
from sim.workload import make_items
from transport.errors import ConfigError, StoreError
from transport.messages import Hello, LeaseOffer, RewardSpec


@pytest.fixture(scope="module")
def told() -> list:
    return recorded(SMALL, seed=2)[1]


@pytest.fixture
def folder(tmp_path: Path, told: list) -> Path:
    write_log(tmp_path, SMALL, told, seed=2)
    return recorded_terms(tmp_path)[0]


def test_a_log_is_replayed_bit_for_bit(folder: Path, told: list) -> None:
    found = replay(folder)
    assert found.equal
    assert found.complete
    assert found.divergence is None
    assert found.build == found.recorded_build
    assert found.events == len(told)
    assert found.batches == -(-len(told) // BATCH)
    assert found.counters["attempts.offered"] > 0


def test_the_first_difference_is_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that forgets one offer."""
    before, seen, forgotten = SchedulerCore.handle, [], []

    def handle(self: SchedulerCore, event: object, now: float) -> list:
        effects = before(self, event, now)  # type: ignore[arg-type]
        seen.append(event)
        if len(seen) >= 100 and effects and not forgotten:
            forgotten.append(len(seen) - 1)
            return effects[1:]
        return effects

    monkeypatch.setattr(SchedulerCore, "handle", handle)
    found = replay(folder)
    assert not found.equal
    assert found.divergence is not None
    assert found.divergence.batch == found.batches == forgotten[0] // BATCH
    assert len(found.divergence.events) == BATCH
    assert found.divergence.error == ""
    assert any(" from " in event for event in found.divergence.events)
    assert all(effect[0].isupper() for effect in found.divergence.effects)


def test_a_core_that_fails_is_a_difference(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transport.errors import InvariantViolation

    def handle(self: SchedulerCore, event: object, now: float) -> list:
        raise InvariantViolation("the books do not balance")

    monkeypatch.setattr(SchedulerCore, "handle", handle)
    found = replay(folder)
    assert found.divergence is not None
    assert found.divergence.batch == 0
    assert "the books do not balance" in found.divergence.error


def test_another_build_is_named_and_its_log_read(tmp_path: Path, told: list) -> None:
    write_log(tmp_path, SMALL, told, seed=2, build="0.0.1+old")
    found = replay(recorded_terms(tmp_path)[0])
    assert found.recorded_build == "0.0.1+old" != found.build
    assert found.equal


def test_a_torn_end_is_left_out(folder: Path, told: list) -> None:
    segment = folder / "events-000000"
    segment.write_bytes(segment.read_bytes()[:-200])
    found = replay(folder)
    assert found.equal
    assert 0 < found.events < len(told)


def test_terms_are_found_from_wherever_one_stands(tmp_path: Path, told: list) -> None:
    events = tmp_path / "state" / "scheduler" / "events"
    write_log(events, SMALL, told[:BATCH])
    [term] = recorded_terms(events)
    for place in (tmp_path, tmp_path / "state" / "scheduler", events, term):
        assert term_folder(place) == term
    assert term_folder(events, 1) == term
    with pytest.raises(ConfigError, match="no event log of term 2"):
        term_folder(events, 2)
    with pytest.raises(ConfigError, match="give a run's folder"):
        term_folder(tmp_path / "nowhere")
    with pytest.raises(StoreError):
        replay(tmp_path)


# ---- the same arrivals under another rule -------------------------------------------------------


def test_the_world_of_a_log_is_that_of_the_simulation_it_is_from(folder: Path, told: list) -> None:
    trace = read_trace(folder)
    fleet = {plan.name: plan for plan in SMALL.fleet(2)}
    assert [plan.name for plan in trace.plans] == sorted(fleet)
    topology = SMALL.topology()
    for plan in trace.plans:
        true = fleet[plan.name]
        assert plan.slots == true.slots
        assert plan.tokens_per_s == pytest.approx(true.tokens_per_s, rel=0.35)
        assert plan.down == pytest.approx(true.down, rel=0.25)
        rtt_s = trace.scenario.sites[plan.site] / 1e3
        assert rtt_s == pytest.approx(topology.rtt_s(true.site, "us-east-1"), rel=0.2, abs=0.01)
    [shape] = trace.scenario.policies.values()
    assert shape.batch_groups == 4
    assert shape.max_policy_lag == 2
    assert shape.train_s == pytest.approx(5.0)
    assert trace.scenario.group_size == 2
    assert trace.scenario.workload.delta_bytes == 10_000_000
    assert trace.faults == []
    assert trace.jobs >= len(trace.lengths)
    assert trace.unknown == trace.jobs - len(trace.lengths)


def test_lengths_are_those_of_the_log(folder: Path) -> None:
    trace = read_trace(folder)
    draws = TraceDraws(trace)

    place = min(trace.lengths)
    whole = LeaseOffer(
        attempt=f"sim/t-{place:06d}#1",
        job=f"sim/t-{place:06d}",
        kind="train",
        fence=(1, 1),
        workflow="single_turn",
        settings={},
        reward=RewardSpec(name="reasoning-gym"),
        policies={},
        items=make_items(place, 1),
        group_size=2,
        seed=0,
        max_new_tokens=16_384,
        temperature=1.0,
        lease_s=10.0,
    )
    assert draws.lengths(whole) == list(trace.lengths[place])
    assert draws.rewards(whole) == trace.rewards[place]
    beyond = msgspec.structs.replace(whole, job="sim/t-999999", seed=7)
    assert tuple(draws.lengths(beyond)) in trace.lengths.values()
    assert draws.lengths(beyond) == draws.lengths(beyond)


def test_both_rules_are_simulated_in_the_same_world(tmp_path: Path) -> None:
    longer = changed(steps=20)
    write_log(tmp_path, longer, recorded(longer)[1])
    trace = read_trace(recorded_terms(tmp_path)[0])
    found = counterfactual(trace, "nearest", range(1))
    assert (found.recorded_placement, found.placement) == ("finish-time", "nearest")
    assert found.problems == []
    assert found.recorded_steps_hour == pytest.approx(found.simulated_steps_hour.mean, rel=0.1)
    same = counterfactual(trace, "finish-time", range(1))
    assert same.ratio.mean == 1.0
    assert same.simulated_steps_hour == found.simulated_steps_hour


def test_comings_and_goings_are_those_of_the_log(tmp_path: Path) -> None:
    churning = changed(faults=FaultSpec(agent_mtbf_s=15.0, agent_down_s=4.0))
    _, told = recorded(churning, seed=1)
    write_log(tmp_path, churning, told, seed=1)
    trace = read_trace(recorded_terms(tmp_path)[0])
    hellos: dict[str, set[int]] = {}
    for event, _ in told:
        if isinstance(event, FromAgent) and isinstance(event.message, Hello):
            hellos.setdefault(event.agent, set()).add(event.message.incarnation)
    for name, lives in hellos.items():
        returns = [fault for fault in trace.faults if (fault.host, fault.what) == (name, "return")]
        assert len(returns) == len(lives) - 1
    assert trace.faults == sorted(trace.faults)
    assert any(len(lives) > 1 for lives in hellos.values())
    assert counterfactual(trace, "nearest", range(1), steps=2).problems == []


def test_a_log_with_too_little_in_it_says_what_is_missing(tmp_path: Path, told: list) -> None:
    assert isinstance(told[0][0], FromOperator)
    write_log(tmp_path, SMALL, told[:BATCH])
    with pytest.raises(ConfigError, match=r"the log has no .*a training step and no a result"):
        read_trace(recorded_terms(tmp_path)[0])


def test_only_training_jobs_have_a_place() -> None:
    assert place_of("run/t-000012") == 12
    assert place_of("run/t-1234567") == 1234567
    assert [place_of(job) for job in ("run/e-000012", "run/x-me.t-1", "t-", "t", "")] == [None] * 5
