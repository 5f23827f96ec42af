"""Links, trajectory log, weight store and task source of the model world (``core_world``): what
lies between the scheduler's core and its peers.
"""

import hashlib
import random
from dataclasses import dataclass, field
from typing import Any

from core_builders import (
    Scene,
    make_items,
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
from scheduler.core.events import AgentRevoked, FromAgent, FromService, FromTrainer, ItemsProduced
from scheduler.core.settings import TRAJECTORY_LOG, WEIGHT_STORE
from transport.ids import policy_id, policy_name
from transport.messages import (
    BodiesGone,
    BodiesReleased,
    CheckpointReport,
    GroupRef,
    GroupSummary,
    Hello,
    LeaseOffer,
    LeaseRevoke,
    Message,
    PartialStored,
    PartialSummary,
    Role,
    StepReport,
    SummariesAccepted,
    TrajectoriesStored,
    VersionAccepted,
    VersionStored,
)
from transport.runs import RunSpec


class Broken(AssertionError):
    """The core broke a promise."""


@dataclass
class Held:
    offer: LeaseOffer
    first: dict[str, int] = field(default_factory=dict)
    summary: GroupSummary | None = None
    turns: int = 0


@dataclass
class Agent:
    name: str
    incarnation: int = 1
    alive: bool = True
    welcome: bool = False
    draining: bool = False
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
    again: list[tuple[int, str]] = field(default_factory=list)
    checkpoint: tuple[int, int, int] = (0, 0, 0)
    unsaid: CheckpointReport | None = None
    reborn: bool = False
    reports: list[StepReport] = field(default_factory=list)
    stopping: bool = False
    final: bool = False
    over: bool = False


class LinkedWorld:
    """One scheduler, its peers and the links between them."""

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
        self.turns: dict[str, PartialSummary] = {}
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

    def agent_revoked(self, agent: str) -> None:
        """The key of ``agent`` is taken back; its name speaks on with another one."""
        self._execute(self.scene.feed(AgentRevoked(agent)))

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
        event = ItemsProduced(asked.run, asked.kind, asked.start, items, asked.evaluation)
        self._execute(self.scene.feed(event))
        return True

    # ---- trajectory log and weight store -----------------------------------------------------

    def log_announces(self, at: int = 0, *, again: bool = False) -> bool:
        """Unaccepted summaries are announced; or, once more, one that was accepted."""
        pool = list(self.bodies.values()) if again else list(self.unaccepted.values())
        if not pool:
            return False
        summary = pool[at % len(pool)]
        self._say(TRAJECTORY_LOG, TrajectoriesStored(summaries=(summary,)))
        return True

    def log_keeps_turns(self, name: str, at: int) -> bool:
        """The log has one more finished turn of an attempt that an agent runs, or ran."""
        held = [h for h in self.agents[name].held.values() if h.first and h.summary is None]
        if not held:
            return False
        found = held[at % len(held)]
        found.turns += 1
        offer = found.offer
        turns = found.turns + (0 if offer.resume is None else offer.resume.turns)
        partial = PartialSummary(
            attempt=offer.attempt,
            fence=offer.fence,
            job=offer.job,
            turns=turns,
            digest=hashlib.sha256(f"{offer.attempt}{offer.fence}{turns}".encode()).hexdigest(),
            size_bytes=100,
            oldest=found.first,
            agent=name,
        )
        self.turns[partial.digest] = partial
        self._say(TRAJECTORY_LOG, PartialStored(partials=(partial,)))
        return True

    def first_versions(self, offer: LeaseOffer, versions: dict[str, int]) -> dict[str, int]:
        """Of the oldest tokens of an attempt that begins with ``versions``: those of the turns that
        it goes on from, which it can have only as long as they are in the log."""
        first = {policy: versions[policy] for policy in offer.policies.values()}
        partial = None if offer.resume is None else self.turns.get(offer.resume.digest)
        if partial is not None:
            first = {policy: min(v, partial.oldest.get(policy, v)) for policy, v in first.items()}
        return first

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
                    self.turns.pop(digest, None)
                self._say(name, BodiesGone(digests=digests))
            case VersionAccepted(policy=policy, version=version):
                self.unaccepted_versions.pop((policy, version), None)

    def _publish(self, policy: str, version: int, parent: int | None, step: int) -> None:
        self.tree[policy, version] = (parent, step)
        self.durable[policy] = max(version, self.durable.get(policy, -1))
        self.unaccepted_versions[policy, version] = make_version_stored(
            version, parent=parent, step=step, policy=policy
        )

    # ---- what peers do with what they hear -----------------------------------------------------

    def _agent_hears(self, agent: Agent, message: Message) -> None:
        raise NotImplementedError

    def _trainer_hears(self, trainer: Trainer, message: Message) -> None:
        raise NotImplementedError

    def _check_results(self) -> None:
        raise NotImplementedError
