"""Programs as workflows: real processes, the real ``openai`` package, a fake engine."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from agent_cloud import WAIT_S, AgentCloud, Life
from chat_bench import Watched, check_exact, client_of
from workflow_bench import SOLVER, Bench, crash, offer

from edge_agent.attempt_runner import AttemptRunner
from edge_agent.config import ProgramTable
from edge_agent.core.effects import RunAttempt
from edge_agent.core.events import GroupSpooled
from edge_agent.workflow import Rollout, Workflow, WorkflowContext
from edge_agent.workflows.program import offered_programs
from transport.errors import ConfigError
from transport.memory_links import MemoryNetwork
from transport.messages import AttemptFailed, Hello, Item, VersionServing
from transport.runtime.clock import SystemClock
from transport.runtime.config import convert

EXAMPLE = Path(__file__).parents[2] / "examples" / "programs" / "second_try.py"

ASK = """
import json, os, sys, urllib.request

def post(path, body):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + path,
        data=json.dumps(body).encode(),
        headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.load(reply)

item = json.loads(os.environ["FARFLOW_ITEM"])
messages = [{"role": "user", "content": item["prompt"]}]
answer = post("/chat/completions", {"model": "solver", "messages": messages})
"""


class ProgramBench(Bench):
    """A bench for workflows that an agent offers, and an engine that notes what it does."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.watched = self.engine = Watched()

    @contextlib.asynccontextmanager
    async def running(self, workflow: Workflow) -> AsyncIterator[AttemptRunner]:
        await self.start()
        runner = AttemptRunner(
            self.engine,
            self.rewards,
            self.spool,
            {workflow.reference: workflow},
            clock=SystemClock(),
            timeout_s=20.0,
            feed=self.feed,
        )
        try:
            yield runner
        finally:
            await runner.close()
            await self.engine.close()

    async def attempt(self, workflow: Workflow, **changes: Any) -> Any:
        """The last event of an attempt with two siblings."""
        values = {"group_size": 2, "settings": {}, "workflow": workflow.reference, **changes}
        async with self.running(workflow) as runner, asyncio.TaskGroup() as tasks:
            runner.start(RunAttempt(offer=offer(**values), queued_s=0.0), tasks)
        return self.events[-1]


@pytest.fixture
def bench(tmp_path: Path) -> ProgramBench:
    return ProgramBench(tmp_path)


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "Z (zombie)" not in status.read_text()


def program(code: str, folder: Path, **table: Any) -> Workflow:
    (folder / "agent.py").write_text(code)
    given = {"command": (sys.executable, "agent.py"), "folder": str(folder), **table}
    return offered_programs({"mine": ProgramTable(**given)})["program:mine"]


@pytest.mark.asyncio
async def test_the_example_with_the_openai_package_makes_exact_rollouts(
    bench: ProgramBench,
) -> None:
    [offered] = offered_programs(
        {"second_try": ProgramTable(command=(sys.executable, str(EXAMPLE)))}
    ).values()
    spooled = await bench.attempt(offered, group_size=3)
    assert isinstance(spooled, GroupSpooled), spooled
    group = bench.group()
    assert len(group.sequences) == 3
    drawn = {completion.tokens for _, done in bench.watched.drawn for completion in done}
    for sequence in group.sequences:
        assert sequence.reward in (0.0, 0.5, 1.0)
        begin = 0
        for count, policy, version in sequence.segments:
            tokens = sequence.tokens[begin : begin + count]
            assert (policy, version) == (-1, 0) or (tokens in drawn and version == 3)
            begin += count
        assert len(sequence.segments) == (1 if sequence.reward == 1.0 else 3)
    assert {request.request_id.split("/chat-")[1] for request, _ in bench.watched.drawn} >= {
        "1.1", "2.1", "3.1",
    }  # fmt: skip


@pytest.mark.asyncio
async def test_without_a_reward_the_runs_verifier_scores_the_last_text(
    bench: ProgramBench, tmp_path: Path
) -> None:
    spooled = await bench.attempt(program(ASK, tmp_path))
    assert isinstance(spooled, GroupSpooled), spooled
    for sequence in bench.group().sequences:
        text = bench.engine.decode(SOLVER, sequence.tokens)
        assert sequence.reward == float(text == "7")


