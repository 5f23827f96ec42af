"""The trainer core in the world: links, threads, disk and one timer.

What always holds: the event loop never waits for the model or the disk. Each kind of work has a
thread of its own, so that its order is the order of effects: the model, the publisher, the disk;
bodies are checked in any order. Work is handed over at the moment of its effect; its end
is an event. Nothing is decided here. An error of any part ends the shell with that error.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from cloud_trainer.bodies import CheckedBody, Group, check_body
from cloud_trainer.checkpoints import CheckpointMeta
from cloud_trainer.config import TrainerTable
from cloud_trainer.core import effects as do
from cloud_trainer.core import events as on
from cloud_trainer.core.effects import Effect
from cloud_trainer.core.events import Event
from cloud_trainer.core.machine import TrainerCore
from cloud_trainer.core.settings import CoreSettings
from cloud_trainer.factory import MakeTrainer, spec_digest
from cloud_trainer.home import Start, TrainerHome
from cloud_trainer.publisher import Publisher
from cloud_trainer.ranks import LeadTrainer, Ranks
from cloud_trainer.tracking import Sink, Tracking
from cloud_trainer.workers import Workers
from transport.chunk_service import ChunkService
from transport.errors import ConfigError, FarflowError, InvariantViolation
from transport.ids import policy_name
from transport.keys import SigningKey
from transport.messages import (
    WORK_PLANES,
    Body,
    ChunkRequest,
    Goodbye,
    GroupUnusable,
    Message,
    Plane,
)
from transport.plane_links import PlaneLinks
from transport.runs import RunSpec
from transport.runtime.clock import Clock
from transport.weights.digest import first_non_finite
from transport.weights.tensors import TensorBytes

_CHECKERS = 2

_EVENTS: dict[Plane, Callable[[Message], Event]] = {
    Plane.CONTROL: lambda message: on.FromScheduler(message=message),
    Plane.TRAJECTORIES: lambda message: on.FromTrajectoryLog(message=message),
    Plane.WEIGHTS: lambda message: on.FromWeightStore(message=message),
}

_log = structlog.get_logger()

Tensors = dict[str, TensorBytes]


class _Loaded(NamedTuple):
    trainer: LeadTrainer
    weights: Tensors


_Stepped = tuple[on.StepFinished, Tensors, str | None]
"""With the name of a tensor that is not finite, if there is one."""


class TrainerShell:
    """One incarnation of a trainer, from its start to ``Exit`` or ``Rollback``."""

    def __init__(
        self,
        table: TrainerTable,
        *,
        home: TrainerHome,
        start: Start,
        links: PlaneLinks,
        signer: SigningKey,
        ranks: Ranks,
        trainers: MakeTrainer,
        clock: Clock,
        build: str,
        sinks: Mapping[str, Sink] | None = None,
    ) -> None:
        settings = CoreSettings(
            policy=table.policy,
            incarnation=start.incarnation,
            build=build,
            fetch_window_bytes=table.fetch_window_bytes,
            fetch_timeout_s=table.fetch_timeout_s,
            publish_timeout_s=table.publish_timeout_s,
        )
        self.core = TrainerCore(settings, start.position, trained=start.trained)
        self._table = table
        self._home = home
        self._start = start
        self._links = links
        self._signer = signer
        self._ranks = ranks
        self._make_trainer = trainers
        self._clock = clock
        self._build = build
        self._metrics = Tracking(home.folder, policy=table.policy, project=table.wandb, sinks=sinks)
        self._workers = Workers(model=1, publisher=1, disk=1, reader=1, bodies=_CHECKERS)
        self._chunks = ChunkService(start.outbox, links, self._workers.executor("reader"))
        self._trainer: LeadTrainer | None = None
        self._publisher: Publisher | None = None
        self._run: RunSpec | None = None
        self._committed: CheckpointMeta | None = start.meta
        self._written: CheckpointMeta | None = None
        self._arrived: dict[str, bytes] = {}
        self._checking: set[str] = set()
        self._bodies: dict[str, Group] = {}
        self._unsent: list[Message] = []
        self._retimed = asyncio.Event()
        self._outcome: asyncio.Future[do.Exit | do.Rollback] | None = None

    async def run(self, stop: asyncio.Event) -> do.Exit | do.Rollback:
        """Until the core ends; ``stop`` asks it to leave.

        Raises:
            ConfigError, ModelError, StoreError: what was asked for cannot be done.
        """
        outcome = asyncio.get_running_loop().create_future()
        self._outcome = outcome
        try:
            async with asyncio.TaskGroup() as tasks:
                self._workers.start(tasks)
                background = [tasks.create_task(part) for part in self._parts(stop)]
                self._feed(on.Tick())
                await outcome
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as errors:
            error = _innermost(errors)
            if isinstance(error, FarflowError):
                self._links.send(Plane.CONTROL, Goodbye(reason=error.code))
            raise error from error.__cause__
        finally:
            await asyncio.to_thread(self._workers.close)
            await asyncio.to_thread(self._metrics.close)
        ended: do.Exit | do.Rollback = outcome.result()
        return ended

    def _parts(self, stop: asyncio.Event) -> list[Coroutine[Any, Any, None]]:
        links = [part(p) for p in WORK_PLANES for part in (self._receive, self._links.watch)]
        return [*links, self._chunks.run(), self._keep_time(), self._watch(stop)]

    async def _watch(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._feed(on.StopRequested())

    async def _receive(self, plane: Plane) -> None:
        event = _EVENTS[plane]

        def arrived(message: Message, payload: list[bytes]) -> None:
            if isinstance(message, ChunkRequest):
                self._chunks.ask(message)
            if isinstance(message, Body) and payload:
                self._arrived[message.digest] = b"".join(payload)
            self._feed(event(message))
            self._arrived.clear()

        await self._links.receive(plane, arrived)

    # ---- events in, effects out --------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        for effect in self.core.handle(event, self._clock.monotonic_s()):
            self._execute(effect)
        self._retimed.set()
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            self._feed(on.NotSent(message=message))

    async def _keep_time(self) -> None:
        while True:
            self._retimed.clear()
            deadline = self.core.next_deadline()
            delay_s = None if deadline is None else deadline - self._clock.monotonic_s()
            try:
                async with asyncio.timeout(delay_s):
                    await self._retimed.wait()
            except TimeoutError:
                self._feed(on.Tick())

    def _execute(self, effect: Effect) -> None:
        match effect:
            case do.ToScheduler(message=message):
                if isinstance(message, GroupUnusable):
                    _log.warning("group.unusable", job=message.job, code=message.code)
                self._send(Plane.CONTROL, message)
            case do.ToTrajectoryLog(message=message):
                self._send(Plane.TRAJECTORIES, message)
            case do.ToWeightStore(message=message):
                self._send(Plane.WEIGHTS, message)
            case do.RenewLink(plane=plane):
                self._links.renew(plane)
            case do.LoadModel(run=run):
                self._run = run
                self._workers.hand_over("model", partial(self._load, run), self._loaded)
            case do.CheckBody(digest=digest):
                self._check_body(digest)
            case do.ForgetBodies(digests=digests):
                self._checking.difference_update(digests)
                for digest in digests:
                    self._bodies.pop(digest, None)
            case do.RunStep():
                self._run_step(effect)
            case do.RecordStep(report=report):
                facts = {"step": report.step, "version": report.version, **report.metrics}
                times = {"busy_s": report.busy_s, "waiting_s": report.waiting_s}
                _log.info("step.done", step=report.step, version=report.version, **times)
                self._record("step", {**facts, **times})
            case do.BuildVersion():
                self._build_version(effect)
            case do.ForgetVersion(version=version):
                _log.debug("version.durable", version=version)
                self._workers.hand_over("publisher", partial(self._start.outbox.remove, version))
            case do.WriteCheckpoint():
                self._write_checkpoint(effect)
            case do.CommitCheckpoint(step=step):
                self._commit_checkpoint(step)
            case do.ExportModel():
                self._export()
            case do.Exit() | do.Rollback():
                if self._outcome is not None and not self._outcome.done():
                    self._outcome.set_result(effect)
            case _:
                raise InvariantViolation(f"no way to do {type(effect).__name__}")

    def _send(self, plane: Plane, message: Message) -> None:
        if not self._links.send(plane, message):
            self._unsent.append(message)

    def _record(self, kind: str, facts: dict[str, Any]) -> None:
        self._workers.hand_over(
            "disk", partial(self._metrics.write, kind, self._clock.wall_s(), facts)
        )

    # ---- the model ---------------------------------------------------------------------------

    def _load(self, run: RunSpec) -> _Loaded:
        spec = run.policies[policy_name(self._table.policy)]
        meta = self._start.meta
        if meta is not None and meta.spec_digest != spec_digest(run, self._table.policy):
            raise ConfigError(
                f"{self._home.folder} holds a checkpoint of {meta.policy} with another model, "
                "trainer, settings or seed; set trainer.folder to another folder, or remove it"
            )
        trainer = LeadTrainer(self._make_trainer(spec, self._table), self._ranks, spec)
        trainer.load(Path(spec.model))
        if meta is not None:
            trainer.load_state_dict(self._home.checkpoints.load_arrays(meta), meta.trainer)
        return _Loaded(trainer, trainer.published_state())

    def _loaded(self, loaded: _Loaded) -> None:
        assert self._run is not None  # noqa: S101 - set with the work
        self._trainer = loaded.trainer
        self._publisher = Publisher(
            self._start.outbox,
            self._signer,
            self._clock,
            run=self._run.name,
            policy=self._table.policy,
            model=Path(self._run.policies[policy_name(self._table.policy)].model),
            base_version=self._start.position.version,
            base=loaded.weights,
            table=self._table.publication,
            artefacts=loaded.trainer.artefacts(),
        )
        _log.info("model.loaded", step=self._start.position.step, tensors=len(loaded.weights))
        self._feed(on.ModelReady())

    def _model(self) -> LeadTrainer:
        assert self._trainer is not None  # noqa: S101 - the core orders nothing before ModelReady
        return self._trainer

    def _run_step(self, order: do.RunStep) -> None:
        groups = [self._bodies[ref.digest] for ref in order.groups]
        _log.debug("step.begins", step=order.step, jobs=[ref.job for ref in order.groups])
        self._bodies.clear()
        self._checking.clear()

        def step() -> _Stepped:
            model = self._model()
            metrics = model.step(groups)
            weights = model.published_state()
            odd = first_non_finite(weights)
            found = on.StepFinished(
                step=order.step,
                metrics=metrics,
                finite=odd is None,
                drifts=model.drifts(),
                moved=model.moved(),
            )
            return found, weights, odd

        def done(stepped: _Stepped) -> None:
            found, weights, odd = stepped
            if odd is None and self._publisher is not None:
                self._publisher.capture(order.step, weights)
            else:
                _log.error("step.non_finite", step=order.step, tensor=odd)
            self._feed(found)

        self._workers.hand_over("model", step, done)

    def _build_version(self, order: do.BuildVersion) -> None:
        assert self._publisher is not None  # noqa: S101 - as for _model

        def done(built: tuple[Any, dict[str, Any]]) -> None:
            offer, facts = built
            self._record("version", facts)
            self._feed(on.VersionReady(version=order.version, offer=offer))

        self._workers.hand_over("publisher", partial(self._publisher.build, order), done)

    def _export(self) -> None:
        def done(folder: Path) -> None:
            _log.info("model.exported", folder=str(folder))
            self._feed(on.ModelExported())

        self._workers.hand_over("model", lambda: self._home.export(self._model()), done)

    # ---- checkpoints ---------------------------------------------------------------------------

    def _write_checkpoint(self, order: do.WriteCheckpoint) -> None:
        # The copy is taken in the model's thread, before the next step can change anything; the
        # disk's thread waits for it.
        state = self._workers.hand_over("model", self._model().state_dict)
        assert self._run is not None  # noqa: S101 - as for _model
        digest, previous, run = (
            spec_digest(self._run, self._table.policy), self._committed, self._run.name,
        )  # fmt: skip

        def write() -> CheckpointMeta:
            arrays, trainer = state.result()
            return self._home.checkpoints.write(
                arrays,
                trainer,
                run=run,
                policy=self._table.policy,
                step=order.step,
                version=order.version,
                spec_digest=digest,
                build=self._build,
                trained=order.trained,
                previous=previous,
            )

        def done(meta: CheckpointMeta) -> None:
            self._written = meta
            self._feed(on.CheckpointWritten(step=meta.step))

        self._workers.hand_over("disk", write, done)

    def _commit_checkpoint(self, step: int) -> None:
        def done(_: None) -> None:
            self._committed = self._written
            _log.info("checkpoint.committed", step=step)
            self._record("checkpoint", {"step": step})
            self._feed(on.CheckpointCommitted(step=step))

        self._workers.hand_over("disk", partial(self._home.checkpoints.commit, step), done)

    # ---- bodies --------------------------------------------------------------------------------

    def _check_body(self, digest: str) -> None:
        data = self._arrived.pop(digest, b"")
        self._checking.add(digest)

        def done(checked: CheckedBody) -> None:
            if checked.reason:
                _log.warning("body.bad", digest=digest, reason=checked.reason)
            if digest in self._checking:
                self._checking.discard(digest)
                if not checked.event.code:
                    self._bodies[digest] = checked.group
            self._feed(checked.event)

        run = self._run
        assert run is not None  # noqa: S101 - bodies are asked for after the run is known
        limit = run.workflow.max_sequence_tokens
        self._workers.hand_over(
            "bodies", partial(check_body, digest, data, self._table.policy, limit), done
        )


def _innermost(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The only error, or the group as it is."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
