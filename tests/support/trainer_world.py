"""A trainer core in a small world: scheduler, trajectory log, weight store, disk and worker threads
as plain objects, driven step by step. Messages and work wait in queues until somebody lets them
go on, so every interleaving, loss and crash can be played."""

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from cloud_trainer.core import effects as do
from cloud_trainer.core import events as on
from cloud_trainer.core.effects import Effect, LineageStep
from cloud_trainer.core.events import Event
from cloud_trainer.core.machine import TrainerCore
from cloud_trainer.core.settings import CoreSettings, PendingVersion, StartPosition
from cloud_trainer.core.trained_jobs import TrainedJobs
from transport import messages as wire
from transport.messages import GroupRef, Message
from transport.runs import PolicySpec, RunSpec, TaskSpec, WorkflowSpec

POLICY = "run/solver"
QUEUES = ("to_scheduler", "from_scheduler", "to_log", "from_log", "to_store", "from_store")
THREADS = ("trainer", "publisher", "disk", "check")


def make_run(*, steps: int = 6, batch_groups: int = 2, checkpoint_every: int = 2) -> RunSpec:
    return RunSpec(
        name="run",
        policies={
            "solver": PolicySpec(
                model="model",
                trainer="numpy",
                steps=steps,
                batch_groups=batch_groups,
                checkpoint_every=checkpoint_every,
            )
        },
        task=TaskSpec(source="jsonl", path="items.jsonl", reward="exact"),
        workflow=WorkflowSpec(policies=("solver",)),
    )


def make_ref(number: int, lag: int = 0) -> GroupRef:
    return GroupRef(
        job=f"run/t-{number:06d}", digest=f"digest-{number}", size_bytes=100, policy_lag=lag
    )


def make_offer(version: int) -> wire.VersionOffer:
    return wire.VersionOffer(manifest=str(version).encode(), signature=b"s", key_id="k")


@dataclass
class Scheduler:
    """What the trainer sees of the scheduler: grants, and what a restart makes of them."""

    run: RunSpec
    buffer: deque[int] = field(default_factory=deque)
    next_job: int = 0
    taken: dict[int, list[int]] = field(default_factory=dict)
    trained: set[int] = field(default_factory=set)
    unusable: set[int] = field(default_factory=set)
    highest_version: int = 0
    incarnation: int = 0
    known: bool = False
    stopping: bool = False
    final: tuple[int, int] | None = None
    reports: dict[int, int] = field(default_factory=dict)
    checkpoint_reports: list[tuple[int, int]] = field(default_factory=list)
    finished: bool = False
    lost_after_s: float = 12.0
    incarnations: list[int] = field(default_factory=list)

    def take(self, message: Message) -> list[Message]:
        if isinstance(message, wire.Hello):
            return self._hello(message)
        if not self.known:
            return [wire.HelloRequired()]
        match message:
            case wire.Ping(sequence=sequence, sent_s=sent_s):
                return [wire.Pong(sequence=sequence, sent_s=sent_s)]
            case wire.BatchRequest(step=step):
                return self._grant(step)
            case wire.GroupUnusable(step=step, job=job):
                number = int(job[-6:])
                if number in self.taken.get(step, []):
                    self.taken[step].remove(number)
                    self.unusable.add(number)
                    return self._grant(step)
            case wire.StepReport(step=step, version=version):
                self.reports[step] = version
                self.highest_version = max(self.highest_version, version)
            case wire.CheckpointReport(step=step, version=version, final=final):
                self._checkpoint(step)
                self.checkpoint_reports.append((step, version))
                if final:
                    self.final = (step, version)
                    self.finished = True
                    return [wire.RunState(run=self.run.name, state="finished")]
            case wire.Goodbye():
                self.known = False
        return []

    def _hello(self, hello: wire.Hello) -> list[Message]:
        assert hello.trainer is not None
        if hello.incarnation < self.incarnation:
            return []
        if hello.incarnation > self.incarnation:
            self.incarnation = hello.incarnation
            self.incarnations.append(hello.incarnation)
            for step in [s for s in self.taken if s > hello.trainer.checkpoint_step]:
                self.buffer.extend(self.taken.pop(step))
        self._checkpoint(hello.trainer.checkpoint_step)
        self.known = True
        return [
            wire.Welcome(
                term=1,
                heartbeat_s=1.0,
                lost_after_s=self.lost_after_s,
                run=self.run,
                highest_version=self.highest_version,
                stopping=self.stopping,
            )
        ]

    def _checkpoint(self, step: int) -> None:
        for done in [s for s in self.taken if s <= step]:
            self.trained.update(self.taken.pop(done))

    def _grant(self, step: int) -> list[Message]:
        spec = self.run.policies["solver"]
        groups = self.taken.setdefault(step, [])
        while len(groups) < spec.batch_groups:
            if not self.buffer:
                self.buffer.append(self.next_job)
                self.next_job += 1
            groups.append(self.buffer.popleft())
        refs = tuple(make_ref(number) for number in groups)
        return [wire.BatchGrant(policy=POLICY, step=step, groups=refs)]


