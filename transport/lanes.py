"""When one more connection to the same hub pays; without sockets and clocks.

What always holds: there are between one lane and the configured number; a lane is opened only while
there is something to fetch, one at a time, and stays only if what arrives in all grew by
``GROWTH``; a trial that failed is not repeated before ``AGAIN_S``; lanes that are idle for
``IDLE_S`` are closed.

A lane is too narrow for its path when its window is at its bound, when it delivers what one
connection can encrypt and copy (``LANE_BYTES_S``), or when so much is under way that the kernels'
buffers of one connection may be the limit (``BUFFER_BYTES``): then nothing but a trial tells.
"""

from collections.abc import Sequence
from typing import Final

from transport.delivery_window import DeliveryWindow

LANE_BYTES_S: Final = 150e6
BUFFER_BYTES: Final = 2 << 20
GROWTH: Final = 1.2
TRIAL_S: Final = 2.0
TRIAL_ROUNDS: Final = 20
AGAIN_S: Final = 60.0
IDLE_S: Final = 30.0


def too_narrow(window: DeliveryWindow) -> bool:
    """Whether the lane of this window may carry less than its path."""
    under_way = window.rate_bytes_s * (window.min_rtt_s or 0.0)
    return (
        window.at_bound or window.rate_bytes_s >= LANE_BYTES_S or under_way >= BUFFER_BYTES
    ) and not window.starting


class LanePlan:
    """How many lanes there are to be, from what those that there are deliver."""

    def __init__(self, max_lanes: int) -> None:
        self._max_lanes = max_lanes
        self._wanted = 1
        self._busy_at: float | None = None
        self._trial: tuple[float, float] | None = None  # when it ends, the rate before
        self._not_before = 0.0

    def wanted(self, windows: Sequence[DeliveryWindow], *, busy: bool, now: float) -> int:
        """Lanes to have now. ``windows`` are those of the open ones, ``busy`` says that there is
        more to ask for than may be on the way. Call it every second or so."""
        if busy or self._busy_at is None:
            self._busy_at = now
        if now - self._busy_at >= IDLE_S:
            self._wanted, self._trial = 1, None
            return 1
        rate = sum(window.rate_bytes_s for window in windows)
        if self._trial is not None:
            ends_s, before = self._trial
            if now >= ends_s:
                self._trial = None
                if rate < GROWTH * before:
                    self._wanted = max(1, self._wanted - 1)
                    self._not_before = now + AGAIN_S
            return self._wanted
        more = busy and now >= self._not_before and self._wanted < self._max_lanes
        if more and len(windows) >= self._wanted and all(map(too_narrow, windows)):
            rounds_s = TRIAL_ROUNDS * max(window.min_rtt_s or 0.0 for window in windows)
            self._trial = (now + max(TRIAL_S, rounds_s), rate)
            self._wanted += 1
        return self._wanted
