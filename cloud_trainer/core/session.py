"""Our standing with the scheduler: saying hello, signs of life, noticing silence.

What always holds: ``Hello`` is repeated until it is answered, never more often than every
``hello_retry_s`` unless the scheduler asks; a joined peer pings every ``heartbeat_s``; who has
heard nothing for ``lost_after_s`` makes the link anew and says hello again.
"""

from collections.abc import Callable

from cloud_trainer.core.effects import Effect, RenewLink, ToScheduler
from cloud_trainer.core.settings import CoreSettings
from transport.messages import Hello, Ping, Plane, Refuse, Role, TrainerInventory, Welcome

_LOST_AFTER_S = 12.0
"""Until the scheduler assigns one."""


class SchedulerSession:
    """Timers and messages of one peer of the scheduler; ``inventory`` is asked for each hello."""

    def __init__(self, settings: CoreSettings, inventory: Callable[[], TrainerInventory]) -> None:
        self.joined = False
        self.term = 0
        self._settings = settings
        self._inventory = inventory
        self._heartbeat_s = settings.hello_retry_s
        self._lost_after_s = _LOST_AFTER_S
        self._hello_due: float | None = None
        self._ping_due = 0.0
        self._heard: float | None = None
        self._pings = 0

    def asked_for(self, message: Welcome | Refuse) -> bool:
        """Whether the answer is to a hello of this life."""
        return message.incarnation in (0, self._settings.incarnation)

    def heard(self, now: float) -> None:
        self._heard = now

    def welcomed(self, message: Welcome, now: float) -> None:
        self.joined = True
        self.term = message.term
        self._heartbeat_s = message.heartbeat_s
        self._lost_after_s = message.lost_after_s
        self._ping_due = now + self._heartbeat_s

    def hello_required(self, now: float) -> None:
        """The scheduler does not know us; a hello that is already on its way is enough."""
        if self.joined:
            self.joined = False
            self._hello_due = now

    def refused(self, retry_s: float, now: float) -> None:
        self.joined = False
        self._hello_due = now + retry_s

    def poll(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self._heard is None:
            self._heard = now
        if now >= self._heard + self._lost_after_s:
            self._heard = now
            self.joined = False
            self._hello_due = now
            effects.append(RenewLink(plane=Plane.CONTROL))
        if self.joined:
            if now >= self._ping_due:
                self._pings += 1
                self._ping_due = now + self._heartbeat_s
                effects.append(ToScheduler(message=Ping(sequence=self._pings, sent_s=now)))
        elif self._hello_due is None or now >= self._hello_due:
            self._hello_due = now + max(self._settings.hello_retry_s, self._heartbeat_s)
            effects.append(ToScheduler(message=self._hello()))
        return effects

    def next_deadline(self) -> float | None:
        if self._heard is None:
            return None
        due = self._ping_due if self.joined else self._hello_due
        silence = self._heard + self._lost_after_s
        return silence if due is None else min(due, silence)

    def _hello(self) -> Hello:
        return Hello(
            role=Role.TRAINER,
            incarnation=self._settings.incarnation,
            build=self._settings.build,
            trainer=self._inventory(),
        )
