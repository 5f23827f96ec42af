"""Clocks: the only place where farflow reads the time.

Cores take ``now`` as an argument; shells ask a ``Clock`` for it. Durations and deadlines come from
``monotonic_s`` alone: it never goes back, means nothing in another process, and does not survive
one. ``wall_s`` is for people, files and peers, and may jump in either direction.
"""

import math
import time
from typing import Protocol

from transport.errors import InvariantViolation


class Clock(Protocol):
    """Where a shell takes its time from."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary moment; never decreases within one process."""
        ...

    def wall_s(self) -> float:
        """Seconds since 1970-01-01 UTC; may jump."""
        ...


class SystemClock:
    """The machine's clocks."""

    __slots__ = ()

    def monotonic_s(self) -> float:
        return time.monotonic()  # noqa: TID251 - this module is what the rule points to

    def wall_s(self) -> float:
        return time.time()  # noqa: TID251 - likewise


class ManualClock:
    """A clock that moves only when told to; both readings advance together."""

    __slots__ = ("_monotonic_s", "_wall_s")

    def __init__(self, monotonic_s: float = 0.0, wall_s: float = 1_700_000_000.0) -> None:
        self._monotonic_s = monotonic_s
        self._wall_s = wall_s

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def wall_s(self) -> float:
        return self._wall_s

    def advance(self, seconds: float) -> float:
        """Moves both readings forward and returns the new monotonic one.

        Raises ``InvariantViolation`` for a negative or non-finite step: time does not go back.
        """
        if not (math.isfinite(seconds) and seconds >= 0):
            raise InvariantViolation(f"a clock cannot advance by {seconds!r} s")
        self._monotonic_s += seconds
        self._wall_s += seconds
        return self._monotonic_s

    def advance_to(self, monotonic_s: float) -> float:
        """Moves to a moment at or after the present one, e.g. a core's next deadline."""
        return self.advance(monotonic_s - self._monotonic_s)

    def set_wall(self, wall_s: float) -> None:
        """Makes the wall clock jump, as a correction from the network would."""
        self._wall_s = wall_s
