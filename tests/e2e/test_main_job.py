"""``farflow up examples/arithmetic.toml`` as a user runs it: it learns, and leaves its results."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from bench.toy import write_toy

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "arithmetic.toml"


async def up(*argv: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "farflow",
        "up",
        "--plain",
        *argv,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.asyncio
async def test_the_main_job_learns(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = await up(str(EXAMPLE), "--folder", str(folder))
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    summary = json.loads((folder / "summary.json").read_text())
    (policy,) = summary["policies"]
    assert summary["problems"] == []
    assert policy["accuracy_before"] <= 0.5
    assert policy["accuracy_after"] >= 0.8
    assert policy["held_out_items"] >= 1024
    assert all(agent["equal"] for agent in summary["agents"])
    for name in ("metrics.jsonl", "learning_curve.png", "policy_lag.png", "config.json"):
        assert (folder / name).stat().st_size > 0, name
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "models" / "solver")
    tokenizer = AutoTokenizer.from_pretrained(folder / "models" / "solver")
    assert model.num_parameters() < 2_000_000
    assert tokenizer("1 + 2")["input_ids"]


def alive(folder: Path) -> list[str]:
    """Command lines of processes that name the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if str(folder) in line and int(process.name) != os.getpid():
            found.append(line)
    return found


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.asyncio
async def test_ctrl_c_stops_in_order_and_resume_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    toy = str(write_toy(tmp_path, steps=30))
    process = await up(
        toy, "--folder", str(folder), "--set", "http.enabled=true", "--set", "http.port=0"
    )
    assert process.stdout is not None
    said = [b""]
    async with asyncio.timeout(25):
        while b"step 6 " not in said[-1]:
            said.append(await process.stdout.readline())
    [dashboard] = [line.decode() for line in said if line.startswith(b"dashboard: ")]
    assert str(folder / "state" / "scheduler" / "gateway" / "local-token") in dashboard
    async with aiohttp.ClientSession() as client, client.get(dashboard.split()[1]) as reply:
        assert (reply.status, reply.content_type) == (200, "text/html")
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(10):
        rest = await process.stdout.read()
        assert await process.wait() == 0
    assert b"--resume" in rest
    assert alive(folder) == []

    for _ in range(2):  # the second time there is nothing left to do but the summary
        process = await up("--resume", str(folder))
        assert process.stdout is not None
        async with asyncio.timeout(25):
            output = await process.stdout.read()
            assert await process.wait() == 0, output.decode()
        summary = folder / "summary.json"
        assert json.loads(summary.read_text())["problems"] == []
        summary.unlink()


@pytest.mark.timeout(90)
@pytest.mark.asyncio
async def test_a_second_ctrl_c_leaves_at_once_and_leaves_nobody_behind(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = await up(str(write_toy(tmp_path, steps=200)), "--folder", str(folder))
    assert process.stdout is not None
    async with asyncio.timeout(25):
        while b"step 2 " not in await process.stdout.readline():
            pass
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(5):
        while b"stopping" not in await process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        assert b"--resume" in await process.stdout.read()
        assert await process.wait() == 130
    async with asyncio.timeout(10):
        while alive(folder):
            await asyncio.sleep(0.05)
