"""A trainer: its production core, with modelled times for steps and publications.

A crash keeps what is on disk: the last committed checkpoint with its lineage, versions that the
weight store may not have, the highest number given.
"""

from collections import deque
from typing import Final

import msgspec

from cloud_trainer.core import effects as do
from cloud_trainer.core import events as on
from cloud_trainer.core.machine import TrainerCore
from cloud_trainer.core.settings import CoreSettings, PendingVersion, StartPosition
from cloud_trainer.core.trained_jobs import TrainedJobs
from edge_agent.engines.fake import place_uniform
from sim.actors.modelled import Spooled
from sim.actors.names import LOG, SCHEDULER, STORE
from sim.actors.services import ModelledVersion
from sim.faults import Fault
from sim.kernel import Alarm, Kernel
from sim.ledger import Ledger, Step
from sim.network import Network
from sim.workload import Steps, Workload, log_normal, make_digest, step_seed
from transport.errors import InvariantViolation
from transport.messages import Body, Message, Plane, VersionOffer

DISK_S: Final = 0.05
PLANE_HOSTS: Final = {Plane.CONTROL: SCHEDULER, Plane.TRAJECTORIES: LOG, Plane.WEIGHTS: STORE}


class TrainerActor:
    """The trainer of one policy, over its lives. Steps take ``train_s`` in the mean, log-normal
    with ``train_cv``; a step that is made again takes as long as it did."""

    def __init__(
        self,
        name: str,
        policy: str,
        *,
        kernel: Kernel,
        network: Network,
        workload: Workload,
        ledger: Ledger,
        train_s: float,
        check: bool,
        train_cv: float = 0.0,
        seed: int = 0,
        deltas: Steps | None = None,
    ) -> None:
        self.name = name
        self.policy = policy
        self.alive = False
        self.core: TrainerCore
        self._kernel = kernel
        self._network = network
        self._workload = workload
        self._ledger = ledger
        self._train_s = train_s
        self._train_cv = train_cv
        self._seed = step_seed(seed, policy)
        self._deltas = deltas or Steps(workload)
        self._check = check
        self._incarnation = 0
        self._position = StartPosition()
        self._lineage: tuple[do.LineageStep, ...] = ()
        self._written: do.WriteCheckpoint | None = None
        self._unpublished: dict[int, do.BuildVersion] = {}
        self._highest = 0
        self._used: list[tuple[int, tuple[str, ...]]] = []
        self._bodies: dict[str, Spooled] = {}
        self._events: deque[on.Event] = deque()
        self._handling = False
        self._alarm = Alarm(kernel, self._tick)

    # ---- life ----------------------------------------------------------------------------------

    def start(self, _: object = None) -> None:
        """Begin a life at the last checkpoint that counts."""
        self._incarnation += 1
        self.alive = True
        position = self._position
        for step, digests in self._used:
            if step > position.step:
                self._ledger.lineage_left(self.policy, digests)
        self._used = [used for used in self._used if used[0] <= position.step]
        pending = tuple(
            PendingVersion(version=v, parent=built.parent, step=built.step, whole=built.whole)
            for v, built in sorted(self._unpublished.items())
            if v <= position.version
        )
        self._unpublished = {p.version: self._unpublished[p.version] for p in pending}
        self.core = TrainerCore(
            CoreSettings(policy=self.policy, incarnation=self._incarnation, build="sim"),
            msgspec.structs.replace(position, highest_version=self._highest, pending=pending),
            trained=TrainedJobs(job for entry in self._lineage for job in entry.jobs),
        )
        self.feed(on.Tick())

    def strike(self, fault: Fault) -> None:
        """Suffer what happens to the machine."""
        if fault.what == "crash" and self.alive:
            self.crash()
        elif fault.what == "return" and not self.alive:
            self.start()

    def crash(self) -> None:
        """Die at once."""
        self.alive = False
        self._network.reset(self.name)
        self._bodies.clear()
        self._events.clear()
        self._written = None
        self._alarm.set(None)

    def receive(self, source: str, message: Message, extra: object) -> None:
        if not self.alive:
            return
        if source == SCHEDULER:
            self.feed(on.FromScheduler(message=message))
        elif source == STORE:
            self.feed(on.FromWeightStore(message=message))
        else:
            if isinstance(message, Body) and isinstance(extra, Spooled):
                self._bodies[message.digest] = extra
            self.feed(on.FromTrajectoryLog(message=message))

    def feed(self, event: on.Event) -> None:
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        while self._events:
            for effect in self.core.handle(self._events.popleft(), self._kernel.now):
                self._perform(effect)
            if self._check:
                self.core.check()
        self._handling = False
        self._alarm.set(self.core.next_deadline() if self.alive else None)

    def _tick(self) -> None:
        if self.alive:
            self.feed(on.Tick())

    def _later(self, delay_s: float, event: on.Event) -> None:
        life = self._incarnation

        def happen(_: object) -> None:
            if self.alive and self._incarnation == life:
                self.feed(event)

        self._kernel.after(delay_s, happen)

    # ---- effects -------------------------------------------------------------------------------

    def _perform(self, effect: do.Effect) -> None:
        match effect:
            case do.ToScheduler(message=message):
                self._network.send(self.name, SCHEDULER, message)
            case do.ToTrajectoryLog(message=message):
                self._network.send(self.name, LOG, message)
            case do.ToWeightStore(message=message):
                self._network.send(self.name, STORE, message)
            case do.RenewLink(plane=plane):
                self._network.renew(self.name, PLANE_HOSTS[plane])
            case do.LoadModel():
                self._later(0.0, on.ModelReady())
            case do.CheckBody(digest=digest):
                self._check_body(digest)
            case do.RunStep():
                self._run_step(effect)
            case do.BuildVersion():
                self._build_version(effect)
            case do.ForgetVersion(version=version):
                self._unpublished.pop(version, None)
            case do.WriteCheckpoint(step=step):
                self._written = effect
                self._later(DISK_S, on.CheckpointWritten(step=step))
            case do.CommitCheckpoint(step=step):
                self._commit(step)
            case do.ExportModel():
                self._later(DISK_S, on.ModelExported())
            case do.ForgetBodies(digests=digests):
                for digest in digests:
                    self._bodies.pop(digest, None)
            case do.RecordStep(report=report):
                self._ledger.steps[self.policy][-1].waiting_s = report.waiting_s
            case do.Rollback():
                self.crash()
                self._kernel.after(DISK_S, self.start)
            case do.Exit():
                self.crash()
            case _:
                raise InvariantViolation(f"unknown effect {type(effect).__name__}")

    def _check_body(self, digest: str) -> None:
        body = self._bodies[digest].summary
        self.feed(
            on.BodyChecked(
                digest=digest,
                job=body.job,
                size_bytes=body.size_bytes,
                trainable_tokens=sum(body.lengths),
            )
        )

    def _run_step(self, effect: do.RunStep) -> None:
        life = self._incarnation
        began_s = self._kernel.now

        def done(_: object) -> None:
            if not self.alive or self._incarnation != life:
                return
            lags: list[int] = []
            for ref in effect.groups:
                body = self._bodies.pop(ref.digest)
                if not ref.replay:
                    self._ledger.body_trained(self.policy, ref.digest, body.tokens)
                lags.append(ref.policy_lag)
            fresh = tuple(ref.digest for ref in effect.groups if not ref.replay)
            self._used.append((effect.step, fresh))
            steps = self._ledger.steps.setdefault(self.policy, [])
            steps.append(Step(effect.step, self._kernel.now, tuple(lags)))
            if self._ledger.recorder is not None:
                self._ledger.recorder.step_made(self.policy, effect.step, began_s, lags)
            self.feed(on.StepFinished(step=effect.step))

        uniform = place_uniform(self._seed, effect.step)
        self._kernel.after(log_normal(self._train_s, self._train_cv, uniform), done)

    def _build_version(self, effect: do.BuildVersion) -> None:
        self._highest = max(self._highest, effect.version)
        self._unpublished[effect.version] = effect
        modelled = ModelledVersion(
            policy=self.policy,
            version=effect.version,
            parent=effect.parent,
            step=effect.step,
            digest=make_digest(self.policy, effect.version),
            delta_bytes=(
                self._workload.full_bytes if effect.whole else self._deltas.delta_bytes(effect.step)
            ),
        )
        offer = VersionOffer(
            manifest=msgspec.msgpack.encode(modelled), signature=b"\0" * 64, key_id="sim"
        )
        self._later(self._workload.publish_s, on.VersionReady(version=effect.version, offer=offer))

    def _commit(self, step: int) -> None:
        written = self._written
        if written is None or written.step != step:
            raise InvariantViolation(f"{self.name}: checkpoint {step} was not written")
        self._position = StartPosition(step=step, version=written.version)
        self._lineage += written.trained
        self._used = [used for used in self._used if used[0] > step]
        self._later(0.0, on.CheckpointCommitted(step=step))
