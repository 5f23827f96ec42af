"""The failure runs with torch and real time constants: the example's own model and task, fewer
steps. Several minutes on two cores."""

from pathlib import Path

import pytest

from bench.toy import counts, running
from transport.status import SchedulerStatus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic.toml"
STEPS = 24
FEWER = (
    f"policies.solver.steps={STEPS}",
    "policies.solver.checkpoint_every=8",
    "evaluation.items=256",
    "evaluation.every_versions=0",
)
WITHIN_S = 200.0


def clean(summary: object, steps: int = STEPS) -> None:
    assert summary.problems == ()
    row = counts(summary)
    assert row["trained"] == steps * 32
    assert row["taken"] == row["buffered"] == row["in_flight"] == row["queued"] == 0


def state(status: SchedulerStatus, agent: str) -> str:
    return next(a.state for a in status.agents if a.name == agent)


@pytest.mark.asyncio
async def test_agent_scheduler_and_trainer_killed_one_after_the_other(tmp_path: Path) -> None:
    async with running(EXAMPLE, tmp_path / "run", FEWER) as run:
        await run.reach_step(4, 90.0)
        run.deployment.child("agent-near").kill()
        await run.reach_step(8, 90.0)
        before = await run.until("an answer", lambda s: True, 10.0)
        run.deployment.child("scheduler").kill()
        await run.until("a new term", lambda s: s.term > before.term, 30.0)
        await run.reach_step(12, 90.0)
        run.deployment.child("trainer-solver").kill()
        clean(await run.finish(WITHIN_S))


@pytest.mark.asyncio
async def test_a_late_agent_and_a_link_down_for_twenty_seconds(tmp_path: Path) -> None:
    # A fast machine must not be through before the link is back: steps enough for a minute on it.
    steps = 120
    late = (*FEWER, f"policies.solver.steps={steps}", "local.agents.near.join_after_s=25.0")
    async with running(EXAMPLE, tmp_path / "run", late) as run:
        await run.reach_step(2, 90.0)
        run.deployment.command_link("far", {"down": 20.0})
        await run.until("far is away", lambda s: state(s, "far") == "lost", 60.0)
        await run.until("far is back", lambda s: state(s, "far") == "ready", 90.0)
        summary = await run.finish(WITHIN_S)
        clean(summary, steps)
        assert {a.agent for a in summary.agents} == {"near", "metro", "far"}
