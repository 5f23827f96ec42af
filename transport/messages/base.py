"""What all planes share: bounds of numbers, roles, hello and farewell."""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from transport.ids import Fence
from transport.runs import RunSpec

PROTOCOL_VERSION = 1

FEATURE_OFFERS = "offers"
"""In ``Hello.features`` of a peer that understands ``LeaseOffers``."""

FEATURE_TEMPLATE = "chat_template_kwargs"
"""In ``Hello.features`` of an agent that heeds ``LeaseOffer.chat_template_kwargs``; one that does
not would draw from other prompts."""

FEATURE_ANSWER = "reward.answer"
"""In ``Hello.features`` of an agent that heeds ``RewardSpec.answer``; one that does not would find
other rewards."""

MAX_COUNT = 2**53
MAX_ID_LENGTH = 200
"""Ids are made of names of up to 48 characters each (``transport.ids``)."""

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
MAX_FINITE = 1e15
Finite = Annotated[float, Meta(ge=-MAX_FINITE, le=MAX_FINITE)]
"""Neither NaN nor infinite, and sums of it are not either. Rewards are within these bounds, too."""
By = Annotated[str, Meta(max_length=64)]
"""For whom an operator's key gives an order, as ``http:NAME``; "" for its holder."""
Id = Annotated[str, Meta(max_length=MAX_ID_LENGTH)]


class Plane(StrEnum):
    CONTROL = "control"
    TRAJECTORIES = "trajectories"
    WEIGHTS = "weights"
    ENROLMENT = "enrolment"


WORK_PLANES = (Plane.CONTROL, Plane.TRAJECTORIES, Plane.WEIGHTS)
"""The planes that enrolled peers work on."""


class Role(StrEnum):
    """What a key may do. ``SERVICE`` is the scheduler's own trajectory log and weight store."""

    AGENT = "agent"
    TRAINER = "trainer"
    SERVICE = "service"
    OPERATOR = "operator"
    VIEWER = "viewer"
    RELAY = "relay"
    SUBMITTER = "submitter"
    SCHEDULER = "scheduler"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages."""


class VersionRef(msgspec.Struct, frozen=True, kw_only=True):
    """A policy version and the digest of its whole state."""

    version: Count
    digest: Id


class HeldAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that an agent holds: waiting, running (``started``), or finished and in its
    spool. Only one that is not started can be recalled."""

    attempt: Id
    fence: Fence
    spooled: bool = False
    started: bool = False


class AgentInventory(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent can do and what it still holds from before. The prices are what its owner
    pays for the box and for a gigabyte (10^9 bytes) that leaves it; 0 means unknown or free.
    ``bases`` are names or ids of policies whose adapters its engine can have, as their model is
    there."""

    slots: Count
    hardware: str
    engine: str
    workflows: dict[str, str]
    rewards: tuple[str, ...]
    held: tuple[HeldAttempt, ...] = ()
    versions: dict[str, VersionRef] = {}
    labels: dict[str, str] = {}
    price_usd_hour: Finite = 0.0
    egress_usd_gb: Finite = 0.0
    rechecks: bool = False
    bases: tuple[str, ...] = ()
    recheck_kinds: tuple[str, ...] = ()


class TrainerInventory(msgspec.Struct, frozen=True, kw_only=True):
    """Where a trainer stands: its last durable checkpoint. ``checkpoint_step`` 0 with version 0
    is the initial model."""

    policy: Id
    checkpoint_step: Count
    checkpoint_version: Count


class Hello(Message, frozen=True, kw_only=True):
    """First message on the control plane. ``incarnation`` grows with every start of the peer;
    ``process`` is drawn anew at every start and tells two boxes that have the same key apart."""

    role: Role
    incarnation: Count
    build: str
    protocol: Count = PROTOCOL_VERSION
    features: tuple[str, ...] = ()
    agent: AgentInventory | None = None
    trainer: TrainerInventory | None = None
    process: Id = ""


class SignerCertificate(msgspec.Struct, frozen=True, kw_only=True):
    """The deployment's root key says that ``verify_key`` (Ed25519, hexadecimal) signs the
    manifests of ``policy``; ``signature`` is over what ``transport.certificates`` says."""

    policy: Id
    verify_key: Id
    signature: bytes


class Welcome(Message, frozen=True, kw_only=True):
    """Answer to ``Hello``. ``policies`` are the policy ids that an agent is to host;
    a trainer gets its run, the highest version number ever published and whether to go on.
    ``incarnation`` is that of the hello (0: not said): what a process asked that has died meanwhile
    is no answer to the one in its place. ``upto``: see ``HeartbeatReply``. ``kinds`` are the kind
    bytes that the scheduler, its trajectory log and its weight store know, rising (none: not said);
    a newer agent says nothing else to them."""

    term: int
    heartbeat_s: float
    lost_after_s: float
    features: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    run: RunSpec | None = None
    highest_version: int = 0
    stopping: bool = False
    signers: tuple[SignerCertificate, ...] = ()
    incarnation: Count = 0
    upto: dict[Id, Count] = {}
    kinds: Annotated[bytes, Meta(max_length=256)] = b""


class Refuse(Message, frozen=True, kw_only=True):
    """The peer may not join (now, when ``retry_s`` is set). ``incarnation`` as in ``Welcome``."""

    code: str
    message: str
    retry_s: float | None = None
    incarnation: Count = 0


class HelloRequired(Message, frozen=True, kw_only=True):
    """We do not know who this is (we restarted): say ``Hello`` again."""


class Ping(Message, frozen=True, kw_only=True):
    """Sign of life of a trainer or service; ``sent_s`` is the sender's monotonic clock."""

    sequence: Count
    sent_s: Finite


class Pong(Message, frozen=True, kw_only=True):
    sequence: int
    sent_s: float


class Goodbye(Message, frozen=True, kw_only=True):
    """The peer leaves on purpose."""

    reason: str
