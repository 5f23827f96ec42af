"""The rollout scheduler's daemon: it puts the core, the store, the control plane, the task sources,
the two service processes and the gateway together.

What always holds: nothing is said to anybody before the new term is durable; the daemon stops, and
says why, when its disk refuses or the core finds itself inconsistent: it never goes on from memory
that no row confirms; stopping in order leaves nothing to repair.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from scheduler.alerts import Alerts
from scheduler.autoscaler import Autoscaler
from scheduler.children import Services
from scheduler.config import SchedulerConfig
from scheduler.control_plane import ControlPlane
from scheduler.core.effects import (
    Effect,
    ProduceItems,
    RecordEvaluation,
    RecordStep,
    Reply,
    RunEnded,
    Send,
    StartTaskSource,
    StopTaskSource,
)
from scheduler.core.events import AgentRevoked
from scheduler.core.machine import SchedulerCore
from scheduler.core.settings import TRAJECTORY_LOG, WEIGHT_STORE, CoreSettings
from scheduler.data.algorithms import DataAlgorithms
from scheduler.decider import Decider
from scheduler.enrolment import Enrolment
from scheduler.event_log import EventLog, EventLogStart
from scheduler.gateway.mqtt_access import check_broker_access
from scheduler.gateway_child import keep_gateway
from scheduler.interpreter import collector_paused
from scheduler.metrics_file import MetricsFiles
from scheduler.service import Worker
from scheduler.service_main import with_system
from scheduler.signer_book import SignerBook
from scheduler.store import Row, SchedulerStore
from scheduler.submissions import Submissions
from scheduler.task_runner import TaskRunner
from transport.errors import FarflowError
from transport.keys import Peer
from transport.links import Network
from transport.messages import Plane, Role
from transport.plane_hub import PlaneHub
from transport.runtime.build import build_id
from transport.runtime.clock import Clock
from transport.runtime.daemon_cli import EXIT_FAILED

STATISTICS_S: Final = 60.0
SIGNERS_S: Final = 1.0
_log = structlog.get_logger()


def core_settings(config: SchedulerConfig) -> CoreSettings:
    """What the core takes from ``[scheduler]``: every field that both have."""
    table = msgspec.structs.asdict(config.scheduler)
    own = {name: table[name] for name in CoreSettings.__struct_fields__ if name in table}
    return CoreSettings(**own, prompts_on_disk=True)


async def run_daemon(
    config: SchedulerConfig,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[dict[str, Any]], None],
) -> int:
    """``serve`` with real links, the machine's clock and unrepeatable randomness."""
    from transport.zmq_links import ZmqNetwork

    strangers = ZmqNetwork()
    try:
        serve_both = partial(serve, enrolment_network=strangers)
        return await with_system(serve_both)(config, stop=stop, on_ready=on_ready)
    finally:
        await strangers.close()


async def serve(
    config: SchedulerConfig,
    *,
    network: Network,
    clock: Clock,
    rng: random.Random,
    stop: asyncio.Event,
    on_ready: Callable[[dict[str, Any]], None],
    enrolment_network: Network | None = None,
) -> int:
    """Run the scheduler until ``stop``; returns the exit status. ``on_ready`` gets the ports once
    all three planes can be reached. Strangers come in over ``enrolment_network`` where it is given.

    Raises:
        ConfigError: keys or addresses are wrong, or files of ``[mqtt]``.
        StoreError: the folder cannot be used.
    """
    await asyncio.to_thread(check_broker_access, config.mqtt)
    writer = Worker("scheduler-writer")
    try:
        table = config.scheduler
        folder = Path(table.folder)
        store = await writer.run(SchedulerStore.open, folder, table.durability)
        try:
            with collector_paused():
                rows: list[Row] = await writer.run(list, store.rows())
                daemon = _Daemon(
                    config, network, enrolment_network or network, clock, rng, writer, store, rows
                )
            del rows  # the daemon gives them up once the event log has them
            return await daemon.run(stop, on_ready)
        finally:
            await writer.run(store.close)
    finally:
        await asyncio.to_thread(writer.close)


