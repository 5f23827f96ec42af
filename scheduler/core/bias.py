"""Whether the lengths of what is trained on are those of what was generated.

A system that drops late work drops long work first, and a policy that only ever sees short answers
learns to be short (FIFO buffers dropped samples 1.3 to 1.7 times as long as those kept, in
AstraFlow's own measurement). So the mean response lengths of the last ``WINDOW`` groups that came
back and of the last ``WINDOW`` that were trained on are compared:

    D = max |F_trained - F_returned|        (two-sample Kolmogorov-Smirnov)
    limit = 1.63 sqrt((n + m) / (n m))      its 1 % level (Smirnov 1948)

What always holds: bounded memory; nothing is durable (a new life starts measuring anew); below
``MIN_GROUPS`` on either side there is no verdict. Groups that never came back (their agent was
lost) are not in it: nobody knows how long they would have been.
"""

import math
from bisect import bisect_right
from collections import deque

import msgspec

WINDOW = 1000
MIN_GROUPS = 100
LOOK_GROUPS = 50
LEVEL_1_PERCENT = 1.63
MAX_RATIO = 1.1
"""How far the means may be apart before a significant difference is worth a person's time."""


class LengthBias(msgspec.Struct, frozen=True, kw_only=True):
    """``ratio`` is mean trained length / mean returned length; ``biased`` when the distributions
    differ beyond chance and the means by more than ``MAX_RATIO``."""

    returned_groups: int
    trained_groups: int
    ratio: float
    distance: float
    limit: float
    biased: bool


class LengthWatch:
    """Mean response lengths, in tokens, of one policy's groups."""

    __slots__ = ("_new", "_returned", "_trained", "since_s", "standing")

    def __init__(self) -> None:
        self._returned: deque[float] = deque(maxlen=WINDOW)
        self._trained: deque[float] = deque(maxlen=WINDOW)
        self._new = 0
        self.standing: LengthBias | None = None
        """The verdict of the last ``look``."""
        self.since_s: float | None = None
        """Since when there has been a bias without a break; None: there is none."""

    def returned(self, mean_tokens: float) -> None:
        self._returned.append(mean_tokens)

    def trained(self, mean_tokens: float) -> None:
        self._trained.append(mean_tokens)
        self._new += 1

    def look(self, now: float) -> None:
        """Bring ``standing`` up to date, once enough has been trained on since the last time."""
        if self._new < LOOK_GROUPS:
            return
        self._new = 0
        self.standing = self.verdict()
        if self.standing is None or not self.standing.biased:
            self.since_s = None
        elif self.since_s is None:
            self.since_s = now

    def verdict(self) -> LengthBias | None:
        """None while there is too little to say; O(n log n)."""
        returned, trained = sorted(self._returned), sorted(self._trained)
        n, m = len(returned), len(trained)
        if n < MIN_GROUPS or m < MIN_GROUPS:
            return None
        distance = max(
            abs(bisect_right(trained, at) / m - bisect_right(returned, at) / n)
            for at in (*returned, *trained)
        )
        limit = LEVEL_1_PERCENT * math.sqrt((n + m) / (n * m))
        ratio = (sum(trained) / m) / max(sum(returned) / n, 1e-9)
        apart = max(ratio, 1.0 / max(ratio, 1e-9))
        return LengthBias(
            returned_groups=n,
            trained_groups=m,
            ratio=ratio,
            distance=distance,
            limit=limit,
            biased=distance > limit and apart > MAX_RATIO,
        )
