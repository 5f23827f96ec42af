"""Every ``farflow`` line of the documents' shell blocks is typed once, against real daemons, in the
order that makes sense: what is set up, what is looked at, what is ordered, what is taken back.

A line that no rule below names is run while everything works, and has to end with status 0. Places
that the documents leave open (CLOUD_ADDRESS, FOLDER, ID) are filled in; ports are free ones."""

import json
import re
import shlex
import shutil
import socket
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from document_commands import PAGES, ROOT, commands, on_hosts

from bench.toy import write_toy
from tests.e2e.test_by_hand import FARFLOW, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

COMMAND_S = 40.0
PLANES = ("control", "trajectories", "weights", "enrolment")

ELSEWHERE = {
    r"^farflow (agent|scheduler|trainer) (un)?install": "systemd: test_installed_agent.py",
    r"^farflow sim (compare|experiment|export|plan|run|sweep) ": "minutes: test_sim_commands.py",
    r"^farflow up ": "whole runs: test_main_job.py, test_adapter_policy.py, test_own_model.py,"
    " tests/vllm/test_arithmetic_vllm.py",
    r"^farflow top ": "needs a terminal: test_top.py",
    r"^farflow relay run ": "test_relay.py",
    r"^farflow (agent|trainer) run --set ": "the same from a file here; by options test_by_hand.py",
    r"^farflow agent run --config box/": "the same from the folder farflow-agent here",
    r" --follow ": "goes on until Ctrl-C: test_front_door.py",
    r" --finish ": "until a restart commands fail, as the page says: test_keys_commands.py",
}
"""Lines that are only parsed (tests/unit/test_documents.py), and who runs what they do."""

PHASES: tuple[tuple[str, str], ...] = (
    (r"trial", "trial"),
    (r"^farflow (keys create|init|config check|trainer numpy-model) ", "before"),
    (r"^farflow token (http )?create ", "tokens"),
    (r"^farflow scheduler run ", "scheduler"),
    (r"^farflow agent enrol .*--folder box ", "first box"),
    (r"^farflow agent enrol --new-key ", "new key"),
    (r"^farflow agent enrol ", "second box"),
    (r"^farflow agent run ", "second box"),
    (r"^farflow run submit ", "run"),
    (r"^farflow keys add ", "run"),
    (r"^farflow submit ", "jobs"),
    (r"^farflow (cancel|results) |^farflow explain .*/x-", "results"),
    (r"^farflow (cordon|uncordon|quarantine) ", "orders"),
    (r"^farflow release ", "release"),
    (r"^farflow run pause ", "pause"),
    (r"^farflow run resume ", "resume"),
    (r"^farflow run stop ", "stop"),
    (r"^farflow drain ", "drain"),
    (r"^farflow agent drain ", "agent drain"),
    (r"^farflow keys revoke ", "revoked"),
    (r"^farflow (token revoke|token http revoke|keys rotate-server) ", "taken back"),
    (r"^farflow scheduler restore ", "restored"),
    (r"^farflow gc ", "restored"),
)
"""The first that matches a line says when it is typed; ``look`` where none does."""

MEANT_TO_FAIL = {r"^farflow dead (show|replay) arithmetic/t-000017": "t-000017|job.unknown"}
"""Where the state that a page speaks of cannot be made here (no job was given up): what is said
with exit status 1."""


def documented() -> list[str]:
    """Distinct lines, in the order of the documents."""
    lines: dict[str, None] = {}
    for page in PAGES:
        hosts = on_hosts(page)
        for line in commands(page):
            if line.startswith("farflow ") and line not in hosts:
                lines[line] = None
    return list(lines)


def first_match(rules: Iterable[str], line: str) -> str | None:
    return next((rule for rule in rules if re.search(rule, line)), None)


LINES = [line for line in documented() if first_match(ELSEWHERE, line) is None]


def phase_of(line: str) -> str:
    return next((phase for rule, phase in PHASES if re.search(rule, line)), "look")


def test_no_rule_is_stale() -> None:
    lines = documented()
    for rule in [*ELSEWHERE, *MEANT_TO_FAIL, *(rule for rule, _ in PHASES)]:
        assert any(re.search(rule, line) for line in lines), rule
    assert len(LINES) >= 60


