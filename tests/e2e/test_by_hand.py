"""What docs/operations.md says, command by command: every daemon started on its own."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.toy import write_toy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

FARFLOW = (sys.executable, "-m", "farflow")
ROOT = Path(__file__).parents[2]


async def call(*argv: str, cwd: Path) -> str:
    process = await asyncio.create_subprocess_exec(
        *FARFLOW,
        *argv,
        cwd=cwd,
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, f"{argv}: {out.decode()}{err.decode()}"
    return out.decode()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


async def daemon(*argv: str, cwd: Path) -> tuple[asyncio.subprocess.Process, dict[str, Any]]:
    with (cwd / f"{argv[0]}.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *FARFLOW, *argv, cwd=cwd, env=environment(), stdout=asyncio.subprocess.PIPE, stderr=log
        )
    assert process.stdout is not None
    async with asyncio.timeout(20):
        ready = json.loads(await process.stdout.readline())
    return process, ready


@pytest.mark.asyncio
async def test_the_daemons_started_by_hand_finish_a_run(tmp_path: Path) -> None:
    file = str(write_toy(tmp_path, steps=8, agents="[local.agents.box1]"))
    await call("keys", "create", "keys", "--agent", "box1", "--trainer", "toy/solver", cwd=tmp_path)
    ports = [f"transport.{plane}_port=0" for plane in ("control", "trajectories", "weights")]
    zero = [part for text in ports for part in ("--set", text)]
    started = []
    try:
        scheduler, ready = await daemon("scheduler", "run", "--config", file, *zero, cwd=tmp_path)
        started.append(scheduler)
        here = [
            part
            for plane, port in ready["ports"].items()
            for part in ("--set", f"transport.{plane}_port={port}")
        ]
        assert "submitted toy" in await call("run", "submit", file, *here, cwd=tmp_path)
        assert "already submitted" in await call("run", "submit", file, *here, cwd=tmp_path)
        agent, _ = await daemon(
            "agent",
            "run",
            "--config",
            file,
            *here,
            "--set",
            "agent.key=keys/box1.toml",
            cwd=tmp_path,
        )
        started.append(agent)
        trainer, _ = await daemon(
            "trainer",
            "run",
            "--config",
            file,
            *here,
            "--set",
            "trainer.policy=toy/solver",
            "--set",
            "trainer.key=keys/trainer-toy-solver.toml",
            "--set",
            "trainer.signing_key=keys/signing/trainer-toy-solver.toml",
            cwd=tmp_path,
        )
        started.append(trainer)
        async with asyncio.timeout(15):
            while True:
                rows = json.loads(await call("run", "ls", "--json", *here, cwd=tmp_path))
                if rows[0]["state"] == "finished":
                    break
        assert rows == [{"name": "toy", "state": "finished", "reason": "completed"}]
        assert "toy · finished (completed)" in await call("status", *here, cwd=tmp_path)
        assert "accounting of run toy" in await call("status", "--all", *here, cwd=tmp_path)
        status = json.loads(await call("status", "--json", *here, cwd=tmp_path))
        assert status["agents"][0]["name"] == "box1"
        async with asyncio.timeout(10):
            assert await trainer.wait() == 0
        assert (tmp_path / "trainer" / "model" / "model.safetensors").is_file()
        for process in (agent, scheduler):
            process.terminate()
            async with asyncio.timeout(8):
                assert await process.wait() == 0
    finally:
        for process in started:
            if process.returncode is None:
                process.kill()
                await process.wait()
