"""Many windows over one bottleneck in virtual time: how fast, how fair, how much they queue."""

import heapq
import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from transport.chunk_parts import part_bytes_for
from transport.delivery_window import (
    MIN_PIECE_BYTES,
    MIN_PIECES,
    SHARE_BYTES,
    SLACK_S,
    SLACK_SHARE,
    START_BYTES,
    DeliveryWindow,
)

MBIT = 1e6 / 8
CHUNK = 1 << 20
SIZE = 4_000_000
ASKS, QUEUES, ARRIVES = range(3)


class Piece(NamedTuple):
    flow: int
    size: int
    sent_s: float
    delivered_at_send: int
    lone: bool


class Path:
    """A bottleneck without an end to its queue; what is asked for at the same moment is sent in
    turn. ``jitter_s`` and ``busy_s`` (a mean) are added on the way back, which keeps the order."""

    def __init__(
        self, bytes_s: float, rtt_s: float, *, jitter_s: float = 0.0, busy_s: float = 0.0
    ) -> None:
        self.bytes_s, self.rtt_s = bytes_s, rtt_s
        self.now = 0.0
        self.queued: list[tuple[float, float]] = []  # when, how long
        self.arrived: list[tuple[float, int, int]] = []  # when, which flow, bytes
        self._jitter_s, self._busy_s = jitter_s, busy_s
        self._random = random.Random(1)
        self._free_at = 0.0
        self._events: list[tuple[float, float, int, int, Piece | None]] = []
        self._count = 0

    def fetch(
        self,
        windows: Sequence[DeliveryWindow],
        size: float,
        *,
        late_s: float = 0.0,
        slower: tuple[float, float] = (float("inf"), 0.0),
    ) -> float:
        """Seconds until all have ``size`` bytes; the last one begins ``late_s`` later, and the
        rate changes at a time to another one."""
        began = self.now
        self.queued, self.arrived = [], []
        left, outstanding = [int(size)] * len(windows), [0] * len(windows)
        last = [0.0] * len(windows)
        for flow in range(len(windows)):
            late = late_s if flow == len(windows) - 1 else 0.0
            self._at(began + late, 0, ASKS, flow)
        while self._events:
            self.now, _, kind, flow, piece = heapq.heappop(self._events)
            if self.now - began >= slower[0]:
                self.bytes_s = slower[1]
            if piece is not None and kind == QUEUES:
                self._free_at = max(self._free_at, self.now)
                self.queued.append((self.now - began, self._free_at - self.now))
                self._free_at += piece.size / self.bytes_s
                delay = self.rtt_s / 2 + self._random.random() * self._jitter_s
                delay += self._random.expovariate(1 / self._busy_s) if self._busy_s else 0.0
                last[flow] = max(last[flow], self._free_at + delay)
                self._at(last[flow], 0, ARRIVES, flow, piece)
                continue
            window = windows[flow]
            if piece is not None:
                outstanding[flow] -= piece.size
                self.arrived.append((self.now - began, flow, piece.size))
                window.delivered(
                    piece.size,
                    sent_s=piece.sent_s,
                    delivered_at_send=piece.delivered_at_send,
                    lone=piece.lone,
                    now=self.now,
                )
            turn = 0
            while left[flow]:
                part = part_bytes_for(CHUNK, window.piece_bytes()) or CHUNK
                size_bytes = min(part, left[flow])
                after = outstanding[flow] + size_bytes
                if outstanding[flow] and after > window.limit_bytes():
                    break
                outstanding[flow] = after
                left[flow] -= size_bytes
                lone = after <= MIN_PIECES * window.piece_bytes()
                asked = Piece(flow, size_bytes, self.now, window.delivered_bytes, lone)
                self._at(self.now + self.rtt_s / 2, turn, QUEUES, flow, asked)
                turn += 1
            if not left[flow]:
                window.nothing_more_to_ask(outstanding[flow])
        return self.now - began

    def _at(self, when: float, turn: int, kind: int, flow: int, piece: Piece | None = None) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, turn + self._count * 1e-9, kind, flow, piece))

    def shares(self, count: int, begin_s: float, end_s: float) -> list[int]:
        found = [0] * count
        for at_s, flow, size in self.arrived:
            if begin_s <= at_s < end_s:
                found[flow] += size
        return found

    def queue_s(self, begin_s: float = 0.0, end_s: float = float("inf")) -> tuple[float, float]:
        """Median and worst."""
        found = [queue for at_s, queue in self.queued if begin_s <= at_s < end_s]
        return statistics.median(found), max(found)


