"""The entities of the scheduler, as rows: what survives a restart.

What always holds: everything that a restarted scheduler must still know is in one of these
Structs; a row is the Struct's MessagePack; whoever changes an entity calls ``Tables.touch``. What
is not here (leases' clocks, estimates, who was heard when) starts anew with every life.
"""

from typing import Any, ClassVar, Literal

import msgspec

from transport.errors import StoreError
from transport.ids import Fence
from transport.messages import AttemptRecord, DeadLetter, Item, JobResult, VersionRef
from transport.runs import RunSpec
from transport.status import AccountingRow, CopyState, StepStatus

Row = tuple[str, str, bytes]
Change = tuple[str, str, bytes | None]

JobState = Literal["queued", "in_flight", "done"]
OPEN_STATES: frozenset[str] = frozenset({"queued", "in_flight", "buffered", "taken"})
WAITING_STATES: frozenset[str] = frozenset({"queued", "in_flight", "buffered"})


class Entity(msgspec.Struct, kw_only=True):
    """Base of all rows."""

    table: ClassVar[str] = ""

    @property
    def key(self) -> str:
        raise NotImplementedError


class Run(Entity):
    """A training effort. ``finishing`` is the reason with which it will end, once that is known;
    ``cursor`` the next training item, ``submitted_groups`` how many groups were made of items."""

    table: ClassVar[str] = "run"

    name: str
    spec: RunSpec
    state: Literal["running", "paused", "stopping", "finished"] = "running"
    reason: str = ""
    finishing: str = ""
    cursor: int = 0
    submitted_groups: int = 0
    eval_jobs: int = 0
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
    step of this lineage whose report came. Versions up to ``floor`` that are not
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
    evaluated_step: int = 0
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


class Copy(msgspec.Struct):
    """What one policy makes of a job. ``step`` and ``lag`` are of the batch that took it,
    ``oldest`` is the oldest version that drew a token of this policy."""

    state: CopyState
    reason: str = ""
    step: int = 0
    lag: int = 0
    oldest: int = -1


class Attempt(msgspec.Struct):
    """A live try. A stray one is no longer counted on (its agent is lost or does not list it),
    but its result still wins if it comes first."""

    id: str
    fence: Fence
    agent: str
    stray: bool = False


class Result(msgspec.Struct, frozen=True):
    """The accepted result: what the batch statistics and the grant need of its summary."""

    attempt: str
    agent: str
    digest: str
    size_bytes: int
    reward_mean: float
    response_tokens: int


class External(msgspec.Struct, frozen=True):
    """What a submitter asked for beyond the run's own: who it is, its id for the job, until when
    (core's clock, 0: whenever) and with what."""

    submitter: str
    id: str
    due_s: float = 0.0
    max_new_tokens: int = 0
    temperature: float | None = None
    pinned: dict[str, int] = {}
    require: dict[str, tuple[str, ...]] = {}


class Job(Entity):
    """One group to be made. ``items`` go when the result is there; ``avoid`` are agents on which
    it failed; ``evaluation`` is empty for training and external jobs; ``history`` are its last
    tries that are over; ``replays`` how often it was brought back from the dead letters."""

    table: ClassVar[str] = "job"

    id: str
    run: str
    kind: Literal["train", "eval", "external"]
    index: int
    sequences: int
    items: tuple[Item, ...]
    copies: dict[str, Copy]
    priority: int = 0
    created_s: float = 0.0
    external: External | None = None
    history: list[AttemptRecord] = []
    replays: int = 0
    evaluation: str = ""
    state: JobState = "queued"
    attempts: list[Attempt] = []
    attempts_made: int = 0
    failures: int = 0
    losses: int = 0
    avoid: list[str] = []
    result: Result | None = None

    @property
    def key(self) -> str:
        return self.id

    @property
    def queue(self) -> str:
        """The ready queue that it waits in: its evaluation's or its run's."""
        return self.evaluation or self.run


