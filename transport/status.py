"""The view model: what a person sees of a scheduler, shared by ``status``, the live view and
everything later that draws it. Built by the scheduler core, read by the front door."""

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from transport.runs import HELD_OUT

CopyState = Literal[
    "queued",
    "in_flight",
    "buffered",
    "taken",
    "trained",
    "scored",
    "delivered",
    "filtered",
    "expired",
    "dropped",
    "rejected",
    "failed",
    "cancelled",
]
"""Where one (group, policy) can be; each is a column of the accounting."""


class AccountingRow(msgspec.Struct, kw_only=True):
    """Where every (group, policy) of one kind stands; ``submitted`` equals the sum of the states.

    ``scored`` is how evaluation jobs succeed, ``delivered`` how external ones do. Two columns are
    outside the sum: ``abandoned`` counts consumptions that a rolled-back lineage lost (the group
    returned to the buffer and is counted again where it went), ``requeued`` how many of
    ``submitted`` were dead letters before (their first copies stay ``failed``), ``replayed`` how
    often groups were trained on again, as far as a checkpoint covers it (``trained`` speaks of the
    first time).
    """

    policy: str
    kind: str
    submitted: int = 0
    queued: int = 0
    in_flight: int = 0
    buffered: int = 0
    taken: int = 0
    trained: int = 0
    scored: int = 0
    delivered: int = 0
    filtered: int = 0
    expired: int = 0
    dropped: int = 0
    rejected: int = 0
    failed: int = 0
    cancelled: int = 0
    abandoned: int = 0
    requeued: int = 0
    replayed: int = 0

    @property
    def balance(self) -> int:
        """0 when every submitted copy is accounted for."""
        placed: int = sum(getattr(self, state) for state in get_args(CopyState))
        return self.submitted - placed


MAX_GPUS = 16


class GpuReading(msgspec.Struct, frozen=True, kw_only=True):
    """What a GPU of an agent says of itself; None where it does not say."""

    name: Annotated[str, Meta(max_length=64)]
    power_w: Annotated[float, Meta(ge=0.0, le=1e6)] | None = None
    temperature_c: Annotated[float, Meta(ge=-300.0, le=1e4)] | None = None
    used_bytes: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    total_bytes: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    busy_share: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None


class AgentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One agent. ``rate_tokens_s`` is the learnt rate of one slot, i.e. of one sequence; the
    agent's is about that times ``running_sequences``. ``versions`` by policy id. ``up_bytes_s``
    and ``down_bytes_s`` are learnt from real transfers, None before the first; ``spool_bytes`` are
    bodies on its disk that nobody has acknowledged."""

    name: str
    state: str
    slots: int
    running_sequences: int
    leases: int
    rtt_s: float | None
    rate_tokens_s: float | None
    tokens_generated: int
    bytes_up: int
    bytes_down: int
    versions: dict[str, int]
    digests: dict[str, str]
    groups_done: int
    attempts_failed: int
    hardware: str = ""
    labels: dict[str, str] = {}
    cordoned: bool = False
    quarantined: str = ""
    evidence: tuple[str, ...] = ()
    clock_offset_s: float | None = None
    price_usd_hour: float = 0.0
    up_bytes_s: float | None = None
    down_bytes_s: float | None = None
    spool_bytes: int = 0
    gpus: tuple[GpuReading, ...] = ()


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """Something that wants a person: stable ``code``, what it is about, and what to do."""

    code: str
    subject: str
    message: str
    since_s: float


class DemandStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a run's trainers could use. ``binds`` is generation, links, staleness, training or
    nothing (no trainer wants work); ``more_slots`` would raise ``steps_hour`` to
    ``steps_hour_with``; 0 when more slots would not help, ``reason`` says why."""

    run: str
    binds: str
    more_slots: int
    hardware: str
    steps_hour: float
    steps_hour_with: float
    reason: str


class EvaluationStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How good one version is in the evaluation ``name``. ``accuracy`` is the share of right
    answers over ``scored`` items of ``samples`` answers each (avg@samples); ``pass_at`` has, by k,
    the probability that one of k answers is right. ``failed`` items have no answers, as their jobs
    were given up, last for ``failure``; one that ended without any answer is not ``done``."""

    policy: str
    version: int
    step: int
    items: int
    scored: int
    accuracy: float
    done: bool
    name: str = HELD_OUT
    samples: int = 1
    pass_at: dict[str, float] = {}
    failed: int = 0
    failure: str = ""


class StepStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step as the scheduler saw it."""

    policy: str
    step: int
    version: int
    reward_mean: float
    policy_lag_mean: float
    policy_lag_max: int
    response_tokens: int
    busy_s: float
    waiting_s: float
    delta_bytes: int | None
    full_bytes: int | None
    at_s: float


class PolicyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One policy of a run. ``trainer`` is absent, waiting, training or done; ``replay_groups`` are
    kept to be trained on again. ``delta_bytes`` of ``full_bytes`` has the delta of the newest
    version that is stored, which may be older than the last step's; None before there is one."""

    policy: str
    trainer: str
    step: int
    steps: int
    head_version: int
    head_digest: str
    checkpoint_step: int
    buffered_groups: int
    last_step: StepStatus | None
    evaluations: tuple[EvaluationStatus, ...]
    replay_groups: int = 0
    delta_bytes: int | None = None
    full_bytes: int | None = None


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One run. ``turnaround`` is of training groups, from their job's creation to their accepted
    result, since this scheduler started; None before the first and once the run has ended."""

    name: str
    state: str
    reason: str
    policies: tuple[PolicyStatus, ...]
    accounting: tuple[AccountingRow, ...]
    tenant: str = ""
    cost_usd: float = 0.0
    tokens: int = 0
    hedge_tokens: int = 0
    external_open: int = 0
    dead_letters: int = 0
    turnaround_p50_s: float | None = None
    turnaround_p95_s: float | None = None


class SchedulerStatus(msgspec.Struct, frozen=True, kw_only=True):
    term: int
    build: str
    uptime_s: float
    runs: tuple[RunStatus, ...]
    agents: tuple[AgentStatus, ...]
    counters: dict[str, int]
    demand: tuple[DemandStatus, ...] = ()
    alerts: tuple[Alert, ...] = ()
