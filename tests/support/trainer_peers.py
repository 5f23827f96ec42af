"""What a trainer meets, as plain objects: a scheduler and a weight store."""

from collections import deque
from dataclasses import dataclass, field

from transport import messages as wire
from transport.messages import GroupRef, Message
from transport.runs import DataSpec, PolicySpec, ReplaySpec, RunSpec, TaskSpec, WorkflowSpec

POLICY = "run/solver"


def make_run(
    *, steps: int = 6, batch_groups: int = 2, checkpoint_every: int = 2, replay: float = 0.0
) -> RunSpec:
    return RunSpec(
        name="run",
        policies={
            "solver": PolicySpec(
                model="model",
                trainer="numpy",
                steps=steps,
                batch_groups=batch_groups,
                checkpoint_every=checkpoint_every,
                data=DataSpec(replay=ReplaySpec(ratio=replay)),
            )
        },
        task=TaskSpec(source="jsonl", path="items.jsonl", reward="exact"),
        workflow=WorkflowSpec(policies=("solver",)),
    )


def make_ref(number: int, lag: int = 0, *, replay: bool = False) -> GroupRef:
    return GroupRef(
        job=f"run/t-{number:06d}",
        digest=f"digest-{number}",
        size_bytes=100,
        policy_lag=lag,
        replay=replay,
    )


@dataclass
class Scheduler:
    """What the trainer sees of the scheduler: grants, and what a restart makes of them."""

    run: RunSpec
    buffer: deque[int] = field(default_factory=deque)
    next_job: int = 0
    taken: dict[int, list[int]] = field(default_factory=dict)
    again: dict[int, list[int]] = field(default_factory=dict)
    trained: set[int] = field(default_factory=set)
    unusable: set[int] = field(default_factory=set)
    highest_version: int = 0
    incarnation: int = 0
    known: bool = False
    stopping: bool = False
    final: tuple[int, int] | None = None
    reports: dict[int, int] = field(default_factory=dict)
    head: int = 0
    floor: int = -1
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
            case wire.BatchRequest(step=step, head_version=head):
                return self._grant(step) if self._moves(head) else []
            case wire.GroupUnusable(step=step, job=job):
                number = int(job[-6:])
                if number in self.taken.get(step, []):
                    self.taken[step].remove(number)
                    self.unusable.add(number)
                    return self._grant(step)
                if number in self.again.get(step, []):
                    self.again[step].remove(number)
                    self.unusable.add(number)
                    return self._grant(step)
            case wire.StepReport(step=step, version=version):
                self.reports[step] = version
                self._moves(version)
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
            self.floor = self.highest_version = max(self.highest_version, self.head)
            self.head = hello.trainer.checkpoint_version
            for step in [s for s in self.taken if s > hello.trainer.checkpoint_step]:
                self.buffer.extend(self.taken.pop(step))
                self.again.pop(step, None)
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

    def _moves(self, head: int) -> bool:
        """Whether the trainer may be there: where it was, or at a number that is new."""
        if head != self.head and head <= max(self.floor, self.head):
            return False
        self.head = head
        self.highest_version = max(self.highest_version, head)
        return True

    def _checkpoint(self, step: int) -> None:
        for done in [s for s in self.taken if s <= step]:
            self.trained.update(self.taken.pop(done))

    def _grant(self, step: int) -> list[Message]:
        spec = self.run.policies["solver"]
        groups, again = self.taken.setdefault(step, []), self.again.setdefault(step, [])
        past = {n for at, numbers in self.taken.items() if at < step for n in numbers}
        pool = sorted((self.trained | past) - self.unusable - {*groups, *again})
        share = int(spec.data.replay.ratio * spec.batch_groups) - len(again)
        missing = spec.batch_groups - len(groups) - len(again)
        again += pool[max(0, len(pool) - min(share, missing)) :]
        while len(groups) + len(again) < spec.batch_groups:
            if not self.buffer:
                self.buffer.append(self.next_job)
                self.next_job += 1
            groups.append(self.buffer.popleft())
        refs = [make_ref(number) for number in groups]
        refs += [make_ref(number, replay=True) for number in again]
        return [wire.BatchGrant(policy=POLICY, step=step, groups=tuple(refs))]


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
