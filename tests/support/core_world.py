"""A small model of everything around the scheduler's core: agents, trainers, trajectory log, weight
store, task sources and the links between them.

Links are first in, first out per peer; a cut loses what is under way in both directions; a message
may be delivered twice. Peers behave like the real ones: standing things are repeated, spools and
checkpoints survive a crash of their owner. The model keeps its own version tree and its own record
of what each lineage was trained on, and raises where the core breaks a promise to it.
"""

import random
from dataclasses import dataclass, field
from typing import Any

from core_builders import (
    Scene,
    make_agent_hello,
    make_items,
    make_ref,
    make_summary,
    make_trainer_hello,
    make_version_stored,
)

from scheduler.core.effects import (
    Effect,
    ProduceItems,
    RecordStep,
    RunEnded,
    Send,
    StartTaskSource,
    StopTaskSource,
)
from scheduler.core.events import FromAgent, FromService, FromTrainer, ItemsProduced
from scheduler.core.settings import TRAJECTORY_LOG, WEIGHT_STORE
from transport.ids import policy_id, policy_name
from transport.messages import (
    AttemptFailed,
    BatchGrant,
    BatchRequest,
    BodiesGone,
    BodiesReleased,
    CheckpointReport,
    GroupRef,
    GroupSummary,
    GroupUnusable,
    Heartbeat,
    HeartbeatReply,
    HeldAttempt,
    Hello,
    HelloRequired,
    HostedPolicies,
    LeaseOffer,
    LeaseReply,
    LeaseRevoke,
    Message,
    Ping,
    Role,
    RunState,
    StepReport,
    SummariesAccepted,
    TrajectoriesStored,
    VersionAccepted,
    VersionServing,
    VersionStored,
    Welcome,
)
from transport.runs import RunSpec


class Broken(AssertionError):
    """The core broke a promise."""


@dataclass
class Held:
    offer: LeaseOffer
    first: dict[str, int] = field(default_factory=dict)
    summary: GroupSummary | None = None


@dataclass
class Agent:
    name: str
    incarnation: int = 1
    alive: bool = True
    welcome: bool = False
    held: dict[str, Held] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    hosted: tuple[str, ...] = ()


@dataclass
class Trainer:
    name: str
    policy: str
    incarnation: int = 1
    alive: bool = True
    welcome: bool = False
    step: int = 0
    head: int = 0
    highest: int = 0
    grant: tuple[GroupRef, ...] = ()
    lineage: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    checkpoint: tuple[int, int, int] = (0, 0, 0)
    unsaid: CheckpointReport | None = None
    reborn: bool = False
    reports: list[StepReport] = field(default_factory=list)
    stopping: bool = False
    final: bool = False
    over: bool = False


