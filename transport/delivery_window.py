"""How much may be on the way on one link, and in what pieces; without sockets and clocks.

What always holds: the window is between two pieces (or its floor) and its bound; a piece is between
``MIN_PIECE_BYTES`` and what the path delivers in ``PIECE_S``, so that no frame blocks a slow link
for longer than moments; what was asked for while there was little to ask may raise the estimate of
the rate, never lower it.

Window (bytes on the way), after BBR (Cardwell et al., ACM Queue 14(5), 2016):

    rate     = largest recent (bytes delivered while a piece was on its way / that time)
    min RTT  = smallest time from request to arrival within 10 s; when older, the window shrinks
               to two pieces for one round trip to see it again
    window   = gain x rate x (min RTT + ``SLACK_S``), at least 2 pieces; gain 2 until the rate
               stops growing by a quarter in three round trips or a whole round trip was spent in
               a queue (after HyStart: Ha and Rhee, Computer Networks 55(9), 2011), then 1.25:
               enough to notice a faster path, little enough that renewals do not wait behind bulk

Doubling alone takes a long path several round trips. The pieces of one round arrive as a train
whose spacing is the bottleneck's (packet pairs: Keshav, SIGCOMM 1991), so during the start the
window may also follow the train's rate, with gain 1.25 and at most ``TRAIN_GROWTH`` times what was
delivered per round trip: jitter can make a train look shorter than it was.
"""

import math
from collections import deque

START_BYTES = 1 << 20
MIN_PIECE_BYTES = 64 << 10
MAX_PIECE_BYTES = 4 << 20
MAX_WINDOW_BYTES = 64 << 20
MIN_PIECES = 2
WINDOW_PIECES = 4
"""A window holds at least so many pieces where ``MIN_PIECE_BYTES`` lets it."""
PIECE_S = 0.25
SLACK_S = 0.005
"""Scheduling and disk on both ends, which fills no queue on the path."""

STARTUP_GAIN = 2.0
CRUISE_GAIN = 1.25
TRAIN_GROWTH = 4.0
QUEUED_ROUND = 1.5
_TRAIN_PIECES = 3
_TRAIN_S = 0.002
_GROWTH = 1.25
_FLAT_ROUNDS = 3
_RTT_WINDOW_S = 10.0
_RATE_ROUNDS = 10

FIRST_TIMEOUT_S = 30.0
MIN_TIMEOUT_S = 5.0
MAX_TIMEOUT_S = 300.0


