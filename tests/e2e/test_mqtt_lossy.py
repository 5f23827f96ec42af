"""MQTT is lossy by contract: a broker that hangs, dies and comes back changes no decision.

A whole run with the bridge on while a real Mosquitto is stopped, killed and started again. It ends
complete, with balanced books and no failed attempt; the scheduler's log of what it was told is
replayed to the same effects, and again without everything that the gateway asked for: whatever the
broker did could have reached the scheduler only through there.
"""

import random
import signal
from collections import Counter
from pathlib import Path

import pytest
from mosquitto import Broker, listening, mosquitto, needs_mosquitto

from bench.toy import Running, counts, running, write_toy
from scheduler.core.effects import Effect, Reply, Send
from scheduler.core.events import Event, FromOperator
from scheduler.core.machine import SchedulerCore
from scheduler.event_log import RecordedTerm, recorded_terms, unpack_event
from sim.replay import replay
from transport.keys import GATEWAY
from transport.messages import EventsRequest, StatusRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.asyncio, needs_mosquitto]

STEPS = 120
BASE = "farflow/lossy"


async def test_a_broker_that_hangs_dies_and_returns_changes_no_decision(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    async with mosquitto(tmp_path) as broker:
        settings = {
            "http.enabled": "true",
            "http.port": 0,
            "mqtt.enabled": "true",
            "mqtt.port": broker.port,
            "mqtt.base_topic": BASE,
            "mqtt.commands": "true",
            "mqtt.interval_s": 1,
            "mqtt.keepalive_s": 1,
            "mqtt.retry_max_s": 0.5,
        }
        overrides = tuple(f"{key}={value}" for key, value in settings.items())
        async with running(write_toy(work, steps=STEPS), tmp_path / "run", overrides) as run:
            await disturb(broker, run)
            ended = await run.until(
                "the run ended", lambda s: s.runs[0].state == "finished", within_s=60.0
            )
            summary = await run.finish()
    assert summary.problems == ()
    row = counts(summary)
    assert row["trained"] == STEPS * 4
    assert row["taken"] == row["buffered"] == row["in_flight"] == row["queued"] == 0
    assert [agent.attempts_failed for agent in ended.agents] == [0, 0]
    assert "mqtt.lost" in (tmp_path / "run/state/scheduler/logs/gateway.log").read_text()
    [term] = recorded_terms(tmp_path / "run/state/scheduler/events")
    found = replay(term)
    assert (found.equal, found.complete, found.divergence) == (True, True, None)
    asked = Counter(type(event.message) for _, event in told(term) if of_gateway(event))
    assert set(asked) <= {StatusRequest, EventsRequest}, "it asks, and orders nothing"
    assert asked[StatusRequest] >= 2, "at least once before and once after"
    with_it = decided(term, without_gateway=False)
    assert sum(isinstance(effect, Send) for effect in with_it[0]) > STEPS
    assert decided(term, without_gateway=True) == with_it


async def disturb(broker: Broker, run: Running) -> None:
    """The broker is well, hangs, dies, is away, and comes back."""
    async with listening(broker.port) as listener:
        await listener.is_kept(f"{BASE}/status", b"online")
        await listener.is_kept(f"{BASE}/policies/toy/solver/version")
        step = run.policy(await run.reach_step(5)).step
        broker.signal(signal.SIGSTOP)
        await run.reach_step(step + 30)
        await broker.kill()
    step = run.policy(await run.reach_step(step + 60)).step
    await broker.start()
    async with listening(broker.port) as listener:
        await listener.is_kept(f"{BASE}/status", b"online")
        assert step < STEPS, "the run was over before the broker was back"


def told(term: Path) -> list[tuple[float, Event]]:
    """All that the scheduler was told, in order."""
    return [
        (now, unpack_event(packed))
        for batch in RecordedTerm(term).batches()
        for now, packed in batch.inputs
    ]


def of_gateway(event: Event) -> bool:
    return isinstance(event, FromOperator) and event.peer == GATEWAY


def decided(term: Path, *, without_gateway: bool) -> tuple[list[Effect], list[object]]:
    """Every effect but answers to the gateway, and every row that was written, of a core that is
    told the log, with or without what the gateway said."""
    log = RecordedTerm(term)
    start = log.start
    core = SchedulerCore(
        start.settings,
        term=start.term,
        rng=random.Random(start.seed),
        build=start.build,
        rows=list(log.rows()),
        now=start.now,
    )
    effects: list[Effect] = []
    rows: list[object] = []
    for now, event in told(term):
        if without_gateway and of_gateway(event):
            continue
        effects += core.handle(event, now)
        rows += core.take_changes()
    return [e for e in effects if not (isinstance(e, Reply) and e.peer == GATEWAY)], rows
