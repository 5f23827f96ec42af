"""Control plane: submitters of jobs of their own, and what operators ask about jobs and agents.

An external job belongs to a live run: its policies, workflow and reward make the group. Its id is
the client's own, so that submitting it again is harmless; in the scheduler it is
``RUN/x-SUBMITTER.ID``. Its result waits, durable, in the submitter's own numbered list until a
``ResultsRequest`` has passed it.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from transport.messages.agents import Item
from transport.messages.base import By, Count, Id, Message

MAX_JOBS_PER_SUBMIT = 512
MAX_LABELS = 64

Labels = Annotated[
    dict[Id, Annotated[tuple[Id, ...], Meta(max_length=MAX_LABELS)]], Meta(max_length=MAX_LABELS)
]
"""Label to the values that are allowed; all labels must match."""

ResultState = Literal["accepted", "failed", "cancelled", "expired"]


class ExternalJob(msgspec.Struct, frozen=True, kw_only=True):
    """``group_size`` sequences for each of ``items``. ``deadline_s`` counts from acceptance (0:
    none); what is 0 or None otherwise is the run's. Higher ``priority`` goes first."""

    id: Annotated[str, Meta(min_length=1, max_length=80, pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    items: Annotated[tuple[Item, ...], Meta(min_length=1, max_length=256)]
    group_size: Annotated[int, Meta(ge=1, le=1024)] = 1
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    deadline_s: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    max_new_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    pinned: Annotated[dict[Id, Count], Meta(max_length=32)] = {}
    require: Labels = {}


class JobSubmit(Message, frozen=True, kw_only=True):
    run: Id
    jobs: Annotated[tuple[ExternalJob, ...], Meta(max_length=MAX_JOBS_PER_SUBMIT)]


class JobReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """``known``: it was submitted before, exactly so. A refused one has a stable ``code``:
    ``job.conflict``, ``job.invalid``, ``job.unknown`` (of a cancel), ``quota.queued``,
    ``quota.share``, ``quota.results``, ``run.unknown``, ``run.finished``."""

    id: str
    state: Literal["queued", "known", "refused"]
    code: str = ""
    message: str = ""


class JobReceipts(Message, frozen=True, kw_only=True):
    """Durable when it arrives; in the order of the jobs submitted."""

    receipts: tuple[JobReceipt, ...]


class JobCancel(Message, frozen=True, kw_only=True):
    """Answered with ``JobReceipts``: ``known`` when it is cancelled or over."""

    run: Id
    ids: Annotated[tuple[Id, ...], Meta(max_length=MAX_JOBS_PER_SUBMIT)]


class ResultsRequest(Message, frozen=True, kw_only=True):
    """The submitter's results after number ``after``; those up to it are confirmed, and gone.
    Answered as soon as there is one, or empty after ``wait_s``."""

    after: Count
    limit: Annotated[int, Meta(ge=1, le=256)] = 256
    wait_s: Annotated[float, Meta(ge=0.0, le=60.0)] = 0.0


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended. The body of an accepted one is in the trajectory log under ``digest``."""

    number: int
    run: str
    id: str
    state: ResultState
    code: str = ""
    digest: str = ""
    size_bytes: int = 0
    rewards: tuple[float, ...] = ()
    lengths: tuple[int, ...] = ()
    versions: dict[str, tuple[int, int]] = {}
    agent: str = ""
    attempts: int = 0


class Results(Message, frozen=True, kw_only=True):
    """``last`` is the highest number given so far; ``open_jobs`` how many have no result yet. A
    ``last`` below the request's ``after`` says that the scheduler's store was restored from an
    older backup: nothing was confirmed, start again from ``after`` 0."""

    results: tuple[JobResult, ...]
    last: int
    open_jobs: int


class ExplainRequest(Message, frozen=True, kw_only=True):
    """Why does this wait, why did it go where it went: a job, attempt, agent, policy or run."""

    subject: Id


class ScoredCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """An agent as placement saw it. ``cost_s`` is the predicted finish (None: not scored), made
    of ``parts``; ``verdict`` is ``chosen``, ``possible`` or why not."""

    agent: str
    verdict: str
    cost_s: float | None = None
    parts: dict[str, float] = {}


class Explanation(Message, frozen=True, kw_only=True):
    """``reasons`` for people, ``history`` of remembered transitions, oldest first, each beginning
    with its time; ``now_s`` is the present on the same clock (0: not said)."""

    subject: str
    kind: str
    state: str
    reasons: tuple[str, ...]
    candidates: tuple[ScoredCandidate, ...] = ()
    history: tuple[str, ...] = ()
    now_s: float = 0.0


class EventsRequest(Message, frozen=True, kw_only=True):
    """Transitions after number ``after`` (None: from now on), of ``subject`` and what names it
    only, unless it is empty. Answered as soon as there is one, or empty after ``wait_s``."""

    after: Count | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 1000
    wait_s: Annotated[float, Meta(ge=0.0, le=60.0)] = 0.0
    subject: Id = ""


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    at_s: float
    subject: str
    what: str
    facts: dict[str, str] = {}


class Events(Message, frozen=True, kw_only=True):
    """``missed`` transitions were forgotten before this request came. Ask again after ``last``.
    Numbers grow over restarts, with gaps; what a life did not send before it ended is not told.
    ``now_s`` is the present on the clock of ``at_s`` (0: not said)."""

    transitions: tuple[Transition, ...]
    last: int
    missed: int = 0
    now_s: float = 0.0


class AgentOrder(Message, frozen=True, kw_only=True):
    """What an operator wants of an agent. ``drain`` lets it finish within ``deadline_s`` (0: its
    own setting) and leave; a cordoned or quarantined one keeps what it has and gets no more."""

    agent: Id
    order: Literal["drain", "cordon", "uncordon", "quarantine", "release"]
    deadline_s: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    reason: Annotated[str, Meta(max_length=500)] = ""
    by: By = ""


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A try that is over. ``outcome``: result, failed, lost, declined, recalled, revoked."""

    attempt: str
    agent: str
    offered_s: float
    ended_s: float
    outcome: str
    detail: str = ""


class DeadLettersRequest(Message, frozen=True, kw_only=True):
    """Jobs that were given up, by id after ``after``; of one run unless it is empty."""

    run: Id = ""
    after: Id = ""
    limit: Annotated[int, Meta(ge=1, le=100)] = 50


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A job that was given up, with its attempts; ``prompt`` is the beginning of its first item."""

    job: str
    run: str
    kind: str
    reason: str
    died_s: float
    prompt: str
    attempts: tuple[AttemptRecord, ...]


class DeadLetters(Message, frozen=True, kw_only=True):
    letters: tuple[DeadLetter, ...]
    more: bool = False


class JobReplay(Message, frozen=True, kw_only=True):
    """Queue dead letters again, as new tries of the same jobs; empty ``jobs``: all of ``run``."""

    run: Id = ""
    jobs: Annotated[tuple[Id, ...], Meta(max_length=MAX_JOBS_PER_SUBMIT)] = ()
    by: By = ""


class AgentLogsRequest(Message, frozen=True, kw_only=True):
    """Answered with ``AgentLogs`` once the agent has, or refused after a while."""

    agent: Id
    run: Id = ""
    lines: Annotated[int, Meta(ge=1, le=2000)] = 200


class AgentLogs(Message, frozen=True, kw_only=True):
    agent: str
    lines: tuple[str, ...]
