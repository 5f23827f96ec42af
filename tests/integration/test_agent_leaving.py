"""The agent daemon asked to leave, and asked for its log, against a scripted cloud."""

import asyncio
import io
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import structlog
from agent_cloud import WAIT_S, AgentCloud, Life

from edge_agent.draining import NOTE_NAME
from transport.memory_links import MemoryNetwork
from transport.messages import (
    AgentLog,
    AgentLogRequest,
    AttemptFailed,
    DrainOrder,
    Goodbye,
    Heartbeat,
    LeaseReply,
    VersionServing,
)
from transport.runtime.logs import configure_logging
from transport.runtime.shutdown import Stop


@pytest_asyncio.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[AgentCloud]:
    async with AgentCloud(tmp_path, MemoryNetwork()) as made, asyncio.timeout(WAIT_S):
        yield made


SLOW = {"tokens_per_s": 1.0, "mean_tokens": 500.0}


@pytest.mark.asyncio
async def test_an_order_to_drain_ends_the_agent_in_the_time_given(cloud: AgentCloud) -> None:
    cloud.publish()
    life = Life(cloud, fake=SLOW, drain_s=600.0)
    await cloud.hear(VersionServing)
    cloud.offer(1)
    await cloud.until(lambda: cloud.all(Heartbeat)[-1].running_sequences)
    cloud.say(DrainOrder(deadline_s=0.2, reason="maintenance"))
    assert await asyncio.wait_for(life.task, WAIT_S) == 0
    (failed,) = cloud.all(AttemptFailed)
    assert (failed.code, failed.detail) == ("agent.draining", "maintenance")
    assert (await cloud.hear(Goodbye)).reason == "drained: maintenance"


@pytest.mark.asyncio
async def test_a_second_stop_ends_a_drain_at_once_and_in_order(cloud: AgentCloud) -> None:
    cloud.publish()
    life = Life(cloud, stop=Stop(), fake=SLOW, drain_s=600.0)
    assert isinstance(life.stop, Stop)
    await cloud.hear(VersionServing)
    cloud.offer(1)
    await cloud.until(lambda: cloud.all(Heartbeat)[-1].running_sequences)
    life.stop.set()
    await cloud.until(lambda: cloud.all(Heartbeat)[-1].draining)
    note = cloud.folder / "agent" / NOTE_NAME
    note.write_bytes(b'{"deadline_s": 500.0}')  # `farflow agent drain` during a drain
    life.stop.again.set()
    await cloud.until(lambda: not note.exists())
    assert not life.task.done()
    life.stop.again.set()
    assert await asyncio.wait_for(life.task, WAIT_S) == 0
    await cloud.hear(Goodbye)
    assert len(cloud.all(AttemptFailed)) == 1


@pytest.mark.asyncio
async def test_a_note_gives_a_drain_its_deadline(cloud: AgentCloud) -> None:
    cloud.publish()
    life = Life(cloud, fake=SLOW, drain_s=600.0)
    await cloud.hear(VersionServing)
    cloud.offer(1)
    await cloud.until(lambda: cloud.all(Heartbeat)[-1].running_sequences)
    (cloud.folder / "agent" / NOTE_NAME).write_bytes(b'{"deadline_s": 0.1}')
    assert await life.end() == 0


@pytest.mark.asyncio
async def test_the_log_of_a_run_can_be_asked_for(cloud: AgentCloud) -> None:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    configure_logging("info", json=True, stream=io.StringIO())
    try:
        cloud.publish()
        life = Life(cloud)
        await cloud.hear(VersionServing)
        cloud.offer(1, workflow="unheard_of")
        await cloud.hear(LeaseReply)
        cloud.say(AgentLogRequest(request=5, run="run", lines=10))
        cloud.say(AgentLogRequest(request=6, run="other", lines=10))
        cloud.say(AgentLogRequest(request=7, run="", lines=1000))
        await cloud.hear(AgentLog, 3)
        mine, others, whole = cloud.all(AgentLog)
        assert await life.end() == 0
    finally:
        logging.captureWarnings(False)
        structlog.reset_defaults()
        root.handlers[:] = handlers
        root.setLevel(level)
    assert (mine.request, others.request, whole.request) == (5, 6, 7)
    assert "lease.declined" in [json.loads(line)["event"] for line in mine.lines]
    assert others.lines == ()
    assert any(json.loads(line)["event"] == "agent.started" for line in whole.lines)
