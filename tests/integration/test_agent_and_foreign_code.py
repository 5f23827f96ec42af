"""What code that is not the agent's may do to a running agent, and what then becomes of it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from agent_cloud import WAIT_S, AgentCloud, Life

from edge_agent.config import AgentConfig
from edge_agent.daemon import make_engine
from edge_agent.engine import Engine, EngineStats
from edge_agent.life import OwnTasksCancelled
from transport.memory_links import MemoryNetwork
from transport.messages import AttemptFailed, VersionServing
from transport.runtime.clock import Clock

pytestmark = pytest.mark.asyncio

SOURCE = """
import asyncio

SPARED = set()

async def says_what_utf8_cannot(context, item):
    raise ValueError("no \\ud800")

async def cancels_all(context, item):
    for task in asyncio.all_tasks() - SPARED:
        task.cancel()
    await asyncio.sleep(0)
"""


@pytest_asyncio.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[AgentCloud]:
    async with AgentCloud(tmp_path, MemoryNetwork()) as made, asyncio.timeout(WAIT_S):
        yield made


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import importlib

    (tmp_path / "foreign_code.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "foreign_code", raising=False)
    return importlib.import_module("foreign_code")


async def test_an_exception_with_any_text_ends_only_its_attempt(
    cloud: AgentCloud, foreign: Any
) -> None:
    cloud.publish()
    name = "foreign_code:says_what_utf8_cannot"
    life = Life(cloud, workflows=(name,))
    await cloud.hear(VersionServing)
    cloud.offer(1, workflow=name)
    failed = await cloud.hear(AttemptFailed)
    assert (failed.code, failed.detail) == ("workflow.error", r"ValueError: no \ud800")
    cloud.offer(2)
    await cloud.until(lambda: cloud.bodies)
    assert await life.end() == 0


async def test_a_workflow_that_cancels_everything_ends_the_agent_by_name(
    cloud: AgentCloud, foreign: Any
) -> None:
    cloud.publish()
    foreign.SPARED.update(asyncio.all_tasks())
    name = "foreign_code:cancels_all"
    life = Life(cloud, workflows=(name,))
    await cloud.hear(VersionServing)
    cloud.offer(1, workflow=name)
    with pytest.raises(OwnTasksCancelled, match="while run/t-000001#1 ran"):
        await life.task


async def test_an_error_in_a_callback_of_the_loop_ends_the_agent_with_it(cloud: AgentCloud) -> None:
    engines: list[Engine] = []

    def engine(config: AgentConfig, clock: Clock) -> Engine:
        engines.append(make_engine(config, clock))
        return engines[-1]

    def broken() -> EngineStats:
        raise RuntimeError("no statistics")

    cloud.publish()
    life = Life(cloud, engines=engine)
    await cloud.hear(VersionServing)
    engines[0].stats = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no statistics"):
        await life.task
