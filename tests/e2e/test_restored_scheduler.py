"""docs/operations.md, "Backup and restore": a scheduler is backed up under load, goes on, dies, is
restored from the backup and started; agents reconcile, the trainer is started again, and the run
ends with books that balance and no group trained twice."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.toy import write_toy
from cloud_trainer.checkpoints import lineage_ids
from farflow.summary import repeated
from tests.e2e.test_by_hand import call, daemon

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

AGENTS = "[local.agents.box1]\n[local.agents.box2]"
STEPS = 60


@pytest.mark.asyncio
async def test_a_restored_scheduler_goes_on_with_its_agents(tmp_path: Path) -> None:
    file = str(write_toy(tmp_path, steps=STEPS, agents=AGENTS))
    names = ("--agent", "box1", "--agent", "box2", "--trainer", "toy/solver")
    await call("keys", "create", "keys", *names, cwd=tmp_path)
    zero = [
        part
        for plane in ("control", "trajectories", "weights")
        for part in ("--set", f"transport.{plane}_port=0")
    ]
    zero += ["--set", "http.enabled=false"]
    started: list[asyncio.subprocess.Process] = []
    try:
        scheduler, ready = await daemon("scheduler", "run", "--config", file, *zero, cwd=tmp_path)
        started.append(scheduler)
        here = [
            part
            for plane, port in ready["ports"].items()
            for part in ("--set", f"transport.{plane}_port={port}")
        ]
        for name in ("box1", "box2"):
            own = ("--set", f"agent.key=keys/{name}.toml", "--set", f"agent.folder={name}")
            agent, _ = await daemon("agent", "run", "--config", file, *here, *own, cwd=tmp_path)
            started.append(agent)
        trainer_of = (
            *("trainer", "run", "--config", file, *here, "--set", "trainer.policy=toy/solver"),
            *("--set", "trainer.key=keys/trainer-toy-solver.toml"),
            *("--set", "trainer.signing_key=keys/signing/trainer-toy-solver.toml"),
        )
        trainer, _ = await daemon(*trainer_of, cwd=tmp_path)
        started.append(trainer)
        await call("run", "submit", file, *here, cwd=tmp_path)

        async def until(what: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
            async with asyncio.timeout(90):
                while True:
                    status = json.loads(await call("status", "--json", *here, cwd=tmp_path))
                    if status["runs"] and what(status):
                        return status

        def step(status: dict[str, Any]) -> int:
            return int(status["runs"][0]["policies"][0]["step"])

        await until(lambda status: step(status) >= 8)
        told = await call("scheduler", "backup", "backup", "--json", "--config", file, cwd=tmp_path)
        saved = json.loads(told)
        assert saved["runs"] == {"toy": "running"}
        assert saved["versions"] > 0
        later = await until(lambda status: step(status) >= 20)
        scheduler.kill()
        await scheduler.wait()
        told = await call(
            "scheduler", "restore", "backup", "--replace", "--json", "--config", file, cwd=tmp_path
        )
        restored = json.loads(told)
        scheduler, _ = await daemon("scheduler", "run", "--config", file, *here, cwd=tmp_path)
        started.append(scheduler)
        trainer.terminate()
        async with asyncio.timeout(30):
            await trainer.wait()
        trainer, _ = await daemon(*trainer_of, cwd=tmp_path)
        started.append(trainer)

        again = await until(lambda status: len(status["agents"]) == 2 and step(status) > 0)
        assert again["term"] == restored["term"] + 1 > later["term"] + 1000
        ended = await until(lambda status: status["runs"][0]["state"] == "finished")
        (run,) = ended["runs"]
        assert run["reason"] == "completed"
        assert run["policies"][0]["step"] == STEPS
        for row in run["accounting"]:
            outside = ("policy", "kind", "submitted", "abandoned", "requeued", "replayed")
            placed = sum(count for name, count in row.items() if name not in outside)
            assert row["submitted"] == placed
        async with asyncio.timeout(30):
            assert await trainer.wait() == 0
        lineage = lineage_ids(tmp_path / "trainer")
        assert lineage is not None
        assert repeated(lineage) == ()
        for process in started:
            if process.returncode is None:
                process.terminate()
                async with asyncio.timeout(30):
                    assert await process.wait() == 0
    finally:
        for process in started:
            if process.returncode is None:
                process.kill()
                await process.wait()
