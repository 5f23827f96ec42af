"""A scenario of the simulator in real time: the real daemons on this machine, behind link proxies.

What always holds: what is measured is what ``sim.measures`` measures of a simulation; faults happen
at the scenario's times, counted from the run's submission, which waits until every agent is
connected; everything that was started is stopped at the end.

Not emulated: the cloud's NIC as a shared link, the time that items and versions take to become
durable (they take what this machine takes), slow start and loss (``sim.link_proxy``).
"""

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from farflow.emulate_files import write_emulation
from farflow.emulate_times import ServiceTimes, recorded_events, service_times
from farflow.local import LocalDeployment
from farflow.run_folder import RunFolder
from farflow.up import Options, prepare
from farflow.up_config import up_config
from scheduler.core.settings import PlacementName
from scheduler.operator import Operator
from sim.faults import Fault, all_faults
from sim.measures import Measures, measure
from sim.scenario import Scenario
from transport.errors import FarflowError, LinkError, ProcessFailed
from transport.ids import policy_id
from transport.runtime.processes import RestartPolicy
from transport.status import RunStatus, SchedulerStatus, StepStatus

POLL_S: Final = 0.25
CONNECTED_S: Final = 90.0
"""Within this time all agents must be there."""
STOP_S: Final = 6.0

Notice = Callable[[str], None]


class Emulated(msgspec.Struct, frozen=True, kw_only=True):
    """What an emulation gave; ``finished`` false: the scenario's ``limit_s`` came first.
    ``service`` are this machine's own times; ``back_s`` those from an agent's restart to its first
    sign of life."""

    scenario: str
    seed: int
    finished: bool
    wall_s: float
    measures: Measures
    service: ServiceTimes
    back_s: tuple[float, ...]
    counters: dict[str, int]
    folder: str


async def emulate(
    scenario: Scenario,
    folder: Path,
    *,
    seed: int = 0,
    placement: PlacementName = "finish-time",
    engine: str = "fake",
    model: Path | None = None,
    notice: Notice = lambda text: None,
) -> Emulated:
    """Run it in the new ``folder`` until every policy that has a trainer made ``scenario.steps``.

    Raises:
        ConfigError: something in the scenario cannot be emulated.
        ProcessFailed: a process did not start, or does not stay.
    """
    file = await asyncio.to_thread(
        write_emulation,
        scenario,
        folder,
        seed=seed,
        placement=placement,
        engine=engine,
        model=model,
    )
    prepared = prepare(file, Options(folder=folder / "run"))
    config, agents = up_config(prepared.data)
    deployment = LocalDeployment(
        RunFolder(prepared.path),
        (),
        config,
        agents,
        prepared.spec,
        on_notice=notice,
        restart=RestartPolicy(first_delay_s=0.2, max_delay_s=2.0),
    )
    try:
        await deployment.start()
        async with Operator(deployment.transport(), deployment.operator_key) as operator:
            return await _Emulation(scenario, seed, deployment, operator, notice).run()
    finally:
        await deployment.stop(STOP_S)


