"""Whole bodies on their way to the trajectory log's disk, and what makes one unusable."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from scheduler.segments import BodyStore, Outcome
from transport.messages import GroupSummary
from transport.summaries import summary_fault
from transport.trajectory import body_digest

_HEX: Final = frozenset("0123456789abcdef")


class Put(NamedTuple):
    """A whole body. ``cumulative`` says that its sender understands ``TrajectoryAcks``."""

    route: bytes
    summary: GroupSummary
    body: bytes
    cumulative: bool


def check_and_append(store: BodyStore, batch: Sequence[Put]) -> list[Outcome | None]:
    """In the writer's thread; None for a body whose digest is not the promised one."""
    sound = [body_digest(put.body) == put.summary.digest for put in batch]
    stored = iter(
        store.append(
            [(put.summary, put.body) for put, good in zip(batch, sound, strict=True) if good]
        )
    )
    return [next(stored) if good else None for good in sound]


def is_digest(text: str) -> bool:
    return len(text) == 64 and _HEX.issuperset(text)


def put_fault(summary: GroupSummary, payload: Sequence[bytes]) -> str:
    """What makes a summary unusable without looking into the body, or nothing."""
    if len(payload) != 1:
        return f"{len(payload)} payload frames, one body expected"
    if len(payload[0]) != summary.size_bytes:
        return f"size_bytes: {summary.size_bytes}, the body has {len(payload[0])}"
    return summary_fault(summary)
