"""Stored bodies that the scheduler is to be told of.

What always holds: a summary is announced until the scheduler has it in its own store, again after
``ANNOUNCE_AGAIN_S`` without a confirmation; at most ``ANNOUNCE_WINDOW`` are on their way, the
others wait; one that fits no message is given up without silencing the others.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

import msgspec

from transport.errors import LocalProtocolError
from transport.messages import GroupSummary, Message, TrajectoriesStored
from transport.runtime.clock import Clock

ANNOUNCE_BYTES: Final = 128 * 1024
"""Summaries in one message; a control frame holds twice that."""

ANNOUNCE_WINDOW: Final = 4096
"""Summaries on their way to the scheduler; the others wait for a confirmation."""

ANNOUNCE_AGAIN_S: Final = 5.0


class Announcements:
    """``tell`` gives a message to the scheduler, False when it cannot take it now; ``hopeless``
    hears of a summary of which the scheduler can never be told, and why."""

    def __init__(
        self,
        tell: Callable[[Message], bool],
        clock: Clock,
        hopeless: Callable[[GroupSummary, str], None],
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._hopeless = hopeless
        self._waiting: dict[str, GroupSummary] = {}
        self._announced: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, summary: GroupSummary) -> None:
        self._waiting[summary.digest] = summary

    def accepted(self, digests: Iterable[str]) -> list[str]:
        """The scheduler has these; returns those that were waiting for it."""
        known = []
        for digest in digests:
            self._announced.pop(digest, None)
            if self._waiting.pop(digest, None) is not None:
                known.append(digest)
        return known

    def forget(self, digest: str) -> None:
        """Nobody is to be told of it any more."""
        self._waiting.pop(digest, None)
        self._announced.pop(digest, None)

    def start_again(self) -> None:
        """The scheduler may have forgotten what it was told."""
        self._announced.clear()
        self.announce()

    def expire(self) -> None:
        """Announce again what was not confirmed in time."""
        before = self._clock.monotonic_s() - ANNOUNCE_AGAIN_S
        for digest in [d for d, at in self._announced.items() if at <= before]:
            del self._announced[digest]
        self.announce()

    def announce(self) -> None:
        """Tell the scheduler of what it does not have, in frames of bounded size."""
        chosen: list[GroupSummary] = []
        size_bytes = 0
        room = ANNOUNCE_WINDOW - len(self._announced)
        for digest, summary in list(islice(self._waiting.items(), 2 * ANNOUNCE_WINDOW)):
            if room <= 0:
                break
            if digest in self._announced:
                continue
            room -= 1
            summary_bytes = len(msgspec.msgpack.encode(summary))
            if chosen and size_bytes + summary_bytes > ANNOUNCE_BYTES:
                if not self._tell_stored(chosen):
                    return
                chosen, size_bytes = [], 0
            chosen.append(summary)
            size_bytes += summary_bytes
        if chosen:
            self._tell_stored(chosen)

    def _tell_stored(self, summaries: list[GroupSummary]) -> bool:
        try:
            if not self._tell(TrajectoriesStored(summaries=tuple(summaries))):
                return False
        except LocalProtocolError as error:  # one of them must not silence the others
            if len(summaries) > 1:
                return all(self._tell_stored([summary]) for summary in summaries)
            self.forget(summaries[0].digest)
            self._hopeless(summaries[0], str(error))
            return True
        now = self._clock.monotonic_s()
        self._announced.update((summary.digest, now) for summary in summaries)
        return True
