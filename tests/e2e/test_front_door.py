"""What docs/jobs.md says against real daemons: jobs of one's own, what an operator asks and orders,
an agent that drains from the box itself."""

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bench.toy import write_toy
from farflow.cli import cli
from farflow.client import BodyGone, Client, JobResult, job
from scheduler.operator import Operator, RequestRefused
from transport.keys import create_keys
from transport.runtime.settings import TransportConfig
from transport.status import AgentStatus

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
WITHIN_S = 30.0


class World:
    """A scheduler, an agent and a trainer as processes of their own, with the toy run."""

    def __init__(self, folder: Path, file: Path) -> None:
        self.folder = folder
        self.file = file
        self.keys = folder / "keys"
        self.ports: dict[str, int] = {}
        self.processes: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, name: str, *argv: str) -> dict[str, Any]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "farflow",
                *argv,
                "--config",
                str(self.file),
                *self.here(),
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
        self.processes[name] = process
        assert process.stdout is not None
        async with asyncio.timeout(WITHIN_S):
            line = await process.stdout.readline()
        assert line, (self.folder / f"{name}.log").read_text()[-3000:]
        ready: dict[str, Any] = json.loads(line)
        return ready

    def here(self) -> list[str]:
        planes = ("control", "trajectories", "weights")
        return [
            part
            for plane in planes
            for part in ("--set", f"transport.{plane}_port={self.ports.get(plane, 0)}")
        ]

    @property
    def transport(self) -> TransportConfig:
        return TransportConfig(
            control_port=self.ports["control"],
            trajectories_port=self.ports["trajectories"],
            keys=str(self.keys),
        )

    async def cli(self, *argv: str) -> Result:
        """A command, in this process, with an event loop of its own."""
        places = ["--config", str(self.file), *self.here(), "--set", f"transport.keys={self.keys}"]
        return await asyncio.to_thread(CliRunner().invoke, cli, [*argv, *places])

    async def end(self) -> None:
        for process in self.processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()
            process._transport.close()  # type: ignore[attr-defined]


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    made = World(folder, write_toy(folder, steps=100_000, agents="[local.agents.box1]"))
    create_keys(
        made.keys,
        agents=["box1"],
        trainers=["toy/solver"],
        operators=["operator"],
        submitters=["submitter"],
    )
    try:
        ready = await made.start("scheduler", "scheduler", "run")
        made.ports = ready["ports"]
        await made.start("agent", "agent", "run", "--set", "agent.key=keys/box1.toml")
        trainer = [
            "trainer.policy=toy/solver",
            "trainer.key=keys/trainer-toy-solver.toml",
            "trainer.signing_key=keys/signing/trainer-toy-solver.toml",
        ]
        sets = [part for text in trainer for part in ("--set", text)]
        await made.start("trainer", "trainer", "run", *sets)
        yield made
    finally:
        await made.end()


async def until_agent(operator: Operator, what: str, condition: Any) -> AgentStatus:
    """Poll until the one agent is as wanted; the interval bounds the delay only."""
    agent = None
    try:
        async with asyncio.timeout(WITHIN_S):
            while True:
                agents = (await operator.status()).agents
                agent = agents[0] if agents else None
                if agent is not None and condition(agent):
                    return agent
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"never: {what}; last: {agent}") from None


