"""A trainer core in a small world: scheduler, trajectory log, weight store, disk and worker threads
as plain objects, driven step by step. Messages and work wait in queues until somebody lets them
go on, so every interleaving, loss and crash can be played."""

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from trainer_peers import POLICY, Scheduler, Store, make_ref, make_run

from cloud_trainer.core import effects as do
from cloud_trainer.core import events as on
from cloud_trainer.core.effects import Effect, LineageStep
from cloud_trainer.core.events import Event
from cloud_trainer.core.machine import TrainerCore
from cloud_trainer.core.settings import CoreSettings, PendingVersion, StartPosition
from cloud_trainer.core.trained_jobs import TrainedJobs
from transport import messages as wire
from transport.runs import RunSpec

QUEUES = ("to_scheduler", "from_scheduler", "to_log", "from_log", "to_store", "from_store")
THREADS = ("trainer", "publisher", "disk", "check")


def make_offer(version: int) -> wire.VersionOffer:
    return wire.VersionOffer(manifest=str(version).encode(), signature=b"s", key_id="k")


@dataclass
class Checkpoint:
    step: int
    version: int
    lineage: tuple[LineageStep, ...]


class TrainerWorld:
    """Everything around one trainer, which may die and come back."""

    def __init__(self, run: RunSpec | None = None, **settings: Any) -> None:
        self.scheduler = Scheduler(run or make_run())
        self.store = Store()
        self.settings = settings
        self.now = 0.0
        self.incarnation = 0
        self.disk: list[Checkpoint] = []
        self.staged: Checkpoint | None = None
        self.outbox: dict[int, tuple[int | None, int]] = {}
        self.highest = 0
        self.again: dict[int, int] = {}
        self.unreachable: set[str] = set()
        self.given: list[int] = []
        self.bad_bodies: dict[int, str] = {}
        self.poison = False
        self.exit: do.Exit | None = None
        self.rollback: do.Rollback | None = None
        self.exported = 0
        self.start()

    # ---- life ------------------------------------------------------------------------------

    def start(self, republish: bool = False) -> None:
        """A new incarnation from what is on the disk."""
        self.incarnation += 1
        last = self.disk[-1] if self.disk else Checkpoint(0, 0, ())
        self.lineage = last.lineage
        if republish:
            self.again.pop(last.version, None)
        version = self.again.get(last.version, last.version)
        position = StartPosition(
            step=last.step,
            version=version,
            highest_version=self.highest,
            pending=self._pending(version, last.step, republish),
        )
        kept = {pending.version for pending in position.pending}
        self.outbox = {v: entry for v, entry in self.outbox.items() if v in kept}
        trained = TrainedJobs(job for entry in last.lineage for job in entry.jobs)
        settings = CoreSettings(
            policy=POLICY, incarnation=self.incarnation, build="test", **self.settings
        )
        self.core = TrainerCore(settings, position, trained=trained)
        self.staged = None
        self.to_scheduler: deque[wire.Message] = deque()
        self.from_scheduler: deque[wire.Message] = deque()
        self.to_log: deque[str] = deque()
        self.from_log: deque[wire.Message] = deque()
        self.to_store: deque[wire.VersionOffer] = deque()
        self.from_store: deque[wire.Message] = deque()
        self.work: dict[str, deque[Effect]] = {name: deque() for name in THREADS}
        self.bodies: set[str] = set()
        self.stepping = 0
        self.unsent: list[wire.Message] = []
        self.exit = self.rollback = None
        self.feed(on.Tick())

    def _pending(self, version: int, step: int, republish: bool) -> tuple[PendingVersion, ...]:
        if republish or version == 0:
            return (PendingVersion(version=version, parent=None, step=step, whole=True),)
        found = []
        at: int | None = version
        while at is not None and at in self.outbox:
            parent, step = self.outbox[at]
            found.append(PendingVersion(version=at, parent=parent, step=step, whole=parent is None))
            at = parent
        return tuple(found[::-1])

    @property
    def alive(self) -> bool:
        return self.exit is None and self.rollback is None

    def feed(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event, self.now)
        for effect in effects:
            self._execute(effect)
        self.core.check()
        unsent, self.unsent = self.unsent, []
        for message in unsent:
            self.feed(on.NotSent(message=message))
        return effects

    def _execute(self, effect: Effect) -> None:
        match effect:
            case do.ToScheduler(message=message):
                if isinstance(message, wire.CheckpointReport):
                    assert message.version in self.store.versions, "reported before it is durable"
                    assert message.step in [c.step for c in self.disk] or message.step == 0
                if "to_scheduler" in self.unreachable:
                    self.unsent.append(message)
                else:
                    self.to_scheduler.append(message)
            case do.ToTrajectoryLog(message=message) if "to_log" in self.unreachable:
                self.unsent.append(message)
            case do.ToTrajectoryLog(message=wire.BodyRequest(digests=digests)):
                self.to_log.extend(digests)
            case do.ToWeightStore(message=wire.VersionOffer() as offer):
                assert int(offer.manifest) in self.outbox, "offered without its files"
                self.to_store.append(offer)
            case do.RunStep(groups=groups):
                assert self.stepping == 0, "two steps at a time"
                assert all(ref.digest in self.bodies for ref in groups)
                self.stepping += 1
                self.bodies.clear()
                self.work["trainer"].append(effect)
            case do.LoadModel() | do.ExportModel():
                self.work["trainer"].append(effect)
            case do.BuildVersion(version=version, whole=whole):
                pending = version in [p.version for p in self.core._pending]
                if not (whole or pending):
                    assert version > max(self.given, default=0), "version numbers must rise"
                    self.given.append(version)
                self.work["publisher"].append(effect)
            case do.ForgetVersion(version=version):
                self.outbox.pop(version, None)
            case do.WriteCheckpoint(step=step):
                assert self.core.step == step
                self.work["disk"].append(effect)
            case do.CommitCheckpoint():
                self.work["disk"].append(effect)
            case do.CheckBody():
                self.work["check"].append(effect)
            case do.ForgetBodies(digests=digests):
                self.bodies.difference_update(digests)
            case do.Exit():
                self.exit = effect
            case do.Rollback():
                self.rollback = effect

    # ---- what others do ----------------------------------------------------------------------

    def finish_work(self, name: str) -> bool:
        """The oldest work of one thread is done."""
        if not self.alive or not self.work[name]:
            return False
        match self.work[name].popleft():
            case do.LoadModel():
                self.feed(on.ModelReady())
                highest = max(self.given, default=0)
                assert self.core.head_version == self.core.highest_version >= highest
            case do.ExportModel():
                self.exported += 1
                self.feed(on.ModelExported())
            case do.RunStep(step=step, groups=groups):
                self.stepping -= 1
                finite, self.poison = not self.poison, False
                if finite:
                    self.lineage += (
                        LineageStep(step, tuple(ref.job for ref in groups if not ref.replay)),
                    )
                self.feed(on.StepFinished(step=step, metrics={"loss": 1.0}, finite=finite))
            case do.BuildVersion(version=version, parent=parent, step=step, again=again):
                if again and parent is not None:
                    known = [of for of, newest in self.again.items() if newest == parent]
                    self.again[known[0] if known else parent] = version
                self.outbox.setdefault(version, (parent, step))
                self.highest = max(self.highest, version)
                self.feed(on.VersionReady(version=version, offer=make_offer(version)))
            case do.WriteCheckpoint(step=step, version=version, trained=trained):
                past = self.disk[-1].lineage if self.disk else ()
                self.staged = Checkpoint(step, version, past + trained)
                self.feed(on.CheckpointWritten(step=step))
            case do.CommitCheckpoint(step=step):
                assert self.staged is not None
                assert self.staged.step == step
                on_disk = self.staged.version in self.outbox
                assert on_disk or self.staged.version in self.store.versions
                self.disk.append(replace(self.staged))
                self.audit()
                self.feed(on.CheckpointCommitted(step=step))
            case do.CheckBody(digest=digest):
                self._check(digest)
        return True

    def _check(self, digest: str) -> None:
        number = int(digest.rpartition("-")[2])
        if self.bad_bodies.get(number) == "damaged":
            self.feed(on.BodyChecked(digest=digest, code="body.digest"))
            return
        self.bodies.add(digest)
        job = "run/t-999999" if self.bad_bodies.get(number) == "other" else make_ref(number).job
        self.feed(on.BodyChecked(digest=digest, job=job, size_bytes=100, trainable_tokens=5))

    def deliver(self, name: str) -> bool:
        """The oldest message of one queue arrives."""
        queue = getattr(self, name)
        if not self.alive or not queue:
            return False
        message = queue.popleft()
        if name == "to_scheduler":
            self.from_scheduler.extend(self.scheduler.take(message))
        elif name == "to_log":
            number = int(message.rpartition("-")[2])
            found = self.bad_bodies.get(number) != "missing"
            self.from_log.append(wire.Body(digest=message, found=found))
        elif name == "to_store":
            version = int(message.manifest)
            entry = self.outbox.get(version)
            if entry is not None:
                self.from_store.append(self.store.take(version, entry[0]))
                self.scheduler.highest_version = max(self.scheduler.highest_version, version)
        elif name == "from_scheduler":
            self.feed(on.FromScheduler(message=message))
        elif name == "from_log":
            self.feed(on.FromTrajectoryLog(message=message))
        else:
            self.feed(on.FromWeightStore(message=message))
        return True

    def wait(self, at_most_s: float = 1e9) -> bool:
        """Time passes until the next deadline."""
        deadline = self.core.next_deadline()
        if not self.alive or deadline is None:
            return False
        self.now = max(self.now, min(deadline, self.now + at_most_s))
        self.feed(on.Tick())
        return True

    def audit(self) -> None:
        """No job twice along the lineage of any checkpoint; steps without gaps."""
        for checkpoint in self.disk:
            jobs = [job for entry in checkpoint.lineage for job in entry.jobs]
            assert len(set(jobs)) == len(jobs), "a group was trained on twice"
            steps = [entry.step for entry in checkpoint.lineage]
            assert steps == list(range(1, checkpoint.step + 1))

    def turn(self, without: str = "") -> bool:
        """Every queue and thread but one moves by one; whether any did."""
        moved = [self.deliver(name) for name in QUEUES if name != without]
        moved += [self.finish_work(name) for name in THREADS if name != without]
        return any(moved)

    def settle(self, waits: int = 400) -> None:
        """All goes on without faults; time passes when nothing else moves, ``waits`` times."""
        for _ in range(waits):
            while self.alive and self.turn():
                pass
            if not self.alive or not self.wait():
                return
