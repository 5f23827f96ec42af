"""Workflows that block the agent's event loop, in whole deployments of real processes."""

from pathlib import Path

import pytest

from bench.toy import TOY, running, write_toy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]  # whole deployments

OWN = "farflow_e2e_blocking"
ONE_AGENT = "[local.agents.near]\n"
CODE = """
import os, pathlib, time

from edge_agent.workflow import Rollout, workflow


@workflow("blocks")
async def blocks(context, item):
    if context.kind == "train" and item.index % 10 == 3:
        {block}
    made = await context.policy().generate(item.prompt, n=context.group_size)
    return [Rollout.of(one) for one in made]
"""
SPIN = "while True: pass"
SLEEP_ONCE = """mark = pathlib.Path(os.environ["BLOCKED_ONCE"])
        if not mark.exists():
            mark.touch()
            time.sleep(1e6)"""


def blocking(work: Path, monkeypatch: pytest.MonkeyPatch, block: str, name: str) -> Path:
    """A toy run of one agent whose workflow blocks at one item in ten."""
    work.mkdir()
    module = f"{OWN}_{name}"
    (work / f"{module}.py").write_text(CODE.format(block=block))
    monkeypatch.setenv("PYTHONPATH", str(work))
    monkeypatch.setenv("BLOCKED_ONCE", str(work / "once"))
    path = write_toy(work, steps=8)
    text = TOY.format(steps=8, agents=ONE_AGENT)
    text = text.replace('reference = "single_turn"', f'reference = "{module}:blocks"')
    text = text.replace("[run]\n", "[run]\nmax_attempts = 1\n")
    table = f'[agent]\nstall_s = 1.0\nworkflows = ["{module}:blocks"]\n'
    path.write_text(text.replace("[agent]\n", table), encoding="utf-8")
    return path


@pytest.mark.asyncio
async def test_an_item_that_spins_fails_and_the_agent_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = blocking(tmp_path / "work", monkeypatch, SPIN, "spin")
    async with running(file, tmp_path / "run") as run:
        await run.reach_step(8, 60.0)
        letters = await run.operator.dead_letters("toy")
        summary = await run.finish()
        assert run.deployment.restarts("agent-near") == 0
    assert letters
    for letter in letters:  # an attempt beside it may have been called back
        assert any("workflow.stalled" in one.detail for one in letter.attempts), letter
    assert summary.problems == ()
    row = next(row for row in summary.accounting if row.kind == "train")
    assert row.trained == 8 * 4


@pytest.mark.asyncio
async def test_a_call_that_never_returns_ends_the_process_and_its_work_is_handed_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = blocking(tmp_path / "work", monkeypatch, SLEEP_ONCE, "sleep")
    notices: list[str] = []
    async with running(file, tmp_path / "run", on_notice=notices.append) as run:
        await run.reach_step(8, 60.0)
        letters = await run.operator.dead_letters("toy")
        summary = await run.finish()
        assert run.deployment.restarts("agent-near") == 1
    assert any("agent-near ended (status 75)" in notice for notice in notices), notices
    assert list(letters) == []  # the item was done by the next life
    assert summary.problems == ()
    row = next(row for row in summary.accounting if row.kind == "train")
    assert row.trained == 8 * 4
