"""docs/install.md, command by command: a deployment is written, a box becomes an agent with one
command, what its unit says starts it, and the same command again is an upgrade."""

import asyncio
import json
import re
import shlex
from pathlib import Path

import pytest

from tests.e2e.test_by_hand import FARFLOW, call, daemon, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


async def refused(*argv: str, cwd: Path) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *FARFLOW,
        *argv,
        cwd=cwd,
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    return process.returncode, out.decode()


@pytest.mark.asyncio
async def test_a_box_becomes_an_agent_with_one_command(tmp_path: Path) -> None:
    await call("init", "cloud", cwd=tmp_path)
    file = tmp_path / "cloud" / "deployment.toml"
    text = file.read_text()
    for plane in ("control", "trajectories", "weights", "enrolment"):
        text = re.sub(rf"(?m)^#{plane}_port = \d+ .*", f"{plane}_port = 0", text)
    file.write_text(text)
    await call("config", "check", str(file), cwd=tmp_path)
    config = ("--config", str(file))
    first_port = ("--set", "transport.enrolment_port=1")  # any open token has the port chosen
    await call("token", "create", *config, *first_port, cwd=tmp_path)
    place = ("--folder", "box", "--unit-folder", "units", "--user")
    started = []
    try:
        scheduler, ready = await daemon("scheduler", "run", *config, cwd=tmp_path)
        started.append(scheduler)
        async with asyncio.timeout(10):
            while not (tmp_path / "cloud" / "scheduler" / "enrolment-port").is_file():
                await asyncio.sleep(0.05)
        await call("token", "create", *config, "--out", "box.token", cwd=tmp_path)

        status, said = await refused("agent", "install", *place, cwd=tmp_path)
        assert (status, "--token-file" in said) == (78, True)
        install = ("agent", "install", "--token-file", "box.token", "--name", "box", *place)
        said = await call(*install, "--engine", "fake", "--slots", "7", cwd=tmp_path)
        assert "not started" in said
        own = tmp_path / "box" / "agent.toml"
        assert "\nslots = 7\n" in own.read_text()
        unit = (tmp_path / "units" / "farflow-agent.service").read_text()
        assert "\nTimeoutStopSec=75\n" in unit
        own.write_text(own.read_text().replace("slots = 7", "slots = 9"))
        status, said = await refused("agent", "install", *place, "--slots", "3", cwd=tmp_path)
        assert (status, f"{own} has slots = 9" in said) == (78, True)
        said = await call("agent", "install", *place, "--slots", "9", cwd=tmp_path)
        assert f'kept: engine = "fake", device = "cpu", slots = 9 ({own})' in said
        assert "unchanged:" in said
        assert "\nslots = 9\n" in own.read_text()

        found = re.search(r"(?m)^ExecStart=(.*)$", unit)
        assert found is not None
        agent = await asyncio.create_subprocess_exec(
            *shlex.split(found[1]), cwd=tmp_path / "box", env=environment()
        )
        started.append(agent)
        here = [
            part
            for plane, port in ready["ports"].items()
            for part in ("--set", f"transport.{plane}_port={port}")
        ]
        async with asyncio.timeout(20):
            while True:
                found_status = json.loads(
                    await call("status", "--json", *config, *here, cwd=tmp_path)
                )
                if [(a["name"], a["slots"]) for a in found_status["agents"]] == [("box", 9)]:
                    break
        assert "removed:" in await call(
            "agent", "uninstall", "--unit-folder", "units", "--user", cwd=tmp_path
        )
        assert own.exists()

        own.write_text(own.read_text().replace('engine = "fake"', 'engine = "warp"'))
        status, said = await refused("agent", "install", *place, cwd=tmp_path)
        assert (status, "agent.engine" in said) == (78, True)
        own.write_text(own.read_text().replace('engine = "warp"', 'engine = "fake"'))
        (tmp_path / "box" / "keys" / "server.public.toml").unlink()
        said = await call("agent", "install", *place, cwd=tmp_path)  # as for an image
        assert ("first: keys" in said, "warning: something is wrong" in said) == (True, True)
        assert (tmp_path / "units" / "farflow-agent.service").exists()
        for process in (agent, scheduler):
            process.terminate()
            async with asyncio.timeout(10):
                assert await process.wait() == 0
    finally:
        for process in started:
            if process.returncode is None:
                process.kill()
                await process.wait()
