"""Versions on their way to the weight store.

What always holds: versions become durable in the order in which they were added, parents first;
one at a time is offered, and again every ``every_s`` while the store says nothing; a version
leaves the queue only when the store has it.

    building -> ready -> offered -> durable (leaves)
"""

from cloud_trainer.core.effects import (
    Effect,
    Exit,
    ForgetVersion,
    RenewLink,
    Rollback,
    ToWeightStore,
)
from cloud_trainer.core.settings import CoreSettings
from transport.messages import Message, Plane, VersionDurable, VersionOffer, VersionRejected


class _Version:
    __slots__ = ("number", "offer", "whole")

    def __init__(self, number: int, whole: bool) -> None:
        self.number = number
        self.whole = whole
        self.offer: VersionOffer | None = None


class Publications:
    """The queue of versions that the weight store may not have yet."""

    def __init__(self, settings: CoreSettings) -> None:
        self._policy = settings.policy
        self._every_s = settings.offer_every_s
        self._timeout_s = settings.publish_timeout_s
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

    def heard(self, message: Message, now: float) -> list[Effect]:
        """The store spoke; while it fetches, there is no need to offer again."""
        self._heard = now
        if self._offer_due is not None:
            self._offer_due = now + self._every_s
        match message:
            case VersionDurable(policy=p, version=number) if p == self._policy:
                return self._durable(number)
            case VersionRejected(policy=p) if p == self._policy:
                return self._rejected(message)
            case _:
                return []

    def _durable(self, number: int) -> list[Effect]:
        for index, version in enumerate(self._queue):
            # A store that claims what it was never offered speaks of another life of ours.
            if version.number == number and version.offer is not None:
                del self._queue[index]
                self._offer_due = None
                return [ForgetVersion(version=number)]
        return []

    def _rejected(self, message: VersionRejected) -> list[Effect]:
        number, code = message.version, message.code
        whole = next((v.whole for v in self._queue if v.number == number), None)
        text = f"the weight store refused version {number}: {message.message}"
        if whole is None:
            return []
        if whole:
            return [Exit(status=1, code=code, message=text)]
        return [Rollback(code=code, message=text, republish=True)]

    def is_ready(self, number: int) -> bool:
        """Whether a version would survive our death: its files are durable here or there."""
        return all(v.offer is not None for v in self._queue if v.number == number)

    def is_durable(self, number: int) -> bool:
        """Whether the store has this version, which was added once."""
        return all(v.number != number for v in self._queue)

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