@pytest.mark.slow
@pytest.mark.asyncio
async def test_jobs_results_questions_orders_and_a_drain_on_the_box(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        submitted = await here.cli("run", "submit", str(here.file))
        assert submitted.exit_code == 0, submitted.output
        async with (
            Operator(here.transport, here.keys / "operator.toml") as operator,
            Client(here.transport) as client,
        ):
            await jobs_and_results(here, client)
            await a_scheduler_that_dies(here, client)
            await the_program_of_the_page(here)
            await questions(here, operator)
            await orders(here, operator)
            left = await here.cli(
                "agent", "drain", "--deadline", "5s", "--set", f"agent.folder={here.folder}/agent"
            )
            assert left.exit_code == 0, left.output
            assert await here.processes["agent"].wait() == 0
            await until_agent(operator, "the agent is gone", lambda a: a.state == "gone")
            nobody = await here.cli("agent", "drain", "--set", f"agent.folder={here.folder}/agent")
            assert nobody.exit_code == 1
            assert "no agent runs on" in nobody.output
            # The same by an operator, from anywhere.
            await here.start("agent", "agent", "run", "--set", "agent.key=keys/box1.toml")
            await until_agent(operator, "it is back", lambda a: a.state == "ready")
            told = await here.cli("drain", "box1", "--deadline", "5s", "--reason", "maintenance")
            assert told.exit_code == 0, told.output
            assert await here.processes["agent"].wait() == 0
            await until_agent(operator, "the agent is gone", lambda a: a.state == "gone")
            away = await here.cli("drain", "box1")
            assert (away.exit_code, "agent.away" in str(away.exception)) == (1, True)


async def jobs_and_results(here: World, client: Client) -> None:
    refused = await client.submit("nope", [job("a", "1 + 1 =", "2")])
    assert [(r.state, r.code) for r in refused] == [("refused", "run.unknown")]
    jobs = [job(f"a-{n}", f"{n} + 1 =", str(n + 1), group_size=3) for n in range(20)]
    assert {r.state for r in await client.submit("toy", jobs)} == {"queued"}
    assert {r.state for r in await client.submit("toy", jobs)} == {"known"}
    cursor = here.folder / "cursor"
    seen = {}
    async with asyncio.timeout(WITHIN_S):
        async for result in client.results(cursor=cursor, until="done"):
            assert result.state == "accepted", result
            group = await client.body(result)
            assert len(group.sequences) == len(result.rewards) == 3
            assert tuple(len(s.tokens) for s in group.sequences) == result.lengths
            seen[result.id] = result
    assert sorted(seen) == sorted(j.id for j in jobs)
    assert int(cursor.read_text()) == 20
    with pytest.raises(BodyGone):  # confirmed, so it is let go, some time
        await until_gone(client, seen["a-0"])

    lines = [json.dumps({"id": f"b-{n}", "prompt": f"{n} + 2 =", "answer": ""}) for n in range(5)]
    file = here.folder / "jobs.jsonl"
    file.write_text("\n".join(lines))
    bodies = here.folder / "bodies"
    waited = await here.cli(
        "submit", "toy", str(file), "--wait", "--timeout", "30s", "--json", "--bodies", str(bodies)
    )
    assert waited.exit_code == 0, waited.output
    shown = [json.loads(line) for line in waited.stdout.splitlines()]
    assert sorted(one["id"] for one in shown) == [f"b-{n}" for n in range(5)]
    assert len(list((bodies / "toy").glob("*.fftg"))) == 5
    again = await here.cli("results", "--after", "25", "--json")
    assert (again.exit_code, again.stdout) == (0, "")
    over = await here.cli("cancel", "toy", "b-1")
    assert over.exit_code == 0, over.output
    unknown = await here.cli("cancel", "toy", "never-was")
    assert (unknown.exit_code, "job.unknown" in unknown.output) == (1, True)


async def a_scheduler_that_dies(here: World, client: Client) -> None:
    """Killed between two results: the client goes on by itself, nothing is lost or given twice."""
    receipts = await client.submit("toy", [job(f"c-{n}", f"{n} + 3 =", "") for n in range(40)])
    assert {receipt.state for receipt in receipts} == {"queued"}
    seen = []
    async with asyncio.timeout(2 * WITHIN_S):
        async for result in client.results(cursor=here.folder / "cursor", until="done"):
            assert (await client.body(result)).sequences
            seen.append(result.id)
            if len(seen) == 3:
                here.processes["scheduler"].kill()
                await here.processes["scheduler"].wait()
                ready = await here.start("scheduler", "scheduler", "run")
                assert ready["ports"] == here.ports
    assert sorted(seen) == sorted(f"c-{n}" for n in range(40))


async def the_program_of_the_page(here: World) -> None:
    """``docs/jobs.md`` has a whole program: it runs."""
    page = (ROOT / "docs" / "jobs.md").read_text()
    [program] = re.findall(r"```python\n(import.*?)```", page, re.DOTALL)
    ports = "".join(f"{plane}_port = {port}\n" for plane, port in here.ports.items())
    deployment = here.folder / "deployment.toml"
    deployment.write_text(f'[transport]\nkeys = "keys"\n{ports}')
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program.replace('"arithmetic"', '"toy"').replace("range(100)", "range(4)"),
        cwd=here.folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(WITHIN_S):
        out, _ = await process.communicate()
    assert process.returncode == 0
    assert out.decode().count("accepted") == 4


async def until_gone(client: Client, result: JobResult) -> None:
    async with asyncio.timeout(WITHIN_S):
        while True:
            await client.packed(result)
            await asyncio.sleep(0.05)


async def questions(here: World, operator: Operator) -> None:
    agent = await until_agent(operator, "a clock offset", lambda a: a.clock_offset_s is not None)
    assert agent.clock_offset_s is not None
    assert abs(agent.clock_offset_s) < 0.05  # one machine, one clock
    assert agent.rtt_s is not None
    assert agent.rtt_s < 0.5
    status = await operator.status()
    assert "loop.lag_ms" in status.counters
    explained = await here.cli("explain", "toy")
    assert explained.exit_code == 0, explained.output
    assert "run toy: running" in explained.output
    agents = await here.cli("explain", "box1", "--json")
    assert json.loads(agents.stdout)["kind"] == "agent"
    nothing = await here.cli("explain", "no-such-thing")
    assert nothing.exit_code == 1
    happened = await here.cli("events", "--json")
    assert happened.exit_code == 0
    numbers = [json.loads(line)["number"] for line in happened.stdout.splitlines()]
    assert numbers == sorted(numbers)
    assert numbers
    following = await here.cli("events", "--follow", "--timeout", "1s")
    assert following.exit_code == 0, following.output
    letters = await here.cli("dead", "ls")
    assert letters.exit_code == 0, letters.output
    absent = await here.cli("dead", "show", "toy/t-1")
    assert (absent.exit_code, "no such dead letter" in absent.output) == (1, True)
    replayed = await here.cli("dead", "replay", "toy/t-1")
    assert replayed.exit_code == 1, replayed.output


async def orders(here: World, operator: Operator) -> None:
    shown = await here.cli("logs", "box1", "--lines", "2000")
    assert shown.exit_code == 0, shown.output
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    assert any(line["event"] == "agent.welcome" for line in lines)
    with pytest.raises(RequestRefused, match=r"agent\.unknown"):
        await operator.agent_logs("box9")
    for order, check in (
        ("cordon", lambda a: a.cordoned),
        ("uncordon", lambda a: not a.cordoned),
        ("quarantine", lambda a: bool(a.quarantined)),
        ("release", lambda a: not a.quarantined),
    ):
        done = await here.cli(order, "box1")
        assert done.exit_code == 0, done.output
        await until_agent(operator, order, check)
    table = await here.cli("status")
    assert table.exit_code == 0
    assert "box1" in table.output