class _Emulation:
    """One emulation whose processes run."""

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        deployment: LocalDeployment,
        operator: Operator,
        notice: Notice,
    ) -> None:
        self._scenario = scenario
        self._seed = seed
        self._deployment = deployment
        self._operator = operator
        self._notice = notice
        self._spec = deployment.spec
        self._began_s = 0.0
        self._starting: dict[str, float] = {}
        self._back_s: list[float] = []

    async def run(self) -> Emulated:
        scenario = self._scenario
        await self._connected()
        await self._operator.submit(self._spec)
        self._began_s = self._now()
        self._notice(f"{scenario.name}: {len(self._deployment.agents)} agents, run submitted")
        faults = asyncio.create_task(self._faults())
        try:
            status, finished = await self._watch(faults)
        finally:
            faults.cancel()
            with contextlib.suppress(asyncio.CancelledError, FarflowError):
                await faults
        return Emulated(
            scenario=scenario.name,
            seed=self._seed,
            finished=finished,
            wall_s=self._now() - self._began_s,
            measures=self._measures(_run(status, self._spec.name)),
            service=self._service(),
            back_s=tuple(self._back_s),
            counters=dict(status.counters),
            folder=str(self._deployment.folder.path),
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _status(self) -> SchedulerStatus | None:
        """None while the scheduler does not answer."""
        if self._deployment.failure.done():
            raise ProcessFailed(self._deployment.failure.result())
        try:
            return await self._operator.status()
        except LinkError:
            return None

    async def _connected(self) -> None:
        names = {agent.name for agent in self._deployment.agents}
        missing = sorted(names)
        try:
            async with asyncio.timeout(CONNECTED_S):
                while missing:
                    status = await self._status()
                    seen = {agent.name for agent in status.agents} if status else set()
                    missing = sorted(names - seen)
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise ProcessFailed(
                f"within {CONNECTED_S:g} s there came no {', '.join(missing)}; see their logs in "
                f"{self._deployment.folder.logs}"
            ) from None

    async def _watch(self, faults: "asyncio.Task[None]") -> tuple[SchedulerStatus, bool]:
        """Until the end; the last status and whether all steps were made."""
        scenario = self._scenario
        dead = scenario.faults.dead_trainers if not scenario.faults.trainer_down_s else ()
        waited_for = {policy_id(self._spec.name, n) for n in scenario.policies if n not in dead}
        said = 0
        while True:
            if faults.done() and not faults.cancelled():
                faults.result()  # an error there ends the emulation
            status = await self._status()
            if status is not None:
                run = _run(status, self._spec.name)
                self._note_returns(status)
                steps = [p.step for p in run.policies if p.policy in waited_for]
                if min(steps) >= scenario.steps:
                    return status, True
                if min(steps) >= said + 20:
                    said = min(steps)
                    self._notice(f"step {said} of {scenario.steps}")
                if self._now() - self._began_s > scenario.limit_s or run.state == "finished":
                    return status, False
            await asyncio.sleep(POLL_S)

    def _measures(self, run: RunStatus) -> Measures:
        names = self._scenario.policies
        path = self._deployment.folder.scheduler_metrics(self._spec.name)
        return measure(
            read_steps(path),
            run,
            most={policy_id(self._spec.name, name): self._scenario.steps for name in names},
            batch_groups={
                policy_id(self._spec.name, name): shape.batch_groups
                for name, shape in names.items()
            },
        )

    def _service(self) -> ServiceTimes:
        topology, cloud = self._scenario.topology(), self._scenario.cloud
        plans = self._scenario.fleet(self._seed)
        rtt_s = {plan.name: topology.rtt_s(cloud, plan.site) for plan in plans}
        folder = self._deployment.folder.scheduler / "events"
        return service_times(recorded_events(folder), rtt_s, self._scenario.workload)

    # ---- faults --------------------------------------------------------------------------------

    async def _faults(self) -> None:
        scenario = self._scenario
        plans = scenario.fleet(self._seed)
        # Here a process takes the time to start that it takes.
        spec = msgspec.structs.replace(scenario.faults, agent_start_s=0.0)
        sites = [(plan.name, plan.site) for plan in plans]
        faults = all_faults(spec, sites, list(scenario.policies), self._seed, scenario.limit_s)
        for fault in faults:
            await asyncio.sleep(max(0.0, self._began_s + fault.at_s - self._now()))
            self._do(fault)

    def _do(self, fault: Fault) -> None:
        is_trainer = fault.host.startswith("trainer-")
        child = fault.host if is_trainer else f"agent-{fault.host}"
        self._notice(f"{fault.at_s:.1f} s: {fault.what} of {fault.host}")
        match fault.what:
            case "crash":
                self._deployment.hold(child)
            case "return":
                self._deployment.let_go(child)
                self._starting[fault.host] = self._now()
            case "cut":
                self._deployment.command_link(fault.host, {"down": True})
            case "restore":
                self._deployment.command_link(fault.host, {"up": True})
            case "notice" | "slow" | "skew":
                pass  # such scenarios are refused before anything starts

    def _note_returns(self, status: SchedulerStatus) -> None:
        ready = {agent.name for agent in status.agents if agent.state in ("ready", "joining")}
        for name in sorted(ready & self._starting.keys()):
            self._back_s.append(self._now() - self._starting.pop(name))


def read_steps(path: Path) -> list[StepStatus]:
    """The steps in a ``metrics.jsonl``, in order."""
    steps = []
    for line in path.read_bytes().splitlines():
        facts = json.loads(line)
        if facts.get("type") == "step":
            steps.append(msgspec.convert(facts, StepStatus))
    return steps


def _run(status: SchedulerStatus, name: str) -> RunStatus:
    return next(run for run in status.runs if run.name == name)
