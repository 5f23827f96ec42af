"""Enrolment plane, and what keys need on the control plane: probes and the next server key."""

from typing import Annotated

from msgspec import Meta

from transport.messages.base import (
    PROTOCOL_VERSION,
    Count,
    Finite,
    Id,
    Message,
    Role,
)

Secret = Annotated[str, Meta(max_length=128)]


class EnrolRequest(Message, frozen=True, kw_only=True):
    """Let the key of this connection in. ``token`` and ``secret`` are of the token that the sender
    was given, ``name`` is what it would like to be called ("": the scheduler chooses). The key is
    not in the message: CURVE has proved it."""

    token: Id
    secret: Secret
    name: Id = ""
    protocol: Count = PROTOCOL_VERSION
    build: Id = ""


class EnrolReply(Message, frozen=True, kw_only=True):
    """The key is (or was already) let in as ``name``. The ports are those of the host that the
    sender reached; ``root_key`` (Ed25519, hexadecimal, "" without one) certifies signers."""

    name: Id
    role: Role
    control_port: Count
    trajectories_port: Count
    weights_port: Count
    server_key: Id
    root_key: Id = ""


class Probe(Message, frozen=True, kw_only=True):
    """Is anybody there, and what time is it? It changes nothing: the sender stays unknown until it
    says ``Hello``."""

    sequence: Count
    sent_s: Finite


class ProbeReply(Message, frozen=True, kw_only=True):
    """Echo of ``sequence`` and ``sent_s``, with the scheduler's wall clock when the probe came and
    when this left. ``known`` is whether another live connection speaks with the same key."""

    sequence: int
    sent_s: float
    received_s: float
    replied_s: float
    build: str
    name: str
    protocol: int = PROTOCOL_VERSION
    known: bool = False


class NextServerKey(Message, frozen=True, kw_only=True):
    """The hubs will have ``public_key`` soon: keep it beside the present one. ``signature`` is the
    deployment root's (``transport.certificates``)."""

    public_key: Id
    signature: bytes
