"""A run of the scheduler's production core and data functions with a real learner, in one process.

    ProduceItems -> task source -> curators -> core -> LeaseOffer -> engine and verifier -> filters
         ^                                                                     |
         +------- core <- StepReport <- trainer <- BatchGrant (new | replayed) <+

There is one agent, which draws ``ROUND_GROUPS`` groups at a time and only while the trainer waits
for a batch, always with the newest weights. So no group is older than it has to be, and nothing
depends on speed. Curators, filters, replay selectors, histories, buffer, pool and quota are those
of a deployment: they are only called.
"""

import hashlib
import random
from collections.abc import Sequence
from typing import Any, Final

from bench.learning_loop import GROUPS, POLICY, SIBLINGS, TOKENS, Asked, Group, Learner
from scheduler.core.effects import Effect, ProduceItems, Reply, Send
from scheduler.core.events import (
    Event,
    FromAgent,
    FromOperator,
    FromService,
    FromTrainer,
    ItemsProduced,
    Tick,
)
from scheduler.core.machine import SchedulerCore
from scheduler.core.settings import TRAJECTORY_LOG, WEIGHT_STORE, CoreSettings
from scheduler.data.algorithms import DataAlgorithms
from transport.messages import (
    AgentInventory,
    BatchGrant,
    BatchRequest,
    BodiesGone,
    BodiesReleased,
    CheckpointReport,
    CommandReply,
    GroupSummary,
    Heartbeat,
    HeldAttempt,
    Hello,
    LeaseOffer,
    LeaseOffers,
    LeaseReplies,
    LeaseReply,
    LeaseRevoke,
    Message,
    Role,
    RunSubmit,
    StepReport,
    TrainerInventory,
    TrajectoriesStored,
    VersionRef,
    VersionServing,
    VersionStored,
)
from transport.runs import AlgorithmSpec, DataSpec, PolicySpec, RunSpec, TaskSpec, WorkflowSpec

RUN, SOLVER = POLICY.split("/")
AGENT: Final = "agent"
TRAINER: Final = "trainer"
ROUND_GROUPS: Final = 16
ROUND_S: Final = 1.0
"""What a round takes in the core's time, which nothing but its heartbeats goes by."""

CHECKPOINT_EVERY: Final = 5
MAX_ROUNDS: Final = 200
"""For one batch: more than any curator or filter of the bench can ask for."""


def run_spec(
    task: TaskSpec, seed: int, data: DataSpec, curators: tuple[AlgorithmSpec, ...]
) -> RunSpec:
    """The main job with other items and data algorithms."""
    solver = PolicySpec(
        model="arithmetic-1m",
        steps=100_000,
        batch_groups=GROUPS,
        max_policy_lag=4,
        checkpoint_every=CHECKPOINT_EVERY,
        data=data,
    )
    return RunSpec(
        name=RUN,
        seed=seed,
        policies={SOLVER: solver},
        task=task,
        workflow=WorkflowSpec(policies=(SOLVER,), group_size=SIBLINGS, max_new_tokens=TOKENS),
        curators=curators,
    )


