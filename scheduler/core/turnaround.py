"""How long groups take from their job's creation to their accepted result, as a small sketch.

    bucket of t = floor(log(t / LEAST_S) / log(GROWTH)),   quantile = geometric middle of its bucket

(log-spaced buckets as in DDSketch: Masson et al., VLDB 2019). What always holds: at most
``BUCKETS`` buckets; a quantile of durations between ``LEAST_S`` and about 10^8 s is within 1 % of a
true one; nothing here is durable, it counts from the start of this scheduler.
"""

import math

GROWTH = 1.02
LEAST_S = 1e-3
BUCKETS = 1280
_LOG_GROWTH = math.log(GROWTH)


class Durations:
    """``count`` durations and their quantiles."""

    __slots__ = ("_buckets", "count")

    def __init__(self) -> None:
        self.count = 0
        self._buckets: dict[int, int] = {}

    def add(self, duration_s: float) -> None:
        index = 0
        if duration_s > LEAST_S:
            index = int(min(BUCKETS - 1, math.log(duration_s / LEAST_S) / _LOG_GROWTH))
        self._buckets[index] = self._buckets.get(index, 0) + 1
        self.count += 1

    def quantile(self, share: float) -> float | None:
        """Seconds that ``share`` of the durations do not exceed; None while there are none."""
        if not self.count:
            return None
        left = min(self.count - 1, int(share * self.count))
        for index in sorted(self._buckets):
            left -= self._buckets[index]
            if left < 0:
                return LEAST_S * math.exp((index + 0.5) * _LOG_GROWTH)
        raise AssertionError("the buckets hold as many as were counted")