def jain(shares: Sequence[float]) -> float:
    """Fairness index (Jain, Chiu and Hawe, DEC TR-301, 1984): 1 when all are equal."""
    return sum(shares) ** 2 / len(shares) / sum(share**2 for share in shares)


def windows(count: int) -> list[DeliveryWindow]:
    return [DeliveryWindow() for _ in range(count)]


def enough(count: int, path: Path) -> float:
    """Bytes of each flow so that all together last for some round trips."""
    return max(SIZE, 5 * path.bytes_s * path.rtt_s / count)


LINKS = [(rate * MBIT, rtt_s) for rate in (50, 200, 1000) for rtt_s in (0.02, 0.08, 0.18)]


@pytest.mark.parametrize("count", [1, 2, 8, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("bytes_s", "rtt_s"), LINKS)
def test_flows_together_fill_their_path_cold_and_on_kept_windows(bytes_s, rtt_s, count):
    path = Path(bytes_s, rtt_s, jitter_s=0.1 * rtt_s)
    size, flows = enough(count, path), windows(count)
    ideal_s = count * size / bytes_s + rtt_s
    times = [path.fetch(flows, size) / ideal_s]
    for _ in range(20 if count * size < 40e6 else 6):
        path.now += 1.0
        times.append(path.fetch(flows, size) / ideal_s)
    # Nobody knows what a path carries before the first answer.
    known = bytes_s * rtt_s <= 8 * count * START_BYTES
    assert times[0] <= (1.25 if known else 1.5)
    assert statistics.median(times[1:]) <= 1.2
    assert max(times[1:]) <= 1.35


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize(("bytes_s", "rtt_s"), [LINKS[2], LINKS[4], LINKS[6]])
def test_a_long_transfer_is_fair_and_queues_little(bytes_s, rtt_s, count):
    path = Path(bytes_s, rtt_s, jitter_s=0.05 * rtt_s)
    size = 60 * bytes_s * rtt_s / count
    took_s = path.fetch(windows(count), size)
    assert took_s <= 1.1 * (count * size / bytes_s + rtt_s)
    begin_s, end_s = 0.3 * took_s, 0.7 * took_s
    median_s, worst_s = path.queue_s(begin_s, end_s)
    slack_s = max(SLACK_S, SLACK_SHARE * rtt_s)
    assert median_s <= slack_s + (count + 2) * SHARE_BYTES / bytes_s + 0.1 * rtt_s
    assert worst_s <= rtt_s + slack_s + count * MIN_PIECE_BYTES / bytes_s
    assert jain(path.shares(count, begin_s, end_s)) >= 0.9


@pytest.mark.parametrize(("bytes_s", "rtt_s"), [LINKS[2], LINKS[4], LINKS[6]])
def test_a_path_that_becomes_slower_is_followed_within_some_round_trips(bytes_s, rtt_s):
    path, size, turn_s = Path(bytes_s, rtt_s), 40 * bytes_s * rtt_s, 30 * rtt_s
    took_s = path.fetch(windows(2), size, slower=(turn_s, bytes_s / 2))
    assert took_s <= 1.1 * (turn_s + (2 * size - turn_s * bytes_s) / (bytes_s / 2))
    median_s, _ = path.queue_s(turn_s + 10 * rtt_s, turn_s + 40 * rtt_s)
    assert median_s <= rtt_s


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize(("bytes_s", "rtt_s"), [LINKS[2], LINKS[4], LINKS[6]])
def test_one_that_begins_later_gets_its_share_and_leaves_one(bytes_s, rtt_s, count):
    path = Path(bytes_s, rtt_s, jitter_s=0.05 * rtt_s)
    size = 60 * bytes_s * rtt_s / count
    took_s = path.fetch(windows(count), size, late_s=10 * rtt_s)
    assert took_s <= 1.15 * (count * size / bytes_s + rtt_s)
    shares = path.shares(count, 10 * rtt_s, 30 * rtt_s)
    # It takes the queue that it finds for the length of the path, and so more than its share.
    assert shares[-1] >= 0.5 * sum(shares) / count
    assert sum(shares[:-1]) >= 0.2 * sum(shares)


def test_delays_of_busy_machines_do_not_shut_the_window():
    for count in (1, 8):
        path, flows = Path(200 * MBIT, 0.08, busy_s=0.02), windows(count)
        ideal_s = count * SIZE / path.bytes_s + path.rtt_s
        times = []
        for _ in range(20):
            times.append(path.fetch(flows, SIZE) / ideal_s)
            path.now += 1.0
        assert statistics.median(times) <= 1.4  # where an answer is late by some 60 ms
        assert max(times[1:]) <= 1.8
