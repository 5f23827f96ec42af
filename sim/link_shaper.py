"""How a wide-area link treats bytes: queue per connection, one bottleneck, then the flight.

::

    source ─> queue ─┐                                      ┌─> sink        (one ``Flow`` each)
    source ─> queue ─┼─ turns at one bottleneck ─ flight ──┼─> sink        (one ``Lane`` for all)
    source ─> queue ─┘                                      └─> sink

What always holds:

1. A flow's bytes arrive complete, unchanged and in order, or its connection is reset; jitter never
   reorders.
2. A byte leaves the bottleneck when the link has carried everything before it, and arrives
   ``delay + jitter`` later. Departures are computed, not slept: a late wake-up costs no capacity,
   and an idle moment earns none.
3. All flows of a lane share its rate, in turns of at most ``PIECE_BYTES`` (less on a slow link,
   where that would take long), so a bulk transfer delays a small message by a turn per connection,
   not by its own length.
4. Memory is bounded: a lane queues at most its queue plus ``GUARANTEED_BYTES + READ_BYTES`` per
   flow, and a flow has at most twice bandwidth x delay plus ``MIN_FLIGHT_BYTES`` in flight. Beyond,
   the source is not read and TCP pushes back.
5. While the link is down its own time stands still: nothing is lost or delivered, and what was in
   flight continues afterwards.
"""

import asyncio
import contextlib
import enum
import heapq
import math
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from sim.link_profile import LinkProfile

if TYPE_CHECKING:
    import random

PIECE_BYTES: Final = 16 * 1024
"""A turn at the bottleneck."""
PIECE_TIME_S: Final = 0.005
"""A turn on a slow link takes no longer than this ..."""
PACKET_BYTES: Final = 1460
"""... unless it is a single packet."""
READ_BYTES: Final = 64 * 1024
"""What one read of a socket takes at most."""
GUARANTEED_BYTES: Final = 64 * 1024
"""A flow may always queue this much, however full the others keep the bottleneck."""
MIN_FLIGHT_BYTES: Final = 256 * 1024
"""Slack of the flight for late wake-ups and for what the sink takes in bursts."""
FASTEST_BITS_PER_S: Final = 4e9
"""What an unlimited link is taken to carry when its flight is bounded; above what Python does."""
HORIZON_S: Final = 0.001
"""Turns are given out this far ahead, the resolution of the event loop's timer."""


_ABORTIVE_CLOSE: Final = struct.pack("ii", 1, 0)


class DirectionStats(msgspec.Struct, frozen=True, kw_only=True):
    """One direction since the start; ``queue_delay_s`` is smoothed over about 16 turns."""

    delivered_bytes: int
    queued_bytes: int
    in_flight_bytes: int
    queue_delay_s: float
    queue_delay_max_s: float


class TargetStats(msgspec.Struct, frozen=True, kw_only=True):
    """One target since the start; ``connections`` is how many are open now."""

    connections: int
    connections_total: int
    refused_total: int
    up_bytes: int
    down_bytes: int


