"""How much may be on the way on one link, and in what pieces; without sockets and clocks.

What always holds: the window is between two pieces (or its floor) and its bound, and at most halves
and at most doubles in a round trip once the start is over; a piece is between ``MIN_PIECE_BYTES``
and what the path delivers in ``PIECE_S``, so that no frame blocks a slow link for longer than
moments; what was asked for while there was little to ask changes the window only by the queue that
it made.

Window (bytes on the way), set once a round trip, after FAST (Jin, Wei and Low, INFOCOM 2004):

    window  = rate x (min RTT + slack) + ``SHARE_BYTES``
    rate    = largest of (bytes delivered while a piece was on its way / that time) in this round
    min RTT = smallest time from request to arrival within 10 s; when it is older, that of a
              request beside which next to nothing was on the way (during a long exchange the
              window shrinks to two pieces for a round trip for it)
    slack   = ``SLACK_S`` or ``SLACK_SHARE`` of the min RTT: how long the queue may get, and ours
              and the machines' own delays with it

On a full path the first term leaves everybody's share as it is and the queue at the slack; the
second, equal for all, moves the shares towards equal ones, at the cost of so many bytes of queue
each. A round without half of that queue multiplies the window instead, the next one by more. Two
things look like a queue and are none of ours: the burst of a beginning exchange, of whose pieces
only the time that they take together counts; and delays of busy machines, which stay while the
window is halved, and are added to the slack (``MAX_FOREIGN_S`` at most) until the next look at the
min RTT.

Doubling alone takes a long path several round trips. The pieces of one round arrive as a train
whose spacing is the bottleneck's (packet pairs: Keshav, SIGCOMM 1991), so during the start the
window follows the train's rate, with gain ``TRAIN_GAIN`` and at most ``TRAIN_GROWTH`` times what
was delivered per round trip: jitter can make a train look shorter than it was.
"""

import math
from collections import deque

START_BYTES = 5 << 18
"""1.25 MiB: what a path of 50 Mbit/s and 200 ms holds."""
MIN_PIECE_BYTES = 64 << 10
MAX_PIECE_BYTES = 4 << 20
MAX_WINDOW_BYTES = 64 << 20
MIN_PIECES = 2
WINDOW_PIECES = 8
"""A window holds at least so many pieces where ``MIN_PIECE_BYTES`` lets it."""
PIECE_S = 0.25
SLACK_S = 0.015
SLACK_SHARE = 0.25
SHARE_BYTES = 64 << 10
"""What each link may keep in the queue beyond the slack."""

