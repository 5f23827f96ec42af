"""Trained groups that may be trained on again: rows, and their index."""

from dataclasses import dataclass, field
from typing import ClassVar

import msgspec

from scheduler.core.state import Entity


class Kept(Entity, omit_defaults=True):
    """A group that its policy was trained on by ``step`` and may be again. ``uses`` are the steps
    that did so since, the last of them maybe running; ``lag`` is of that one. ``score`` and
    ``drawn`` are its verdict's, ``oldest`` the oldest version that drew a token."""

    table: ClassVar[str] = "kept"

    policy: str
    job: str
    index: int
    digest: str
    size_bytes: int
    oldest: int
    reward_mean: float
    response_tokens: int
    step: int
    score: float = 0.0
    drawn: bool = False
    uses: list[int] = msgspec.field(default_factory=list)
    lag: int = 0

    @property
    def key(self) -> str:
        return f"{self.policy}|{self.job}"


class Reuse(Entity):
    """How many groups each step of a policy trained on again, for the steps since its checkpoint:
    they count for good once a checkpoint covers them."""

    table: ClassVar[str] = "reuse"

    policy: str
    steps: dict[int, int] = msgspec.field(default_factory=dict)

    @property
    def key(self) -> str:
        return self.policy


@dataclass(slots=True)
class ReplayPool:
    """Index of one policy's ``Kept`` rows: by job, oldest first, and by the step that is not done
    and takes them again. ``usable`` is how many the next batch could take, None: not counted."""

    entries: dict[str, Kept] = field(default_factory=dict)
    taken: dict[int, dict[str, None]] = field(default_factory=dict)
    usable: int | None = None
