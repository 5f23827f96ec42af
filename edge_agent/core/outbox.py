"""Spooled results on their way to the trajectory log.

What always holds: a body leaves the spool only after the log acknowledged or refused it, or the
scheduler said that it is not wanted; small bodies are put whole, and those put and not yet
acknowledged add up to at most the window (one may always be under way); larger ones are offered and
asked for by the log, at its own pace, so the window does not count them, and only so many are
offered at once; when the log stays silent with something put or offered, the link is remade, which
drops what was queued in it, and everything is put and offered again, each time after a longer wait,
so that a slow uplink is not flooded with copies. What the log has of an offered body it does not
ask for again.
"""

from collections.abc import Iterable

from edge_agent.core.effects import Effect, OfferBodies, RemakeLink, ToTrajectoryLog
from edge_agent.core.settings import AgentSettings
from transport.envelope import BULK_FRAME_BYTES, KIND_OF
from transport.errors import InvariantViolation
from transport.messages import GroupSummary, Plane, TrajectoryOffer


class Outbox:
    """Bodies by attempt, oldest first; ``size_bytes`` is what they take in the spool."""

    def __init__(self, settings: AgentSettings, spooled: Iterable[GroupSummary] = ()) -> None:
        self._settings = settings
        self._entries: dict[str, GroupSummary] = {}
        self._sent: dict[str, None] = {}
        self._offered: dict[str, None] = {}
        self._sent_bytes = 0
        self._progress_s = 0.0
        self._stall_s = settings.upload_stall_s
        self._retry_s: float | None = None
        self._connected = True
        self._offers = True
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
        """Of bodies that the log was sent or told of."""
        return self._sent_bytes + sum(self._entries[name].size_bytes for name in self._offered)

    def add(self, summary: GroupSummary) -> None:
        self._entries[summary.attempt] = summary
        self.size_bytes += summary.size_bytes

    def progressed(self, now: float) -> None:
        """The log is alive: it said something about a body, or asked for a part of one."""
        self._progress_s = now
        self._stall_s = self._settings.upload_stall_s

    def remove(self, attempt: str) -> None:
        """Forget an entry that is known to be here."""
        summary = self._entries.pop(attempt)
        self.size_bytes -= summary.size_bytes
        self._unsend(summary)

    def peer_knows(self, kinds: bytes) -> None:
        """Which kinds of messages the log knows (none: not said). One that is too old for offers
        is sent bodies whole, as far as a frame can hold them."""
        self._offers = not kinds or KIND_OF[TrajectoryOffer] in kinds

    def undeliverable(self) -> list[GroupSummary]:
        """Bodies that can be given to the log in no way that it knows."""
        if self._offers:
            return []
        return [one for one in self._entries.values() if one.size_bytes > BULK_FRAME_BYTES]

    def link_up(self) -> None:
        """What was under way may be lost: all of it is sent and offered again."""
        self._connected = True
        self._sent.clear()
        self._offered.clear()
        self._sent_bytes = 0
        self._retry_s = None

    def link_down(self) -> None:
        """Nothing can be sent before ``link_up``."""
        self.link_up()
        self._connected = False

    def not_sent(self, attempt: str, now: float) -> None:
        """The link refused the body or the offer; try again a little later, or when it is up."""
        summary = self._entries.get(attempt)
        if summary is not None:
            self._unsend(summary)
        if summary is not None and self._connected:
            self._retry_s = now + self._settings.upload_retry_s

    def advance(self, now: float) -> list[Effect]:
        """Send and offer what may be; notice that the log has gone silent."""
        effects: list[Effect] = []
        if (self._sent or self._offered) and now >= self._progress_s + self._stall_s:
            self.link_up()
            self._stall_s = min(2 * self._stall_s, self._settings.upload_stall_max_s)
            effects.append(RemakeLink(plane=Plane.TRAJECTORIES))
        if not self._connected or (self._retry_s is not None and now < self._retry_s):
            return effects
        self._retry_s = None
        if not (self._sent or self._offered):
            self._progress_s = now
        offers: list[GroupSummary] = []
        full = False
        for attempt, summary in self._entries.items():
            if attempt in self._sent or attempt in self._offered:
                continue
            if self._offers and summary.size_bytes > self._settings.whole_body_bytes:
                if len(self._offered) < self._settings.upload_offers:
                    self._offered[attempt] = None
                    offers.append(summary)
                continue
            full = full or not self._fits(summary)
            if not full:
                self._sent[attempt] = None
                self._sent_bytes += summary.size_bytes
                effects.append(ToTrajectoryLog(summary=summary))
        if offers:
            effects.append(OfferBodies(summaries=tuple(offers)))
        return effects

    def deadline(self) -> float | None:
        retry_s = self._retry_s
        if not (self._sent or self._offered):
            return retry_s
        stalled_s = self._progress_s + self._stall_s
        return stalled_s if retry_s is None else min(retry_s, stalled_s)

    def _fits(self, summary: GroupSummary) -> bool:
        """Whether the window has room for one more put; there always is for one."""
        settings = self._settings
        if not self._sent:
            return True
        total_bytes = self._sent_bytes + summary.size_bytes
        room = len(self._sent) < settings.upload_window_messages
        return room and total_bytes <= settings.upload_window_bytes

    def _unsend(self, summary: GroupSummary) -> None:
        self._offered.pop(summary.attempt, None)
        if summary.attempt in self._sent:
            del self._sent[summary.attempt]
            self._sent_bytes -= summary.size_bytes

    def check(self) -> None:
        """Raise ``InvariantViolation`` when the sums do not match the entries."""
        total = sum(summary.size_bytes for summary in self._entries.values())
        sent = [self._entries[attempt] for attempt in self._sent]
        sent_bytes = sum(summary.size_bytes for summary in sent)
        if total != self.size_bytes or sent_bytes != self._sent_bytes:
            raise InvariantViolation(f"spool of {total} bytes, {sent_bytes} under way, miscounted")
        if len(sent) > 1 and sent_bytes > self._settings.upload_window_bytes:
            raise InvariantViolation(f"{sent_bytes} bytes under way are more than the window")
        if any(attempt in self._sent or attempt not in self._entries for attempt in self._offered):
            raise InvariantViolation("a body is offered that was sent or is not here")
        if len(self._offered) > self._settings.upload_offers:
            raise InvariantViolation(f"{len(self._offered)} bodies are offered at once")