class Desk:
    """Somebody who types in ``folder``; every program that was started is gone afterwards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: list[subprocess.Popen[str]] = []
        self.filled: list[tuple[str, str]] = [("CLOUD_ADDRESS", "127.0.0.1")]
        self.faults: list[str] = []
        self.typed: list[str] = []

    def words(self, line: str) -> list[str]:
        for place, value in self.filled:
            line = re.sub(rf"\b{place}\b", value, line)
        return [*FARFLOW, *shlex.split(line)[1:]]

    def type(self, line: str) -> str:
        """Run one line to its end; what is wrong is kept and told at the end."""
        told = first_match(MEANT_TO_FAIL, line)
        status, word = (0, "") if told is None else (1, MEANT_TO_FAIL[told])
        self.typed.append(line)
        process = subprocess.Popen(
            self.words(line),
            cwd=self.folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            said, _ = process.communicate(timeout=COMMAND_S)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        if process.returncode != status or not re.search(word, said):
            self.faults.append(f"{line}\n    status {process.returncode}: {said.strip()[-700:]}")
        return said

    def start(self, line: str, *more: str) -> subprocess.Popen[str]:
        """Start a daemon, and wait until it says that it is up."""
        log = (self.folder / f"daemon-{len(self.daemons)}.log").open("w")
        with log:
            process = subprocess.Popen(
                [*self.words(line), *more],
                cwd=self.folder,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.daemons.append(process)
        self.typed.append(line)
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready.startswith("{"), f"{line}: {Path(log.name).read_text()[-2000:]}"
        return process

    def left(self, process: subprocess.Popen[str], line: str) -> None:
        """Wait until a daemon has ended in order after ``line``."""
        try:
            status = process.wait(COMMAND_S)
        except subprocess.TimeoutExpired:
            status = None
        assert status == 0, "\n".join([f"{line}: the daemon's status is {status}", *self.faults])

    def end(self, process: subprocess.Popen[str]) -> None:
        process.terminate()
        status = process.wait(COMMAND_S)
        if status != 0:
            self.faults.append(f"exit status {status} of {process.args!r}")

    def until(self, line: str, word: str = "") -> None:
        """Type a line until it succeeds and says ``word``."""
        before = len(self.faults)
        for _ in range(40):
            said = self.type(line)
            if len(self.faults) == before and re.search(word, said):
                return
            fault = "\n".join(self.faults[before:])
            del self.faults[before:]
        self.faults.append(f"never came true: {line}\n{fault}")


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    for process in desk.daemons:
        if process.poll() is None:
            process.kill()
        process.communicate()


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def phase(name: str) -> list[str]:
    return [line for line in LINES if phase_of(line) == name]


def write_deployment(folder: Path) -> None:
    """``deployment.toml``, the run of ``examples/arithmetic.toml`` in small, and the files that
    the documents speak of."""
    toy = write_toy(folder, steps=100_000, agents="[local.agents.box1]").read_text()
    toy = toy.replace('name = "toy"', 'name = "arithmetic"')
    (folder / "examples").mkdir()
    toy = toy.replace('model = "model"', 'model = "../model"').replace('"items', '"../items')
    (folder / "examples" / "arithmetic.toml").write_text(toy)
    (folder / "examples" / "mine.toml").write_text(toy)
    ports = dict(zip(PLANES, free_ports(len(PLANES)), strict=True))
    lines = [f"{plane}_port = {port}" for plane, port in ports.items()]
    transport = "\n".join(["[transport]", 'keys = "keys"', *lines])
    deployment = (
        f'{transport}\n[scheduler]\nfolder = "scheduler"\nkeep_versions = 64\n[http]\nport = 0\n'
    )
    (folder / "deployment.toml").write_text(deployment)
    (folder / "runs" / "arithmetic-0001").mkdir(parents=True)
    (folder / "runs" / "arithmetic-0001" / "deployment.toml").write_text(deployment)
    (folder / "trainer.toml").write_text(
        f"{transport}\n[trainer]\npolicy = 'arithmetic/solver'\nfolder = 'trainer'\n"
        "key = 'keys/trainer-arithmetic-solver.toml'\n"
        "signing_key = 'keys/signing/trainer-arithmetic-solver.toml'\n"
    )


def write_jobs(folder: Path, *numbers: int) -> None:
    jobs = [{"id": f"q-{n}", "prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in numbers]
    (folder / "jobs.jsonl").write_text("".join(json.dumps(job) + "\n" for job in jobs))


def with_fake_engine(folder: Path) -> None:
    """What the page's ``agent.toml`` says, with the engine that needs no GPU and no torch."""
    file = folder / "agent.toml"
    text = re.sub(r"(?m)^#? ?\[agent\]$", '[agent]\nengine = "fake"\nslots = 16', file.read_text())
    file.write_text(text)
    shutil.copy(file, folder.parent / "agent.toml")


