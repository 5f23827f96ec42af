"""The entities of the scheduler, as rows: what survives a restart.

What always holds: everything that a restarted scheduler must still know is in one of these
Structs; a row is the Struct's MessagePack (``tables``). What is not here (leases' clocks,
estimates, who was heard when) starts anew with every life.
"""

from typing import ClassVar, Literal

import msgspec

from transport.ids import Fence
from transport.messages import AttemptRecord, DeadLetter, DrainOrder, Item, VersionRef
from transport.messages.services import PartialSummary
from transport.runs import HELD_OUT, RunSpec
from transport.status import AccountingRow, CopyState, StepStatus

Row = tuple[str, str, bytes]
Change = tuple[str, str, bytes | None]

JobState = Literal["queued", "in_flight", "done"]
OPEN_STATES: frozenset[str] = frozenset({"queued", "in_flight", "buffered", "taken"})
RECHECKER = "~"
"""Submits rechecks of rewards; no key has such a name."""
WAITING_STATES: frozenset[str] = frozenset({"queued", "in_flight", "buffered"})


class Entity(msgspec.Struct, kw_only=True):
    """Base of all rows."""

    table: ClassVar[str] = ""

    @property
    def key(self) -> str:
        raise NotImplementedError


class Run(Entity):
    """A training effort. ``finishing`` is the reason with which it will end, once that is known;
    ``cursor`` the next training item, ``submitted_groups`` how many groups were made of items,
    ``skipped`` how many were left out by curators, ``skipped_in_row`` since the last that was not.
    """

    table: ClassVar[str] = "run"

    name: str
    spec: RunSpec
    state: Literal["running", "paused", "stopping", "finished"] = "running"
    reason: str = ""
    finishing: str = ""
    cursor: int = 0
    submitted_groups: int = 0
    skipped: int = 0
    skipped_in_row: int = 0
    eval_jobs: int = 0
    external_jobs: int = 0
    evaluations: int = 0
    start_evaluated: bool = False
    end_evaluated: bool = False
    created_s: float = 0.0
    ended_s: float = 0.0

    @property
    def key(self) -> str:
        return self.name

    @property
    def live(self) -> bool:
        return self.state != "finished"


class StandingRequest(msgspec.Struct, frozen=True):
    """A batch that the trainer waits for."""

    step: int
    groups: int


class PendingStep(msgspec.Struct):
    """A step whose record waits for the size of its version."""

    status: StepStatus
    metrics: dict[str, float]


class Policy(Entity):
    """One policy of a run and where its trainer stands.

    ``step`` is the last completed step and ``head`` the version it made, ``reported`` the last
    step of this lineage whose report came, ``evaluated_steps`` the step of the version that each
    of the run's evaluations looked at last. Versions up to ``floor`` that are not
    ``checkpoint_version`` belong to lineages that were left.
    """

    table: ClassVar[str] = "policy"

    id: str
    run: str
    name: str
    trained: bool
    trainer: str = ""
    incarnation: int = -1
    step: int = 0
    head: int = 0
    reported: int = 0
    checkpoint_step: int = 0
    checkpoint_version: int = 0
    highest: int = 0
    floor: int = -1
    final: bool = False
    evaluated_steps: dict[str, int] = {}
    request: StandingRequest | None = None
    unrecorded: list[PendingStep] = []
    last_step: StepStatus | None = None

    @property
    def key(self) -> str:
        return self.id


class Version(Entity):
    """A node of a policy's version tree; ``stored`` once the weight store has it, until then
    parent and step are what the trainer said."""

    table: ClassVar[str] = "version"

    policy: str
    version: int
    parent: int | None
    step: int
    digest: str = ""
    delta_bytes: int | None = None
    full_bytes: int | None = None
    stored: bool = False

    @property
    def key(self) -> str:
        return f"{self.policy}@{self.version}"


class Copy(msgspec.Struct, omit_defaults=True):
    """What one policy makes of a job. ``step`` and ``lag`` are of the batch that took it,
    ``oldest`` is the oldest version that drew a token of this policy; ``arrived_s`` is when its
    result came (where the order asks for it), ``score`` and ``drawn`` are its verdict's."""

    state: CopyState
    reason: str = ""
    step: int = 0
    lag: int = 0
    oldest: int = -1
    arrived_s: float = 0.0
    score: float = 0.0
    drawn: bool = False


class Attempt(msgspec.Struct):
    """A live try. A stray one is no longer counted on (its agent is lost or does not list it),
    but its result still wins if it comes first."""

    id: str
    fence: Fence
    agent: str
    stray: bool = False
    offered_s: float = 0.0


class Result(msgspec.Struct, frozen=True):
    """The accepted result: what the batch statistics and the grant need of its summary."""

    attempt: str
    agent: str
    digest: str
    size_bytes: int
    reward_mean: float
    response_tokens: int


class Recheck(msgspec.Struct, frozen=True):
    """Rewards of an accepted result that are found again: what ``agent`` recorded for ``digest``,
    and what a ``second`` agent ``found`` when it found others. ``kinds`` is what an agent must be
    able to find beside plain rewards of single turns."""

    job: str
    attempt: str
    agent: str
    digest: str
    rewards: tuple[float, ...]
    second: str = ""
    found: tuple[float, ...] = ()
    kinds: tuple[str, ...] = ()


