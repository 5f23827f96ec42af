"""Spooled results on their way to the trajectory log.

What always holds: a body leaves the spool only after the log acknowledged or refused it, or the
scheduler said that it is not wanted; bodies sent and not yet acknowledged add up to at most the
window (one body may always be under way); when the log stays silent with something under way, the
link is remade, which drops what was queued in it, and everything is sent again, each time after a
longer wait, so that a slow uplink is not flooded with copies.
"""

from collections.abc import Iterable

from edge_agent.core.effects import Effect, RemakeLink, ToTrajectoryLog
from edge_agent.core.settings import AgentSettings
from transport.errors import InvariantViolation
from transport.messages import GroupSummary, Plane


class Outbox:
    """Bodies by attempt, oldest first; ``size_bytes`` is what they take in the spool."""

    def __init__(self, settings: AgentSettings, spooled: Iterable[GroupSummary] = ()) -> None:
        self._settings = settings
        self._entries: dict[str, GroupSummary] = {}
        self._sent: dict[str, None] = {}
        self._unacked_bytes = 0
        self._progress_s = 0.0
        self._stall_s = settings.upload_stall_s
        self._retry_s: float | None = None
        self._connected = True
        self.size_bytes = 0
        for summary in spooled:
            self.add(summary)

    def __len__(self) -> int:
        return len(self._entries)

    def summaries(self) -> list[GroupSummary]:
        return list(self._entries.values())

    def find(self, attempt: str) -> GroupSummary | None:
        return self._entries.get(attempt)

    @property
    def unacked_bytes(self) -> int:
        return self._unacked_bytes

    def add(self, summary: GroupSummary) -> None:
        self._entries[summary.attempt] = summary
        self.size_bytes += summary.size_bytes

    def progressed(self, now: float) -> None:
        """The log is alive: it said something about a body."""
        self._progress_s = now
        self._stall_s = self._settings.upload_stall_s

    def remove(self, attempt: str) -> None:
        """Forget an entry that is known to be here."""
        summary = self._entries.pop(attempt)
        self.size_bytes -= summary.size_bytes
        self._unsend(summary)

    def link_up(self) -> None:
        """What was under way may be lost: all of it is sent again."""
        self._connected = True
        self._sent.clear()
        self._unacked_bytes = 0
        self._retry_s = None

    def link_down(self) -> None:
        """Nothing can be sent before ``link_up``."""
        self.link_up()
        self._connected = False

    def not_sent(self, attempt: str, now: float) -> None:
        """The link refused the body; try again a little later, or when it is up again."""
        summary = self._entries.get(attempt)
        if summary is not None:
            self._unsend(summary)
        if summary is not None and self._connected:
            self._retry_s = now + self._settings.upload_retry_s

    def advance(self, now: float) -> list[Effect]:
        """Send what the window allows; notice that the log has gone silent."""
        effects: list[Effect] = []
        if self._sent and now >= self._progress_s + self._stall_s:
            self.link_up()
            self._stall_s = min(2 * self._stall_s, self._settings.upload_stall_max_s)
            effects.append(RemakeLink(plane=Plane.TRAJECTORIES))
        if not self._connected or (self._retry_s is not None and now < self._retry_s):
            return effects
        self._retry_s = None
        for attempt, summary in self._entries.items():
            if attempt in self._sent:
                continue
            total = self._unacked_bytes + summary.size_bytes
            full = len(self._sent) >= self._settings.upload_window_messages
            if full or (self._sent and total > self._settings.upload_window_bytes):
                break
            if not self._sent:
                self._progress_s = now
            self._sent[attempt] = None
            self._unacked_bytes = total
            effects.append(ToTrajectoryLog(summary=summary))
        return effects

    def deadline(self) -> float | None:
        due = [] if self._retry_s is None else [self._retry_s]
        if self._sent:
            due.append(self._progress_s + self._stall_s)
        return min(due, default=None)

    def _unsend(self, summary: GroupSummary) -> None:
        if summary.attempt in self._sent:
            del self._sent[summary.attempt]
            self._unacked_bytes -= summary.size_bytes

    def check(self) -> None:
        """Raise ``InvariantViolation`` when the sums do not match the entries."""
        total = sum(summary.size_bytes for summary in self._entries.values())
        sent = [self._entries[attempt] for attempt in self._sent]
        unacked = sum(summary.size_bytes for summary in sent)
        if total != self.size_bytes or unacked != self._unacked_bytes:
            raise InvariantViolation(f"spool of {total} bytes, {unacked} under way, miscounted")
        if len(sent) > 1 and unacked > self._settings.upload_window_bytes:
            raise InvariantViolation(f"{unacked} bytes under way are more than the window")