class Agent(Entity):
    """An edge agent as it last introduced itself; ``gone`` after it said goodbye. ``quarantined``
    is why it gets no work until an operator releases it, ``evidence`` what speaks against it."""

    table: ClassVar[str] = "agent"

    name: str
    incarnation: int
    slots: int
    hardware: str = ""
    engine: str = ""
    workflows: dict[str, str] = {}
    rewards: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    versions: dict[str, VersionRef] = {}
    groups_done: int = 0
    attempts_failed: int = 0
    gone: bool = False
    cordoned: bool = False
    quarantined: str = ""
    evidence: list[str] = []
    price_usd_hour: float = 0.0
    egress_usd_gb: float = 0.0

    @property
    def key(self) -> str:
        return self.name


class Evaluation(Entity):
    """Greedy accuracy of pinned versions; ``next_item`` is the first item without a job."""

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
    restarts: int = 0
    done: bool = False

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


class Outcome(Entity):
    """A result that waits for its submitter."""

    table: ClassVar[str] = "outcome"

    submitter: str
    result: JobResult

    @property
    def key(self) -> str:
        return f"{self.submitter}|{self.result.number}"


class Submitter(Entity):
    """``last`` is the highest number that a result of it got, ``confirmed`` up to where it has
    them."""

    table: ClassVar[str] = "submitter"

    name: str
    last: int = 0
    confirmed: int = 0

    @property
    def key(self) -> str:
        return self.name


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


_ENTITIES: tuple[type[Entity], ...] = (
    Run,
    Policy,
    Version,
    Job,
    Agent,
    Evaluation,
    Release,
    Outcome,
    Submitter,
    Dead,
    Spend,
    Account,
    Counters,
)
_DECODERS: dict[str, Any] = {kind.table: msgspec.msgpack.Decoder(kind).decode for kind in _ENTITIES}


class Tables:
    """All entities by table and key, and which of them changed since they were last taken."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.policies: dict[str, Policy] = {}
        self.versions: dict[str, Version] = {}
        self.jobs: dict[str, Job] = {}
        self.agents: dict[str, Agent] = {}
        self.evaluations: dict[str, Evaluation] = {}
        self.releases: dict[str, Release] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.submitters: dict[str, Submitter] = {}
        self.dead: dict[str, Dead] = {}
        self.spends: dict[str, Spend] = {}
        self.accounts: dict[str, Account] = {}
        self.counters: dict[str, Counters] = {}
        self._by_name: dict[str, dict[str, Any]] = {
            Run.table: self.runs,
            Policy.table: self.policies,
            Version.table: self.versions,
            Job.table: self.jobs,
            Agent.table: self.agents,
            Evaluation.table: self.evaluations,
            Release.table: self.releases,
            Outcome.table: self.outcomes,
            Submitter.table: self.submitters,
            Dead.table: self.dead,
            Spend.table: self.spends,
            Account.table: self.accounts,
            Counters.table: self.counters,
        }
        self._dirty: dict[tuple[str, str], None] = {}
        self._encode = msgspec.msgpack.Encoder().encode

    def add(self, entity: Entity) -> None:
        self._by_name[entity.table][entity.key] = entity
        self.touch(entity)

    def touch(self, entity: Entity) -> None:
        """``entity`` has changed; its row is due."""
        self._dirty[entity.table, entity.key] = None

    def remove(self, entity: Entity) -> None:
        self._by_name[entity.table].pop(entity.key, None)
        self.touch(entity)

    def take_changes(self) -> list[Change]:
        """Rows changed since the last call, in the order of their first change; O(changed)."""
        changes: list[Change] = []
        for table, key in self._dirty:
            entity = self._by_name[table].get(key)
            changes.append((table, key, None if entity is None else self._encode(entity)))
        self._dirty.clear()
        return changes

    def dump(self) -> list[Row]:
        """Every row, whether changed or not."""
        return [
            (table, key, self._encode(entity))
            for table, entities in self._by_name.items()
            for key, entity in entities.items()
        ]

    def load(self, table: str, key: str, value: bytes) -> None:
        """Take in a stored row.

        Raises:
            StoreError: the row is of no known table or does not decode; names table and key.
        """
        decode = _DECODERS.get(table)
        if decode is None:
            raise StoreError(
                f"row {table}/{key}: unknown table; it was written by a newer farflow, use that"
            )
        try:
            self._by_name[table][key] = decode(value)
        except msgspec.MsgspecError as error:
            raise StoreError(
                f"row {table}/{key} does not decode: {error}; restore the store from a backup"
            ) from error
