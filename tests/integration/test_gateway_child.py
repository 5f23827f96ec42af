"""A gateway that hangs, as the scheduler sees it."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from scheduler import gateway_child
from scheduler.config import HttpTable, SchedulerConfig, SchedulerTable
from scheduler.gateway import service
from transport.errors import FarflowError
from transport.keys import create_keys
from transport.runtime.processes import ChildSpec, start_child
from transport.runtime.settings import TransportConfig

ALIVE_FOR = """
import time
for _ in range(%d):
    print('{"alive": true}', flush=True)
    time.sleep(0.05)
time.sleep(%d)
"""
pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(gateway_child, "LOOK_S", 0.3)
    monkeypatch.setattr(gateway_child, "LOOKS", 4)


@pytest_asyncio.fixture
async def started(tmp_path):
    """Starts a child that says so often that it is alive, and then lives on for so long."""
    children = []

    async def start(signs, silent_s):
        argv = (sys.executable, "-c", ALIVE_FOR % (signs, silent_s))
        spec = ChildSpec(
            name="gateway", argv=argv, log_path=tmp_path / "log", capture_stdout=True, grace_s=1.0
        )
        children.append(await start_child(spec))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        await child.wait()


@pytest.mark.parametrize(("silent_s", "what", "said"), [(60, "hangs", 1), (0, "ended", 0)])
async def test_one_that_gives_no_sign_of_life_has_failed(started, silent_s, what, said):
    child = await started(20, silent_s)
    with capture_logs() as logs, pytest.raises(FarflowError, match=what):
        async with asyncio.timeout(20.0):
            await gateway_child.watch(child)
    assert [one["event"] for one in logs].count("gateway.silent") == said


async def test_a_machine_that_was_stopped_costs_nobody_their_life(started):
    child = await started(2000, 60)
    watching = asyncio.create_task(gateway_child.watch(child))
    for _ in range(2):
        await asyncio.sleep(0.3)
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(2.0)  # noqa: ASYNC251 - the scheduler is stopped as well
        os.kill(child.pid, signal.SIGCONT)
    await asyncio.sleep(0.5)
    assert not watching.done()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_the_gateway_says_that_it_is_alive_only_after_it_is_ready(monkeypatch):
    monkeypatch.setattr(service, "ALIVE_S", 0.01)
    ready, said = asyncio.Event(), []
    saying = asyncio.create_task(service._say_alive(ready, said.append))
    await asyncio.sleep(0.05)
    assert said == []
    ready.set()
    async with asyncio.timeout(5.0):
        while len(said) < 3:
            await asyncio.sleep(0.01)
    saying.cancel()
    await asyncio.gather(saying, return_exceptions=True)


def gateway_of_ours() -> int:
    """This process may have other children: whatever tests before it left to end."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    [found] = [
        int(one)
        for one in children
        if b"scheduler.gateway" in Path(f"/proc/{one}/cmdline").read_bytes()
    ]
    return found


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_gateway_that_hangs_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(gateway_child, "LOOK_S", 1.5 * service.ALIVE_S)
    monkeypatch.setattr(gateway_child, "LOOKS", 2)
    monkeypatch.setattr(gateway_child, "GRACE_S", 0.5)
    create_keys(tmp_path / "keys")
    (tmp_path / "logs").mkdir()
    config = SchedulerConfig(
        transport=TransportConfig(keys=str(tmp_path / "keys")),
        scheduler=SchedulerTable(folder=str(tmp_path)),
        http=HttpTable(port=0),
    )

    def events(name):
        return [one for one in logs if one["event"] == name]

    with capture_logs() as logs:
        keeping = asyncio.create_task(gateway_child.keep_gateway(config))
        try:
            async with asyncio.timeout(120.0):
                while not events("gateway.ready"):
                    await asyncio.sleep(0.05)
                await asyncio.sleep(4 * service.ALIVE_S)
                assert not events("gateway.silent"), "it says that it is there"
                pid = gateway_of_ours()
                os.kill(pid, signal.SIGSTOP)
                while len(events("gateway.ready")) < 2:
                    await asyncio.sleep(0.05)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
    assert [one["pid"] for one in events("gateway.silent")] == [pid]
