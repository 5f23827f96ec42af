"""Round trip and clock offset from four time stamps (RFC 5905, sections 8 and 10).

What always holds: the time that the scheduler had a heartbeat (deciding, committing) is no part of
a round trip; of the last ``SAMPLES`` heartbeats the one with the least delay speaks, so that a busy
loop, here or there, moves neither number; a step of our wall clock changes no sample, because our
two stamps are of the monotonic clock.
"""

import math
from collections import deque
from typing import Final, NamedTuple

SAMPLES: Final = 8
"""As NTP's clock filter keeps."""


CLOCKS_AGREE_S: Final = 1e-3
CLOCKS_DRIFT: Final = 1e-3
"""By how much two clocks may differ over the same time: what is rounded, and a part of it."""


class _Sample(NamedTuple):
    delay_s: float
    ahead_s: float | None


class ClockFilter:
    """The latest samples; empty at first."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES)
        self.rtt_s: float | None = None
        """The least delay; None without a sample."""
        self.ahead_s: float | None = None
        """The scheduler's wall clock minus our monotonic one; None without stamps."""

    def add(self, *, sent_s: float, arrived_s: float, received_s: float, replied_s: float) -> None:
        """One answered heartbeat. ``sent_s`` and ``arrived_s`` are our monotonic clock,
        ``received_s`` and ``replied_s`` the scheduler's wall clock. Where those cannot be (0: not
        stamped; apart by less than nothing or by more than the whole took: its clock was set in
        between) the sample is a delay alone, an upper bound of it."""
        elapsed_s = max(arrived_s - sent_s, 0.0)
        held_s = replied_s - received_s
        most_s = elapsed_s + CLOCKS_AGREE_S + CLOCKS_DRIFT * elapsed_s
        if received_s > 0.0 and math.isfinite(received_s) and 0.0 <= held_s <= most_s:
            ahead_s = ((received_s - sent_s) + (replied_s - arrived_s)) / 2
            self._samples.append(_Sample(max(elapsed_s - held_s, 0.0), ahead_s))
        else:
            self._samples.append(_Sample(elapsed_s, None))
        self._choose()

    def _choose(self) -> None:
        """Once per sample, not each time that somebody asks; of equal ones the oldest."""
        least_s = stamped_s = math.inf
        self.ahead_s = None
        for delay_s, ahead_s in self._samples:
            if delay_s < least_s:
                least_s = delay_s
            if ahead_s is not None and delay_s < stamped_s:
                stamped_s, self.ahead_s = delay_s, ahead_s
        self.rtt_s = least_s
