"""What a program started in a session of its own ends with it, or with the agent at the latest."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agent_cloud import WAIT_S, AgentCloud, Life

from edge_agent.program_marks import MARK, ProgramMarks, kill_marked
from edge_agent.rewards import RewardPool, RewardTimeout
from transport.memory_links import MemoryNetwork
from transport.messages import Hello, Item, RewardSpec
from transport.runtime.files import private_dir

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="there is no /proc elsewhere"
)

DAEMON = """
import os, signal, sys, time

def leave(path):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with open(path, "a") as file:
                file.write(f"{os.getpid()}\\n")
            time.sleep(300)
        os._exit(0)
    os.wait()
    while not (os.path.exists(path) and open(path).read().endswith("\\n")):
        time.sleep(0.01)
"""


def left(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()]


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "Z (zombie)" not in status.read_text()


def gone_soon(pids: list[int]) -> bool:
    for _ in range(500):
        if not any(map(alive, pids)):
            break
        time.sleep(0.01)
    return not any(map(alive, pids))


def double_forked(path: Path, mark: str) -> list[int]:
    """Processes that carry a mark and are nobody's children any more."""
    code = f"{DAEMON}\nleave({str(path)!r})\nleave({str(path)!r} + '.2')"
    subprocess.run((sys.executable, "-c", code), env={**os.environ, MARK: mark}, check=True)
    found = left(path) + left(path.with_name(f"{path.name}.2"))
    assert len(found) == 2
    assert all(map(alive, found))
    return found


def test_only_what_carries_the_mark_is_killed(tmp_path: Path) -> None:
    marks = ProgramMarks(tmp_path)
    first, second = marks.new(), marks.new()
    pids = double_forked(tmp_path / "first", first), double_forked(tmp_path / "second", second)
    try:
        assert kill_marked([first[:-1]]) == 0  # no mark is the beginning of another
        assert kill_marked([first]) == 2
        assert gone_soon(pids[0])
        assert all(map(alive, pids[1]))
        assert ProgramMarks().end_all() == 0
        assert ProgramMarks(tmp_path).end_all() == 2  # another life in the same folder
        assert gone_soon(pids[1])
    finally:
        kill_marked([first, second])


@pytest.mark.asyncio
async def test_those_that_end_at_once_share_a_look(tmp_path: Path) -> None:
    marks = ProgramMarks(tmp_path)
    given = [marks.new() for _ in range(4)]
    pids = [pid for n, one in enumerate(given) for pid in double_forked(tmp_path / f"{n}", one)]
    await asyncio.gather(*(marks.end(one) for one in given))
    assert gone_soon(pids)


@pytest.mark.asyncio
async def test_an_agent_kills_what_an_earlier_life_left(tmp_path: Path) -> None:
    async with AgentCloud(tmp_path, MemoryNetwork()) as cloud, asyncio.timeout(WAIT_S):
        folder = private_dir(Path(cloud.config().agent.folder))
        pids = double_forked(tmp_path / "left", ProgramMarks(folder).new())
        life = Life(cloud)
        await cloud.hear(Hello)
        assert gone_soon(pids)
        assert await life.end() == 0


@pytest.mark.asyncio
async def test_what_a_verifier_left_goes_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "left"
    code = f"{DAEMON}\nleave({str(path)!r})\ntime.sleep(60)"
    pool = RewardPool(2.0, workers=1, command=(sys.executable, "-c", code))
    pairs = [(Item(index=1, prompt="", answer=""), "x")]
    with pytest.raises(RewardTimeout):
        await pool.score(RewardSpec(name="math-verify"), pairs)
    await pool.close()
    assert gone_soon(left(path))
