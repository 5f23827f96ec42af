"""What docs/enrolment.md says, command by command: no key is copied to any box, and agents learn
from the scheduler whose weights to believe."""

import asyncio
import json
from pathlib import Path

import pytest

from bench.toy import write_toy
from tests.e2e.test_by_hand import FARFLOW, call, daemon, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


async def enrol_from_stdin(token: str, folder: str, cwd: Path) -> str:
    process = await asyncio.create_subprocess_exec(
        *FARFLOW,
        *("agent", "enrol", "--token-file", "-", "--folder", folder),
        cwd=cwd,
        env=environment(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate(token.encode())
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.asyncio
async def test_boxes_enrol_with_a_token_and_finish_a_run_that_came_later(tmp_path: Path) -> None:
    file = str(write_toy(tmp_path, steps=6, agents="[local.agents.unused]"))
    await call("keys", "create", "keys", cwd=tmp_path)
    ports = ("control", "trajectories", "weights", "enrolment")
    zero = [part for plane in ports for part in ("--set", f"transport.{plane}_port=0")]
    # Any open token makes the scheduler listen; port 0 is chosen then.
    await call("token", "create", "--set", "transport.enrolment_port=1", cwd=tmp_path)
    started = []
    try:
        scheduler, ready = await daemon("scheduler", "run", "--config", file, *zero, cwd=tmp_path)
        started.append(scheduler)
        here = [
            part
            for plane, port in ready["ports"].items()
            for part in ("--set", f"transport.{plane}_port={port}")
        ]
        async with asyncio.timeout(10):
            while not (tmp_path / "scheduler" / "enrolment-port").is_file():
                await asyncio.sleep(0.05)
        await call(
            *("token", "create", "--uses", "2", "--name-prefix", "spot-", "--lifetime", "10min"),
            *("--out", "token", "--config", file, "--set", "transport.enrolment_port=0"),
            cwd=tmp_path,
        )
        token = (tmp_path / "token").read_text()
        assert "enrolled as spot-1" in await enrol_from_stdin(token, "box", tmp_path)
        own = str(tmp_path / "box" / "agent.toml")
        told = await call(
            "agent", "doctor", "--json", "--config", file, "--config", own, cwd=tmp_path
        )
        assert json.loads(told)["healthy"]
        first, _ = await daemon("agent", "run", "--config", file, "--config", own, cwd=tmp_path)
        started.append(first)
        spot = {
            "agent.token_file": str(tmp_path / "token"),
            "agent.folder": str(tmp_path / "spot" / "state"),
            "transport.keys": str(tmp_path / "spot" / "keys"),
        }
        settings = [part for key, value in spot.items() for part in ("--set", f"{key}={value}")]
        second, said = await daemon("agent", "run", "--config", file, *settings, cwd=tmp_path)
        started.append(second)
        assert said["agent"] == "spot-2"
        (row,) = [
            row
            for row in json.loads(await call("token", "ls", "--json", cwd=tmp_path))
            if row["max_uses"] == 2
        ]
        assert (row["state"], row["names"]) == ("used up", ["spot-1", "spot-2"])

        await call("keys", "create", "keys", "--trainer", "toy/solver", cwd=tmp_path)
        trainer, _ = await daemon(
            *("trainer", "run", "--config", file, *here),
            *("--set", "trainer.policy=toy/solver"),
            cwd=tmp_path,
        )
        started.append(trainer)
        await call("run", "submit", file, *here, cwd=tmp_path)
        async with asyncio.timeout(30):
            while True:
                rows = json.loads(await call("run", "ls", "--json", *here, cwd=tmp_path))
                if rows[0]["state"] == "finished":
                    break
        assert rows == [{"name": "toy", "state": "finished", "reason": "completed"}]
        status = json.loads(await call("status", "--json", *here, cwd=tmp_path))
        assert {agent["name"] for agent in status["agents"]} == {"spot-1", "spot-2"}
        assert list((tmp_path / "box" / "keys" / "signers").iterdir()) == []

        assert "revoked" in await call("keys", "revoke", "spot-2", cwd=tmp_path)
        rows = json.loads(await call("keys", "ls", "--json", cwd=tmp_path))
        assert {row["name"]: row["state"] for row in rows}["spot-2"] == "revoked"
        for process in (first, scheduler):
            process.terminate()
            async with asyncio.timeout(10):
                assert await process.wait() == 0
    finally:
        for process in started:
            if process.returncode is None:
                process.kill()
                await process.wait()
