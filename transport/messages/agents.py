"""Control plane: agents and the scheduler."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from transport.ids import Fence
from transport.messages.base import (
    Count,
    Finite,
    HeldAttempt,
    Id,
    Message,
    SignerCertificate,
    VersionRef,
)
from transport.runs import AnswerForm, CodeReward
from transport.status import MAX_GPUS, GpuReading


class Heartbeat(Message, frozen=True, kw_only=True):
    """Sign of life of an agent; renews the lease of every attempt in ``held``. ``rtt_s`` is the
    agent's smoothed round trip as measured from earlier replies, ``clock_offset_s`` by how much the
    scheduler's wall clock is ahead of the agent's (four time stamps, RFC 5905), ``wall_s`` the
    agent's wall clock when it sent this, ``gpus`` what its GPUs say where they can be asked."""

    sequence: Count
    sent_s: Finite
    held: tuple[HeldAttempt, ...] = ()
    running_sequences: Count = 0
    waiting_sequences: Count = 0
    tokens_generated: Count = 0
    versions: dict[str, VersionRef] = {}
    rtt_s: Finite | None = None
    spool_bytes: Count = 0
    bytes_up: Count = 0
    bytes_down: Count = 0
    draining: bool = False
    wall_s: Finite = 0.0
    clock_offset_s: Finite | None = None
    gpus: Annotated[tuple[GpuReading, ...], Meta(max_length=MAX_GPUS)] = ()


class HeartbeatReply(Message, frozen=True, kw_only=True):
    """Echo of ``sequence`` and ``sent_s``, with the scheduler's wall clock when the heartbeat came
    and when this left (0: not stamped). ``unknown`` are held attempts that the scheduler wants
    no more: the agent aborts them and drops their spool. ``upto`` are versions, by policy, that its
    copies are not to pass until a later reply says otherwise: an evaluation needs them still."""

    sequence: int
    sent_s: float
    unknown: tuple[str, ...] = ()
    received_s: float = 0.0
    replied_s: float = 0.0
    upto: dict[str, int] = {}


class HostedPolicies(Message, frozen=True, kw_only=True):
    """The policies an agent is to host from now on."""

    policies: tuple[str, ...]
    signers: tuple[SignerCertificate, ...] = ()


class DrainOrder(Message, frozen=True, kw_only=True):
    """Finish or hand back what is held within ``deadline_s``, then say goodbye and leave."""

    deadline_s: float
    reason: str


class AgentLogRequest(Message, frozen=True, kw_only=True):
    """The last ``lines`` lines of the agent's log, of attempts of ``run`` only unless it is
    empty. ``request`` is echoed."""

    request: int
    run: str
    lines: int


class AgentLog(Message, frozen=True, kw_only=True):
    """Lines, oldest first; what does not fit a control frame is left out at the front."""

    request: Count
    lines: tuple[str, ...]


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One task entry. ``meta`` is JSON that its verifier wants to see again; items of one
    ``family`` have a common length and reward behaviour."""

    index: int
    prompt: str
    answer: str
    meta: str = ""
    family: str = ""


class PartialRef(msgspec.Struct, frozen=True, kw_only=True):
    """Finished turns of an earlier attempt of the job, in the trajectory log under ``digest``:
    ``turns`` of all siblings together."""

    digest: str
    turns: int


class RewardSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a response is scored: a verifier of the data set, exact match, math-verify, or the item's
    unit tests, run as ``code`` says. ``answer`` is the part of a response that a verifier or exact
    match is given; a response without one gets 0 (``FEATURE_ANSWER``)."""

    name: Literal["reasoning-gym", "exact", "math-verify", "code"]
    dataset: str = ""
    code: CodeReward | None = None
    answer: AnswerForm = "whole"


class LeaseOffer(Message, frozen=True, kw_only=True):
    """One attempt of a job. ``resume`` names turns that an earlier attempt had finished.
    Each of ``items`` gets ``group_size`` siblings: training jobs hold one item, evaluations several
    of one ``reward``. ``pinned`` policies must be used at exactly that version, ``at_least`` at
    that or a descendant. With ``recheck`` nothing is generated: the rewards of the group whose body
    has this digest are found again, and it is sent back with them. ``chat_template_kwargs`` are
    those policies' arguments of their chat templates, by id (``FEATURE_TEMPLATE``)."""

    attempt: str
    fence: Fence
    job: str
    kind: Literal["train", "eval", "external"]
    items: tuple[Item, ...]
    group_size: int
    workflow: str
    settings: dict[str, Any]
    policies: dict[str, str]
    reward: RewardSpec
    max_new_tokens: int
    temperature: float
    seed: int
    lease_s: float
    pinned: dict[str, int] = {}
    resume: PartialRef | None = None
    recheck: Id = ""
    chat_template_kwargs: dict[str, dict[str, Any]] = {}


class LeaseOffers(Message, frozen=True, kw_only=True):
    """Several offers in one frame, in order; the same as one after the other."""

    offers: tuple[LeaseOffer, ...]


class LeaseReply(Message, frozen=True, kw_only=True):
    """``accepted`` false gives the reason (``draining``, ``full``, ``spool_full``,
    ``workflow_unknown``, ``version_passed`` ...)."""

    attempt: Id
    fence: Fence
    accepted: bool
    reason: str = ""


class LeaseReplies(Message, frozen=True, kw_only=True):
    """Several replies in one frame, in order."""

    replies: Annotated[tuple[LeaseReply, ...], Meta(max_length=4096)]


class LeaseRecall(Message, frozen=True, kw_only=True):
    """Give this attempt back if it has not started; it could finish earlier elsewhere. Answered
    with a ``LeaseReply``: not accepted, ``recalled``, or accepted, when it has started."""

    attempt: str
    fence: Fence


class LeaseRevoke(Message, frozen=True, kw_only=True):
    """Stop this attempt and forget it."""

    attempt: str
    fence: Fence
    reason: str


class AttemptFailed(Message, frozen=True, kw_only=True):
    """The attempt is over without a result; ``code`` is stable, ``detail`` is for people."""

    attempt: Id
    fence: Fence
    code: str
    detail: str = ""


class VersionServing(Message, frozen=True, kw_only=True):
    """The agent now generates with this version: how it got there, for the estimators."""

    policy: Id
    version: Count
    digest: Id
    pause_s: Finite
    fetched_bytes: Count = 0
    fetch_s: Finite = 0.0