class World:
    """One scheduler and its surroundings; every verb is one thing that can happen."""

    def __init__(
        self,
        spec: RunSpec,
        agents: int = 2,
        seed: int = 0,
        *,
        republish: bool = True,
        **settings: Any,
    ) -> None:
        self.spec = spec
        self.republish = republish
        self.scene = Scene(seed=seed, **settings)
        self.rng = random.Random(seed)
        self.policies = [policy_id(spec.name, name) for name in sorted(spec.policies)]
        self.agents = {f"a{i}": Agent(f"a{i}") for i in range(agents)}
        self.trainers = {
            f"t-{policy_name(policy)}": Trainer(f"t-{policy_name(policy)}", policy)
            for policy in self.policies
        }
        self.to_core: dict[str, list[Message]] = {}
        self.to_peer: dict[str, list[Message]] = {}
        self.items: list[ProduceItems] = []
        self.bodies: dict[str, GroupSummary] = {}
        self.unaccepted: dict[str, GroupSummary] = {}
        self.unaccepted_versions: dict[tuple[str, int], VersionStored] = {}
        self.tree: dict[tuple[str, int], tuple[int | None, int]] = {}
        self.durable: dict[str, int] = {}
        self.revoked: dict[str, None] = {}
        self.won: dict[str, str] = {}
        self.ended: list[str] = []
        self.recorded: list[tuple[str, int, int]] = []
        self.source = False
        for policy in self.policies:
            self._publish(policy, 0, None, 0)
        self.scene.submitted(spec)
        self._execute(self.scene.effects)

    # ---- links -----------------------------------------------------------------------------------

    def _execute(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer=peer, message=message):
                    self.to_peer.setdefault(peer, []).append(message)
                    if isinstance(message, LeaseRevoke):
                        self.revoked[message.attempt] = None
                case ProduceItems():
                    if not self.source:
                        raise Broken("items asked of a source that was not started")
                    self.items.append(effect)
                case StartTaskSource():
                    self.source = True
                case StopTaskSource():
                    self.source = False
                case RecordStep(step=step):
                    self.recorded.append((step.policy, step.step, step.version))
                case RunEnded(reason=reason):
                    self.ended.append(reason)

    def _say(self, peer: str, message: Message) -> None:
        self.to_core.setdefault(peer, []).append(message)

    def _event(self, peer: str, message: Message) -> Any:
        if peer in self.agents:
            return FromAgent(peer, message)
        return (FromTrainer if peer in self.trainers else FromService)(peer, message)

    def arrive(self, peer: str, *, twice: bool = False) -> bool:
        """The core takes in a peer's next message."""
        waiting = self.to_core.get(peer)
        if not waiting:
            return False
        message = waiting[0] if twice else waiting.pop(0)
        effects = self.scene.feed(self._event(peer, message))
        self._check_results()
        self._execute(effects)
        return True

    def hear(self, peer: str) -> bool:
        """A peer takes in the next message from the core."""
        waiting = self.to_peer.get(peer)
        if not waiting:
            return False
        message = waiting.pop(0)
        if peer in self.agents:
            self._agent_hears(self.agents[peer], message)
        elif peer in self.trainers:
            self._trainer_hears(self.trainers[peer], message)
        else:
            self._service_hears(peer, message)
        return True

    def cut(self, peer: str) -> None:
        """The connection breaks: what is under way is lost, and the peer says hello again."""
        self.to_core.pop(peer, None)
        self.to_peer.pop(peer, None)
        for found in (self.agents.get(peer), self.trainers.get(peer)):
            if found is not None:
                found.welcome = False

    def pass_time(self, seconds: float) -> None:
        self._execute(self.scene.wait(seconds))

    def restart_core(self) -> None:
        """Kill -9: all connections break; what was not sent is lost."""
        for peer in [*self.agents, *self.trainers, TRAJECTORY_LOG, WEIGHT_STORE]:
            self.cut(peer)
        self.items.clear()
        self.source = False
        self._execute(self.scene.restart())
        self._say(TRAJECTORY_LOG, Hello(role=Role.SERVICE, incarnation=1, build="b"))

    def commanded(self, command: Any) -> None:
        before = len(self.scene.effects)
        self.scene.commanded(command, self.spec.name)
        self._execute(self.scene.effects[before:])

    def produce(self, share: int = 1) -> bool:
        """The task source answers its oldest request, in full or in part."""
        if not self.items:
            return False
        asked = self.items.pop(0)
        items = make_items(asked.start, max(1, asked.count // share))
        event = ItemsProduced(asked.run, asked.kind, asked.start, items)
        self._execute(self.scene.feed(event))
        return True

    # ---- agents ----------------------------------------------------------------------------------

    def agent_beats(self, name: str) -> None:
        agent = self.agents[name]
        if not agent.alive:
            return
        held = tuple(
            HeldAttempt(attempt=id, fence=h.offer.fence, spooled=h.summary is not None)
            for id, h in agent.held.items()
        )
        if not agent.welcome:
            hello = make_agent_hello(
                agent.incarnation, slots=3, held=held, versions=dict(agent.versions)
            )
            self._say(name, hello)
            return
        versions = {policy: make_ref(policy, v) for policy, v in agent.versions.items()}
        self._say(name, Heartbeat(sequence=1, sent_s=0.0, held=held, versions=versions))

    def agent_updates(self, name: str, policy: str) -> bool:
        """The agent fetches a newer version, unless pinned work keeps it back."""
        agent = self.agents[name]
        newest = self.durable.get(policy, -1)
        pins = [h.offer.pinned[policy] for h in agent.held.values() if policy in h.offer.pinned]
        target = min([newest, *pins])
        if (
            not agent.alive
            or policy not in agent.hosted
            or agent.versions.get(policy, -1) >= target
        ):
            return False
        agent.versions[policy] = target
        digest = make_ref(policy, target).digest
        self._say(name, VersionServing(policy=policy, version=target, digest=digest, pause_s=0.0))
        return True

    def agent_starts(self, name: str, at: int) -> bool:
        """Draw the first token of a held attempt."""
        found = self._running(name, at)
        if found is None or found.first:
            return False
        versions = self.agents[name].versions
        if any(versions.get(p) != v for p, v in found.offer.pinned.items()):
            return False
        found.first = {policy: versions[policy] for policy in found.offer.policies.values()}
        return True

    def agent_finishes(self, name: str, at: int) -> bool:
        found = self._running(name, at)
        if found is None or not found.first:
            return False
        now = self.agents[name].versions
        spans = {policy: (first, max(first, now[policy])) for policy, first in found.first.items()}
        found.summary = make_summary(found.offer, name, versions=spans)
        return True

    def agent_fails(self, name: str, at: int) -> bool:
        found = self._running(name, at)
        if found is None:
            return False
        offer = found.offer
        del self.agents[name].held[offer.attempt]
        self._say(name, AttemptFailed(attempt=offer.attempt, fence=offer.fence, code="engine"))
        return True

    def agent_uploads(self, name: str) -> bool:
        """A spooled body reaches the log, is acknowledged and leaves the spool."""
        agent = self.agents[name]
        done = [h for h in agent.held.values() if h.summary is not None]
        if not agent.alive or not done or done[0].summary is None:
            return False
        summary = done[0].summary
        self.bodies[summary.digest] = summary
        self.unaccepted[summary.digest] = summary
        del agent.held[summary.attempt]
        return True

    def agent_dies(self, name: str) -> None:
        self.cut(name)
        agent = self.agents[name]
        agent.alive = False
        agent.held = {id: h for id, h in agent.held.items() if h.summary is not None}

    def agent_returns(self, name: str) -> None:
        agent = self.agents[name]
        if not agent.alive:
            agent.alive = True
            agent.incarnation += 1

    def _running(self, name: str, at: int) -> Held | None:
        agent = self.agents[name]
        running = [h for h in agent.held.values() if h.summary is None]
        return running[at % len(running)] if agent.alive and running else None

    def _agent_hears(self, agent: Agent, message: Message) -> None:
        match message:
            case Welcome(policies=policies) | HostedPolicies(policies=policies):
                agent.welcome = True
                agent.hosted = policies
                agent.versions = {p: v for p, v in agent.versions.items() if p in policies}
            case HelloRequired():
                agent.welcome = False
            case LeaseOffer():
                self._offered(agent, message)
            case LeaseRevoke(attempt=id):
                agent.held.pop(id, None)
            case HeartbeatReply(unknown=unknown):
                for id in unknown:
                    agent.held.pop(id, None)

    def _offered(self, agent: Agent, offer: LeaseOffer) -> None:
        reason = ""
        if any(agent.versions.get(p, -1) > v for p, v in offer.pinned.items()):
            reason = "version_passed"
        elif self.rng.random() < 0.1:
            reason = "full"
        elif any(policy not in agent.versions for policy in offer.policies.values()):
            reason = "policy_unknown"
        if not reason:
            agent.held[offer.attempt] = Held(offer)
        reply = LeaseReply(
            attempt=offer.attempt, fence=offer.fence, accepted=not reason, reason=reason
        )
        self._say(agent.name, reply)

    # ---- trajectory log and weight store -----------------------------------------------------

    def log_announces(self, at: int = 0, *, again: bool = False) -> bool:
        """Unaccepted summaries are announced; or, once more, one that was accepted."""
        pool = list(self.bodies.values()) if again else list(self.unaccepted.values())
        if not pool:
            return False
        summary = pool[at % len(pool)]
        self._say(TRAJECTORY_LOG, TrajectoriesStored(summaries=(summary,)))
        return True

    def store_announces(self, at: int = 0) -> bool:
        pool = list(self.unaccepted_versions.values())
        if not pool:
            return False
        self._say(WEIGHT_STORE, pool[at % len(pool)])
        return True

    def _service_hears(self, name: str, message: Message) -> None:
        match message:
            case SummariesAccepted(digests=digests):
                for digest in digests:
                    self.unaccepted.pop(digest, None)
            case BodiesReleased(digests=digests):
                for digest in digests:
                    self.bodies.pop(digest, None)
                    self.unaccepted.pop(digest, None)
                self._say(name, BodiesGone(digests=digests))
            case VersionAccepted(policy=policy, version=version):
                self.unaccepted_versions.pop((policy, version), None)

    def _publish(self, policy: str, version: int, parent: int | None, step: int) -> None:
        self.tree[policy, version] = (parent, step)
        self.durable[policy] = max(version, self.durable.get(policy, -1))
        self.unaccepted_versions[policy, version] = make_version_stored(
            version, parent=parent, step=step, policy=policy
        )

    # ---- trainers ----------------------------------------------------------------------------

    def trainer_speaks(self, name: str) -> None:
        """Hello, or everything that stands: reports, the request or the final report."""
        trainer = self.trainers[name]
        if not trainer.alive or trainer.over:
            return
        spec = self.spec.policies[policy_name(trainer.policy)]
        if not trainer.welcome:
            step, version, _ = trainer.checkpoint
            hello = make_trainer_hello(
                trainer.policy, trainer.incarnation, step=step, version=version
            )
            self._say(name, hello)
            return
        self._say(name, Ping(sequence=1, sent_s=0.0))
        for report in trainer.reports:
            self._say(name, report)
        if trainer.stopping or trainer.step >= spec.steps:
            self.trainer_checkpoints(name)
            trainer.final = True
            report = CheckpointReport(
                policy=trainer.policy, step=trainer.step, version=trainer.head, final=True
            )
            self._say(name, report)
        elif not trainer.grant:
            request = BatchRequest(
                policy=trainer.policy,
                step=trainer.step + 1,
                groups=spec.batch_groups,
                head_version=trainer.head,
            )
            self._say(name, request)

    def trainer_steps(self, name: str) -> bool:
        trainer = self.trainers[name]
        if not trainer.alive or not trainer.grant:
            return False
        jobs = tuple(ref.job for ref in trainer.grant)
        before = [job for _, done in trainer.lineage for job in done]
        if len(set(before + list(jobs))) != len(before) + len(jobs):
            raise Broken(f"{jobs} trained on twice by {name}: {before}")
        self._check_bodies(trainer)
        trainer.grant = ()
        trainer.step += 1
        trainer.highest += 1
        parent, trainer.head = trainer.head, trainer.highest
        trainer.lineage.append((trainer.step, jobs))
        self._publish(trainer.policy, trainer.head, parent, trainer.step)
        report = StepReport(
            policy=trainer.policy,
            step=trainer.step,
            version=trainer.head,
            busy_s=1.0,
            waiting_s=0.0,
        )
        trainer.reports.append(report)
        self._say(name, report)
        self._say_checkpoint(trainer)
        return True

    def trainer_checkpoints(self, name: str) -> bool:
        trainer = self.trainers[name]
        if not trainer.alive or trainer.checkpoint[0] == trainer.step:
            return False
        trainer.checkpoint = (trainer.step, trainer.head, len(trainer.lineage))
        trainer.unsaid = CheckpointReport(
            policy=trainer.policy, step=trainer.step, version=trainer.head
        )
        if trainer.step % 2:
            self._say_checkpoint(trainer)
        return True

    def _say_checkpoint(self, trainer: Trainer) -> None:
        """Some checkpoints are reported only after the next step."""
        if trainer.unsaid is not None:
            self._say(trainer.name, trainer.unsaid)
            trainer.unsaid = None

    def trainer_crashes(self, name: str) -> None:
        """It is back at once, at its checkpoint."""
        self.cut(name)
        trainer = self.trainers[name]
        trainer.incarnation += 1
        trainer.step, trainer.head, length = trainer.checkpoint
        del trainer.lineage[length:]
        trainer.grant = ()
        trainer.unsaid = None
        trainer.reborn = True
        trainer.reports = []

    def trainer_refuses(self, name: str, at: int) -> bool:
        """One body of the grant is of no use."""
        trainer = self.trainers[name]
        if not trainer.alive or not trainer.grant or not self.republish:
            return False  # without, a rejected group may be the last one that a rollback can use
        ref = trainer.grant[at % len(trainer.grant)]
        trainer.grant = ()
        self._say(
            name,
            GroupUnusable(
                policy=trainer.policy, step=trainer.step + 1, job=ref.job, code="body.missing"
            ),
        )
        return True

    def _trainer_hears(self, trainer: Trainer, message: Message) -> None:
        match message:
            case Welcome(highest_version=highest, stopping=stopping):
                trainer.welcome = True
                trainer.highest = max(trainer.highest, highest)
                trainer.stopping = trainer.stopping or stopping
                if self.republish and trainer.reborn and trainer.highest > trainer.head:
                    # Agents are on versions that were left; this leads them back.
                    trainer.highest += 1
                    parent, trainer.head = trainer.head, trainer.highest
                    self._publish(trainer.policy, trainer.head, parent, trainer.step)
                trainer.reborn = False
            case HelloRequired():
                trainer.welcome = False
            case BatchGrant(step=step, groups=groups):
                if trainer.welcome and step == trainer.step + 1 and not trainer.final:
                    trainer.grant = groups
                    trainer.reports = [r for r in trainer.reports if r.step >= step]
                    self._check_bodies(trainer)
            case RunState(state=state):
                trainer.stopping = trainer.stopping or state in ("stopping", "finished")
                trainer.over = trainer.over or state == "finished"

    # ---- promises --------------------------------------------------------------------------------

    def lag(self, policy: str, version: int, head: int) -> int:
        """Optimizer steps on the tree path, from the model's own tree."""
        paths = []
        for start in (version, head):
            at: int | None = start
            path = []
            while at is not None:
                path.append(at)
                at = self.tree[policy, at][0]
            paths.append(path)
        fork = next(v for v in paths[0] if v in paths[1])
        step = {v: self.tree[policy, v][1] for v in (version, head, fork)}
        return step[version] + step[head] - 2 * step[fork]

    def _check_bodies(self, trainer: Trainer) -> None:
        """What is granted is in the log, and fresh enough for the head that trains on it."""
        bound = self.spec.policies[policy_name(trainer.policy)].max_policy_lag
        for ref in trainer.grant:
            summary = self.bodies.get(ref.digest)
            if summary is None:
                raise Broken(f"{ref.job} was granted and its body released")
            oldest = summary.versions[trainer.policy][0]
            lag = self.lag(trainer.policy, oldest, trainer.head)
            if lag > bound or ref.policy_lag != lag:
                raise Broken(f"{ref.job}: lag {lag}, said {ref.policy_lag}, bound {bound}")

    def _check_results(self) -> None:
        """An attempt that was revoked before its result came never wins."""
        for job in self.scene.core._ctx.tables.jobs.values():
            if job.result is not None and job.id not in self.won:
                self.won[job.id] = job.result.attempt
                if job.result.attempt in self.revoked:
                    raise Broken(f"{job.id}: revoked {job.result.attempt} won")

    # ---- until the end -----------------------------------------------------------------------

    def round(self) -> None:
        """Everything that can happen happens once, in order."""
        for name in self.agents:
            self.agent_returns(name)
            for policy in self.policies:
                self.agent_updates(name, policy)
            self.agent_beats(name)
            for at in range(4):
                self.agent_starts(name, at)
            self.agent_finishes(name, 0)
            while self.agent_uploads(name):
                pass
        for name, trainer in self.trainers.items():
            trainer.alive = True
            self.trainer_steps(name)
            if trainer.step % 2 == 0:
                self.trainer_checkpoints(name)
            self.trainer_speaks(name)
        for at in range(len(self.unaccepted)):
            self.log_announces(at)
        for at in range(len(self.unaccepted_versions)):
            self.store_announces(at)
        while self.produce():
            pass
        peers = [*self.agents, *self.trainers, TRAJECTORY_LOG, WEIGHT_STORE]
        busy = True
        while busy:
            moved = [self.arrive(peer) or self.hear(peer) for peer in peers]
            busy = any(moved)
        self.pass_time(1.0)

    def finish(self, rounds: int = 300) -> None:
        """Without further mishaps the run comes to its end, and everything is given back."""
        for _ in range(rounds):
            if self.ended and not self.bodies:
                break
            self.round()
        else:
            raise Broken(f"no end in sight: {self.scene.run(self.spec.name)}")
        if self.scene.core._ctx.tables.jobs:
            raise Broken("jobs are left")