class _Daemon:
    """One life."""

    def __init__(
        self,
        config: SchedulerConfig,
        network: Network,
        enrolment_network: Network,
        clock: Clock,
        rng: random.Random,
        writer: Worker,
        store: SchedulerStore,
        rows: list[Row],
    ) -> None:
        folder = Path(config.scheduler.folder)
        self._config = config
        self._writer = writer
        self._clock = clock
        self._metrics = MetricsFiles(folder, clock)
        self._event_log = EventLog(folder / "events")
        settings = core_settings(config)
        seed = rng.getrandbits(64)
        self._core = SchedulerCore(
            settings,
            term=store.term,
            rng=random.Random(seed),  # noqa: S311 - recorded, so that a replay draws the same
            build=build_id(),
            rows=rows,
            now=store.now,
        )
        self._start = EventLogStart(
            build=build_id(),
            term=store.term,
            now=store.now,
            seed=seed,
            settings=settings,
            wall_s=clock.wall_s(),
            rows=len(rows),
        )
        self._rows = rows
        self._hub = PlaneHub(
            network,
            Plane.CONTROL,
            config.transport,
            port=config.transport.control_port,
            port_file=folder / "control-port",
            clock=clock,
        )
        self._hub.on_removed = self._key_removed
        self._plane = ControlPlane(self._hub, clock)
        self._decider = Decider(
            self._core,
            store,
            writer,
            self._event_log,
            clock,
            self._execute,
            self._plane.takes_offers,
            partial(DataAlgorithms(config.scheduler.data_modules).prepare, self._core),
        )
        self._alerts = Alerts(
            folder,
            folder / TRAJECTORY_LOG / "bodies",
            config.scheduler.trajectory_disk_bytes,
            now=self._decider.now,
            lag_s=lambda: self._decider.loop_lag_s,
            keys=lambda: self._hub.allowed.warnings,
        )
        self._plane.gauges = self._gauges
        self._plane.alerts = self._alerts.standing
        self._book = self._plane.book = SignerBook(Path(config.transport.keys))
        self._ports: dict[str, int] | None = None
        self._enrolment = Enrolment(
            enrolment_network,
            config.transport,
            port_file=folder / "enrolment-port",
            clock=clock,
            ports=lambda: self._ports,
        )
        modules = config.scheduler.task_modules
        self._runner = TaskRunner(self._decider.put, rng, modules=modules)
        self._submissions = Submissions(
            self._runner, self._decider.put, lambda run: self._core.run_spec(run) is not None
        )
        self._records: list[RecordStep | RecordEvaluation | RunEnded] = []
        self._recorded = asyncio.Event()
        _log.info(
            "scheduler.opened", term=store.term, rows=len(rows), now=store.now, build=build_id()
        )

    async def run(self, stop: asyncio.Event, on_ready: Callable[[dict[str, Any]], None]) -> int:
        """Everything at once, until ``stop`` or the first part that fails."""
        config = msgspec.structs.replace(
            self._config,
            transport=msgspec.structs.replace(self._config.transport, control_port=self._hub.port),
        )
        services = Services(config)
        gateway = {"gateway": keep_gateway(config)} if config.http.enabled else {}
        # The event log comes before every other task: the writer does what it is given in order.
        own_parts = _tasks(
            {
                "event log": self._begin_event_log(),
                "receive": self._receive(),
                "keys": self._hub.keep_refreshing(),
                "enrolment": self._enrolment.run(),
                "signers": self._follow_signers(),
                "ready": self._say_ready(services, on_ready),
                "records": self._write_records(),
                "statistics": self._log_statistics(),
                "disk": self._alerts.keep_looking(),
                **self._autoscaler_parts(),
                **self._decider.parts(),
            }
        )
        service_parts = _tasks({**services.parts(), **gateway})
        stopping = asyncio.create_task(stop.wait())
        failed: BaseException | None = None
        try:
            watched = {stopping, *own_parts, *service_parts}
            while not stopping.done() and failed is None:
                done, watched = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
                failed = next((e for t in done if (e := _error(t)) is not None), None)
        finally:
            stopping.cancel()
            status = await self._end(own_parts, service_parts, failed)
        if failed is not None and not isinstance(failed, FarflowError):
            raise failed
        return status

    async def _end(
        self,
        own_parts: list[asyncio.Task[None]],
        service_parts: list[asyncio.Task[None]],
        failed: BaseException | None,
    ) -> int:
        """Services first, so that what they still say is heard; then what was decided is
        committed and sent."""
        for task in service_parts:
            task.cancel()
        await asyncio.gather(*service_parts, return_exceptions=True)
        for task in own_parts:
            task.cancel()
        await asyncio.gather(*own_parts, return_exceptions=True)
        await self._submissions.close()
        await self._runner.close()
        status = 0
        if failed is not None:
            status = EXIT_FAILED
            _log.error("scheduler.failed", reason=str(failed), error=type(failed).__name__)
        else:
            try:
                await self._decider.flush()
            except FarflowError as error:
                status = EXIT_FAILED
                _log.error("scheduler.not_flushed", reason=str(error))
        await self._write_records_once()
        await self._writer.run(self._event_log.close)
        await self._hub.close()
        _log.info("scheduler.stopped", status=status)
        return status

    def _autoscaler_parts(self) -> dict[str, Coroutine[Any, Any, None]]:
        table = self._config.scheduler.autoscaler
        if not table.enabled:
            return {}
        return {"autoscaler": Autoscaler(table, self._clock, self._core.demand).run()}

    async def _begin_event_log(self) -> None:
        """The first that the writer does, so before any commit; nobody else waits for it."""
        await self._writer.run(self._event_log.begin, self._start, self._rows)
        self._rows = []

    async def _receive(self) -> None:
        while True:
            for arrival in await self._hub.recv():
                event = self._plane.event(arrival)
                if event is not None:
                    self._submissions.put(event)
            await self._decider.has_room()

    async def _say_ready(
        self, services: Services, on_ready: Callable[[dict[str, Any]], None]
    ) -> None:
        ports = await services.ports()
        facts = {
            "control": self._hub.port,
            "trajectories": ports[TRAJECTORY_LOG],
            "weights": ports[WEIGHT_STORE],
        }
        self._ports = facts
        _log.info("scheduler.ready", **facts)
        on_ready({"ready": True, "ports": facts})

    def _key_removed(self, peer: Peer) -> None:
        if peer.role is Role.AGENT:
            _log.warning("agent.revoked", agent=peer.name)
            self._decider.put(AgentRevoked(peer.name))

    def _gauges(self) -> dict[str, int]:
        return {**self._alerts.counters(), **self._enrolment.counters}

    async def _follow_signers(self) -> None:
        while True:
            await asyncio.sleep(SIGNERS_S)
            if await asyncio.to_thread(self._book.refresh):
                self._plane.keys_changed()

    # ---- effects ------------------------------------------------------------------------------

    def _execute(self, effect: Effect) -> None:
        match effect:
            case Send(peer, message):
                self._plane.send(peer, message)
            case Reply(_, request, message):
                self._plane.reply(request, message)
            case StartTaskSource(run):
                self._runner.start(run)
            case StopTaskSource(run):
                self._runner.stop(run)
            case ProduceItems(run, kind, start, count, evaluation):
                self._runner.produce(run, kind, start, count, evaluation)
            case RecordStep() | RecordEvaluation() | RunEnded():
                if isinstance(effect, RunEnded):
                    _log.info("run.ended", run=effect.run, reason=effect.reason)
                self._records.append(effect)
                self._recorded.set()

    async def _write_records(self) -> None:
        while True:
            await self._recorded.wait()
            self._recorded.clear()
            await self._write_records_once()

    async def _write_records_once(self) -> None:
        records, self._records = self._records, []
        for record in records:
            await self._writer.run(self._metrics.record, record)

    async def _log_statistics(self) -> None:
        while True:
            await asyncio.sleep(STATISTICS_S)
            _log.info(
                "scheduler.statistics",
                peers=self._hub.peers,
                commits=self._decider.commits,
                loop_lag_s=round(self._decider.loop_lag_s, 4),
                **self._hub.counters,
                **self._plane.counters,
                **self._enrolment.counters,
            )


def _tasks(parts: Mapping[str, Coroutine[Any, Any, None]]) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(part, name=name) for name, part in parts.items()]


def _error(task: asyncio.Task[Any]) -> BaseException | None:
    return None if task.cancelled() else task.exception()
