"""Which old things ``farflow gc`` removes: a pure function of what is there and the bounds.

What always holds: nothing that is in use, that a daemon bounds by itself, or that is the newest of
its kind is removed.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from farflow.deployment import RetentionTable
from farflow.words import human_age

Kind = Literal["run folder", "record", "event log", "partial", "weights", "log", "bounded"]


class Found(NamedTuple):
    """Something on the disk; ``idle_s`` since its last change. ``holds`` says why it has to stay,
    "" if it need not."""

    kind: Kind
    path: Path
    size_bytes: int
    idle_s: float
    holds: str = ""


class Verdict(NamedTuple):
    """Whether it goes, and why or why not."""

    found: Found
    removes: bool
    reason: str


def plan(things: Iterable[Found], limits: RetentionTable) -> list[Verdict]:
    """A verdict for each thing, by kind and then the longest untouched first."""
    most_s = {
        "run folder": limits.run_s,
        "record": limits.record_s,
        "event log": limits.event_log_s,
        "partial": limits.partial_s,
        "weights": limits.weights_s,
        "log": limits.log_s,
    }
    by_kind: dict[Kind, list[Found]] = {}
    for found in things:
        by_kind.setdefault(found.kind, []).append(found)
    verdicts: list[Verdict] = []
    for kind, group in by_kind.items():
        group.sort(key=lambda found: (-found.idle_s, found.path))
        left_bytes = sum(found.size_bytes for found in group)
        for found in group:
            reason = ""
            if found.holds or kind == "bounded":
                verdicts.append(Verdict(found, False, found.holds))
                continue
            if found.idle_s > most_s[kind]:
                reason = f"untouched for more than {human_age(most_s[kind])}"
            elif kind == "run folder" and left_bytes > limits.run_bytes and found is not group[-1]:
                reason = "all are larger than retention.run_bytes"
            if reason:
                left_bytes -= found.size_bytes
            verdicts.append(Verdict(found, bool(reason), reason or "within bounds"))
    return verdicts
