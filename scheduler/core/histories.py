"""What came of items, as rows."""

from typing import ClassVar

import msgspec

from scheduler.core.state import Entity


class ItemHistory(Entity, omit_defaults=True):
    """The groups that one item of a run (told by its prompt), or all items of a family, came back
    with: how many, their mean reward as a moving average, and of the last ones the mean reward and
    how far rewards were apart, oldest first. ``number`` orders the rows of a run by their last
    change."""

    table: ClassVar[str] = "item"

    run: str
    item: str
    number: int
    groups: int = 0
    reward: float = 0.0
    means: list[float] = msgspec.field(default_factory=list)
    spreads: list[float] = msgspec.field(default_factory=list)

    @property
    def key(self) -> str:
        return f"{self.run}|{self.item}"
