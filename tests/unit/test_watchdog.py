"""The watchdog: what blocks the event loop ends its attempt, or the process."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from workflow_bench import Bench, crash, offer

from edge_agent.containment import stalls_ended
from edge_agent.core.effects import RunAttempt
from edge_agent.core.events import AttemptCrashed, GroupSpooled
from edge_agent.watchdog import EXIT_STALLED, Watchdog
from edge_agent.workflow import Item, Rollout, WorkflowContext

STALL_S = 0.2

PROCESS = """
import asyncio, re, sys, time
from edge_agent.containment import Containment
from edge_agent.watchdog import Watchdog

async def sleeps():
    time.sleep(1e6)

async def catches():
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass

async def matches():
    re.match("(a+)+$", "a" * 60 + "b")

async def fine():
    pass

async def main(name, stall_s):
    contained = Containment()
    with Watchdog(stall_s, before_exit=lambda: print("cleaned", flush=True)):
        print("ready", flush=True)
        await contained.start(globals()[name]())
        await asyncio.sleep(1.5)

asyncio.run(main(sys.argv[1], float(sys.argv[2])))
"""


async def good(context: WorkflowContext, item: Item) -> list[Rollout]:
    made = await context.policy().generate(item.prompt, n=context.group_size)
    return [Rollout.of(one) for one in made]


async def spins(context: WorkflowContext, item: Item) -> Any:
    if item.index == 1:
        while True:
            pass
    return await good(context, item)


def busy() -> None:
    for _ in range(100):
        time.sleep(6 * STALL_S / 100)


def kept_from_ending(status: int) -> None:
    raise AssertionError(f"the process was to end with {status}")


def process(name: str, stall_s: float = STALL_S) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        (sys.executable, "-c", PROCESS, name, str(stall_s)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.asyncio
async def test_a_workflow_that_spins_fails_its_attempt_and_no_other(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.start()
    runner = bench.runner(spins, timeout_s=20.0)
    with Watchdog(STALL_S, leave=kept_from_ending):
        async with asyncio.TaskGroup() as tasks:
            for index in range(4):
                items = (Item(index=index, prompt="3 + 4 =", answer="7"),)
                made = offer(attempt=f"run/t-{index}#1", job=f"run/t-{index}", items=items)
                runner.start(RunAttempt(offer=made, queued_s=0.0), tasks)
    await bench.engine.close()
    ends = [e for e in bench.events if isinstance(e, (AttemptCrashed, GroupSpooled))]
    (crashed,) = [end for end in ends if isinstance(end, AttemptCrashed)]
    assert (crashed.attempt, crashed.code) == ("run/t-1#1", "workflow.stalled")
    assert "agent.stall_s" in crashed.detail
    assert len(ends) == 4


@pytest.mark.asyncio
async def test_items_of_one_attempt_that_spin_one_after_another_end_no_process(
    tmp_path: Path,
) -> None:
    """The loop does not tick between two of them, and yet each has been ended."""
    bench = Bench(tmp_path)
    before = stalls_ended()
    items = tuple(Item(index=1, prompt="3 + 4 =", answer="7") for _ in range(6))
    with Watchdog(STALL_S, leave=kept_from_ending):
        failed = crash(await bench.run(spins, timeout_s=20.0, items=items))
    assert failed.code == "workflow.stalled"
    assert stalls_ended() - before == len(items)


@pytest.mark.asyncio
async def test_what_the_agent_itself_does_is_told_and_not_interrupted() -> None:
    with capture_logs() as logs, Watchdog(STALL_S, leave=kept_from_ending):
        busy()
        await asyncio.sleep(2 * STALL_S)
    told = [line for line in logs if line["event"] == "agent.stalled"]
    assert [line["workflow"] for line in told] == [False]
    assert "test_watchdog" in told[0]["stack"]
    assert [line["raised"] for line in logs if line["event"] == "agent.stall_over"] == [0]


@pytest.mark.asyncio
async def test_a_callback_of_the_owners_module_is_interrupted_as_well() -> None:
    told: list[dict[str, Any]] = []

    def spin() -> None:
        while True:
            pass

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context))
    with Watchdog(STALL_S, modules={__name__}, leave=kept_from_ending):
        loop.call_soon(spin)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert [type(one["exception"]).__name__ for one in told] == ["LoopStalled"]


@pytest.mark.asyncio
async def test_what_a_workflow_returned_may_block_as_well(tmp_path: Path) -> None:
    class Endless(list[Rollout]):
        def __len__(self) -> int:
            while True:
                pass

    async def returns(context: WorkflowContext, item: Item) -> list[Rollout]:
        return Endless()

    with Watchdog(STALL_S, modules={__name__}, leave=kept_from_ending):
        failed = crash(await Bench(tmp_path).run(returns, timeout_s=20.0))
    assert failed.code == "workflow.stalled"


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("sleeps", EXIT_STALLED, "agent.stalled_for_good"),
        ("catches", EXIT_STALLED, "agent.stalled_for_good"),
        ("matches", 1, "Timeout"),  # it keeps Python's lock: no thread of ours can run
    ],
)
def test_what_nothing_can_interrupt_ends_the_process(name: str, status: int, says: str) -> None:
    with process(name) as started:
        try:
            said, error = started.communicate(timeout=30)
        finally:
            started.kill()
    assert started.returncode == status, error
    assert says in said + error
    assert f"in {name}" in said + error  # where it was
    assert ("cleaned" in said) == (status == EXIT_STALLED)


def test_a_process_that_was_stopped_did_not_stall() -> None:
    with process("fine", 0.5) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        time.sleep(0.1)
        os.kill(started.pid, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(started.pid, signal.SIGCONT)
        said, error = started.communicate(timeout=20)
    assert (started.returncode, "stalled" in said + error) == (0, False), said + error