@pytest.mark.asyncio
async def test_a_program_sees_nothing_else_of_the_agents_environment(
    bench: ProgramBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "x")
    monkeypatch.setenv("WANTED", "y")
    code = ASK + "open(sys.argv[1], 'w').write(json.dumps(dict(os.environ)))"
    seen = tmp_path / "seen"
    await bench.attempt(
        program(
            code,
            tmp_path,
            command=(sys.executable, "agent.py", str(seen)),
            inherit=("WANTED", "ABSENT"),
            environment={"MODE": "short"},
        ),
        group_size=1,
    )
    found = json.loads(seen.read_text())
    found.pop("LC_CTYPE", None)  # Python's own doing
    assert set(found) == {
        "OPENAI_BASE_URL", "OPENAI_API_KEY", "FARFLOW_ITEM", "PATH", "WANTED", "MODE",
        "FARFLOW_PROGRAM",
    }  # fmt: skip
    assert json.loads(found["FARFLOW_ITEM"])["answer"] == "7"
    assert (found["WANTED"], found["MODE"]) == ("y", "short")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("code", "failure", "says"),
    [
        (f"{ASK}\nraise ValueError('no such tool')", "program.failed", "no such tool"),
        ("import sys; sys.exit(3)", "program.failed", "status 3"),
        ("import os; os.kill(os.getpid(), 9)", "program.failed", "SIGKILL"),
        ("pass", "chat.no_calls", "no call"),
        ("import sys, time\nprint('hm', file=sys.stderr, flush=True)\ntime.sleep(60)",
         "program.timeout", "hm"),
    ],
)  # fmt: skip
async def test_a_program_that_fails_fails_its_attempt(
    bench: ProgramBench, tmp_path: Path, code: str, failure: str, says: str
) -> None:
    timeout_s = 1.0 if failure == "program.timeout" else 15.0
    settings = {"timeout_s": timeout_s}
    crashed = await bench.attempt(program(code, tmp_path), settings=settings, group_size=1)
    assert (crash([crashed]).code, says in crashed.detail) == (failure, True), crashed.detail


@pytest.mark.asyncio
async def test_what_a_program_leaves_behind_is_killed(bench: ProgramBench, tmp_path: Path) -> None:
    code = f"""{ASK}
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open("pid", "w").write(str(child.pid))
"""
    spooled = await bench.attempt(program(code, tmp_path), group_size=1)
    assert isinstance(spooled, GroupSpooled), spooled
    pid = int((tmp_path / "pid").read_text())
    async with asyncio.timeout(5.0):
        while alive(pid):
            await asyncio.sleep(0.01)


@pytest.mark.asyncio
@pytest.mark.parametrize("ends", ["sys.exit(0)", "sys.exit(3)", "time.sleep(60)"])
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is no /proc elsewhere")
async def test_what_left_its_session_is_killed_too(
    bench: ProgramBench, tmp_path: Path, ends: str
) -> None:
    code = f"""{ASK}
import signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open("pid", "w").write(str(os.getpid()))
        os.rename("pid", "left")
        time.sleep(60)
    os._exit(0)
while not os.path.exists("left"):
    time.sleep(0.01)
{ends}
"""
    await bench.attempt(program(code, tmp_path), group_size=1, settings={"timeout_s": 3.0})
    pid = int((tmp_path / "left").read_text())
    async with asyncio.timeout(5.0):
        while alive(pid):
            await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_an_abort_kills_the_program(bench: ProgramBench, tmp_path: Path) -> None:
    offered = program(ASK + "import time; time.sleep(60)", tmp_path)
    async with bench.running(offered) as runner, asyncio.TaskGroup() as tasks:
        made = offer(group_size=2, settings={}, workflow=offered.reference)
        runner.start(RunAttempt(offer=made, queued_s=0.0), tasks)
        await bench.watched.asked.wait()
        runner.abort(made.attempt, made.fence)
    assert bench.events == []


