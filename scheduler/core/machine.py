"""The rollout scheduler's state machine (signatures; see the other modules for the decisions)."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from scheduler.core.effects import Effect
from scheduler.core.events import Event
from scheduler.core.settings import CoreSettings
from transport.status import SchedulerStatus

if TYPE_CHECKING:
    import random

Row = tuple[str, str, bytes]
Change = tuple[str, str, bytes | None]


class SchedulerCore:
    """Feed events with ``handle``; store ``take_changes`` before executing the effects.

    ``rows`` are (table, key, MessagePack) as last stored. After construction ``next_deadline`` is
    ``now``: the first ``handle`` (a ``Tick`` at the latest) restarts the task sources of live
    runs.
    """

    def __init__(
        self,
        settings: CoreSettings,
        *,
        term: int,
        rng: "random.Random",
        build: str,
        rows: Iterable[Row] = (),
        now: float = 0.0,
    ) -> None: ...

    def handle(self, event: Event, now: float) -> list[Effect]: ...

    def next_deadline(self) -> float | None: ...

    def take_changes(self) -> list[Change]: ...

    def status(self, now: float) -> SchedulerStatus: ...

    def check(self) -> None: ...

    def story(self, id: str) -> list[str]: ...
