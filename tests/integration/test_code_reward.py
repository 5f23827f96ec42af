"""The reward ``code``: what a program gets, and what is not the program's fault."""

import asyncio
import json
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from sandbox_bench import it_runs, limits_of_its_own, need_sandbox, nothing_is_left
from workflow_bench import SOLVER, Bench, crash, offer

from edge_agent import sandbox
from edge_agent.code_reward import CodeNotRun
from edge_agent.core.effects import RunAttempt
from edge_agent.reward_worker import ScoreRequest, answer
from edge_agent.rewards import RewardPool, available_rewards
from edge_agent.tools import python_tool
from edge_agent.workflow import Rollout, WorkflowContext
from transport.messages import Item, RewardSpec
from transport.runs import CodeReward

pytestmark = pytest.mark.asyncio

ADD = [
    {"assert": "assert add(1, 2) == 3"},
    {"assert": "assert add(-1, 1) == 0\nassert add(0, 0) == 0"},
]
SUM = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 -5\n", "output": "0\n"}]
RIGHT = "def add(a, b):\n    return a + b"


def item(tests: Any = None, index: int = 7, **more: Any) -> Item:
    found = {"tests": ADD if tests is None else tests, **more}
    return Item(index=index, prompt="p", answer=json.dumps(found))


def response(program: str) -> str:
    return f"Let me think.\n```python\n{program}\n```\nThat is it."


@pytest_asyncio.fixture
async def box() -> None:
    await need_sandbox()


async def scores(*pairs: tuple[Item, str], **how: Any) -> list[float]:
    pool = RewardPool(0.001, command=("/no/such/program",))
    return await pool.score(RewardSpec(name="code", code=CodeReward(**how)), pairs)


@pytest.mark.usefixtures("box")
@pytest.mark.parametrize(
    ("program", "reward"),
    [
        (RIGHT, 1.0),
        ("def add(a, b):\n    return abs(a) + b", 0.0),
        ("def add(a, b):\n    raise ValueError", 0.0),
        ("def add(a, b):\n    while True: pass", 0.0),
        ("def sub(a, b):\n    return a + b", 0.0),
        ("def add(a, b) return", 0.0),
        ("import sys; sys.exit(0)", 0.0),
        ("import os; os._exit(0)", 0.0),
        ("x = bytearray(1 << 40)", 0.0),
        ("while True: print('x' * 1000)", 0.0),
        ("#" * (sandbox.MAX_CODE_BYTES + 1), 0.0),
    ],
    ids=lambda value: str(value)[:24],
)
async def test_a_program_gets_what_its_tests_say(program: str, reward: float) -> None:
    assert await scores((item(), response(program)), time_limit_s=2.0) == [reward]


@pytest.mark.usefixtures("box")
async def test_a_program_that_prints_is_compared_outside_of_it() -> None:
    right = "print(sum(map(int, input().split())))"
    pairs = [
        (item(SUM), response(right)),
        (item(SUM), response(f"{right}\nprint()")),
        (item(SUM), response("print(3)")),
        (item(SUM), response(f"{right}\nraise SystemExit(1)")),
        (item(SUM), "print(3)"),
        (item(SUM, index=8), response(f"if __name__ == '__main__':\n    {right}")),
    ]
    assert await scores(*pairs) == [1.0, 1.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.usefixtures("box")
async def test_the_share_of_the_tests_is_a_choice_and_time_is_not_taken_twice() -> None:
    half = response("def add(a, b):\n    assert a >= 0\n    return a + b")
    assert await scores((item(), half), share=True) == [0.5]
    assert await scores((item(), half)) == [0.0]
    slow = response("def add(a, b):\n    if a < 0:\n        while True: pass\n    return a + b")
    tests = [ADD[0], *[ADD[1]] * 200, ADD[0]]
    async with asyncio.timeout(20):
        got = await scores((item(tests, time_limit_s=1.0), slow), share=True)
    assert got == [1 / len(tests)]


@pytest.mark.usefixtures("box")
@pytest.mark.parametrize("tests", ["", [{"assert": "assert add("}], [{}]])
async def test_tests_that_cannot_be_run_are_the_item_s_fault(tests: Any) -> None:
    with pytest.raises(CodeNotRun, match="code, item 8: answer: ") as failed:
        await scores((item(), response(RIGHT)), (item(tests, index=8), response(RIGHT)))
    assert failed.value.code == "reward.code"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("#!/bin/sh\necho 'bwrap: Can not mount' >&2\nexit 1\n", "sandbox.failed: .*Can not mount"),
        ("#!/bin/sh\nkill -9 $$\n", "sandbox.failed: .*status -9"),
        ("#!/bin/sh\nwhile :; do :; done\n", "sandbox.failed: .*within 0.2 s"),
        ("#!/no/such/interpreter\n", "sandbox.failed: .*status 12[67].*not found"),
    ],
)
async def test_a_sandbox_that_fails_is_no_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    path = tmp_path / "bwrap"
    path.write_text(script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sandbox, "_found", sandbox.SandboxProbe("", ""))
    monkeypatch.setattr(sandbox, "START_S", 0.2)
    with pytest.raises(CodeNotRun, match=f"code, item 7: {words}"):
        await scores((item(), response(RIGHT)), (item(), "no program"))


