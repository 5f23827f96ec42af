"""Training on groups again, under every order of steps, checkpoints, crashes of the trainer,
restarts of the scheduler and refused groups.

The model keeps the lineage by itself: what each step trained on for the first time and again. Every
grant must fit it, every body that is granted must still be there, and the books must count it. The
core checks its own invariants after each event (``Scene.feed``).
"""

import os
from typing import TYPE_CHECKING

from core_builders import SOLVER, Scene, grants, make_run, make_scene, released
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from transport.runs import AlgorithmSpec, DataSpec, ReplaySpec

if TYPE_CHECKING:
    from transport.messages import GroupRef

BATCH = 4
SELECTORS = st.sampled_from(["latest", "uniform", "prioritised", "data_functions:lowest_index"])


class ReplayMachine(RuleBasedStateMachine):
    @initialize(
        ratio=st.sampled_from([0.25, 0.5, 0.9]),
        keep=st.sampled_from([1, 3, 64]),
        max_uses=st.integers(1, 3),
        lag=st.integers(1, 4),
        select=SELECTORS,
        order=st.sampled_from(["edf", "fifo"]),
        filtered=st.booleans(),
    )
    def begin(self, ratio, keep, max_uses, lag, select, order, filtered) -> None:
        self.spec = ReplaySpec(
            ratio=ratio, keep=keep, max_uses=max_uses, select=AlgorithmSpec(name=select)
        )
        filters = (AlgorithmSpec(name="zero_advantage"),) if filtered else ()
        data = DataSpec(filters=filters, order=order, replay=self.spec)
        policy = {"steps": 1000, "batch_groups": BATCH, "max_policy_lag": lag, "data": data}
        self.lag = lag
        self.scene: Scene = make_scene(run=make_run(policy=policy), modules=("data_functions",))
        self.scene.joined("a", slots=32)
        self.step, self.head, self.highest = 0, 0, 0
        self.checkpoint = (0, 0)
        self.lineage: list[tuple[list[str], list[str]]] = []
        self.grant: tuple[GroupRef, ...] = ()
        self.incarnation = 1
        self.released: set[str] = set()
        self.made = 0

    def take(self, effects) -> None:
        """Read what the core says, and answer what it asks of the task source."""
        effects = [*effects, *self.scene.produced(effects)]
        self.released.update(released(effects))
        for grant in grants(effects):
            if grant.step == self.step + 1:
                self.granted(grant.groups)

    def granted(self, groups) -> None:
        fresh = [ref.job for ref in groups if not ref.replay]
        again = [ref.job for ref in groups if ref.replay]
        known = [job for first, _ in self.lineage for job in first]
        used = [job for _, repeated in self.lineage for job in repeated]
        assert len(groups) == BATCH == len({*fresh, *again})
        assert not set(fresh) & set(known), "trained on twice for the first time"
        assert set(again) <= set(known), "again, and never before"
        assert len(again) <= self.spec.ratio * BATCH
        assert all(used.count(job) < self.spec.max_uses for job in again)
        assert all(ref.policy_lag <= self.lag for ref in groups)
        assert not self.released & {ref.digest for ref in groups}, "its body is gone"
        self.grant = groups

    @rule(count=st.integers(1, 6))
    def groups_come(self, count) -> None:
        for offer in self.scene.live_offers()[:count]:
            self.made += 1
            rewards = (1.0, float(self.made % 2))
            self.take(self.scene.finished(offer, version=self.head, rewards=rewards))

    @rule()
    def trainer_asks(self) -> None:
        before = self.grant
        self.take(self.scene.requested(self.step + 1, head=self.head, groups=BATCH))
        if before:
            assert self.grant == before, "asked again and granted something else"

    @rule(reported=st.booleans())
    def trainer_steps(self, reported) -> None:
        """``reported`` False: the report is lost, and the next request tells."""
        if not self.grant:
            return
        groups, self.grant = self.grant, ()
        fresh = [ref.job for ref in groups if not ref.replay]
        self.lineage.append((fresh, [ref.job for ref in groups if ref.replay]))
        parent = self.head
        self.step += 1
        self.highest += 1
        self.head = self.highest
        if reported:
            self.take(self.scene.stepped(self.step, self.head))
        self.publish(parent)
        self.trainer_asks()

    @rule(steps=st.integers(1, 3), checkpoint=st.booleans())
    def all_goes_well(self, steps, checkpoint) -> None:
        for _ in range(steps):
            self.trainer_asks()
            for _ in range(10):
                if self.grant:
                    break
                self.groups_come(4)
            self.trainer_steps(True)
        if checkpoint:
            self.trainer_checkpoints()

    def publish(self, parent) -> None:
        self.take(self.scene.version_stored(self.head, parent=parent, step=self.step))
        self.take(self.scene.serving(self.head))

    @rule()
    def trainer_checkpoints(self) -> None:
        self.checkpoint = (self.step, self.head)
        self.take(self.scene.checkpointed(self.step, self.head))

    @rule()
    def trainer_crashes(self) -> None:
        """It is back at its checkpoint, which it publishes again above all numbers."""
        self.grant = ()
        self.incarnation += 1
        self.step, version = self.checkpoint
        del self.lineage[self.step :]
        hello = {"incarnation": self.incarnation, "step": self.step, "version": version}
        self.take(self.scene.trainer_joined(**hello))
        self.highest += 1
        self.head = self.highest
        self.publish(version)

    @rule(at=st.integers(0, BATCH - 1))
    def trainer_refuses(self, at) -> None:
        if self.grant:
            bad, self.grant = self.grant[at], ()
            self.take(self.scene.refused_group(self.step + 1, bad.job))

    @rule()
    def scheduler_restarts(self) -> None:
        self.take(self.scene.restart())
        self.take(self.scene.trainer_joined(incarnation=self.incarnation, **self.held()))
        self.take(self.scene.joined("a", slots=32, versions={SOLVER: self.head}))
        self.take(self.scene.beats("a", versions={SOLVER: self.head}))
        self.take(self.scene.wait(1.0))

    def held(self) -> dict[str, int]:
        return {"step": self.checkpoint[0], "version": self.checkpoint[1]}

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "scene"):
            return
        row = self.scene.books()
        covered = self.lineage[: self.checkpoint[0]]
        assert row.balance == 0
        assert row.replayed == sum(len(again) for _, again in covered)
        assert row.trained == sum(len(first) for first, _ in covered)

    def teardown(self) -> None:
        """Left in peace the run makes steps, and gives everything back at its end."""
        if not hasattr(self, "scene"):
            return
        goal = self.step + 2
        for _ in range(8):
            if self.step < goal:
                self.all_goes_well(1, False)
        assert self.step >= goal, "no step any more"
        self.scene.commanded("abandon")
        assert not self.scene.core._ctx.tables.kept
        assert not self.scene.core._ctx.tables.jobs


ReplayMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("FARFLOW_EXAMPLES", "12")),
    stateful_step_count=30,
    deadline=None,
    derandomize="FARFLOW_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestReplayMachine = ReplayMachine.TestCase