class CoreRun:
    """A submitted run whose agent and trainer are ready. ``rollouts`` counts all sequences that
    were drawn for training, ``steps`` optimizer steps, ``replayed`` groups that were trained on
    again.

    Raises:
        AssertionError: the core refuses the run, or never grants a batch.
    """

    def __init__(self, learner: Learner, spec: RunSpec) -> None:
        self.rollouts = 0
        self.steps = 0
        self.replayed = 0
        self._learner = learner
        self._core = SchedulerCore(
            CoreSettings(), term=1, rng=random.Random(spec.seed), build="bench"
        )
        self._data = DataAlgorithms()
        self._now = 0.0
        self._offers: dict[str, LeaseOffer] = {}
        self._bodies: dict[str, Group] = {}
        self._grants: dict[int, BatchGrant] = {}
        self._replies: list[CommandReply] = []
        self._feed(FromOperator(peer="bench", request=1, message=RunSubmit(run=spec)))
        [reply] = self._replies
        assert reply.ok, reply.message
        self._publish(0, None)
        trainer = TrainerInventory(policy=POLICY, checkpoint_step=0, checkpoint_version=0)
        self._feed(FromTrainer(TRAINER, _hello(Role.TRAINER, trainer=trainer)))
        agent = AgentInventory(
            slots=ROUND_GROUPS * SIBLINGS,
            hardware="bench",
            engine="torch",
            workflows={"single_turn": "1"},
            rewards=("reasoning-gym",),
            versions={POLICY: _ref(0)},
        )
        self._feed(FromAgent(AGENT, _hello(Role.AGENT, agent=agent)))

    def counters(self) -> dict[str, int]:
        """What data functions did, by the core's names."""
        return self._core.status(self._now).counters

    async def step(self) -> None:
        """Draw until a batch is granted, train on it, serve what came of it."""
        learner, step = self._learner, self.steps + 1
        self._say(BatchRequest(policy=POLICY, step=step, groups=GROUPS, head_version=self.steps))
        for _ in range(MAX_ROUNDS):
            if step in self._grants:
                break
            await self._round()
        assert step in self._grants, f"no batch for step {step}: {self.counters()}"
        granted = self._grants.pop(step).groups
        await learner.step([self._bodies[ref.digest] for ref in granted])
        await learner.serve(learner.state())
        self.replayed += sum(ref.replay for ref in granted)
        self.steps = step
        self._say(StepReport(policy=POLICY, step=step, version=step, busy_s=ROUND_S, waiting_s=0.0))
        self._publish(step, step - 1)
        serving = VersionServing(
            policy=POLICY, version=step, digest=_digest(f"version {step}"), pause_s=0.0
        )
        self._feed(FromAgent(AGENT, serving))
        if step % CHECKPOINT_EVERY == 0:
            self._say(CheckpointReport(policy=POLICY, step=step, version=step))

    async def _round(self) -> None:
        """The oldest offers are drawn and their results stored."""
        offers = list(self._offers.values())[:ROUND_GROUPS]
        asked = [Asked(offer.job, offer.items[0], offer.seed) for offer in offers]
        drawn = await self._learner.draw(asked)
        summaries = tuple(map(self._stored, offers, drawn))
        self.rollouts += len(offers) * SIBLINGS
        self._feed(FromService(TRAJECTORY_LOG, TrajectoriesStored(summaries=summaries)))
        self._now += ROUND_S
        held = tuple(
            HeldAttempt(attempt=one.attempt, fence=one.fence) for one in self._offers.values()
        )
        versions = {POLICY: _ref(self.steps)}
        beat = Heartbeat(sequence=1, sent_s=self._now, held=held, versions=versions)
        self._feed(FromAgent(AGENT, beat))
        self._feed(Tick())

    def _stored(self, offer: LeaseOffer, group: Group) -> GroupSummary:
        digest = _digest(offer.attempt)
        self._bodies[digest] = group
        del self._offers[offer.attempt]
        return GroupSummary(
            attempt=offer.attempt,
            fence=offer.fence,
            job=offer.job,
            digest=digest,
            size_bytes=1000,
            rewards=tuple(one.reward for one in group),
            lengths=tuple(len(one.tokens) for one in group),
            versions={POLICY: (self.steps, self.steps)},
            prompt_tokens=len(group[0].prompt_tokens),
            queued_s=0.0,
            generating_s=ROUND_S,
            agent=AGENT,
        )

    def _publish(self, version: int, parent: int | None) -> None:
        message = VersionStored(
            policy=POLICY,
            version=version,
            parent=parent,
            step=version,
            digest=_digest(f"version {version}"),
            delta_bytes=1000,
            full_bytes=1000,
        )
        self._feed(FromService(WEIGHT_STORE, message))

    def _say(self, message: Message) -> None:
        self._feed(FromTrainer(TRAINER, message))

    def _feed(self, event: Event) -> None:
        """Let the core handle an event and carry out what it wants, until it wants nothing."""
        events: list[Event] = [event]
        while events:
            prepared = self._data.prepare(self._core, events.pop(0))
            effects = self._core.handle(prepared, self._now)
            self._core.take_changes()
            events += self._performed(effects)

    def _performed(self, effects: Sequence[Effect]) -> list[Event]:
        """What the world answers."""
        answers: list[Event] = []
        for effect in effects:
            match effect:
                case ProduceItems(run=run, kind=kind, start=start, count=count):
                    items = tuple(self._learner.source.items(kind, start, count))
                    answers.append(ItemsProduced(run, kind, start, items, effect.evaluation))
                case Reply(message=CommandReply() as reply):
                    self._replies.append(reply)
                case Send(message=message):
                    answers += self._heard(message)
                case _:
                    pass  # rows for files that nobody reads here
        return answers

    def _heard(self, message: Message) -> list[Event]:
        match message:
            case LeaseOffer():
                return [self._accepted([message])]
            case LeaseOffers(offers=offers):
                return [self._accepted(offers)]
            case LeaseRevoke(attempt=attempt):
                self._offers.pop(attempt, None)
            case BatchGrant():
                self._grants[message.step] = message
            case BodiesReleased(digests=digests):
                for digest in digests:
                    self._bodies.pop(digest, None)
                return [FromService(TRAJECTORY_LOG, BodiesGone(digests=digests))]
            case _:
                pass  # replies to heartbeats and hellos
        return []

    def _accepted(self, offers: Sequence[LeaseOffer]) -> Event:
        self._offers |= {offer.attempt: offer for offer in offers}
        replies = tuple(
            LeaseReply(attempt=one.attempt, fence=one.fence, accepted=True) for one in offers
        )
        return FromAgent(AGENT, LeaseReplies(replies=replies))


def _hello(role: Role, **inventory: Any) -> Hello:
    return Hello(role=role, incarnation=1, build="bench", **inventory)


def _ref(version: int) -> VersionRef:
    return VersionRef(version=version, digest=_digest(f"version {version}"))


def _digest(what: str) -> str:
    return hashlib.sha256(what.encode()).hexdigest()