def agent_folder(folder: Path) -> str:
    """``agent.folder`` of the enrolled box."""
    return str(tomllib.loads((folder / "agent.toml").read_text())["agent"]["folder"])


def token(desk: Desk) -> None:
    (desk.folder / "box1.token").unlink(missing_ok=True)
    [line] = [x for x in phase("tokens") if "--lifetime 24h" in x]
    desk.type(line)


def test_the_documents_commands_do_what_they_say(desk: Desk) -> None:
    folder, fill = desk.folder, desk.filled
    write_deployment(folder)
    fill += [("far", "box1"), ("RUN", "."), ("state/scheduler", "scheduler")]
    desk.filled = [*fill, ("FOLDER", "made")]
    for line in phase("before"):
        if "numpy-model" in line:
            (folder / "model").rename(folder / "model-of-toy")
        desk.type(line)
    for line in phase("tokens"):  # pages that stand alone use one name twice
        (folder / "box1.token").unlink(missing_ok=True)
        if match := re.search(r" http create (\w+)", line):
            (folder / "keys" / "http" / f"{match[1]}.toml").unlink(missing_ok=True)
        desk.type(line)
    [line] = phase("scheduler")
    scheduler = desk.start(line)
    for line in [*phase("first box"), *phase("revoked")]:
        if " enrol " in line:
            token(desk)
        desk.type(line)
    for line in phase("second box"):
        if " enrol " in line:
            token(desk)
            desk.type(line)
            with_fake_engine(folder / "farflow-agent")
        else:
            run_agent = line
    agent = desk.start(run_agent)
    trainer = desk.start("farflow trainer run --config trainer.toml")
    for line in phase("run"):
        desk.type(line)
    newest = "farflow weights show arithmetic/solver 12 --config deployment.toml"
    desk.until(newest)
    desk.filled = [*fill, ("FOLDER", "scheduler")]
    for name in ("pause", "look", "resume", "jobs", "results", "orders", "release", "stop"):
        if name == "look":
            with ThreadPoolExecutor(4) as hands:
                list(hands.map(desk.type, phase(name)))
            continue
        for number, line in enumerate(phase(name)):
            write_jobs(folder, 2 * number + 1, 2 * number + 2)
            desk.type(line)
    desk.left(trainer, "farflow run stop")

    desk.filled = [*fill, ("FOLDER", agent_folder(folder / "farflow-agent"))]
    for line in [*phase("drain"), *phase("agent drain")]:
        if agent.poll() is not None:
            agent = desk.start(run_agent)
            desk.until("farflow explain box1 --config deployment.toml", r"box1: (ready|joining)")
        desk.type(line)
        desk.left(agent, line)

    for line in [*phase("revoked"), *phase("new key")]:
        if " enrol " in line:
            token(desk)
        desk.type(line)
    found = json.loads(desk.type("farflow token ls --json --config deployment.toml"))
    desk.filled = [*fill, ("ID", found[-1]["id"])]
    for line in phase("taken back"):
        desk.type(line)
    desk.end(scheduler)
    for line in phase("restored"):
        desk.type(line)
    untyped = set(LINES) - set(desk.typed) - set(phase("trial"))
    assert (desk.faults, untyped) == ([], set()), "\n".join(desk.faults)


def test_the_trial_by_hand_works_as_it_is_written(desk: Desk) -> None:
    """docs/operations.md, its first section, ports aside."""
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    [trial] = re.findall(r"```toml\n(\[run\]\nname = \"trial\".*?)```", page, re.DOTALL)
    ports = dict(zip(PLANES, free_ports(len(PLANES)), strict=True))
    lines = "\n".join(f"{plane}_port = {port}" for plane, port in ports.items())
    extra = f"\n[transport]\n{lines}\n[http]\nport = 0\n"
    (desk.folder / "trial.toml").write_text(trial + extra)
    [items] = [x for x in commands(ROOT / "docs" / "operations.md") if x.startswith("seq ")]
    subprocess.run(["bash", "-c", items], cwd=desk.folder, check=True, timeout=COMMAND_S)
    desk.type("farflow trainer numpy-model model")
    started = []
    for line in phase("trial"):
        if re.match(r"farflow (scheduler|agent|trainer) run ", line):
            started.append(desk.start(line))
        else:
            desk.type(line)
    scheduler, agent, trainer = started
    assert trainer.wait(COMMAND_S) == 0
    assert "finished (completed)" in desk.type("farflow status --config trial.toml")
    desk.end(agent)
    desk.end(scheduler)
    assert desk.faults == [], "\n".join(desk.faults)