class LinkStats(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a view of the link shows; ``outage_s`` counts the present outage too."""

    profile: str
    is_down: bool
    outages_total: int
    outage_s: float
    up: DirectionStats
    down: DirectionStats
    targets: dict[str, TargetStats]


def send_reset(transport: asyncio.Transport) -> None:
    """Closes a socket so that its peer sees a reset, not the end of the stream."""
    sock = transport.get_extra_info("socket")
    with contextlib.suppress(OSError):  # it may be closed already
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORTIVE_CLOSE)
    transport.abort()


class Mark(enum.Enum):
    """What travels behind the bytes when a sender ends."""

    FIN = enum.auto()
    RESET = enum.auto()


class LinkTime:
    """Deadlines in the link's own time, which stands still while the link is down."""

    def __init__(self) -> None:
        self.down_s = 0.0  # of past outages
        self.stopped_at: float | None = None
        self._loop = asyncio.get_running_loop()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> float:
        moment = self._loop.time() if self.stopped_at is None else self.stopped_at
        return moment - self.down_s

    def call_at(self, when: float, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (when, self._sequence, action))
        self._arm()

    def stop(self) -> None:
        if self.stopped_at is None:
            self.stopped_at = self._loop.time()
            self._disarm()

    def start(self) -> None:
        if self.stopped_at is not None:
            self.down_s += self._loop.time() - self.stopped_at
            self.stopped_at = None
            self._arm()

    def close(self) -> None:
        self._heap.clear()
        self._disarm()

    def _arm(self) -> None:
        if self.stopped_at is not None or not self._heap:
            return
        when = self._heap[0][0] + self.down_s
        if self._timer is None or when < self._timer.when():
            self._disarm()
            self._timer = self._loop.call_at(when, self._run)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run(self) -> None:
        self._timer = None
        now = self.now()
        while self._heap and self._heap[0][0] <= now and self.stopped_at is None:
            heapq.heappop(self._heap)[2]()
        self._arm()


class Lane:
    """One direction of the link: the bottleneck that all connections take turns at."""

    def __init__(self, time: LinkTime, rng: "random.Random") -> None:
        self.time = time
        self.queued_bytes = 0
        self.in_flight_bytes = 0
        self.delivered_bytes = 0
        self.queue_delay_s = 0.0
        self.queue_delay_max_s = 0.0
        self.backlogged = 0  # flows that have bytes queued
        self.waiting: dict[Flow, None] = {}  # flows whose source is not being read, in order
        self._turns: deque[Flow] = deque()
        self._busy_until = 0.0
        self._armed = False
        self._rng = rng

    def configure(self, profile: LinkProfile, rate_bits_per_s: float, delay_s: float) -> None:
        """Takes effect for what departs from now on."""
        bytes_per_s = rate_bits_per_s / 8
        self.s_per_byte = 1 / bytes_per_s if bytes_per_s else 0.0
        self.delay_s = delay_s
        self.jitter_s = profile.jitter_s
        self.queue_bytes = profile.queue_limit_bytes(rate_bits_per_s)
        self.piece_bytes = PIECE_BYTES
        if bytes_per_s:
            self.piece_bytes = min(PIECE_BYTES, max(PACKET_BYTES, int(bytes_per_s * PIECE_TIME_S)))
        carried = (bytes_per_s or FASTEST_BITS_PER_S / 8) * (delay_s + self.jitter_s)
        self.window_bytes = MIN_FLIGHT_BYTES + int(2 * carried)

    def offer(self, flow: "Flow") -> None:
        """``flow`` has something queued: it gets its turn unless it has one or is held back."""
        if flow.in_turn or not flow.backlog or flow.flight_bytes >= self.window_bytes:
            return
        flow.in_turn = True
        self._turns.append(flow)
        self.serve()

    def serve(self) -> None:
        """Gives out turns until the link is busy for longer than the horizon."""
        if self.time.stopped_at is not None or self._armed:
            return
        horizon = self.time.now() + HORIZON_S
        while self._turns:
            if self._busy_until > horizon:
                self._armed = True
                self.time.call_at(self._busy_until - HORIZON_S, self._wake)
                break
            flow = self._turns.popleft()
            flow.in_turn = False
            self._turn(flow)
            if flow.backlog and flow.flight_bytes < self.window_bytes:
                flow.in_turn = True
                self._turns.append(flow)
            flow.arm()
        for flow in [flow for flow in self.waiting if flow.has_room()]:
            flow.gate()

    def _wake(self) -> None:
        self._armed = False
        self.serve()

    def _turn(self, flow: "Flow") -> None:
        """Moves up to one piece of ``flow`` from its queue into flight."""
        room = self.piece_bytes
        while flow.backlog and room > 0:
            queued_at, data = flow.backlog.popleft()
            size = 0 if isinstance(data, Mark) else len(data)
            if not isinstance(data, Mark) and size > room:
                flow.backlog.appendleft((queued_at, data[room:]))
                data, size = data[:room], room
            room -= size
            # A held-back flow missed its chances to send; it does not get them again.
            start = max(self._busy_until, queued_at, flow.eligible_at)
            self._busy_until = start + size * self.s_per_byte
            self._note_queue_delay(start - max(queued_at, flow.eligible_at))
            jitter_s = self._rng.uniform(-self.jitter_s, self.jitter_s) if self.jitter_s else 0.0
            arrival = self._busy_until + max(0.0, self.delay_s + jitter_s)
            flow.last_arrival = max(flow.last_arrival, arrival)
            flow.flight.append((flow.last_arrival, data))
            flow.moved(size)

    def stats(self) -> DirectionStats:
        return DirectionStats(
            delivered_bytes=self.delivered_bytes,
            queued_bytes=self.queued_bytes,
            in_flight_bytes=self.in_flight_bytes,
            queue_delay_s=self.queue_delay_s,
            queue_delay_max_s=self.queue_delay_max_s,
        )

    def _note_queue_delay(self, delay_s: float) -> None:
        self.queue_delay_s += (delay_s - self.queue_delay_s) / 16
        self.queue_delay_max_s = max(self.queue_delay_max_s, delay_s)

    def forget(self, flow: "Flow") -> None:
        self.waiting.pop(flow, None)
        if flow.in_turn:
            flow.in_turn = False
            self._turns.remove(flow)


class Flow:
    """One direction of one connection: ``source`` -> queue -> bottleneck -> flight -> ``sink``."""

    def __init__(self, lane: Lane, on_finished: Callable[[], None]) -> None:
        self.backlog: deque[tuple[float, memoryview | Mark]] = deque()
        self.flight: deque[tuple[float, memoryview | Mark]] = deque()
        self.flight_bytes = 0
        self.eligible_at = -math.inf
        self.last_arrival = -math.inf
        self.in_turn = False
        self.ended = False  # the source said its last byte
        self.finished = False  # the sink has been told so
        self.dead = False  # the sink is gone: bytes have nowhere to go
        self.delivered_bytes = 0
        self.sink_full = False
        self._lane = lane
        self._backlog_bytes = 0
        self._source: asyncio.Transport | None = None
        self._sink: asyncio.Transport | None = None
        self._armed = False
        self._reading = False
        self._on_finished = on_finished

    def open_source(self, source: asyncio.Transport) -> None:
        """Starts to read; the transport is paused until then."""
        self._source = source
        self._reading = True
        source.resume_reading()

    def open_sink(self, sink: asyncio.Transport) -> None:
        self._sink = sink
        self.deliver()

    def feed(self, data: bytes | Mark) -> None:
        if self.dead:
            return
        if isinstance(data, Mark):
            # From now on the source is left alone: reading on would meet the same end again.
            self.ended = True
            self._lane.waiting.pop(self, None)
            self.backlog.append((self._lane.time.now(), data))
        else:
            self._lane.backlogged += not self._backlog_bytes
            self._backlog_bytes += len(data)
            self._lane.queued_bytes += len(data)
            self.backlog.append((self._lane.time.now(), memoryview(data)))
        self._lane.offer(self)
        self.gate()

    def has_room(self) -> bool:
        lane = self._lane
        return self._backlog_bytes < GUARANTEED_BYTES or (
            lane.queued_bytes < lane.queue_bytes
            and self._backlog_bytes < lane.queue_bytes // max(1, lane.backlogged)
        )

    def gate(self) -> None:
        """Reads the source while there is room, and stops while there is none."""
        reading = self.dead or self.has_room()
        if self._source is None or self.ended or reading == self._reading:
            return
        self._reading = reading
        if reading:
            self._lane.waiting.pop(self, None)
            self._source.resume_reading()
        else:
            self._lane.waiting[self] = None
            self._source.pause_reading()

    def moved(self, size: int) -> None:
        """``size`` bytes went from the queue into flight."""
        self._lane.queued_bytes -= size
        self._lane.in_flight_bytes += size
        self._backlog_bytes -= size
        self.flight_bytes += size
        self._lane.backlogged -= size > 0 and not self._backlog_bytes

    def arm(self) -> None:
        if self.flight and not self._armed and not self.sink_full and self._sink is not None:
            self._armed = True
            self._lane.time.call_at(self.flight[0][0], self._wake)

    def _wake(self) -> None:
        self._armed = False
        self.deliver()

    def deliver(self) -> None:
        """Hands the sink what has arrived, as far as it takes it."""
        now = self._lane.time.now()
        held_back = self.flight_bytes >= self._lane.window_bytes
        while self._sink and self.flight and self.flight[0][0] <= now and not self.sink_full:
            if self._sink.is_closing():  # lost; the endpoint is about to be told
                return
            data = self.flight.popleft()[1]
            if isinstance(data, Mark):
                self._finish(self._sink, data)
                continue
            self.flight_bytes -= len(data)
            self._lane.in_flight_bytes -= len(data)
            self._lane.delivered_bytes += len(data)
            self.delivered_bytes += len(data)
            self._sink.write(data)
        self.arm()
        if held_back:
            self.eligible_at = now
            self._lane.offer(self)

    def _finish(self, sink: asyncio.Transport, mark: Mark) -> None:
        if mark is Mark.RESET:
            send_reset(sink)
            return
        with contextlib.suppress(OSError):  # the peer may have reset it in the meantime
            sink.write_eof()
        self.finished = True
        self._on_finished()

    def discard(self) -> None:
        """The sink is gone; what was under way to it is dropped, the source is read to its end."""
        self.dead = True
        lane = self._lane
        lane.queued_bytes -= self._backlog_bytes
        lane.in_flight_bytes -= self.flight_bytes
        lane.backlogged -= self._backlog_bytes > 0
        self._backlog_bytes = self.flight_bytes = 0
        self.backlog.clear()
        self.flight.clear()
        lane.forget(self)
        self.gate()