class External(msgspec.Struct, frozen=True):
    """What a submitter asked for beyond the run's own: who it is, its id for the job, until when
    (core's clock, 0: whenever) and with what. ``fingerprint`` tells whether a job that is
    submitted again is exactly the same; ``pinned`` is by policy id. With ``recheck`` it is the
    scheduler's own, of the submitter ``RECHECKER``."""

    submitter: str
    id: str
    fingerprint: str = ""
    due_s: float = 0.0
    max_new_tokens: int = 0
    temperature: float | None = None
    pinned: dict[str, int] = {}
    require: dict[str, tuple[str, ...]] = {}
    recheck: Recheck | None = None


class Job(Entity):
    """One group to be made. ``items`` go when the result is there; with a ``prompt`` they are
    stored apart under that key, and what is here stands for them. ``avoid`` are agents on which it
    failed; ``evaluation`` is empty for training and external jobs; ``history`` are its last tries
    that are over; ``replays`` how often it was brought back from the dead letters; ``partial`` the
    finished turns that its next attempt may go on from."""

    table: ClassVar[str] = "job"

    id: str
    run: str
    kind: Literal["train", "eval", "external", "recheck"]
    index: int
    sequences: int
    items: tuple[Item, ...]
    copies: dict[str, Copy]
    priority: int = 0
    created_s: float = 0.0
    external: External | None = None
    history: list[AttemptRecord] = []
    replays: int = 0
    prompt: str = ""
    evaluation: str = ""
    state: JobState = "queued"
    attempts: list[Attempt] = []
    attempts_made: int = 0
    failures: int = 0
    losses: int = 0
    avoid: list[str] = []
    result: Result | None = None
    partial: PartialSummary | None = None

    @property
    def key(self) -> str:
        return self.id

    @property
    def queue(self) -> str:
        """The ready queue that it waits in: of its evaluation, its run or the run's submitters."""
        if self.external is not None:
            return external_queue(self.run)
        return self.evaluation or self.run


def external_queue(run: str) -> str:
    """The ready queue of the jobs that submitters have in a run."""
    return f"{run}/x"


class Agent(Entity):
    """An edge agent as it last introduced itself; ``gone`` after it said goodbye. ``quarantined``
    is why it gets no work until an operator releases it, ``evidence`` what speaks against it,
    ``drain`` an order that it has not said to follow yet, ``draining`` once it said that it leaves;
    ``process`` is what its process drew at its start."""

    table: ClassVar[str] = "agent"

    name: str
    incarnation: int
    slots: int
    hardware: str = ""
    engine: str = ""
    workflows: dict[str, str] = {}
    rewards: tuple[str, ...] = ()
    rechecks: bool = False
    recheck_kinds: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    bases: tuple[str, ...] = ()
    versions: dict[str, VersionRef] = {}
    groups_done: int = 0
    attempts_failed: int = 0
    gone: bool = False
    cordoned: bool = False
    quarantined: str = ""
    evidence: list[str] = []
    price_usd_hour: float = 0.0
    egress_usd_gb: float = 0.0
    drain: DrainOrder | None = None
    draining: bool = False
    process: str = ""

    @property
    def key(self) -> str:
        return self.name


class Evaluation(Entity):
    """One of the run's evaluations (by ``name``) of pinned versions; ``next_item`` is the first
    item without a job. Of ``scored`` items with ``samples`` answers each, ``correct`` answers are
    right; ``counts[c]`` items have c right ones. ``failed`` items' jobs were given up, the last for
    ``failure``."""

    table: ClassVar[str] = "evaluation"

    id: str
    run: str
    kind: Literal["start", "between", "end"]
    pinned: dict[str, int]
    steps: dict[str, int]
    items: int
    next_item: int = 0
    open_jobs: int = 0
    scored: int = 0
    correct: int = 0
    name: str = HELD_OUT
    samples: int = 1
    counts: list[int] = []
    restarts: int = 0
    done: bool = False
    failed: int = 0
    failure: str = ""

    @property
    def key(self) -> str:
        return self.id


class Release(Entity):
    """A body that nobody needs any more, until the trajectory log has dropped it."""

    table: ClassVar[str] = "release"

    digest: str

    @property
    def key(self) -> str:
        return self.digest


class Dead(Entity):
    """A job that was given up, as it was, so that it can be tried again."""

    table: ClassVar[str] = "dead"

    letter: DeadLetter
    job: Job

    @property
    def key(self) -> str:
        return self.letter.job


class Spend(Entity):
    """What a run has cost so far: agent time by price, egress of agents and of weights."""

    table: ClassVar[str] = "spend"

    run: str
    agents_usd: float = 0.0
    egress_usd: float = 0.0
    tokens: int = 0
    hedge_tokens: int = 0

    @property
    def key(self) -> str:
        return self.run


class Account(Entity):
    """The accounting row of one policy and kind."""

    table: ClassVar[str] = "account"

    row: AccountingRow

    @property
    def key(self) -> str:
        return account_key(self.row.policy, self.row.kind)


class Counters(Entity):
    """How often what happened; the number of names is bounded."""

    table: ClassVar[str] = "counters"

    values: dict[str, int] = {}

    @property
    def key(self) -> str:
        return "all"


def account_key(policy: str, kind: str) -> str:
    return f"{policy}|{kind}"