async def test_a_box_without_a_sandbox_neither_offers_it_nor_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sandbox, "_found", None)
    assert "code" not in available_rewards()
    with pytest.raises(CodeNotRun, match=r"sandbox\.unavailable: no bwrap here"):
        await scores((item(), response(RIGHT)))
    assert "code" not in available_rewards()


@pytest.mark.usefixtures("box")
async def test_a_box_with_a_sandbox_offers_it() -> None:
    assert "code" in available_rewards()


async def test_a_verifier_process_runs_no_code() -> None:
    reply = answer(ScoreRequest(spec=RewardSpec(name="code"), pairs=((item(), "x"),)))
    assert (reply.rewards, "item 7" in reply.error) == ((), True)


async def solved(context: WorkflowContext, item: Item) -> list[Rollout]:
    """As if the policy had written a right program and then a wrong one, in turns."""
    drawn = await context.policy().generate(item.prompt, n=context.group_size)
    texts = [response(RIGHT), response("def add(a, b):\n    while True: pass")]
    return [
        msgspec.structs.replace(Rollout.of(each), text=texts[number % 2])
        for number, each in enumerate(drawn)
    ]


HOW = RewardSpec(name="code", code=CodeReward(time_limit_s=1.0))


@pytest.mark.usefixtures("box")
async def test_an_attempt_has_the_rewards_of_its_programs(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.run(solved, items=(item(),), group_size=4, reward=HOW, timeout_s=20.0)
    assert [sequence.reward for sequence in bench.group().sequences] == [1.0, 0.0, 1.0, 0.0]


async def test_an_attempt_whose_programs_cannot_be_run_fails_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sandbox, "_found", None)
    failed = crash(await Bench(tmp_path).run(solved, items=(item(),), reward=HOW))
    assert failed.code == "sandbox.reward"
    assert "item 7: sandbox.unavailable: no bwrap here" in failed.detail


@pytest.mark.usefixtures("box")
async def test_a_workflow_that_is_stuck_in_a_tool_leaves_no_program_behind(tmp_path: Path) -> None:
    limits = limits_of_its_own(wall_s=600.0)

    async def stuck(context: WorkflowContext, item: Item) -> list[Rollout]:
        while True:
            try:
                await python_tool("import time; time.sleep(600)", limits=limits)
            except asyncio.CancelledError:
                continue  # the one thing that a workflow must not do

    bench = Bench(tmp_path)
    await bench.engine.load_policy(SOLVER, bench.model, 3)
    runner = bench.runner(stuck, timeout_s=600.0, unwind_s=0.1)
    async with asyncio.TaskGroup() as tasks:
        runner.start(RunAttempt(offer=offer(), queued_s=0.0), tasks)
        await it_runs(limits)
        runner.abort(offer().attempt, offer().fence)
    await nothing_is_left(limits)