@pytest.mark.asyncio
async def test_what_cannot_be_started_says_so(bench: ProgramBench, tmp_path: Path) -> None:
    crashed = await bench.attempt(program("", tmp_path, command=("/nowhere/python",)))
    assert crash([crashed]).code == "program.not_started"
    assert "[agent.programs.mine]" in crashed.detail


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"command": ["rm", "-rf", "/"]}, "command"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"keep": "best"}, "keep"),
    ],
)
async def test_a_run_cannot_say_what_is_the_owners(
    bench: ProgramBench, tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    crashed = await bench.attempt(program(ASK, tmp_path), settings=settings)
    assert crash([crashed]).code == "workflow.malformed"
    assert says in crashed.detail


@pytest.mark.asyncio
async def test_an_item_that_fits_no_environment_is_refused(
    bench: ProgramBench, tmp_path: Path
) -> None:
    items = (Item(index=1, prompt="x" * 100_000, answer=""),)
    crashed = await bench.attempt(program(ASK, tmp_path), items=items)
    assert (crash([crashed]).code, "98304" in crashed.detail) == ("workflow.malformed", True)


@pytest.mark.asyncio
async def test_no_more_of_a_program_run_than_its_owner_allows(
    bench: ProgramBench, tmp_path: Path
) -> None:
    code = f"""
try:
    lock = __import__("os").open("lock", __import__("os").O_CREAT | __import__("os").O_EXCL)
except FileExistsError:
    raise SystemExit("two at once")
{ASK}
os.unlink("lock")
"""
    spooled = await bench.attempt(program(code, tmp_path, at_once=1), group_size=3)
    assert isinstance(spooled, GroupSpooled), spooled


def test_a_fingerprint_is_of_what_runs(tmp_path: Path) -> None:
    def fingerprint(code: str, *words: str, python: str = "python") -> str:
        return program(code, tmp_path, command=(python, "agent.py", *words)).fingerprint

    assert fingerprint("1") == fingerprint("1", python="/elsewhere/python")
    assert len({fingerprint("1"), fingerprint("2"), fingerprint("1", "--fast")}) == 3


@pytest.mark.parametrize(
    ("name", "table", "says"),
    [
        ("a b", {"command": ("x",)}, "agent.programs.a b"),
        ("a", {"command": ("x",), "folder": "/nowhere"}, "agent.programs.a.folder"),
        ("a", {"command": ("x",), "environment": {"PATH": "/"}}, "PATH"),
        ("a", {"command": ("x",), "inherit": ("OPENAI_API_KEY",)}, "OPENAI_API_KEY"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(
    name: str, table: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        offered_programs({name: convert(table, ProgramTable, "agent.programs")})


@pytest.mark.asyncio
async def test_an_agent_function_written_for_the_api_is_a_workflow(bench: ProgramBench) -> None:
    sessions = []

    async def agent(client: Any, question: str) -> str:
        answer = await client.chat.completions.create(
            model="solver", messages=[{"role": "user", "content": question}]
        )
        return str(answer.choices[0].message.content)

    async def mine(context: WorkflowContext, item: Item) -> list[Rollout]:
        async def sibling() -> Rollout:
            async with context.chat() as chat, client_of(chat) as client:
                sessions.append(chat)
                said = await agent(client, item.prompt)
                return chat.rollout(reward=float(len(said)))

        async with asyncio.TaskGroup() as tasks:
            made = [tasks.create_task(sibling()) for _ in range(context.group_size)]
        rollouts = [task.result() for task in made]
        for rollout in rollouts:
            check_exact(rollout, bench.watched)
        return rollouts

    spooled = await bench.attempt(Workflow("mine", "", mine))
    assert isinstance(spooled, GroupSpooled), spooled
    assert len(bench.group().sequences) == 2
    assert not any(chat.opened_by(chat.key) for chat in sessions)


@pytest.mark.asyncio
async def test_a_session_that_a_workflow_keeps_open_dies_with_the_attempt(
    bench: ProgramBench,
) -> None:
    kept: list[Any] = []

    async def careless(context: WorkflowContext, item: Item) -> list[Rollout]:
        manager = context.chat()
        chat = await manager.__aenter__()
        kept.append((manager, chat))
        async with client_of(chat) as client:
            await client.chat.completions.create(
                model="solver", messages=[{"role": "user", "content": item.prompt}]
            )
        return [chat.rollout()]

    spooled = await bench.attempt(Workflow("careless", "", careless), group_size=1)
    assert isinstance(spooled, GroupSpooled), spooled
    [(manager, chat)] = kept
    assert not chat.opened_by(chat.key)
    await manager.__aexit__(None, None, None)


@pytest.mark.asyncio
async def test_an_agent_advertises_its_programs_and_runs_them(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(ASK + 'assert post("/farflow/reward", {"reward": 3}) == {}')
    table = ProgramTable(command=(sys.executable, "agent.py"), folder=str(tmp_path))
    async with AgentCloud(tmp_path, MemoryNetwork()) as cloud, asyncio.timeout(WAIT_S):
        cloud.publish()
        life = Life(cloud, programs={"mine": table})
        hello = await cloud.hear(Hello)
        assert hello.agent is not None
        offered = offered_programs({"mine": table})["program:mine"]
        assert hello.agent.workflows["program:mine"] == offered.fingerprint
        await cloud.hear(VersionServing)
        cloud.offer(1, workflow="program:mine", group_size=2)
        await cloud.until(lambda: cloud.bodies or cloud.all(AttemptFailed))
        (group,) = cloud.groups().values()
        assert [sequence.reward for sequence in group.sequences] == [3.0, 3.0]
        assert await life.end() == 0
