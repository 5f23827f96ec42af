"""Being known to the scheduler: hello, heartbeats, silence, round-trip time, clock offset.

What always holds: a hello is repeated until it is answered, never more often than once per
``hello_repeat_s``; while known, a heartbeat goes out every ``heartbeat_s`` of the last welcome
(the second one after half to one and a half of it: agents that a scheduler welcomed together must
not be heard together for ever); when nothing is heard for ``lost_after_s`` the link is remade and
the hello starts over; work goes on through all of that. A failure report counts as delivered only
once a heartbeat that left after it has been answered (the link is ordered, and a broken one leads
to a new hello, after which all unconfirmed reports are sent again): none is lost, and a repeated
one is harmless.
"""

from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING

from edge_agent.core.clock_filter import ClockFilter
from edge_agent.core.effects import Effect, RemakeLink, ToScheduler
from edge_agent.core.settings import AgentSettings
from transport.messages import AttemptFailed, HeartbeatReply, Plane, Refuse, Welcome

if TYPE_CHECKING:
    from random import Random

_MAX_HEARTBEATS = 64
_MAX_REPORTS = 1024
_INTERVAL_RANGE_S = (0.01, 3600.0)


class SessionState(StrEnum):
    HELLO = "hello"
    UP = "up"
    REFUSED = "refused"


