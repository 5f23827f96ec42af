"""Everything one scheduler life works on: rows, their indexes, clocks, estimates and what is due.

What always holds: an index mirrors rows and is rebuilt from them at a restart; all containers keep
insertion order and none is a set that is walked; the story and the counters are bounded.

The modules beside this one are functions over a ``Context``: each event changes rows and marks
policies, runs and placement as due; ``machine`` then settles what is due in a fixed order.
"""

from collections import deque
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from scheduler.core.asking import DriftWindow, SubmitterLive, Waiting
from scheduler.core.bias import LengthWatch
from scheduler.core.buffers import Buffer
from scheduler.core.effects import Effect, Send
from scheduler.core.estimators import (
    AgentEstimate,
    ArrivalRate,
    Ewma,
    HardwarePriors,
    RunEstimate,
)
from scheduler.core.histories import ItemHistory
from scheduler.core.kept import ReplayPool
from scheduler.core.placement import Absorber, make_rule
from scheduler.core.queues import NamedPool, ReadyQueue, TokenBucket
from scheduler.core.settings import CoreSettings
from scheduler.core.state import Account, Agent, Attempt, Counters, Policy, Run
from scheduler.core.tables import Tables
from scheduler.core.timers import Timers
from scheduler.core.turnaround import Durations
from scheduler.core.unusable import UnusableWatch
from scheduler.core.versions import VersionTree
from scheduler.core.work import Work
from transport.ids import Fence
from transport.messages import Item, Message
from transport.runs import EvaluationSpec
from transport.status import GpuReading

if TYPE_CHECKING:
    import random

    from scheduler.core.shortlists import Shortlists

MAX_COUNTERS = 512
AgentState = Literal["joining", "ready", "suspect", "reconnecting", "lost", "draining", "gone"]
NEVER_S = -1e18
CONNECTED: frozenset[str] = frozenset({"joining", "ready", "suspect", "draining"})


class Lease(msgspec.Struct):
    """The clock side of an attempt; ``record`` is its part of the job's row. ``leased`` after the
    agent accepted; ``counted`` while it occupies slots; ``pinned`` as offered; ``unlisted`` once a
    sign of life left it out.

    ``mean_s`` and ``longest_s`` are what a sequence and the longest one were expected to take when
    it was placed, ``tokens`` what all were expected to have, ``hedge`` how many of those were taken
    from the budget for second attempts. ``started_s`` is when its agent first said that it runs,
    ``newest`` the versions of which its oldest tokens can be at most, ``deadlines`` the last head
    steps at which policies can use it, as predicted,
    ``begin_s`` when it probably began or will; ``recall_s`` when it was asked back last;
    ``resumed`` the oldest versions of the finished turns that it goes on from, if it does."""

    attempt: str
    job: str
    agent: str
    fence: Fence
    sequences: int
    pinned: dict[str, int]
    offered_s: float
    record: Attempt
    accepted_s: float | None = None
    leased: bool = False
    spooled: bool = False
    counted: bool = True
    unlisted: bool = False
    mean_s: float = 0.0
    longest_s: float = 0.0
    tokens: float = 0.0
    hedge: float = 0.0
    started_s: float | None = None
    newest: dict[str, int] = {}
    deadlines: dict[str, int] = {}
    begin_s: float | None = None
    recall_s: float | None = None
    resumed: dict[str, int] = {}