@dataclass
class Store:
    """The weight store: takes a version when it has the parent, and never a number twice."""

    versions: dict[int, int | None] = field(default_factory=dict)

    def take(self, version: int, parent: int | None) -> Message:
        if version in self.versions:
            assert self.versions[version] == parent, f"version {version} was given twice"
        else:
            assert version > max(self.versions, default=-1), f"{version} comes too late"
            assert parent is None or parent in self.versions, f"{version} has no parent {parent}"
            self.versions[version] = parent
        return wire.VersionDurable(policy=POLICY, version=version)


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
        position = StartPosition(
            step=last.step,
            version=last.version,
            highest_version=self.highest,
            pending=self._pending(last, republish),
        )
        kept = {pending.version for pending in position.pending}
        self.outbox = {v: entry for v, entry in self.outbox.items() if v in kept}
        trained = TrainedJobs(job for entry in last.lineage for job in entry.jobs)
        settings = CoreSettings(
            policy=POLICY, incarnation=self.incarnation, build="test", **self.settings
        )
        self.core = TrainerCore(settings, position, trained=trained)
        self.staged = None
        self.to_scheduler: deque[Message] = deque()
        self.from_scheduler: deque[Message] = deque()
        self.to_log: deque[str] = deque()
        self.from_log: deque[Message] = deque()
        self.to_store: deque[wire.VersionOffer] = deque()
        self.from_store: deque[Message] = deque()
        self.work: dict[str, deque[Effect]] = {name: deque() for name in THREADS}
        self.bodies: set[str] = set()
        self.stepping = 0
        self.exit = self.rollback = None
        self.feed(on.Tick())

    def _pending(self, last: Checkpoint, republish: bool) -> tuple[PendingVersion, ...]:
        if republish or last.version == 0:
            first = PendingVersion(version=last.version, parent=None, step=last.step, whole=True)
            return (first,)
        found = []
        at: int | None = last.version
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
        return effects

    def _execute(self, effect: Effect) -> None:
        match effect:
            case do.ToScheduler(message=message):
                if isinstance(message, wire.CheckpointReport):
                    assert message.version in self.store.versions, "reported before it is durable"
                    assert message.step in [c.step for c in self.disk] or message.step == 0
                self.to_scheduler.append(message)
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
            case do.ExportModel():
                self.exported += 1
                self.feed(on.ModelExported())
            case do.RunStep(step=step, groups=groups):
                self.stepping -= 1
                finite, self.poison = not self.poison, False
                if finite:
                    self.lineage += (LineageStep(step, tuple(ref.job for ref in groups)),)
                self.feed(on.StepFinished(step=step, metrics={"loss": 1.0}, finite=finite))
            case do.BuildVersion(version=version, parent=parent, step=step):
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
