"""Workflows in whole deployments of real processes: fake engine, numpy trainers."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from bench.toy import POLL_S, TOY, Running, running, write_toy
from transport.errors import LinkError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]  # whole deployments

STEPS = 20
SINGLE = 'reference = "single_turn"\npolicies = ["solver"]'
AGENTS = "[local.agents.near]\n[local.agents.far]\n"
VERIFIER = """
[policies.verifier]
model = "model"
trainer = "numpy"
steps = 20
batch_groups = 4
checkpoint_every = 5
settings = {lr = 0.01}

[task]
"""
OWN = "farflow_e2e_workflow"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def toy(work: Path, workflow: str, *, steps: int = STEPS, more: str = "") -> Path:
    """The toy run with another workflow."""
    path = write_toy(work, steps=steps)
    text = TOY.format(steps=steps, agents=AGENTS).replace(SINGLE, workflow)
    path.write_text(text.replace("\n[task]\n", more or "\n[task]\n"), encoding="utf-8")
    return path


@pytest.mark.asyncio
async def test_a_solver_and_its_verifier_learn_beside_each_other(
    work: Path, tmp_path: Path
) -> None:
    workflow = 'reference = "solve_and_verify"\npolicies = ["solver", "verifier"]'
    async with running(toy(work, workflow, more=VERIFIER), tmp_path / "run") as run:
        summary = await run.finish()
    assert summary.problems == ()
    rows = {row.policy: row for row in summary.accounting if row.kind == "train"}
    assert set(rows) == {"toy/solver", "toy/verifier"}
    for row in rows.values():
        assert row.trained == STEPS * 4
        assert row.queued == row.in_flight == row.buffered == row.taken == 0
    solver = next(policy for policy in summary.policies if policy.policy == "toy/solver")
    assert solver.accuracy_before < 0.5 < solver.accuracy_after, "it learnt from its own rewards"


async def told(run: Running, agent: str) -> str:
    """What ``farflow explain`` says of an agent's workflows, once it says anything."""
    async with asyncio.timeout(20.0):
        while True:
            with contextlib.suppress(LinkError):
                found = (await run.operator.explain(agent)).reasons
                lines = [line for line in found if "workflow" in line]
                if lines:
                    return lines[0]
            await asyncio.sleep(POLL_S)


async def groups_of(run: Running, agent: str, step: int) -> int:
    """How many groups an agent has made when the run has come to a step."""
    status = await run.reach_step(step)
    return next(one.groups_done for one in status.agents if one.name == agent)


@pytest.mark.asyncio
async def test_an_agent_with_other_code_gets_no_work_and_hears_why(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "from edge_agent.workflow import Rollout, workflow\n"
        "@workflow('flow')\n"
        "async def flow(context, item):\n"
        "    made = await context.policy().generate(item.prompt, n=context.group_size)\n"
        "    return [Rollout.of(one) for one in made]\n"
    )
    module = work / f"{OWN}.py"
    module.write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(work))
    file = toy(work, f'reference = "{OWN}:flow"\npolicies = ["solver"]', steps=1000)
    file.write_text(file.read_text().replace("[agent]\n", f'[agent]\nworkflows = ["{OWN}:flow"]\n'))
    async with running(file, tmp_path / "run") as run:
        await run.reach_step(2)
        module.write_text(code + "# another version\n")
        run.deployment.child("agent-far").kill()
        line = await told(run, "far")
        assert f"no work of run toy: its code of workflow {OWN}:flow" in line
        assert "install the same version" in line
        step = run.policy(await run.until("an answer", lambda _: True, 5.0)).step
        made = await groups_of(run, "far", step + 2)  # what it had spooled has come by then
        assert await groups_of(run, "far", step + 5) == made


FRAGILE = '''
import asyncio

import msgspec

from edge_agent.workflow import Rollout, workflow


@workflow("fragile", rollouts=2)
async def fragile(context, item):
    """Of every six items five go wrong, each in its own way."""
    count = context.group_size * (1 if context.kind == "eval" else 2)
    made = await context.policy().generate(item.prompt, n=count)
    rollouts = [Rollout.of(one) for one in made]
    match item.index % 6 if context.kind == "train" else 5:
        case 0:
            raise ZeroDivisionError("no way")
        case 1:
            await asyncio.Event().wait()
        case 2:
            return rollouts[:-1]
        case 3:
            return [*rollouts[:-1], msgspec.structs.replace(rollouts[-1], parts=())]
        case 4:
            nothing = msgspec.structs.replace(
                made[0].completion, tokens=(), logprobs=(), versions=()
            )
            empty = Rollout.of(msgspec.structs.replace(made[0], completion=nothing), 1.0)
            return [*rollouts[:-1], empty]
    return rollouts
'''


@pytest.mark.asyncio
async def test_items_that_go_wrong_never_stall_a_trainer(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raised, hung, too few, without parts, without tokens: each ends as a dead letter."""
    (work / f"{OWN}_fragile.py").write_text(FRAGILE)
    monkeypatch.setenv("PYTHONPATH", str(work))
    reference = f"{OWN}_fragile:fragile"
    file = toy(work, f'reference = "{reference}"\npolicies = ["solver"]', steps=4)
    text = file.read_text().replace("[run]\n", "[run]\nmax_attempts = 1\n")
    table = f'[agent]\nattempt_timeout_s = 0.5\nworkflows = ["{reference}"]\n'
    file.write_text(text.replace("[agent]\n", table))
    async with running(file, tmp_path / "run") as run:
        await run.reach_step(3)
        letters = await run.operator.dead_letters("toy")
        summary = await run.finish()
    details = {letter.attempts[-1].detail for letter in letters}
    for code in ("workflow.error", "attempt.timeout", "workflow.malformed"):
        assert any(code in detail for detail in details), (code, details)
    assert summary.problems == ()
    row = next(row for row in summary.accounting if row.kind == "train")
    assert row.trained == 4 * 4
    assert row.failed > row.trained