@dataclass(slots=True)
class AgentLive:
    """What this life knows of an agent. ``load`` is sequences of its counted leases,
    ``most_slots`` the most that it ever said it has, ``inherited`` the load that the rows of the
    last life gave it (what is spooled is not in the rows), ``fits`` why it cannot do a work of a
    run at all (empty: it can), by run and name of the work. ``counted_slots`` are those in
    ``Context.ready_slots``. ``frees`` are times and
    numbers of slots that become free then (None: to be worked out, see ``backlog``), ``waiting``
    the attempts that it accepted and has not begun, as far as known, ``prefetch`` the sequences
    beyond its slots that keep it from idling, ``most_prefetch`` the most that ever was,
    ``served_s`` since when it has its version of a policy, ``says_started`` once it told that an
    attempt had started. ``back_s`` is when it was last heard again after having been away, ``away``
    why it was lost or gone last."""

    name: str
    state: AgentState
    heartbeat_s: float
    heard_s: float
    back_s: float = NEVER_S
    billed: dict[str, int] = field(default_factory=dict)
    away: str = ""
    load: int = 0
    most_slots: int = 0
    inherited: int = 0
    leases: dict[str, Lease] = field(default_factory=dict)
    blocked_until_s: float = 0.0
    declines: int = 0
    failures: int = 0
    counted_slots: int = 0
    clock_offset_s: float | None = None
    offered_s: float | None = None
    fits: dict[str, dict[str, str]] = field(default_factory=dict)
    running_sequences: int = 0
    tokens_generated: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    spool_bytes: int = 0
    gpus: tuple[GpuReading, ...] = ()
    estimate: AgentEstimate = field(default_factory=AgentEstimate)
    frees: list[tuple[float, int]] | None = None
    waiting: dict[str, None] = field(default_factory=dict)
    prefetch: int = 0
    most_prefetch: int = 0
    served_s: dict[str, float] = field(default_factory=dict)
    says_started: bool = False


@dataclass(slots=True)
class PolicyLive:
    """Indexes of a policy, and when its trainer was last heard. ``gone`` once it has been silent
    for ``work_grace_s``; ``taken`` are jobs by the step that took them; ``granted_s`` is when the
    last batch went out, ``interval_s`` the time from one batch to the next. ``unplaced`` are
    buffered jobs, and since when, whose oldest version has no place in the tree yet. ``arrivals``
    is how often groups come back, ``flying_by_deadline`` counts attempts by the last head
    step at which they should be usable, ``pool`` has what may be trained on again, ``drifts`` how
    far log-probabilities are from the trainer's, by agent."""

    tree: VersionTree
    buffer: Buffer
    heard_s: float
    present: bool = False
    gone: bool = False
    taken: dict[int, dict[str, None]] = field(default_factory=dict)
    busy_s: Ewma = field(default_factory=Ewma)
    unplaced: dict[str, float] = field(default_factory=dict)
    granted_s: float = 0.0
    interval_s: Ewma = field(default_factory=Ewma)
    starved_since_s: float | None = None
    arrivals: ArrivalRate = field(default_factory=ArrivalRate)
    flying_by_deadline: dict[int, int] = field(default_factory=dict)
    lengths: LengthWatch = field(default_factory=LengthWatch)
    pool: ReplayPool = field(default_factory=ReplayPool)
    drifts: dict[str, DriftWindow] = field(default_factory=dict)
    unusable: UnusableWatch = field(default_factory=UnusableWatch)


@dataclass(slots=True)
class RunLive:
    """Indexes of a run: the policies of its workflow by name there, those of them that are trained,
    its training jobs, items fetched ahead (the first has index ``run.cursor``), which curators want
    to skip by index (``skips``), what came of items before by item and family (the stalest first),
    how far items were asked for, sequences in flight; jobs of submitters (``external``) and how
    many of them are pinned to a (policy, version). ``in_flight`` is of training,
    ``external_in_flight`` of submitters' jobs; ``flying`` are the training jobs in flight,
    ``families`` estimates by task family, ``bucket`` the tokens that may be spent now,
    ``absorbers`` what agents take on (``absorbing``), ``placed_s`` when a training job was placed
    last, ``codes`` the fingerprints of its workflows' code on the agents that work for the run,
    ``works`` what its jobs ask of agents and ``evaluations`` what it evaluates, both by name,
    ``turnaround`` of its training jobs from creation to accepted result, ``cancel_s`` when the next
    of its submitters' jobs are given up."""

    policies: dict[str, str]
    trained: tuple[Policy, ...]
    works: dict[str, Work]
    evaluations: dict[str, EvaluationSpec]
    estimate: RunEstimate
    jobs: dict[str, None] = field(default_factory=dict)
    external: dict[str, None] = field(default_factory=dict)
    cancel_s: float = NEVER_S
    pins: dict[tuple[str, int], int] = field(default_factory=dict)
    reserve: deque[Item] = field(default_factory=deque)
    skips: dict[int, str] = field(default_factory=dict)
    histories: dict[str, ItemHistory] = field(default_factory=dict)
    asked_until: int = 0
    in_flight: int = 0
    external_in_flight: int = 0
    flying: dict[str, None] = field(default_factory=dict)
    families: dict[str, RunEstimate] = field(default_factory=dict)
    bucket: TokenBucket = field(default_factory=TokenBucket)
    absorbers: tuple[Absorber, ...] | None = None
    absorbers_s: float = 0.0
    absorbers_age: int = 0
    placed_s: float = 0.0
    codes: dict[str, str] = field(default_factory=dict)
    source_started: bool = False
    turnaround: Durations = field(default_factory=Durations)


