"""Builders for tests of the scheduler's core, and ``Scene``: a core with a clock and one-line verbs
in the words of the domain. ``Scene`` checks all invariants and keeps the rows like the store does.
"""

import hashlib
import random
from typing import Any

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
    AttemptFailed,
    BatchGrant,
    BatchRequest,
    BodiesGone,
    BodiesReleased,
    CheckpointReport,
    CommandReply,
    GroupSummary,
    GroupUnusable,
    Heartbeat,
    HeldAttempt,
    Hello,
    Item,
    LeaseOffer,
    LeaseReply,
    Message,
    Role,
    RunCommand,
    RunSubmit,
    StepReport,
    TrainerInventory,
    TrajectoriesStored,
    VersionRef,
    VersionServing,
    VersionStored,
)
from transport.runs import EvaluationSpec, PolicySpec, RunSpec, TaskSpec, WorkflowSpec
from transport.status import AccountingRow, AgentStatus, PolicyStatus, RunStatus

RUN = "r"
SOLVER = "r/solver"


def make_settings(**changes: Any) -> CoreSettings:
    return CoreSettings(**{"retry_backoff_s": 0.0, **changes})


def make_run(name: str = RUN, **changes: Any) -> RunSpec:
    """A run of one trained policy, two groups of two siblings per step, lag bound 1."""
    policy = {"steps": 5, "batch_groups": 2, "max_policy_lag": 1, "checkpoint_every": 2}
    policy |= changes.pop("policy", {})
    names = changes.pop("policies", ("solver",))
    workflow = {"group_size": 2, "max_new_tokens": 16, **changes.pop("workflow", {})}
    evaluation = changes.pop("evaluation", None)
    evaluations = changes.pop("evaluations", {})
    return RunSpec(
        **{
            "name": name,
            "policies": {name: PolicySpec(model="m", **policy) for name in names},
            "task": TaskSpec(source="reasoning-gym", dataset="chain_sum"),
            "workflow": WorkflowSpec(policies=names, **workflow),
            "evaluation": None if evaluation is None else EvaluationSpec(**evaluation),
            "evaluations": {name: EvaluationSpec(**one) for name, one in evaluations.items()},
            **changes,
        }
    )


def make_items(start: int, count: int) -> tuple[Item, ...]:
    return tuple(
        Item(index=index, prompt=f"what is {index} + 1?", answer=str(index + 1))
        for index in range(start, start + count)
    )


def version_digest(policy: str, version: int) -> str:
    return hashlib.sha256(f"{policy}@{version}".encode()).hexdigest()


def make_ref(policy: str, version: int) -> VersionRef:
    return VersionRef(version=version, digest=version_digest(policy, version))


def make_agent_hello(
    incarnation: int = 1,
    *,
    slots: int = 4,
    held: tuple[HeldAttempt, ...] = (),
    versions: dict[str, int] | None = None,
    process: str = "",
    **changes: Any,
) -> Hello:
    known = {SOLVER: 0} if versions is None else versions
    inventory = AgentInventory(
        **{
            "slots": slots,
            "hardware": "cpu",
            "engine": "fake",
            "workflows": {"single_turn": "f1"},
            "rewards": ("reasoning-gym", "exact"),
            "rechecks": True,
            "held": held,
            "versions": {policy: make_ref(policy, v) for policy, v in known.items()},
            **changes,
        }
    )
    return Hello(
        role=Role.AGENT, incarnation=incarnation, build="b", agent=inventory, process=process
    )


def make_trainer_hello(
    policy: str = SOLVER, incarnation: int = 1, *, step: int = 0, version: int = 0
) -> Hello:
    inventory = TrainerInventory(policy=policy, checkpoint_step=step, checkpoint_version=version)
    return Hello(role=Role.TRAINER, incarnation=incarnation, build="b", trainer=inventory)


def make_version_stored(
    version: int, parent: int | None = None, step: int | None = None, policy: str = SOLVER
) -> VersionStored:
    return VersionStored(
        policy=policy,
        version=version,
        parent=version - 1 if parent is None and version > 0 else parent,
        step=version if step is None else step,
        digest=version_digest(policy, version),
        delta_bytes=1000 + version,
        full_bytes=50_000,
    )


def make_summary(
    offer: LeaseOffer, agent: str, *, versions: dict[str, tuple[int, int]], **changes: Any
) -> GroupSummary:
    sequences = len(offer.items) * offer.group_size
    return GroupSummary(
        **{
            "attempt": offer.attempt,
            "fence": offer.fence,
            "job": offer.job,
            "digest": hashlib.sha256(f"{offer.attempt}{offer.fence}".encode()).hexdigest(),
            "size_bytes": 1000,
            "rewards": (1.0,) * sequences,
            "lengths": (8,) * sequences,
            "versions": versions,
            "prompt_tokens": 5,
            "queued_s": 0.1,
            "generating_s": 1.0,
            "agent": agent,
            **changes,
        }
    )


