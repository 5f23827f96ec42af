"""A wide-area link on one machine: a TCP proxy with delay, a shared rate, a queue and outages.

::

    agent ─> listener "control"      ─┐                      ┌─> scheduler
    agent ─> listener "trajectories" ─┼─ one link, two lanes ┼─> trajectory log
    agent ─> listener "weights"      ─┘                      └─> weight store

What always holds (for the bytes themselves see ``sim.link_shaper``):

1. All targets of a proxy share one link: one bottleneck per direction.
2. Setting up a connection takes a round trip, as TCP's handshake does; then the target is connected
   and a target that refuses resets the client.
3. While the link is down nothing is delivered, nothing is lost and nothing is connected. New
   connections are accepted by the kernel and stay silent, as the far end of a broken path is;
   ``reset=True`` also kills the existing ones, as a middlebox that lost its state does.
4. What waits in the kernel's socket buffers is a queue that the emulated link does not have;
   therefore those of the proxy are small.

Not modelled: packet loss, headers (about 4 % of the rate), slow start, and TCP's back-off after an
outage (transfers continue at once).
"""

import asyncio
import contextlib
import math
import random
import socket
from collections.abc import Mapping
from typing import Final, Self

import msgspec
import structlog

from sim.link_profile import LinkProfile
from sim.link_shaper import (
    MIN_FLIGHT_BYTES,
    READ_BYTES,
    DirectionStats,
    Flow,
    Lane,
    LinkTime,
    Mark,
)
from transport.errors import ConfigError

SOCKET_BUFFER_BYTES: Final = 128 * 1024
"""Asked of the kernel for each socket, which doubles it for its own bookkeeping."""
CONNECT_TIMEOUT_S: Final = 10.0
MAX_CONNECTIONS: Final = 1024
"""More at once are reset: one agent needs a few, and a reconnect storm must not eat the machine."""
BACKLOG_CONNECTIONS: Final = 128

_log = structlog.get_logger()
_READ_BUFFER: Final = memoryview(bytearray(READ_BYTES))
"""Shared by all sockets: the event loop fills it and hands it over in one step."""


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


class _Endpoint(asyncio.BufferedProtocol):
    """One socket of a connection: source of ``out``, sink of ``into``."""

    transport: asyncio.Transport

    def __init__(self, connection: "_Connection", out: Flow, into: Flow) -> None:
        self.lost = False
        self.connected = False
        self._connection = connection
        self._out = out
        self._into = into

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - narrows for the type checker
        self.transport = transport
        self.connected = True
        transport.set_write_buffer_limits(high=MIN_FLIGHT_BYTES, low=MIN_FLIGHT_BYTES // 2)
        self._connection.endpoint_made(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _READ_BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        self._out.feed(bytes(_READ_BUFFER[:nbytes]))

    def eof_received(self) -> bool:
        self._out.feed(Mark.FIN)
        return True  # the other direction may still have something to say

    def pause_writing(self) -> None:
        self._into.sink_full = True

    def resume_writing(self) -> None:
        self._into.sink_full = False
        self._into.deliver()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._into.discard()
        if exc is not None or not self._out.ended:
            self._out.feed(Mark.RESET)
        self._connection.endpoint_lost()


class _Connection:
    """A client of one target and, once the handshake's time has passed, its upstream socket."""

    def __init__(self, proxy: "LinkProxy", target: "_Target") -> None:
        self.target = target
        self.up = Flow(proxy.up, self._flow_finished)
        self.down = Flow(proxy.down, self._flow_finished)
        self.client = _Endpoint(self, out=self.up, into=self.down)
        self.upstream = _Endpoint(self, out=self.down, into=self.up)
        self._proxy = proxy

    def endpoint_made(self, endpoint: _Endpoint) -> None:
        if endpoint is self.upstream:
            self.down.open_source(endpoint.transport)
            self.up.open_sink(endpoint.transport)
            return
        endpoint.transport.pause_reading()
        if not self._proxy.admit(self):
            endpoint.transport.abort()
            return
        self.down.open_sink(endpoint.transport)
        time, rtt_s = self._proxy.time, self._proxy.up.delay_s + self._proxy.down.delay_s
        time.call_at(time.now() + rtt_s, self._handshake_done)

    def _handshake_done(self) -> None:
        if self.client.lost:
            self._proxy.release(self)
            return
        self.up.open_source(self.client.transport)
        time = self._proxy.time
        time.call_at(time.now() + self._proxy.up.delay_s, self._connect)

    def _connect(self) -> None:
        self._proxy.connect_upstream(self)

    def refuse(self) -> None:
        """The target did not take the connection."""
        self.target.refused_total += 1
        self.abort()

    def abort(self) -> None:
        """Both sockets are reset at once and nothing under way is delivered."""
        for flow in (self.up, self.down):
            flow.discard()
        for endpoint in (self.client, self.upstream):
            if endpoint.connected:
                endpoint.transport.abort()
        if not self.upstream.connected:
            self.upstream.lost = True

    def _flow_finished(self) -> None:
        if self.up.finished and self.down.finished:
            self.client.transport.close()
            self.upstream.transport.close()

    def endpoint_lost(self) -> None:
        if self.client.lost and self.upstream.lost:
            self._proxy.release(self)
