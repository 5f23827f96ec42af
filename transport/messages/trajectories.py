"""Trajectories plane."""

from transport.messages.base import Id, Message
from transport.messages.services import GroupSummary


class TrajectoryPut(Message, frozen=True, kw_only=True):
    """Payload: one frame, the packed trajectory whose digest is in the summary."""

    summary: GroupSummary


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
    digests: tuple[Id, ...]


class Body(Message, frozen=True, kw_only=True):
    """Payload: one frame, or none when ``found`` is false."""

    digest: str
    found: bool = True