class Scene:
    """A core, its clock, the rows as stored, and everything it said."""

    def __init__(
        self,
        *,
        seed: int = 0,
        term: int = 1,
        check: bool = True,
        modules: tuple[str, ...] = (),
        **settings: Any,
    ):
        self.settings = make_settings(**settings)
        self.rows: dict[tuple[str, str], bytes] = {}
        self.now = 0.0
        self.term = term
        self.seed = seed
        self.checks = check
        self.effects: list[Effect] = []
        self.offers: dict[str, LeaseOffer] = {}
        self.offered_to: dict[str, str] = {}
        self.requests = 0
        self.data = DataAlgorithms(modules)
        self.event: Event = Tick()
        self.core = self._new_core()

    def feed(self, event: Event) -> list[Effect]:
        """Handle one event, commit, check; returns its effects."""
        event = self.data.prepare(self.core, event)
        self.event = event
        effects = self.core.handle(event, self.now)
        for table, key, value in self.core.take_changes():
            if value is None:
                self.rows.pop((table, key), None)
            else:
                self.rows[table, key] = value
        if self.checks:
            self.core.check()
        self.effects += effects
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, LeaseOffer):
                self.offers[effect.message.attempt] = effect.message
                self.offered_to[effect.message.attempt] = effect.peer
        return effects

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass, with a tick at each deadline."""
        until = self.now + seconds
        effects: list[Effect] = []
        while (due := self.core.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            effects += self.feed(Tick())
        self.now = until
        return effects

    def restart(self) -> list[Effect]:
        """Kill the core and make a new one of its rows; the first tick's effects."""
        self.term += 1
        self.core = self._new_core()
        return self.feed(Tick())

    def _new_core(self) -> SchedulerCore:
        rows = [(table, key, value) for (table, key), value in sorted(self.rows.items())]
        rng = random.Random(self.seed + self.term)
        return SchedulerCore(
            self.settings, term=self.term, rng=rng, build="test", rows=rows, now=self.now
        )

    def submitted(self, spec: RunSpec | None = None) -> CommandReply:
        return self.asked(RunSubmit(run=make_run() if spec is None else spec))

    def commanded(self, command: Any, run: str = RUN) -> CommandReply:
        return self.asked(RunCommand(run=run, command=command))

    def asked(self, message: Message, peer: str = "op") -> Any:
        [reply] = of_type(self.asks(message, peer), Reply)
        assert reply.request == self.requests
        return reply.message

    def asks(self, message: Message, peer: str = "op") -> list[Effect]:
        """A request that may be answered later (``replies``)."""
        self.requests += 1
        return self.feed(FromOperator(peer, self.requests, message))

    def joined(self, agent: str = "a", incarnation: int = 1, **hello: Any) -> list[Effect]:
        return self.feed(FromAgent(agent, make_agent_hello(incarnation, **hello)))

    def heard(self, agent: str = "a", **heartbeat: Any) -> list[Effect]:
        message = Heartbeat(**{"sequence": 1, "sent_s": self.now, **heartbeat})
        return self.feed(FromAgent(agent, message))

    def beats(self, agent: str = "a", *, versions: dict[str, int] | None = None) -> list[Effect]:
        """A heartbeat that lists every live offer to the agent."""
        known = {SOLVER: 0} if versions is None else versions
        refs = {policy: make_ref(policy, version) for policy, version in known.items()}
        return self.heard(agent, held=self.held_by(agent), versions=refs)

    def held_by(self, agent: str) -> tuple[HeldAttempt, ...]:
        offers = self.live_offers(agent)
        return tuple(HeldAttempt(attempt=offer.attempt, fence=offer.fence) for offer in offers)

    def serving(self, version: int, agent: str = "a", policy: str = SOLVER) -> list[Effect]:
        message = VersionServing(
            policy=policy,
            version=version,
            digest=version_digest(policy, version),
            pause_s=0.01,
            fetched_bytes=1000,
            fetch_s=0.1,
        )
        return self.feed(FromAgent(agent, message))

    def accepted(self, offer: LeaseOffer) -> list[Effect]:
        return self._replied(offer, accepted=True)

    def declined(self, offer: LeaseOffer, reason: str) -> list[Effect]:
        return self._replied(offer, accepted=False, reason=reason)

    def failed(self, offer: LeaseOffer, code: str = "engine.generation") -> list[Effect]:
        message = AttemptFailed(attempt=offer.attempt, fence=offer.fence, code=code)
        return self.feed(FromAgent(self.offered_to[offer.attempt], message))

    def _replied(self, offer: LeaseOffer, **reply: Any) -> list[Effect]:
        message = LeaseReply(attempt=offer.attempt, fence=offer.fence, **reply)
        return self.feed(FromAgent(self.offered_to[offer.attempt], message))

    def finished(
        self, offer: LeaseOffer, version: int = 0, policies: tuple[str, ...] = (SOLVER,), **c: Any
    ) -> list[Effect]:
        """The offer's result is durable in the trajectory log."""
        versions = c.pop("versions", dict.fromkeys(policies, (version, version)))
        agent = c.pop("agent", self.offered_to[offer.attempt])
        return self.stored(make_summary(offer, agent, versions=versions, **c))

    def stored(self, *summaries: GroupSummary) -> list[Effect]:
        return self.feed(FromService(TRAJECTORY_LOG, TrajectoriesStored(summaries=summaries)))

    def gone(self, *digests: str) -> list[Effect]:
        return self.feed(FromService(TRAJECTORY_LOG, BodiesGone(digests=digests)))

    def version_stored(self, version: int, **changes: Any) -> list[Effect]:
        return self.feed(FromService(WEIGHT_STORE, make_version_stored(version, **changes)))

    def trainer_joined(self, name: str = "t", **hello: Any) -> list[Effect]:
        return self.feed(FromTrainer(name, make_trainer_hello(**hello)))

    def trainer_says(self, message: Message, name: str = "t") -> list[Effect]:
        return self.feed(FromTrainer(name, message))

    def requested(
        self, step: int, head: int | None = None, groups: int = 2, policy: str = SOLVER
    ) -> list[Effect]:
        version = step - 1 if head is None else head
        message = BatchRequest(policy=policy, step=step, groups=groups, head_version=version)
        return self.trainer_says(message)

    def stepped(self, step: int, version: int | None = None, policy: str = SOLVER) -> list[Effect]:
        made = step if version is None else version
        message = StepReport(policy=policy, step=step, version=made, busy_s=2.0, waiting_s=1.0)
        return self.trainer_says(message)

    def checkpointed(
        self, step: int, version: int | None = None, *, final: bool = False, policy: str = SOLVER
    ) -> list[Effect]:
        made = step if version is None else version
        message = CheckpointReport(policy=policy, step=step, version=made, final=final)
        return self.trainer_says(message)

    def refused_group(self, step: int, job: str, code: str = "body.missing") -> list[Effect]:
        message = GroupUnusable(policy=SOLVER, step=step, job=job, code=code)
        return self.trainer_says(message)

    def make_items(self, asked: ProduceItems) -> tuple[Item, ...]:
        """What the run's task sources give."""
        return make_items(asked.start, asked.count)

    def produced(self, effects: list[Effect]) -> list[Effect]:
        """Answer every request for items among ``effects``, and those that follow."""
        answers: list[Effect] = []
        waiting = [effect for effect in effects if isinstance(effect, ProduceItems)]
        while waiting:
            asked = waiting.pop(0)
            items = self.make_items(asked)
            event = ItemsProduced(asked.run, asked.kind, asked.start, items, asked.evaluation)
            more = self.feed(event)
            waiting += [effect for effect in more if isinstance(effect, ProduceItems)]
            answers += more
        return answers

    def live_offers(self, agent: str | None = None) -> list[LeaseOffer]:
        """Offers whose attempts are neither over nor revoked, in the order in which they were
        made; read from the rows."""
        live = {record.id for job in self.core._ctx.tables.jobs.values() for record in job.attempts}
        return [
            offer
            for attempt, offer in self.offers.items()
            if attempt in live and agent in (None, self.offered_to[attempt])
        ]

    def books(self, policy: str = SOLVER, kind: str = "train") -> AccountingRow:
        rows = self.run().accounting
        return next(row for row in rows if (row.policy, row.kind) == (policy, kind))

    def run(self, name: str = RUN) -> RunStatus:
        return next(run for run in self.core.status(self.now).runs if run.name == name)

    def policy(self, policy: str = SOLVER) -> PolicyStatus:
        run = self.run(policy.rpartition("/")[0])
        return next(status for status in run.policies if status.policy == policy)

    def agent(self, name: str = "a") -> AgentStatus:
        return next(agent for agent in self.core.status(self.now).agents if agent.name == name)

    def counter(self, name: str) -> int:
        return self.core.status(self.now).counters.get(name, 0)


def messages(effects: list[Effect], kind: type, peer: str | None = None) -> list[Any]:
    """The sent messages of a type, maybe only those to one peer."""
    return [
        effect.message
        for effect in effects
        if isinstance(effect, Send)
        and isinstance(effect.message, kind)
        and peer in (None, effect.peer)
    ]


def of_type(effects: list[Effect], kind: type) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def grants(effects: list[Effect]) -> list[BatchGrant]:
    return messages(effects, BatchGrant)


def replies(effects: list[Effect]) -> list[Any]:
    return [reply.message for reply in of_type(effects, Reply)]


def released(effects: list[Effect]) -> list[str]:
    return [digest for m in messages(effects, BodiesReleased) for digest in m.digests]


def make_scene(**changes: Any) -> Scene:
    """A submitted run with version 0 stored, its trainer waiting and its items produced; ``kind``
    is the class of scene."""
    spec = changes.pop("run", None) or make_run()
    scene: Scene = changes.pop("kind", Scene)(**changes)
    scene.submitted(spec)
    for name in spec.policies:
        scene.version_stored(0, policy=f"{spec.name}/{name}")
    scene.trainer_joined(policy=f"{spec.name}/{next(iter(spec.policies))}")
    scene.produced(scene.effects)
    return scene
