"""Contained coroutines: transparent to asyncio, and ended whatever they do."""

import asyncio
import signal
import subprocess
import sys
import warnings
from contextvars import ContextVar
from typing import Any

import pytest

from edge_agent.containment import Containment

RUNAWAY_AGENT = """
import asyncio, sys
from edge_agent.containment import Containment
from transport.runtime.shutdown import ShutdownSignal

async def runaway():
    while True:
        try:
            await asyncio.Event().wait()
        except BaseException:
            pass

async def main():
    contained = Containment()
    with ShutdownSignal() as stop:
        task = contained.start(runaway())
        await asyncio.sleep(0)
        print("ready", flush=True)
        print(await stop.wait(), flush=True)
        await contained.end([task], 0.01)

asyncio.run(main())
"""


@pytest.mark.asyncio
async def test_asyncio_works_inside_as_ever() -> None:
    seen: ContextVar[int] = ContextVar("seen")

    async def inner(value: int) -> int:
        seen.set(value)
        await asyncio.sleep(0)
        return seen.get()

    async def foreign() -> list[Any]:
        seen.set(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.001)
        shielded = asyncio.ensure_future(inner(7))
        current = asyncio.current_task()
        assert current is not None
        current.cancel()
        try:
            await asyncio.shield(shielded)
        except asyncio.CancelledError:
            assert current.uncancel() == 0
        waiting = asyncio.ensure_future(asyncio.Event().wait())
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(asyncio.wait_for(waiting, 60))
                tasks.create_task(asyncio.to_thread(lambda: [][0]))
        except* IndexError:
            assert waiting.cancelled()
        results = await asyncio.gather(inner(1), inner(2), shielded, asyncio.to_thread(int))
        return [*results, seen.get()]

    contained = Containment()
    task = contained.start(foreign())
    async with asyncio.timeout(5):
        assert await task == [1, 2, 7, 0, 0]
    await asyncio.sleep(0)
    assert contained.tasks() == []
    await contained.end([task], 0.0)
    assert not contained.stuck


@pytest.mark.asyncio
async def test_tasks_of_others_are_as_before() -> None:
    contained = Containment()

    async def nothing() -> None: ...

    await contained.start(nothing())
    other = asyncio.create_task(asyncio.Event().wait())
    assert contained.tasks() == []
    assert "Event.wait" in repr(other)
    other.cancel()


@pytest.mark.asyncio
async def test_what_is_cancelled_before_it_began_leaves_no_warning() -> None:
    async def nothing() -> None: ...

    contained = Containment()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await contained.end([contained.start(nothing())], 1.0)
    assert not contained.stuck


@pytest.mark.asyncio
async def test_an_end_that_is_cancelled_waits_for_nothing() -> None:
    async def slow() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue

    contained = Containment()
    task = contained.start(slow())
    await asyncio.sleep(0)
    ending = asyncio.create_task(contained.end([task], 3600.0))
    await asyncio.sleep(0)
    ending.cancel()
    async with asyncio.timeout(5):
        await asyncio.wait([ending, task])
    assert task.cancelled()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_real_signal_still_stops_a_process_with_a_runaway(number: signal.Signals) -> None:
    with subprocess.Popen(
        (sys.executable, "-c", RUNAWAY_AGENT), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.communicate(timeout=20)[0] == f"{number.name}\n"
    assert process.returncode == 0
