"""Commands: their output, and their end with everything that they started."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL

import pytest

from transport.runtime import commands
from transport.runtime.commands import KEPT_BYTES, run_command, start_talk

pytestmark = pytest.mark.asyncio

CHILD_AND_WORD = (
    "import os, subprocess, sys, time\n"
    "child = subprocess.Popen(['sleep', '600'], start_new_session=len(sys.argv) > 1)\n"
    "print(child.pid, flush=True)\n"
)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def gone(pid: int) -> None:
    async with asyncio.timeout(5):
        while alive(pid):
            await asyncio.sleep(0.001)


async def test_a_command_gets_its_input_and_the_end_of_its_output_is_kept() -> None:
    script = "import sys; text = sys.stdin.read(); print('x' * 200_000 + text); sys.exit(3)"
    status, said = await run_command((sys.executable, "-c", script), body=b"word")
    assert (status, len(said), said[-6:]) == (3, KEPT_BYTES, b"xword\n")
    argv = ("/bin/sh", "-c", "echo out; echo err >&2")
    assert await run_command(argv) == (0, b"out\nerr\n")
    assert await run_command(argv, stdout=DEVNULL) == (0, b"err\n")
    with pytest.raises(OSError, match="no-such"):
        await run_command(("no-such-command-here",))


async def test_a_command_that_never_reads_is_no_obstacle() -> None:
    async with asyncio.timeout(10):
        assert (await run_command(("/bin/sh", "-c", "exit 0"), body=b"x" * 2**20))[0] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("how", ["killed", "cancelled", "ends by itself"])
async def test_its_children_end_with_it(how: str) -> None:
    script = CHILD_AND_WORD + ("" if how == "ends by itself" else "time.sleep(600)")
    talk = await start_talk((sys.executable, "-c", script))
    assert talk.stdout is not None
    child = int(await talk.stdout.readline())
    async with asyncio.timeout(10):
        if how == "killed":
            assert await talk.end() == await talk.end() == -signal.SIGKILL
        elif how == "cancelled":
            ending = asyncio.create_task(talk.end())
            await asyncio.sleep(0)
            ending.cancel()
        assert await talk.wait() == (0 if how == "ends by itself" else -signal.SIGKILL)
        assert await talk.stdout.read() == b""
        await gone(child)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
async def test_a_descendant_that_left_the_group_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commands, "DRAIN_S", 0.05)
    argv = (sys.executable, "-c", CHILD_AND_WORD, "leave")
    async with asyncio.timeout(10):
        status, said = await run_command(argv, body=b"x" * 2**20)
    assert status == 0
    child = int(said)
    assert alive(child)
    os.kill(child, signal.SIGKILL)
    await gone(child)


async def test_what_the_kernel_holds_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = await start_talk((sys.executable, "-c", "import sys; sys.stdin.read()"))
    monkeypatch.setattr(commands, "kill_group", lambda leader: None)
    assert talk.stdout is not None
    async with asyncio.timeout(10):
        assert await talk.end(0.01) is None
        assert await talk.stdout.read() == b"", "its pipes are closed"
        assert await talk.wait() == 0
