"""How fast TCP may send: slow start, window, loss, idle reset. Pure functions and one small state.

A transfer over ``streams`` parallel connections of round trip R never exceeds

    streams x min(window / R, 1.22 x MSS / (R x sqrt(p)))

bytes per second: the receiver's window per round trip, and what Reno's congestion avoidance
sustains at loss rate p (Mathis, Semke, Mahdavi, Ott, "The macroscopic behavior of the TCP
congestion avoidance algorithm", CCR 27(3), 1997). It begins with ten segments per connection and
round trip (RFC 6928) and multiplies that by ``growth`` each round trip (RFC 5681, 3.1) until the
bound above, or the link, holds it. A connection that was idle for longer than its retransmission
timeout begins lower: the window is halved once per timeout down to the initial one (RFC 2861,
which Linux follows; RFC 5681, 4.1, goes down at once).

``growth`` is 2 when every segment is acknowledged or counted (RFC 3465), 1.5 when every second one
is. The default lies between: it is what reproduces published figures of 64 connections between
132 pairs of regions (``bench.simulator_network``, docs/simulator.md).

What always holds: a window never exceeds the bound nor falls below the initial window, except where
the bound itself is lower; times are arguments.
"""

import math
from typing import Annotated, Final

import msgspec
from msgspec import Meta

MATHIS: Final = 1.22
"""sqrt(3/2): periodic loss, every segment acknowledged."""
MIN_RTO_S: Final = 0.2
"""Linux never waits for less than this beyond the round trip (RFC 6298 says a second in all)."""
MIN_RTT_S: Final = 1e-4
"""A shorter round trip has no slow start worth modelling."""


class TcpSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Connections of one transfer. ``window_bytes`` is what one connection may have under way;
    Linux's defaults let a receive buffer grow to 6 MiB and offer half of it. ``loss`` is the share
    of segments that are lost, ``streams`` how many connections share the work."""

    streams: Annotated[int, Meta(ge=1, le=1024)] = 1
    mss_bytes: Annotated[int, Meta(ge=64, le=65_535)] = 1448
    initial_segments: Annotated[int, Meta(ge=1, le=1000)] = 10
    growth: Annotated[float, Meta(ge=1.1, le=2.0)] = 1.7
    window_bytes: Annotated[int, Meta(ge=1460, le=2**40)] = 3 * 2**20
    loss: Annotated[float, Meta(ge=0.0, le=0.5)] = 0.0

    @property
    def initial_bytes(self) -> int:
        """Of all connections, in the first round trip."""
        return self.streams * min(self.initial_segments * self.mss_bytes, self.window_bytes)


def payload_share(mss_bytes: int = 1448) -> float:
    """Of a limit on Ethernet frames, what is left for payload: 52 bytes of each segment are heads
    of IPv4 and TCP with timestamps, 18 Ethernet's."""
    return mss_bytes / (mss_bytes + 52 + 18)


def window_rate(spec: TcpSpec, rtt_s: float) -> float:
    """Bytes per second that windows allow all connections together."""
    return spec.streams * spec.window_bytes / max(rtt_s, MIN_RTT_S)


def loss_rate(spec: TcpSpec, rtt_s: float) -> float:
    """Bytes per second that loss allows all connections together; infinite without loss."""
    if spec.loss <= 0.0:
        return math.inf
    one = MATHIS * spec.mss_bytes / (max(rtt_s, MIN_RTT_S) * math.sqrt(spec.loss))
    return spec.streams * one


def steady_rate(spec: TcpSpec, rtt_s: float) -> float:
    """Bytes per second in the long run on a link that does not bind."""
    return min(window_rate(spec, rtt_s), loss_rate(spec, rtt_s))


def timeout_s(rtt_s: float, deviation_s: float = 0.0) -> float:
    """When silence counts as loss (RFC 6298 with Linux's lower limit)."""
    return rtt_s + max(MIN_RTO_S, 4.0 * deviation_s)


class Window:
    """The congestion windows of the connections between two hosts, together.

    ``size_bytes`` is what may leave per round trip, ``most_bytes`` what the bound lets under way;
    ``used_s`` is when it was last used.
    """

    __slots__ = ("_spec", "most_bytes", "rtt_s", "size_bytes", "used_s")

    def __init__(self, spec: TcpSpec, rtt_s: float) -> None:
        self._spec = spec
        self.rtt_s = max(rtt_s, MIN_RTT_S)
        self.most_bytes = steady_rate(spec, self.rtt_s) * self.rtt_s
        self.size_bytes = self._least_bytes
        self.used_s = -math.inf

    @property
    def _least_bytes(self) -> float:
        return min(float(self._spec.initial_bytes), self.most_bytes)

    @property
    def rate(self) -> float:
        """Bytes per second at the present window."""
        return self.size_bytes / self.rtt_s

    @property
    def is_open(self) -> bool:
        """It cannot grow any more."""
        return self.size_bytes >= self.most_bytes

    def begin(self, now: float) -> None:
        """Something is to be sent, after a silence perhaps."""
        timeouts = (now - self.used_s) / timeout_s(self.rtt_s)
        if timeouts >= 1.0:
            halved = self.size_bytes * 0.5 ** min(64.0, timeouts // 1.0)
            self.size_bytes = max(self._least_bytes, halved)
        self.used_s = now

    def reset(self) -> None:
        """Begin anew."""
        self.size_bytes = self._least_bytes

    def grow(self) -> None:
        """A round trip has passed in which all of it was used."""
        self.size_bytes = min(self.most_bytes, self.size_bytes * self._spec.growth)

    def travel(self, rtt_s: float) -> None:
        """The round trip is another one from now on."""
        self.rtt_s = max(rtt_s, MIN_RTT_S)
        self.most_bytes = steady_rate(self._spec, self.rtt_s) * self.rtt_s
        self.size_bytes = min(self.size_bytes, self.most_bytes)


def arrived_bytes(spec: TcpSpec, rtt_s: float, link_rate: float, elapsed_s: float) -> float:
    """Bytes that have left ``elapsed_s`` after the first one, alone on a link of ``link_rate``
    bytes per second: the closed form of what the network model does step by step."""
    window = Window(spec, rtt_s)
    left_s, total = elapsed_s, 0.0
    while left_s > 0.0:
        held = window.is_open or window.rate >= link_rate
        step_s = left_s if held else min(left_s, window.rtt_s)
        total += min(window.rate, link_rate) * step_s
        left_s -= step_s
        window.grow()
    return total
