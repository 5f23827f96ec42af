"""The row of what an agent did lately that may lead to its quarantine; see ``quarantine``."""

from typing import ClassVar

from scheduler.core.state import Entity

MAX_STARTS = 16


class Conduct(Entity):
    """When an agent started without having said goodbye (core's clock), its failures in a row that
    are its own, its weighed evidence and when that was last added to. There is a row only for an
    agent that has something in it."""

    table: ClassVar[str] = "conduct"

    name: str
    starts: tuple[float, ...] = ()
    own_failures: int = 0
    weight: float = 0.0
    weighed_s: float = 0.0

    @property
    def key(self) -> str:
        return self.name

    @property
    def clean(self) -> bool:
        return not (self.starts or self.own_failures or self.weight)