@dataclass(slots=True)
class EvaluationLive:
    """Indexes of an evaluation: its open jobs, agents that are past its version, how far its
    items were asked for, sequences in flight, the agent that keeps its version back."""

    jobs: dict[str, None] = field(default_factory=dict)
    declined: dict[str, None] = field(default_factory=dict)
    asked_until: int = 0
    in_flight: int = 0
    keeper: str = ""


class Context:
    """The state of one life of the scheduler; see the module's docstring."""

    def __init__(
        self,
        settings: CoreSettings,
        *,
        term: int,
        rng: "random.Random",
        build: str,
        now: float,
    ) -> None:
        self.settings = settings
        self.term = term
        self.rng = rng
        self.sampling = copy(rng)  # so that what is drawn here changes nothing else
        self.sampling.seed(self.sampling.getrandbits(64))
        self.build = build
        self.now = now
        self.started_s = now
        self.swept_s = now
        self.log_back_s = NEVER_S
        self.fences = 0
        self.tables = Tables()
        self.timers = Timers()
        self.rule = make_rule(settings.placement, rng)
        self.hardware = HardwarePriors()
        self.agents: dict[str, AgentLive] = {}
        self.policies: dict[str, PolicyLive] = {}
        self.runs: dict[str, RunLive] = {}
        self.evaluations: dict[str, EvaluationLive] = {}
        self.upto: dict[str, dict[str, int]] = {}  # versions that agents are not to pass
        self.trainers: dict[str, str] = {}
        self.leases: dict[str, Lease] = {}
        self.bodies: dict[str, str] = {}
        self.held_bodies: dict[str, int] = {}
        self.books: dict[tuple[str, str], Account] = {}
        self.submitters: dict[str, SubmitterLive] = {}
        self.concluded: dict[str, str] = {}
        self.external_open = 0
        self.external_characters = 0
        self.dead_bytes = 0
        self.waiting: dict[int, Waiting] = {}
        self.waited = 0
        self.listeners: dict[int, None] = {}
        self.new_results: dict[str, None] = {}
        self.queues: dict[str, ReadyQueue] = {}
        self.ready = NamedPool()
        self.open_agents = NamedPool()
        self.backed_up = NamedPool()
        self.recalls: dict[str, float] = {}
        self.recall_again_s = 0.0
        self.hosted: tuple[str, ...] = ()
        self.largest_group = 1
        self.ready_slots = 0
        self.ready_agents = 0
        self.effects: list[Effect] = []
        self.new_releases: list[str] = []
        self.new_rechecks: list[str] = []
        self.releases_behind = False
        self.due_policies: dict[str, None] = {}
        self.due_runs: dict[str, None] = {}
        self.dispatch_due = False
        self.shortlists: Shortlists  # of the pass that places now
        self.moved: list[str] | None = None  # agents with another load, while a pass wants them
        self.entries: deque[tuple[float, str, str, dict[str, object]]] = deque(
            maxlen=settings.story_length
        )
        self.entries_made = 0
        self._counters = Counters(values={})
        self._stored_counters: Counters | None = None

    def send(self, peer: str, message: Message) -> None:
        self.effects.append(Send(peer, message))

    def next_fence(self) -> Fence:
        self.fences += 1
        return (self.term, self.fences)

    def count(self, name: str, amount: int = 1) -> None:
        """Count under a dotted name; the number of names is bounded because some come from
        peers (``known_code``)."""
        counters = self._stored_counters or self._counters_row()
        values = counters.values
        before = values.get(name)
        if before is None and len(values) >= MAX_COUNTERS:
            name = "counters.other"
            before = values.get(name)
        values[name] = amount if before is None else before + amount
        self.tables.touch(counters)

    def counters(self) -> dict[str, int]:
        """By name. Asking makes no row: what only looks changes nothing."""
        stored = self._stored_counters or self.tables.counters.get(self._counters.key)
        return {} if stored is None else dict(sorted(stored.values.items()))

    def note(self, subject: str, what: str, **facts: object) -> None:
        """Remember a transition for ``story`` and ``Events``."""
        self.entries_made += 1
        self.entries.append((self.now, subject, what, facts))

    def story(self, id: str) -> list[str]:
        """Remembered transitions of ``id``, of its attempts when it is a job, and those that name
        it among their facts."""
        prefix = f"{id}#"
        return [
            " ".join([f"{at:.3f} {subject} {what}", *(f"{k}={v}" for k, v in facts.items())])
            for at, subject, what, facts in self.entries
            if subject == id or subject.startswith(prefix) or any(v == id for v in facts.values())
        ]

    def run_of(self, policy: Policy) -> Run:
        return self.tables.runs[policy.run]

    def queue(self, name: str) -> ReadyQueue:
        found = self.queues.get(name)
        if found is None:
            found = self.queues[name] = ReadyQueue()
        return found

    def runs_changed(self) -> None:
        """A run began or ended: work out what depends on the set of live runs.

        Idle agents go on hosting the run that ended last, so that its final weights can be
        looked at and used; the next run takes their place.
        """
        live = [run for run in self.tables.runs.values() if run.live]
        last = max(self.tables.runs.values(), key=lambda run: (run.ended_s, run.name), default=None)
        names = frozenset(run.name for run in live or ([last] if last is not None else []))
        policies = self.tables.policies.values()
        self.hosted = tuple(sorted(p.id for p in policies if p.run in names))
        self.largest_group = max((run.spec.workflow.group_size for run in live), default=1)
        for name, agent in self.agents.items():
            agent.fits.clear()
            self.refresh_open(self.tables.agents[name], agent)

    def heartbeat_s(self) -> float:
        """The interval to assign: grows with the fleet so that the rate of heartbeats does not."""
        scale = len(self.agents) / self.settings.heartbeat_scale_agents
        return self.settings.heartbeat_s * max(1.0, scale)

    def lost_after_s(self, heartbeat_s: float) -> float:
        return self.settings.lost_after_s * heartbeat_s / self.settings.heartbeat_s

    def refresh_open(self, agent: Agent, live: AgentLive) -> None:
        """Bring ``open_agents`` up to date after a change of state, block or load."""
        if agent.slots > live.most_slots:
            live.most_slots = agent.slots
        live.frees = None
        is_ready = live.state == "ready" and not agent.cordoned and not agent.quarantined
        self.ready.put(agent.name, is_ready)
        is_open = is_ready and live.blocked_until_s <= self.now
        if is_open and live.load >= agent.slots:
            prefetch = self.settings.prefetch_groups
            ahead = max(max(0, prefetch - 1) * self.largest_group, live.prefetch)
            room = agent.slots + ahead - live.load
            is_open = room > 0 or (room == 0 and prefetch > 0) or live.load == 0
        if self.moved is not None:
            self.moved.append(agent.name)
        if self.open_agents.put(agent.name, is_open) and is_open:
            self.dispatch_due = True

    def _counters_row(self) -> Counters:
        if self._stored_counters is None:
            self._stored_counters = self.tables.counters.get(self._counters.key)
            if self._stored_counters is None:
                self._stored_counters = self._counters
                self.tables.add(self._counters)
        return self._stored_counters


def known_code(code: str) -> str:
    """A peer's code as part of a counter's name: short and plain, or ``other``."""
    plain = code.replace("_", "").replace(".", "").replace("-", "")
    return code if 0 < len(code) <= 40 and plain.isascii() and plain.isalnum() else "other"
