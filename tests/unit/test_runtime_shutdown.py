"""Being told to stop, and stopping together."""

import asyncio
import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from transport.runtime.shutdown import (
    ShutdownSignal,
    read_until_eof,
    run_together,
    stop_on_stdin_eof,
)

pytestmark = pytest.mark.asyncio


async def test_a_signal_sets_the_event_once_with_its_name() -> None:
    with ShutdownSignal() as stop:
        assert not stop.requested()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await stop.wait() == "SIGTERM"
        stop.request("somebody else")
        assert await stop.wait() == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_a_second_interrupt_ends_the_process_at_once_with_130() -> None:
    script = (
        "import asyncio\n"
        "from transport.runtime.shutdown import ShutdownSignal\n"
        "async def main():\n"
        "    with ShutdownSignal() as stop:\n"
        "        print('ready', flush=True)\n"
        "        print(await stop.wait(), flush=True)\n"
        "        await asyncio.Event().wait()  # hangs while it stops\n"
        "asyncio.run(main())\n"
    )
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    assert await child.stdout.readline() == b"ready\n"
    child.send_signal(signal.SIGINT)
    assert await child.stdout.readline() == b"SIGINT\n"
    child.send_signal(signal.SIGINT)
    assert await child.wait() == 130


async def test_a_second_termination_is_told_apart_and_ends_nothing_by_itself() -> None:
    again: list[str] = []
    with ShutdownSignal() as stop:
        stop.on_again = lambda: again.append("again")
        stop.request("standard input closed")
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0)  # the loop's signal handler has its turn
        await asyncio.sleep(0)
        assert again == []
        for count in (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(5.0):
                while len(again) < count:
                    await asyncio.sleep(0)
        assert await stop.wait() == "standard input closed"


async def test_the_end_of_standard_input_asks_for_a_stop() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    stop = ShutdownSignal()
    watching = asyncio.create_task(stop_on_stdin_eof(stop, read_end))
    os.write(write_end, b"ignored\n")
    await asyncio.sleep(0.01)
    assert not stop.requested()
    os.close(write_end)
    assert await stop.wait() == "standard input closed"
    await watching
    os.close(read_end)


async def test_the_watch_ends_when_somebody_else_asks_for_the_stop() -> None:
    read_end, write_end = os.pipe()
    stop = ShutdownSignal()
    watching = asyncio.create_task(stop_on_stdin_eof(stop, read_end))
    await asyncio.sleep(0)
    stop.request("done")
    await watching
    os.close(read_end)
    os.close(write_end)


async def test_input_is_handed_over_as_it_comes() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    got: list[bytes] = []
    reading = asyncio.create_task(read_until_eof(got.append, read_end))
    os.write(write_end, b"one")
    await asyncio.sleep(0.005)  # wherever the pieces fall, nothing is lost
    os.write(write_end, b"two")
    os.close(write_end)
    await reading
    assert b"".join(got) == b"onetwo"
    os.close(read_end)


async def test_files_and_closed_descriptors_have_ended_after_what_they_hold(
    tmp_path: Path,
) -> None:
    got: list[bytes] = []
    path = tmp_path / "commands"
    path.write_bytes(b"x" * 100_000)
    for name in (path, os.devnull):
        descriptor = os.open(name, os.O_RDONLY)
        await read_until_eof(got.append, descriptor)
        os.close(descriptor)
    assert b"".join(got) == b"x" * 100_000
    await read_until_eof(got.append, descriptor)


async def test_parts_finish_by_themselves_after_a_stop() -> None:
    stop = ShutdownSignal()
    drained: list[str] = []

    async def drains(name: str) -> None:
        await stop.wait()
        await asyncio.sleep(0.01)
        drained.append(name)

    running = asyncio.create_task(
        run_together(stop, {name: partial(drains, name) for name in ("a", "b")})
    )
    await asyncio.sleep(0)
    stop.request("test")
    await running
    assert sorted(drained) == ["a", "b"]


async def test_a_part_that_fails_stops_the_others_in_order_and_its_error_is_raised() -> None:
    stop = ShutdownSignal()
    drained: list[str] = []

    async def drains() -> None:
        await stop.wait()
        await asyncio.sleep(0.01)
        drained.append("flushed")

    async def fails() -> None:
        raise ValueError("disk on fire")

    with pytest.raises(ValueError, match="disk on fire"):
        await run_together(stop, {"store": drains, "log": fails})
    assert drained == ["flushed"]
    assert stop.reason == "log failed"


async def test_several_failures_are_all_shown() -> None:
    async def fails() -> None:
        raise ValueError("x")

    with pytest.raises(ExceptionGroup) as errors:
        await run_together(ShutdownSignal(), {"a": fails, "b": fails})
    assert len(errors.value.exceptions) == 2


async def test_a_part_that_returns_ends_the_run() -> None:
    stop = ShutdownSignal()

    async def returns() -> None:
        return

    async def waits() -> None:
        await stop.wait()

    await run_together(stop, {"short": returns, "long": waits})
    assert stop.reason == "short ended"


async def test_what_lingers_beyond_the_grace_period_is_cancelled_and_named() -> None:
    stop = ShutdownSignal()
    cancelled = asyncio.Event()

    async def lingers() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    stop.request("test")
    with capture_logs() as logs:
        await run_together(stop, {"stubborn": lingers}, grace_s=0.01)
    assert cancelled.is_set()
    assert logs[-1] == {
        "event": "shutdown.grace_exceeded",
        "grace_s": 0.01,
        "log_level": "warning",
        "parts": ["stubborn"],
    }


async def test_cancelling_the_run_cancels_every_part() -> None:
    cancelled: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append("part")
            raise

    running = asyncio.create_task(run_together(ShutdownSignal(), {"a": waits, "b": waits}))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert cancelled == ["part", "part"]
