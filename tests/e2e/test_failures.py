"""Kill anything in mid-run: the run finishes, the table balances, nothing is trained twice.

Real processes, real sockets with CURVE, real SQLite; the fake engine and the numpy trainer, and
time constants scaled down. ``test_failures_torch.py`` does the same with torch at real constants.
"""

import os
import signal
from pathlib import Path

import pytest

from bench.toy import counts, running, write_toy

pytestmark = pytest.mark.timeout(90)  # whole deployments; 8 s each on two idle cores

STEPS = 30
LINKED = """
[local.agents.near]
[local.agents.far]
link = "short-hop"
[links.short-hop]
rtt = "30ms"
rate = "50Mbit/s"
"""
LATE = """
[local.agents.near]
[local.agents.late]
join_after_s = 2.0
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def clean(summary: object) -> None:
    assert summary.problems == ()
    row = counts(summary)
    assert row["trained"] == STEPS * 4
    assert row["taken"] == row["buffered"] == row["in_flight"] == row["queued"] == 0


@pytest.mark.slow
@pytest.mark.asyncio
async def test_an_undisturbed_run_finishes_and_balances(work: Path, tmp_path: Path) -> None:
    async with running(write_toy(work, steps=STEPS), tmp_path / "run") as run:
        clean(await run.finish())


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_killed_agent_costs_attempts_but_no_groups(work: Path, tmp_path: Path) -> None:
    async with running(write_toy(work, steps=STEPS), tmp_path / "run") as run:
        await run.reach_step(8)
        run.deployment.child("agent-far").kill()
        clean(await run.finish())
        assert run.deployment.restarts("agent-far") == 1


@pytest.mark.asyncio
async def test_a_killed_scheduler_continues_where_it_was(work: Path, tmp_path: Path) -> None:
    async with running(write_toy(work, steps=STEPS), tmp_path / "run") as run:
        before = await run.reach_step(8)
        run.deployment.child("scheduler").kill()
        after = await run.until("a new term", lambda s: s.term > before.term, 10.0)
        assert run.policy(after).step >= 8
        clean(await run.finish())


@pytest.mark.asyncio
async def test_a_killed_trainer_returns_what_no_checkpoint_holds(
    work: Path, tmp_path: Path
) -> None:
    async with running(write_toy(work, steps=STEPS), tmp_path / "run") as run:
        await run.reach_step(8)
        run.deployment.child("trainer-solver").kill()
        summary = await run.finish()
        clean(summary)
        assert counts(summary)["abandoned"] > 0
        assert run.deployment.restarts("trainer-solver") == 1


@pytest.mark.slow
@pytest.mark.asyncio
async def test_an_agent_that_joins_late_takes_its_share(work: Path, tmp_path: Path) -> None:
    async with running(write_toy(work, steps=STEPS, agents=LATE), tmp_path / "run") as run:
        await run.until(
            "the late agent delivers",
            lambda s: any(a.name == "late" and a.groups_done > 0 for a in s.agents),
            15.0,
        )
        clean(await run.finish())


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_link_that_goes_down_delays_but_loses_nothing(work: Path, tmp_path: Path) -> None:
    async with running(write_toy(work, steps=STEPS, agents=LINKED), tmp_path / "run") as run:
        await run.reach_step(6)
        run.deployment.command_link("far", {"down": 2.0})
        clean(await run.finish())


@pytest.mark.slow
@pytest.mark.asyncio
async def test_who_is_stopped_politely_or_before_it_was_ready_comes_back(
    work: Path, tmp_path: Path
) -> None:
    async with running(write_toy(work, steps=STEPS), tmp_path / "run") as run:
        run.deployment.child("agent-far").kill()
        run.deployment.child("trainer-solver").kill()
        await run.reach_step(6)
        for name in ("scheduler", "trainer-solver"):
            os.kill(run.deployment.child(name).pid, signal.SIGTERM)
        clean(await run.finish())


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_dead_trajectory_log_and_weight_store_are_started_again(
    work: Path, tmp_path: Path
) -> None:
    async with running(write_toy(work, steps=STEPS), tmp_path / "run") as run:
        await run.reach_step(6)
        for service in ("trajectory-log", "weight-store"):
            kill_service(run.deployment.child("scheduler").pid, service)
        clean(await run.finish())


def kill_service(scheduler: int, service: str) -> None:
    """SIGKILL to the scheduler's own child of that name (Linux)."""
    module = f"scheduler.{service.replace('-', '_')}"
    children = Path(f"/proc/{scheduler}/task/{scheduler}/children").read_text().split()
    found = [
        int(pid)
        for pid in children
        if module in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    ]
    assert len(found) == 1, f"{service}: {found}"
    os.kill(found[0], signal.SIGKILL)
