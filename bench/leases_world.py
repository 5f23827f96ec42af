"""A deployment for the lease bench: keys of a large fleet, a run, and the scheduler's process."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from scheduler.config import SchedulerConfig, SchedulerTable
from transport.key_files import to_toml
from transport.keys import KeyPair, create_keys
from transport.messages import Role
from transport.runs import PolicySpec, RunSpec, TaskSpec, WorkflowSpec
from transport.runtime.settings import LogConfig, TransportConfig

RUN: Final = "bench"
POLICY: Final = "bench/solver"
SUBMITTERS: Final = ("load-0", "load-1", "load-2", "load-3")
READY_S: Final = 60.0
ITEMS: Final = 64
CONFIG: Final = "deployment.toml"


class World(NamedTuple):
    """Keys by name and where the scheduler listens."""

    folder: Path
    config: SchedulerConfig
    server_key: str
    agents: dict[str, KeyPair]
    submitters: dict[str, KeyPair]
    services: dict[str, KeyPair]
    operator: Path
    run: RunSpec


class Started(NamedTuple):
    """The scheduler's process. ``serving_s`` is from its start to the ready line."""

    process: "subprocess.Popen[str]"
    control_port: int
    trajectories_port: int


def make_world(folder: Path, agents: int, *, http: str = "enabled = false") -> World:
    """Keys and configuration below ``folder``. Agents' secret keys stay in memory: writing and
    syncing a thousand files is not what is measured. ``http`` is the table of that name."""
    keys = folder / "keys"
    made = create_keys(keys, submitters=SUBMITTERS)
    fleet = {}
    for number in range(agents):
        name = f"agent-{number:04d}"
        fleet[name] = KeyPair.generate(name, Role.AGENT)
        public = keys / "authorized" / f"{name}.toml"
        public.write_text(to_toml(fleet[name].public), encoding="utf-8")
    items = folder / "items.jsonl"
    lines = [json.dumps({"prompt": f"{i} + 1 =", "answer": str(i + 1)}) for i in range(ITEMS)]
    items.write_text("\n".join(lines) + "\n", encoding="utf-8")
    config = SchedulerConfig(
        transport=TransportConfig(
            control_port=0, trajectories_port=0, weights_port=0, enrolment_port=0, keys=str(keys)
        ),
        log=LogConfig(level="warning"),
        scheduler=SchedulerTable(folder=str(folder / "scheduler"), durability="power-loss"),
    )
    (folder / CONFIG).write_text(
        f"""
[transport]
control_port = 0
trajectories_port = 0
weights_port = 0
enrolment_port = 0
keys = {json.dumps(config.transport.keys)}

[http]
{http}

[scheduler]
folder = {json.dumps(config.scheduler.folder)}
durability = "power-loss"

[log]
level = "warning"
""",
        encoding="utf-8",
    )
    return World(
        folder,
        config,
        made.server.public_key,
        fleet,
        made.submitters,
        made.services,
        keys / "operator.toml",
        run_spec(str(items)),
    )


def run_spec(path: str) -> RunSpec:
    """One policy that nobody trains: all work but a group or two is external."""
    return RunSpec(
        name=RUN,
        policies={"solver": PolicySpec(model="none", batch_groups=1, max_policy_lag=0)},
        task=TaskSpec(source="jsonl", path=path, reward="exact"),
        workflow=WorkflowSpec(policies=("solver",), group_size=1, max_new_tokens=64),
    )


@contextmanager
def scheduler(world: World, *, real_log: bool, profile: Path | None = None) -> Iterator[Started]:
    """The scheduler daemon, power-loss durability. Without ``real_log`` it starts no services: a
    stand-in speaks for the trajectory log, and weights are not part of the bench."""
    command = [sys.executable, "-m", "bench.leases_scheduler"]
    command += ["--real-log"] if real_log else []
    command += ["--profile", str(profile)] if profile else []
    process = subprocess.Popen(
        [*command, "--config", str(world.folder / CONFIG), "--stop-on-eof"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the scheduler ended with status {process.wait(READY_S)}")
        ports = json.loads(line)["ports"]
        yield Started(process, ports["control"], ports["trajectories"])
    finally:
        process.stdin.close()
        try:
            process.wait(READY_S)
        except subprocess.TimeoutExpired:
            process.kill()
        process.stdout.close()


def with_port(world: World, port: int) -> TransportConfig:
    return msgspec.structs.replace(world.config.transport, control_port=port)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
