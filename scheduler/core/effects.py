"""What the core wants done. The shell commits ``take_changes`` first, then executes effects in
order; an effect is never repeated after a restart (the peers' ``Hello`` reconciles).
"""

from typing import Literal

import msgspec

from transport.messages import Message
from transport.runs import HELD_OUT, RunSpec
from transport.status import EvaluationStatus, StepStatus


class Send(msgspec.Struct, frozen=True):
    """Send a control message to a named peer; whether it is connected is not the core's matter.
    Into an offer with a ``prompt`` the shell puts the items that are stored under that key: those
    in the message only stand for them."""

    peer: str
    message: Message
    prompt: str = ""


class Reply(msgspec.Struct, frozen=True):
    """Answer the operator's request of that number."""

    peer: str
    request: int
    message: Message


class StartTaskSource(msgspec.Struct, frozen=True):
    """Make the run's items available; starting a running one is harmless."""

    run: RunSpec


class StopTaskSource(msgspec.Struct, frozen=True):
    run: str


class ProduceItems(msgspec.Struct, frozen=True):
    """Answer with ``ItemsProduced`` for up to ``count`` items from ``start`` on; after a shorter
    answer the rest is asked for at once. The same request may be repeated. Those of kind ``eval``
    are for the run's ``evaluation`` of that name, which may have a task of its own."""

    run: str
    kind: Literal["train", "eval"]
    start: int
    count: int
    evaluation: str = HELD_OUT


class RecordStep(msgspec.Struct, frozen=True):
    """An optimizer step for the run's metrics; once per step of a lineage, in order."""

    run: str
    step: StepStatus
    metrics: dict[str, float]


class RecordEvaluation(msgspec.Struct, frozen=True):
    """A finished evaluation for the run's metrics."""

    run: str
    evaluation: EvaluationStatus


class RunEnded(msgspec.Struct, frozen=True):
    """The run is finished: ``completed``, ``stopped`` or ``failed: TEXT``; what it cost in all, and
    how many tokens agents generated for it."""

    run: str
    reason: str
    cost_usd: float = 0.0
    tokens: int = 0


Effect = (
    Send
    | Reply
    | StartTaskSource
    | StopTaskSource
    | ProduceItems
    | RecordStep
    | RecordEvaluation
    | RunEnded
)