class DeliveryWindow:
    """How many bytes may be on the way on one link; keep it from one exchange to the next. It is
    never below ``min_window_bytes``: where some answers wait for a third party, the smallest round
    trip says little."""

    def __init__(
        self,
        *,
        max_window_bytes: int = MAX_WINDOW_BYTES,
        start_bytes: int = START_BYTES,
        min_window_bytes: int = 0,
    ) -> None:
        self.max_window_bytes = max_window_bytes
        self.min_rtt_s: float | None = None
        self.smoothed_rtt_s: float | None = None
        self.delivered_bytes = 0
        self.probing = False
        self._start_bytes = start_bytes
        self._floor_bytes = max(min_window_bytes, MIN_PIECES * MIN_PIECE_BYTES)
        self._min_rtt_at = 0.0
        self._rates: deque[tuple[float, float]] = deque()  # (time, bytes/s), rates falling
        self._gain = STARTUP_GAIN
        self._round_ends_bytes = 0
        self._best_round_rate = 0.0
        self._flat_rounds = 0
        self._round_rtt_s = math.inf
        self._limited_until_bytes = 0
        self._train: tuple[float, int, int] | None = None  # began, bytes then, pieces since
        self._train_rate = 0.0

    @property
    def rate_bytes_s(self) -> float:
        """Estimated delivery rate; 0 before the first piece."""
        return self._rates[0][1] if self._rates else 0.0

    @property
    def starting(self) -> bool:
        """The rate is still being found out."""
        return self._gain != CRUISE_GAIN

    @property
    def at_bound(self) -> bool:
        """The path would carry more than ``max_window_bytes`` allow."""
        return not self.probing and self._model_bytes() >= self.max_window_bytes

    def limit_bytes(self) -> int:
        """Bytes that may be on the way now."""
        if self.probing:
            probe = max(MIN_PIECES * self.piece_bytes(), self._floor_bytes)
            return min(probe, self.max_window_bytes)
        return min(max(self._model_bytes(), self._floor_bytes), self.max_window_bytes)

    def piece_bytes(self) -> int:
        """Largest piece to ask for now."""
        if self.min_rtt_s is None:
            return MIN_PIECE_BYTES
        window = min(max(self._model_bytes(), self._floor_bytes), self.max_window_bytes)
        piece = min(window // WINDOW_PIECES, int(PIECE_S * self.rate_bytes_s), MAX_PIECE_BYTES)
        return max(piece, MIN_PIECE_BYTES)

    def timeout_s(self, outstanding_bytes: int) -> float:
        """How long a piece requested now may take before it is asked for again."""
        if self.smoothed_rtt_s is None or not self.rate_bytes_s:
            return FIRST_TIMEOUT_S
        expected = self.smoothed_rtt_s + outstanding_bytes / self.rate_bytes_s
        return min(max(4 * expected, MIN_TIMEOUT_S), MAX_TIMEOUT_S)

    def delivered(
        self, size_bytes: int, *, sent_s: float, delivered_at_send: int, lone: bool, now: float
    ) -> None:
        """A piece arrived that was asked for once. ``lone`` says that it was requested with no
        more than a probe's worth on the way, so that its time has no queue in it."""
        self.delivered_bytes += size_bytes
        rtt = max(now - sent_s, 1e-6)
        self._observe_rtt(rtt, lone, now)
        rate = (self.delivered_bytes - delivered_at_send) / rtt
        limited = delivered_at_send < self._limited_until_bytes
        if not limited or rate > self.rate_bytes_s:
            self._observe_rate(rate, now)
        new_round = delivered_at_send >= self._round_ends_bytes
        if self.starting:
            self._observe_train(new_round, now)
        if new_round and not limited:
            self._round_ends_bytes = self.delivered_bytes
            self._end_round()
        self._round_rtt_s = min(self._round_rtt_s, rtt)

    def delivered_again(self, size_bytes: int) -> None:
        """A piece arrived that was asked for more than once: its time means nothing."""
        self.delivered_bytes += size_bytes

    def nothing_more_to_ask(self, outstanding_bytes: int) -> None:
        """The exchange, not the path, limits what is on the way now."""
        self._limited_until_bytes = self.delivered_bytes + outstanding_bytes

    def _model_bytes(self) -> int:
        if self.min_rtt_s is None:
            return self._start_bytes
        trip_s = self.min_rtt_s + SLACK_S
        if self.starting and self._train_rate:
            train = min(self._train_rate, TRAIN_GROWTH * self.rate_bytes_s)
            return int(CRUISE_GAIN * max(train, self.rate_bytes_s) * trip_s)
        return int(self._gain * self.rate_bytes_s * trip_s)

    def _observe_rtt(self, rtt: float, lone: bool, now: float) -> None:
        before = rtt if self.smoothed_rtt_s is None else self.smoothed_rtt_s
        self.smoothed_rtt_s = before + (rtt - before) / 8
        if self.min_rtt_s is None or rtt <= self.min_rtt_s or (self.probing and lone):
            self.min_rtt_s, self._min_rtt_at, self.probing = rtt, now, False
        elif now - self._min_rtt_at > _RTT_WINDOW_S:
            self.probing = True

    def _observe_rate(self, rate: float, now: float) -> None:
        while self._rates and self._rates[-1][1] <= rate:
            self._rates.pop()
        self._rates.append((now, rate))
        horizon = now - max(1.0, _RATE_ROUNDS * (self.min_rtt_s or 0.0))
        while self._rates[0][0] < horizon:
            self._rates.popleft()

    def _observe_train(self, new_round: bool, now: float) -> None:
        if new_round or self._train is None:
            self._train = (now, self.delivered_bytes, 0)
            return
        began_s, before_bytes, pieces = self._train
        self._train = (began_s, before_bytes, pieces + 1)
        if pieces + 1 >= _TRAIN_PIECES and now - began_s >= _TRAIN_S:
            self._train_rate = (self.delivered_bytes - before_bytes) / (now - began_s)

    def _end_round(self) -> None:
        queued = self._round_rtt_s > QUEUED_ROUND * ((self.min_rtt_s or 0.0) + SLACK_S)
        known, self._round_rtt_s = self._round_rtt_s < math.inf, math.inf
        if not self.starting or self.probing:
            return
        if known and queued:
            self._gain = CRUISE_GAIN
            return
        if self.rate_bytes_s >= self._best_round_rate * _GROWTH:
            self._best_round_rate, self._flat_rounds = self.rate_bytes_s, 0
            return
        self._flat_rounds += 1
        if self._flat_rounds >= _FLAT_ROUNDS:
            self._gain = CRUISE_GAIN
