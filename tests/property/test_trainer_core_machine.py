"""The trainer core under every interleaving of messages, work, losses, restarts and rollbacks.

``TrainerWorld`` asserts while it plays: one step at a time, version numbers that rise over all
incarnations, a head that is the highest of them after every recovery, offers only of durable
files, checkpoints only of publishable versions, reports only of what is durable, no job twice
along the lineage of any checkpoint. Its scheduler follows the trainer only to numbers that are
new. At the end of each run all faults cease, and the trainer must finish.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from trainer_peers import make_run
from trainer_world import QUEUES, THREADS, TrainerWorld

from cloud_trainer.core import events as on
from cloud_trainer.core.phase import Phase
from transport import messages as wire

STEPS = 12


class TrainerMachine(RuleBasedStateMachine):
    @initialize(
        every=st.integers(1, 4),
        window=st.sampled_from([1, 250, 10_000]),
        replay=st.sampled_from([0.0, 0.5]),
    )
    def begin(self, every: int, window: int, replay: float) -> None:
        run = make_run(steps=STEPS, checkpoint_every=every, replay=replay)
        self.world = TrainerWorld(run, fetch_window_bytes=window)
        self.lives = 0

    @rule(queue=st.sampled_from(QUEUES), count=st.integers(1, 6))
    def deliver(self, queue: str, count: int) -> None:
        for _ in range(count):
            if not self.world.deliver(queue):
                break

    @rule(thread=st.sampled_from(THREADS))
    def finish(self, thread: str) -> None:
        self.world.finish_work(thread)

    @rule(turns=st.integers(1, 12), without=st.sampled_from(("", *QUEUES, *THREADS)))
    def go_on(self, turns: int, without: str) -> None:
        """All but one queue or thread move."""
        for _ in range(turns):
            self.world.turn(without)

    @rule(at_most_s=st.sampled_from([0.5, 5.0, 1e6]))
    def wait(self, at_most_s: float) -> None:
        self.world.wait(at_most_s)

    @rule(queue=st.sampled_from(QUEUES))
    def cut(self, queue: str) -> None:
        getattr(self.world, queue).clear()

    @rule(queue=st.sampled_from(("to_scheduler", "to_log")))
    def link_goes_away_or_comes_back(self, queue: str) -> None:
        self.world.unreachable ^= {queue}

    @rule(queue=st.sampled_from(("from_scheduler", "from_log", "from_store", "to_scheduler")))
    def repeat(self, queue: str) -> None:
        messages = getattr(self.world, queue)
        if messages:
            messages.append(messages[0])

    @rule()
    def scheduler_restarts(self) -> None:
        self.world.scheduler.known = False
        self.world.to_scheduler.clear()
        self.world.from_scheduler.clear()

    @precondition(lambda self: self.lives < 6)
    @rule()
    def crash(self) -> None:
        self.lives += 1
        self.world.start()

    @rule(offset=st.integers(0, 3), kind=st.sampled_from(("missing", "damaged", "other")))
    def spoil_a_body(self, offset: int, kind: str) -> None:
        self.world.bad_bodies[self.world.scheduler.next_job + offset] = kind

    @precondition(lambda self: self.lives < 6)
    @rule()
    def poison_a_step(self) -> None:
        self.lives += 1
        self.world.poison = True

    @rule(state=st.sampled_from(("paused", "running")))
    def pause(self, state: str) -> None:
        self.world.from_scheduler.append(wire.RunState(run="run", state=state))  # type: ignore[arg-type]

    @precondition(lambda self: self.lives < 6)
    @rule()
    def ask_to_leave(self) -> None:
        self.lives += 1
        if self.world.alive:
            self.world.feed(on.StopRequested())

    @rule(step=st.integers(0, STEPS + 1), version=st.integers(0, 12))
    def nonsense(self, step: int, version: int) -> None:
        policy = "run/solver"
        for message in (
            wire.BatchGrant(policy=policy, step=step, groups=()),
            wire.BatchGrant(policy="run/other", step=self.world.core.step + 1, groups=()),
            wire.SummariesAccepted(digests=("x",)),
        ):
            if self.world.alive:
                self.world.feed(on.FromScheduler(message=message))
        if self.world.alive:
            self.world.feed(on.FromTrajectoryLog(message=wire.Body(digest=f"digest-{version}")))
        if self.world.alive:
            late = wire.VersionRejected(
                policy=policy, version=version + 100, code="x", message="late"
            )
            self.world.feed(on.FromWeightStore(message=late))

    @invariant()
    def come_back(self) -> None:
        if not hasattr(self, "world") or self.world.alive:
            return
        ended = self.world.exit
        if ended is not None and ended.code == "run.finished":
            return
        assert ended is None or ended.status == 0
        self.world.start()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.poison = False
        world.unreachable.clear()
        for _ in range(12):
            world.from_scheduler.append(wire.RunState(run="run", state="running"))
            world.settle()
            if world.exit is not None and world.exit.code == "run.finished":
                break
            if not world.alive:
                world.start()
        assert world.exit is not None, world.core.dump()
        assert world.exit.code == "run.finished"
        assert world.core.phase is Phase.EXITED
        assert world.core.step == STEPS
        assert world.scheduler.final == (STEPS, world.core.head_version)
        assert world.disk[-1].step == STEPS
        world.audit()
        trained = {job for entry in world.disk[-1].lineage for job in entry.jobs}
        assert trained == {f"run/t-{number:06d}" for number in world.scheduler.trained}
        assert world.core.head_version in world.store.versions


TrainerMachine.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestTrainerCore = TrainerMachine.TestCase
