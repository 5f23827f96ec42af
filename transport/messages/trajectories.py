"""Trajectories plane. Small bodies are put whole (``TrajectoryPut``); larger ones are offered
(``TrajectoryOffer``) and asked for chunk by chunk by the log, with the messages of the weights
plane: ``ChunkRequest`` and ``Chunk``, where a body's digest is the file's."""

from typing import Annotated

import msgspec
from msgspec import Meta

from transport.messages.base import Count, Id, Message
from transport.messages.services import GroupSummary, PartialSummary


class TrajectoryPut(Message, frozen=True, kw_only=True):
    """Payload: one frame, the packed trajectory whose digest is in the summary. With
    ``cumulative`` the sender understands ``TrajectoryAcks``; otherwise it gets a
    ``TrajectoryAck``."""

    summary: GroupSummary
    cumulative: bool = False


class TrajectoryAck(Message, frozen=True, kw_only=True):
    """The body is durable; the agent may forget it."""

    attempt: str
    digest: str


class TrajectoryRefused(Message, frozen=True, kw_only=True):
    """The body will never be taken; the agent drops it and fails the attempt with ``code``."""

    attempt: str
    digest: str
    code: str
    message: str


class BodyRequest(Message, frozen=True, kw_only=True):
    """Trainers and submitters get bodies of results, agents finished turns and those bodies whose
    rewards are found again, and nobody anything else."""

    digests: tuple[Id, ...]


class Body(Message, frozen=True, kw_only=True):
    """Payload: the body, cut into frames of at most 4 MiB, or none when ``found`` is false."""

    digest: str
    found: bool = True


class OfferedBody(msgspec.Struct, frozen=True, kw_only=True):
    """A body that an agent has. All chunks but the last have ``chunk_bytes`` (64 KiB to 4 MiB);
    ``chunk_digests`` are the first 16 bytes of each chunk's SHA-256."""

    summary: GroupSummary
    chunk_bytes: Count
    chunk_digests: tuple[Annotated[bytes, Meta(max_length=32)], ...]


class TrajectoryOffer(Message, frozen=True, kw_only=True):
    """Bodies that wait in the agent's spool, oldest first. The log asks for what it lacks of each
    and acknowledges it when it is durable. Offered again over every new link until then."""

    bodies: tuple[OfferedBody, ...]


class BodyRef(msgspec.Struct, frozen=True, kw_only=True):
    """A body and the attempt whose result it is."""

    attempt: Id
    digest: Id


class TrajectoryAcks(Message, frozen=True, kw_only=True):
    """All of these bodies are durable; the agent may forget them."""

    bodies: tuple[BodyRef, ...]


class PartialPut(Message, frozen=True, kw_only=True):
    """Payload: one frame, the packed turns (``transport.partials``). The newest of an attempt
    replaces the ones before. Answered with ``PartialAck``."""

    partial: PartialSummary


class PartialOffer(Message, frozen=True, kw_only=True):
    """Turns that are too large for one frame: the log asks for their chunks as for a body's."""

    partial: PartialSummary
    chunk_bytes: Count
    chunk_digests: Annotated[
        tuple[Annotated[bytes, Meta(max_length=32)], ...], Meta(max_length=4096)
    ]


class PartialAck(Message, frozen=True, kw_only=True):
    """The log is done with these turns: ``kept``, or there was no room and they are dropped. The
    agent may send the next ones of the attempt."""

    attempt: str
    digest: str
    kept: bool
