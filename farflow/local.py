"""A whole deployment as child processes on this machine: links, scheduler, trainers, agents.

What always holds: every child stops when this process ends, in whatever way (its standard input
closes); a child that ends is started again with growing delays, except one that refuses its
configuration and a trainer that has finished; ports stay the same over a restart of the scheduler.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from farflow.local_argv import FARFLOW, PLANES, CommandLines
from farflow.run_folder import RunFolder
from farflow.up_config import ANY_PORT, LocalAgent, UpConfig
from transport.errors import ConfigError, FarflowError, ProcessFailed
from transport.ids import policy_id
from transport.keys import create_keys
from transport.runs import RunSpec
from transport.runtime.origin import EXIT_CONFIG
from transport.runtime.processes import (
    ChildProcess,
    ChildSpec,
    RestartPolicy,
    describe_status,
    start_child,
)
from transport.runtime.settings import TransportConfig

NO_LINK = "local"
"""The link profile that needs no emulator."""

SETTLED_S = 15.0
"""A child that lived so long has not failed to start."""
MAX_RESTARTS_IN_A_ROW = 8
EXIT_SEEN_S = 2.0

_RESTART = RestartPolicy(first_delay_s=0.2, max_delay_s=5.0)
_LAST_WORDS = 300

_T = TypeVar("_T")

_log = structlog.get_logger()


class _Kept:
    """One child that is kept running."""

    def __init__(self, name: str, spec: ChildSpec) -> None:
        self.name = name
        self.spec = spec
        self.child: ChildProcess | None = None
        self.task: asyncio.Task[None] | None = None
        self.restarts = 0
        self.may_finish = name.startswith("trainer-")
        self.finished = asyncio.Event()
        self.revived = asyncio.Event()
        self.may_run = asyncio.Event()
        self.may_run.set()


class LocalDeployment:
    """Starts, keeps and stops the processes of ``farflow up``."""

    def __init__(
        self,
        folder: RunFolder,
        overrides: tuple[str, ...],
        up: UpConfig,
        agents: list[LocalAgent],
        spec: RunSpec,
        on_notice: Callable[[str], None] = lambda text: None,
        *,
        restart: RestartPolicy = _RESTART,
        most_restarts: int = MAX_RESTARTS_IN_A_ROW,
    ) -> None:
        """A child that ends is started again after the delays of ``restart``; one that ended more
        than ``most_restarts`` times in a row soon after its start fails the deployment."""
        self.folder = folder
        self.on_notice = on_notice
        self.spec = spec
        self.up = up
        self.agents = agents
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        http_port = ANY_PORT.port if up.http == ANY_PORT else None
        self._argv = CommandLines(folder, overrides, spec, http_port)
        self._kept: dict[str, _Kept] = {}
        self._ports: dict[str, int] = {}
        self._restart = restart
        self._most_restarts = most_restarts
        self._stopping = False
        self._late: list[asyncio.Task[None]] = []

    @property
    def trained(self) -> list[str]:
        """Names of the policies that have a trainer here."""
        return [name for name, policy in self.spec.policies.items() if policy.trained]

    def transport(self) -> TransportConfig:
        """How an operator on this machine reaches the scheduler."""
        return msgspec.structs.replace(
            self.up.transport,
            host="127.0.0.1",
            keys=str(self.folder.keys),
            control_port=self._ports["control"],
            trajectories_port=self._ports["trajectories"],
            weights_port=self._ports["weights"],
        )

    @property
    def operator_key(self) -> Path:
        return self.folder.keys / "operator.toml"

    def dashboard(self) -> str:
        """The dashboard's address, "" while it is not there."""
        try:
            return (self.folder.gateway / "address").read_text(encoding="utf-8").strip()
        except OSError:
            return ""

    async def start(self) -> None:
        """Start everything; returns when scheduler and links are ready.

        Raises:
            ProcessFailed: a process did not start; quotes its log.
        """
        create_keys(
            self.folder.keys,
            agents=[agent.name for agent in self.agents],
            trainers=[policy_id(self.spec.name, name) for name in self.trained],
        )
        await self._start_scheduler()
        for name in self.trained:
            self._keep(f"trainer-{name}", self._argv.trainer(name, self._ports))
        async with asyncio.TaskGroup() as group:
            for agent in self.agents:
                group.create_task(self._start_agent(agent))

    async def stop(self, within_s: float) -> None:
        """Ask everything to stop: agents and trainers first, so that they can hand back and
        save; whatever still runs after ``within_s`` is killed."""
        self._stopping = True
        for task in self._late:
            task.cancel()
        deadline = asyncio.get_running_loop().time() + within_s
        edge = [k for k in self._kept.values() if k.name != "scheduler" and not _is_link(k.name)]
        rest = [k for k in self._kept.values() if k not in edge]
        for kept, share in ((edge, 0.7), (rest, 1.0)):
            left = deadline - asyncio.get_running_loop().time()
            await asyncio.gather(
                *(self._terminate(k, max(0.1, left * share)) for k in kept),
            )

    def kill(self) -> None:
        """SIGKILL to every process, without waiting; what was acknowledged is durable."""
        for kept in self._kept.values():
            if kept.child is not None and kept.child.returncode is None:
                kept.child.kill()

    def child(self, name: str) -> ChildProcess:
        """The running process of that name: ``scheduler``, ``trainer-NAME``, ``agent-NAME``,
        ``link-NAME``."""
        child = self._kept[name].child
        if child is None:
            raise ProcessFailed(f"{name} is not running")
        return child

    def hold(self, name: str) -> None:
        """SIGKILL to that process, which is not started again before ``let_go``."""
        kept = self._kept[name]
        kept.may_run.clear()
        if kept.child is not None and kept.child.returncode is None:
            kept.child.kill()

    def let_go(self, name: str) -> None:
        """Start that process again, at once."""
        self._kept[name].may_run.set()

    def restarts(self, name: str) -> int:
        """How often that process was started again."""
        return self._kept[name].restarts

    def trainers_left(self) -> list[str]:
        """Names of policies whose trainer has ended with status 0."""
        return [n for n in self.trained if self._kept[f"trainer-{n}"].finished.is_set()]

    def agents_here(self) -> list[str]:
        """Names of the agents that are kept running."""
        running = {kept.name for kept in self._kept.values() if kept.may_run.is_set()}
        return [agent.name for agent in self.agents if f"agent-{agent.name}" in running]

    def command_link(self, agent: str, command: Mapping[str, Any]) -> None:
        """Tell an agent's link emulator something, for example ``{"down": 2.0}``."""
        self.child(f"link-{agent}").write_line(json.dumps(command).encode())

    # ---- starting ------------------------------------------------------------------------------

    async def _start_scheduler(self) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def on_ready(line: Mapping[str, Any]) -> None:
            if not self._ports:
                self._ports = {plane: int(line["ports"][plane]) for plane in PLANES}
                # From now on a restarted scheduler must listen where its peers look for it.
                self._kept["scheduler"].spec = self._child_spec(
                    "scheduler", self._argv.scheduler(self._ports)
                )
            self._write_deployment()
            if not ready.done():
                ready.set_result(None)

        self._keep("scheduler", self._argv.scheduler(dict.fromkeys(PLANES, 0)), on_ready)
        await self._first(ready)

    def _write_deployment(self) -> None:
        """For ``farflow status --config`` and the like from another terminal."""
        lines = ["[transport]", 'host = "127.0.0.1"', f"keys = {json.dumps(str(self.folder.keys))}"]
        lines += [f"{plane}_port = {port}" for plane, port in self._ports.items()]
        lines += ["", "[scheduler]", f"folder = {json.dumps(str(self.folder.scheduler))}"]
        self.folder.deployment.write_text("\n".join(lines) + "\n", encoding="utf-8")

    async def _start_agent(self, agent: LocalAgent) -> None:
        ports = self._ports
        if agent.link != NO_LINK:
            ports = await self._start_link(agent)
        argv = self._argv.agent(agent, ports)
        if agent.join_after_s:
            self._late.append(asyncio.create_task(self._join(agent, argv)))
        else:
            self._keep(f"agent-{agent.name}", argv)

    async def _join(self, agent: LocalAgent, argv: list[str]) -> None:
        await asyncio.sleep(agent.join_after_s)
        self._keep(f"agent-{agent.name}", argv)

    async def _start_link(self, agent: LocalAgent) -> dict[str, int]:
        name = f"link-{agent.name}"
        table = self.up.links.get(agent.link)
        argv = [*FARFLOW, "sim", "link", "run", "--stop-on-eof", "--log-level", "warning"]
        argv += ["--profile", NO_LINK if table is not None else agent.link]
        for plane in PLANES:
            argv += ["--target", f"{plane}=127.0.0.1:{self._ports[plane]}"]
        ports: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()

        async def on_ready(line: Mapping[str, Any]) -> None:
            found = {plane: int(line["targets"][plane]["port"]) for plane in PLANES}
            if table is not None:
                kept = self._kept[name]
                assert kept.child is not None  # noqa: S101 - it has just said that it is ready
                kept.child.write_line(json.dumps({"profile": table}).encode())
                reply = json.loads(await kept.child.read_line(self.up.local.start_s))
                if "error" in reply:
                    raise ConfigError(f"links.{agent.link}: {reply['error']}")
            if not ports.done():
                ports.set_result(found)
                listen = [f"{plane}=127.0.0.1:{found[plane]}" for plane in PLANES]
                extra = [part for text in listen for part in ("--listen", text)]
                self._kept[name].spec = self._child_spec(name, [*argv, *extra])

        self._keep(name, argv, on_ready)
        return await self._first(ports)

    async def _first(self, ready: asyncio.Future[_T]) -> _T:
        """The result of ``ready``, or the failure of the deployment if that comes first."""
        waiting: set[asyncio.Future[Any]] = {ready, self.failure}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            return ready.result()
        raise ProcessFailed(self.failure.result())

    # ---- keeping -------------------------------------------------------------------------------

    def _keep(
        self,
        name: str,
        argv: list[str],
        on_ready: Callable[[Mapping[str, Any]], Awaitable[None]] | None = None,
    ) -> None:
        kept = _Kept(name, self._child_spec(name, argv))
        self._kept[name] = kept
        kept.task = asyncio.create_task(self._keep_running(kept, on_ready), name=name)
        kept.task.add_done_callback(self._kept_ended)

    def _kept_ended(self, task: asyncio.Task[None]) -> None:
        """A bug in keeping a child must end the deployment, not leave it waiting."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failure.done():
            self.failure.set_result(f"{task.get_name()}: {error!r}")

    async def _keep_running(
        self,
        kept: _Kept,
        on_ready: Callable[[Mapping[str, Any]], Awaitable[None]] | None,
    ) -> None:
        in_a_row = 0
        try:
            while not self._is_stopping():
                started_s = asyncio.get_running_loop().time()
                kept.child = await start_child(kept.spec)
                line = await self._ready_line(kept.child)
                if line is not None and on_ready is not None:
                    await on_ready(line)
                status = await kept.child.wait()
                if self._is_stopping():
                    return
                if not kept.may_run.is_set():
                    await kept.may_run.wait()
                    continue
                if status == 0 and kept.may_finish:
                    kept.finished.set()
                    await kept.revived.wait()
                    kept.revived.clear()
                    kept.finished.clear()
                if status == EXIT_CONFIG:
                    raise ConfigError(f"{kept.name} cannot start{last_words(kept.spec.log_path)}")
                kept.restarts += 1
                settled = asyncio.get_running_loop().time() - started_s >= SETTLED_S
                in_a_row = 1 if settled else in_a_row + 1
                if in_a_row > self._most_restarts:
                    raise kept.child.failure(f"ended {in_a_row} times in a row")
                self.on_notice(
                    f"{kept.name} ended ({describe_status(status)}) and is started again"
                    f"{last_words(kept.spec.log_path)}"
                )
                await asyncio.sleep(self._restart.delay_s(in_a_row))
        except (FarflowError, OSError, ValueError) as error:
            if not self.failure.done():
                self.failure.set_result(str(error))

    def tend(self, run_state: str) -> None:
        """Start trainers again that ended with status 0 although the run goes on (somebody
        stopped them); to be called with every status."""
        if run_state != "finished":
            for name in self.trainers_left():
                self._kept[f"trainer-{name}"].revived.set()

    def _is_stopping(self) -> bool:
        return self._stopping

    async def _ready_line(self, child: ChildProcess) -> Mapping[str, Any] | None:
        """The first line that a child says; None when it ended before (its status tells why)."""
        try:
            line = await child.read_line(self.up.local.start_s)
        except ProcessFailed:
            # The end of its output may be seen a moment before the end of the process.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_SEEN_S):
                    await child.wait()
            if child.returncode is None:
                child.kill()
                raise
            return None
        parsed: Mapping[str, Any] = json.loads(line)
        return parsed

    async def _terminate(self, kept: _Kept, grace_s: float) -> None:
        if kept.child is not None:
            await kept.child.terminate(grace_s)
        if kept.task is not None:
            kept.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await kept.task

    def _child_spec(self, name: str, argv: list[str]) -> ChildSpec:
        return ChildSpec(
            name=name,
            argv=tuple(argv),
            log_path=self.folder.logs / f"{name}.log",
            capture_stdout=True,
            grace_s=self.up.local.stop_s,
        )


def last_words(log: Path) -> str:
    """The last line of a child's log in brackets, cut to what a person reads; "" without one."""
    try:
        lines = log.read_bytes()[-4096:].decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    return f": {lines[-1][:_LAST_WORDS]}" if lines else ""


def _is_link(name: str) -> bool:
    return name.startswith("link-")