class Session:
    """The agent's standing with the scheduler."""

    def __init__(self, settings: AgentSettings, rng: "Random", now: float) -> None:
        self._settings = settings
        self._spread = rng.uniform(0.5, 1.5)
        self._just_welcomed = False
        self.state = SessionState.HELLO
        self.term = 0
        self.heartbeat_s = settings.heartbeat_s
        self.lost_after_s = settings.lost_after_s
        self.clock = ClockFilter()
        self._wall_ahead_s: float | None = None
        self.sequence = 0
        self._heard_s = now
        self._hello_s: float | None = None
        self._due_s = now
        self._beats: dict[int, float] = {}
        self._reports: deque[tuple[AttemptFailed, int]] = deque(maxlen=_MAX_REPORTS)
        self._down: dict[Plane, None] = {}

    def heard(self, now: float) -> None:
        """Any message from the scheduler is a sign of life."""
        self._heard_s = now

    def welcomed(self, message: Welcome, now: float) -> list[Effect]:
        """Go on under the terms of ``message``; unconfirmed reports leave again."""
        shortest_s, longest_s = _INTERVAL_RANGE_S
        self.state = SessionState.UP
        self.term = message.term
        self.heartbeat_s = _clamped(message.heartbeat_s, shortest_s, longest_s)
        self.lost_after_s = _clamped(message.lost_after_s, 2 * self.heartbeat_s, 2 * longest_s)
        self._due_s = now
        self._just_welcomed = True
        self._reports = deque(
            ((report, self.sequence + 1) for report, _ in self._reports), maxlen=_MAX_REPORTS
        )
        reports: list[Effect] = [ToScheduler(message=report) for report, _ in self._reports]
        # The scheduler is there, so its services are or will be at once: no waiting out a back-off.
        return [*reports, *(RemakeLink(plane=plane) for plane in self._down)]

    def plane_down(self, plane: Plane) -> None:
        self._down[plane] = None

    def plane_up(self, plane: Plane) -> None:
        self._down.pop(plane, None)

    def link_up(self, now: float) -> None:
        """Whoever is at the other end has not heard us yet."""
        if self.state is not SessionState.REFUSED:
            self.state = SessionState.HELLO
            self._due_s = now

    def hello_required(self, now: float) -> None:
        """We are, or may be, unknown: say hello now, or once the last one is old enough."""
        if self.state is SessionState.REFUSED:
            return
        repeat_s = self._settings.hello_repeat_s
        self.state = SessionState.HELLO
        self._due_s = now if self._hello_s is None else max(now, self._hello_s + repeat_s)

    def refused(self, message: Refuse, now: float) -> bool:
        """Whether it is worth trying again later."""
        self.state = SessionState.REFUSED
        if message.retry_s is None:
            return False
        shortest_s, longest_s = self._settings.hello_repeat_s, _INTERVAL_RANGE_S[1]
        self._due_s = now + _clamped(message.retry_s, shortest_s, longest_s)
        return True

    def report(self, message: AttemptFailed) -> Effect:
        """Send a failure and keep it until it is known to have arrived."""
        self._reports.append((message, self.sequence + 1))
        return ToScheduler(message=message)

    def report_lost(self, message: AttemptFailed) -> None:
        """The link did not take a report: it leaves again before the next heartbeat."""
        self._reports = deque(
            ((kept, 0 if kept == message else after) for kept, after in self._reports),
            maxlen=_MAX_REPORTS,
        )

    def replied(self, message: HeartbeatReply, now: float) -> bool:
        """Learn from an answered heartbeat; false when it was never sent or answered before."""
        sent_s = self._beats.pop(message.sequence, None)
        if sent_s is None:
            return False
        self.clock.add(
            sent_s=sent_s,
            arrived_s=now,
            received_s=message.received_s,
            replied_s=message.replied_s,
        )
        if self._reports:
            self._reports = deque(
                (entry for entry in self._reports if not 0 < entry[1] <= message.sequence),
                maxlen=_MAX_REPORTS,
            )
        return True

    def read_wall(self, wall_s: float | None, now: float) -> None:
        """What our wall clock shows at ``now``."""
        self._wall_ahead_s = None if wall_s is None else wall_s - now

    def wall_s(self, now: float) -> float:
        """Our wall clock at ``now``; 0 before it was read."""
        return 0.0 if self._wall_ahead_s is None else now + self._wall_ahead_s

    @property
    def clock_offset_s(self) -> float | None:
        """By how much the scheduler's wall clock is ahead of ours; None before that is known."""
        scheduler_s, ours_s = self.clock.ahead_s, self._wall_ahead_s
        return None if scheduler_s is None or ours_s is None else scheduler_s - ours_s

    def silent(self, now: float) -> list[Effect]:
        """What silence calls for: a new link and a hello."""
        if self.state is SessionState.REFUSED or now < self._heard_s + self.lost_after_s:
            return []
        self._heard_s = now
        self.state = SessionState.HELLO
        self._due_s = now
        return [RemakeLink(plane=Plane.CONTROL)]

    def hello_due(self, now: float) -> bool:
        """Whether to say hello now; if so it counts as said."""
        if self.state is SessionState.UP or now < self._due_s:
            return False
        if self.state is SessionState.REFUSED:
            self._heard_s = now
        self.state = SessionState.HELLO
        self._hello_s = now
        self._due_s = now + max(self._settings.hello_repeat_s, self.heartbeat_s)
        return True

    def heartbeat_due(self, now: float) -> list[Effect] | None:
        """Reports to repeat before a heartbeat that is due now (it counts as sent), else None."""
        if self.state is not SessionState.UP or now < self._due_s:
            return None
        self._due_s = now + self.heartbeat_s * (self._spread if self._just_welcomed else 1.0)
        self._just_welcomed = False
        self.sequence += 1
        self._beats[self.sequence] = now
        if len(self._beats) > _MAX_HEARTBEATS:
            del self._beats[min(self._beats)]
        if not self._reports:
            return []
        repeated = [report for report, after in self._reports if not after]
        self._reports = deque(
            ((report, after or self.sequence) for report, after in self._reports),
            maxlen=_MAX_REPORTS,
        )
        return [ToScheduler(message=report) for report in repeated]

    def deadline(self) -> float:
        if self.state is SessionState.REFUSED:
            return self._due_s
        return min(self._due_s, self._heard_s + self.lost_after_s)


def _clamped(value: float, lowest: float, highest: float) -> float:
    """``value`` within bounds; not-a-number becomes the lowest."""
    return min(value, highest) if value >= lowest else lowest