TRAIN_GAIN = 1.25
TRAIN_GROWTH = 4.0
MAX_GROWTH = 2.0
MAX_FOREIGN_S = 0.1
_TRAIN_PIECES = 3
_TRAIN_S = 0.002
_GROWTH = 1.25
_USED = 0.75
"""A window of which less was on the way was not tried."""
_QUEUED = 1.5
_STAYS = 0.75
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
        self.starting = True
        """The rate is still being found out."""
        self._start_bytes = start_bytes
        self._window_bytes = float(start_bytes)
        self._floor_bytes = max(min_window_bytes, MIN_PIECES * MIN_PIECE_BYTES)
        self._min_rtt_at = 0.0
        self._foreign_s = 0.0
        self._shrinking: tuple[float, float, int] | None = None  # window and RTT before, rounds
        self._rates: deque[tuple[float, float]] = deque()  # (time, bytes/s), rates falling
        self._limited_from_bytes = 0
        self._limited_until_bytes = 0
        self._round_ends_bytes = 0
        self._round_rate = 0.0
        self._round_bytes = 0
        self._round_rtt_s = math.inf
        self._growth = MAX_GROWTH
        self._train = (0.0, 0)  # when this round began, bytes then
        self._train_pieces = 0
        self._unasked_train = False
        self._last_s = 0.0

    @property
    def rate_bytes_s(self) -> float:
        """Estimated delivery rate, the largest of some round trips; 0 before the first piece."""
        return self._rates[0][1] if self._rates else 0.0

    @property
    def at_bound(self) -> bool:
        """The path would carry more than ``max_window_bytes`` allow."""
        return not self.probing and self._window_bytes >= self.max_window_bytes

    def limit_bytes(self) -> int:
        """Bytes that may be on the way now."""
        if self.probing:
            probe = max(MIN_PIECES * self.piece_bytes(), self._floor_bytes)
            return min(probe, self.max_window_bytes)
        return self._bounded_bytes()

    def piece_bytes(self) -> int:
        """Largest piece to ask for now."""
        if self.min_rtt_s is None:
            return MIN_PIECE_BYTES
        window = self._bounded_bytes()
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
        # What was asked for before anything arrived came as a burst: its times are its own.
        limited = self._limited_from_bytes <= delivered_at_send <= self._limited_until_bytes
        if not limited or rate > self.rate_bytes_s:
            self._observe_rate(rate, now)
        if self._unasked_train:
            self._train_pieces, self._unasked_train = 0, False
        new_round = delivered_at_send >= self._round_ends_bytes
        if new_round:
            self._end_round()
            self._round_ends_bytes = self.delivered_bytes
            self._train = (now, self.delivered_bytes)
        self._train_pieces = 0 if new_round else self._train_pieces + 1
        self._last_s = now
        if self.starting:
            self._follow_train()
        if not limited:
            self._round_rate = max(self._round_rate, rate)
            self._round_bytes = max(self._round_bytes, self.delivered_bytes - delivered_at_send)
            self._round_rtt_s = min(self._round_rtt_s, rtt)

    def delivered_unasked(self, size_bytes: int, *, now: float) -> None:
        """A piece arrived that the source sent of its own accord: its time means nothing. Where
        nothing is known of the path yet, the pace of such pieces says what fills the slack."""
        began = self.delivered_bytes == 0
        self.delivered_bytes += size_bytes
        if self.min_rtt_s is None:
            if began:
                self._train, self._unasked_train = (now, self.delivered_bytes), True
            self._train_pieces += not began
            self._last_s = now
            window = min(TRAIN_GAIN * self._trip_s * self._train_rate(), 2 * self._start_bytes)
            self._window_bytes = max(self._window_bytes, window)

    def delivered_again(self, size_bytes: int) -> None:
        """A piece arrived that was asked for more than once: its time means nothing."""
        self.delivered_bytes += size_bytes

    def nothing_more_to_ask(self, outstanding_bytes: int) -> None:
        """The exchange, not the path, limits what is on the way now."""
        if self.delivered_bytes > self._limited_until_bytes:
            self._limited_from_bytes = self.delivered_bytes
        self._limited_until_bytes = self.delivered_bytes + outstanding_bytes

    def _bounded_bytes(self) -> int:
        return min(max(int(self._window_bytes), self._floor_bytes), self.max_window_bytes)

    @property
    def _trip_s(self) -> float:
        return (self.min_rtt_s or 0.0) + self._slack_s

    @property
    def _slack_s(self) -> float:
        return max(SLACK_S, SLACK_SHARE * (self.min_rtt_s or 0.0)) + self._foreign_s

    def _observe_rtt(self, rtt: float, lone: bool, now: float) -> None:
        before = rtt if self.smoothed_rtt_s is None else self.smoothed_rtt_s
        self.smoothed_rtt_s = before + (rtt - before) / 8
        age_s = now - self._min_rtt_at
        if self.min_rtt_s is None or rtt <= self.min_rtt_s or (lone and age_s > _RTT_WINDOW_S / 2):
            self.min_rtt_s, self._min_rtt_at, self.probing = rtt, now, False
            if lone:
                self._foreign_s = 0.0
        elif age_s > _RTT_WINDOW_S:
            self.probing = True

    def _observe_rate(self, rate: float, now: float) -> None:
        while self._rates and self._rates[-1][1] <= rate:
            self._rates.pop()
        self._rates.append((now, rate))
        horizon = now - max(1.0, _RATE_ROUNDS * (self.min_rtt_s or 0.0))
        while self._rates[0][0] < horizon:
            self._rates.popleft()

    def _train_rate(self) -> float:
        """At what rate the pieces of this round arrive, all of which were on the way when its
        first one arrived; 0 when nothing can be said."""
        began_s, before_bytes = self._train
        took_s = self._last_s - began_s
        if self._train_pieces < _TRAIN_PIECES or took_s < _TRAIN_S:
            return 0.0
        return (self.delivered_bytes - before_bytes) / took_s

    def _follow_train(self) -> None:
        rate = self._train_rate()
        if rate:
            trip_s = TRAIN_GAIN * self._trip_s
            bound = max(trip_s * TRAIN_GROWTH * self.rate_bytes_s, self._start_bytes)
            self._window_bytes = min(trip_s * rate, bound)

    def _end_round(self) -> None:
        """Set the window by the round that is over; one without a measurement changes nothing."""
        rate, self._round_rate = self._round_rate, 0.0
        flight_bytes, self._round_bytes = self._round_bytes, 0
        rtt_s, self._round_rtt_s = self._round_rtt_s, math.inf
        if self.min_rtt_s is None or self.probing:
            return
        before = self._window_bytes
        train_rate = self._train_rate()
        if rate:
            self.starting = False
            after = rate * self._trip_s + SHARE_BYTES
            if rtt_s < self.min_rtt_s + self._slack_s / 2:
                after = max(after, self._growth * flight_bytes)
                self._growth = min(self._growth * _GROWTH, MAX_GROWTH)
            else:
                self._growth = _GROWTH
                if flight_bytes < _USED * before:
                    after = max(after, before)
            self._observe_delay(after, rtt_s)
        elif train_rate and self._last_s - self._train[0] > self._trip_s:  # a burst that queued
            after = min(train_rate * self._trip_s + SHARE_BYTES, before)
        else:
            return
        after = min(max(after, before / MAX_GROWTH, self._floor_bytes), MAX_GROWTH * before)
        self._window_bytes = min(after, self.max_window_bytes)

    def _observe_delay(self, after: float, rtt_s: float) -> None:
        """A long delay that stays two rounds after the window was halved is not the window's."""
        if after >= self._window_bytes or rtt_s < _QUEUED * self._trip_s:
            self._shrinking = None
            return
        if self._shrinking is None:
            self._shrinking = (self._window_bytes, rtt_s, 0)
            return
        window, before_s, rounds = self._shrinking
        halved = self._window_bytes <= window / 2
        self._shrinking = (window, before_s, rounds + 1 if halved else 0)
        if rounds >= 2:
            self._shrinking = None
            if rtt_s >= _STAYS * before_s:
                self._foreign_s += min(rtt_s - self._trip_s, MAX_FOREIGN_S - self._foreign_s)
