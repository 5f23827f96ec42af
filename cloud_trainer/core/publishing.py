"""Versions on their way to the weight store.

What always holds: versions become durable in the order in which they were added, parents first;
one at a time is offered, and again every ``every_s`` while the store says nothing; a version
leaves the queue only when the store has it.

    building -> ready -> offered -> durable (leaves)
"""

from cloud_trainer.core.effects import Effect, RenewLink, ToWeightStore
from transport.messages import Plane, VersionOffer


class _Version:
    __slots__ = ("number", "offer", "whole")

    def __init__(self, number: int, whole: bool) -> None:
        self.number = number
        self.whole = whole
        self.offer: VersionOffer | None = None


class Publications:
    """The queue of versions that the weight store may not have yet."""

    def __init__(self, *, every_s: float, timeout_s: float) -> None:
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._queue: list[_Version] = []
        self._offer_due: float | None = None
        self._heard = 0.0

    def add(self, number: int, *, whole: bool) -> None:
        self._queue.append(_Version(number, whole))

    def ready(self, number: int, offer: VersionOffer) -> bool:
        """The files of a version are durable here; false for a version that is not awaited."""
        for version in self._queue:
            if version.number == number and version.offer is None:
                version.offer = offer
                return True
        return False

    def durable(self, number: int) -> bool:
        """The store has a version; false when that is no news."""
        for index, version in enumerate(self._queue):
            # A store that claims what it was never offered speaks of another life of ours.
            if version.number == number and version.offer is not None:
                del self._queue[index]
                self._offer_due = None
                return True
        return False

    def rejected(self, number: int) -> bool | None:
        """Whether the refused version was a whole one, None when it is not in the queue."""
        return next((v.whole for v in self._queue if v.number == number), None)

    def is_ready(self, number: int) -> bool:
        """Whether a version would survive our death: its files are durable here or there."""
        return all(v.offer is not None for v in self._queue if v.number == number)

    def is_durable(self, number: int) -> bool:
        """Whether the store has this version, which was added once."""
        return all(v.number != number for v in self._queue)

    def heard(self, now: float) -> None:
        """The store is alive; while it fetches, there is no need to offer again."""
        self._heard = now
        if self._offer_due is not None:
            self._offer_due = now + self._every_s

    def poll(self, now: float) -> list[Effect]:
        if not self._queue or self._queue[0].offer is None:
            return []
        effects: list[Effect] = []
        if self._offer_due is None:
            self._heard = now
        elif now >= self._heard + self._timeout_s:
            self._heard = now
            self._offer_due = None
            effects.append(RenewLink(plane=Plane.WEIGHTS))
        if self._offer_due is None or now >= self._offer_due:
            self._offer_due = now + self._every_s
            effects.append(ToWeightStore(message=self._queue[0].offer))
        return effects

    def next_deadline(self) -> float | None:
        if self._offer_due is None:
            return None
        return min(self._offer_due, self._heard + self._timeout_s)

    @property
    def undurable(self) -> tuple[int, ...]:
        return tuple(version.number for version in self._queue)
