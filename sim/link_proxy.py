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
import math
import random
from collections.abc import Mapping
from functools import partial
from typing import Final

import structlog

from sim.link_profile import LinkProfile
from sim.link_shaper import (
    MIN_FLIGHT_BYTES,
    READ_BYTES,
    Flow,
    Lane,
    LinkStats,
    LinkTime,
    Mark,
    TargetStats,
    send_reset,
)
from sim.link_sockets import Address, listening_socket, small_socket
from transport.errors import ConfigError

CONNECT_TIMEOUT_S: Final = 10.0
MAX_CONNECTIONS: Final = 1024
"""More at once are reset: one agent needs a few, and a reconnect storm must not eat the machine."""

_log = structlog.get_logger()
_READ_BUFFER: Final = memoryview(bytearray(READ_BYTES))
"""Shared by all sockets: the event loop fills it and hands it over in one step."""


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
            if endpoint.lost:  # aborted while it was being dialled
                endpoint.transport.abort()
                return
            self.down.open_source(endpoint.transport)
            self.up.open_sink(endpoint.transport)
            return
        endpoint.transport.pause_reading()
        if not self._proxy.admit(self):
            self.abort()
            return
        self.down.open_sink(endpoint.transport)
        time, rtt_s = self._proxy.time, self._proxy.up.delay_s + self._proxy.down.delay_s
        time.call_at(time.now() + rtt_s, self._handshake_done)

    def _handshake_done(self) -> None:
        if self.client.lost:
            self.abort()
            return
        self.up.open_source(self.client.transport)
        time = self._proxy.time
        time.call_at(time.now() + self._proxy.up.delay_s, self._connect)

    def _connect(self) -> None:
        if self.client.lost:
            self.abort()
        else:
            self._proxy.dial(self)

    def abort(self) -> None:
        """Both sockets are reset at once and nothing under way is delivered; idempotent."""
        for flow in (self.up, self.down):
            flow.discard()
        for endpoint in (self.client, self.upstream):
            if endpoint.connected:
                send_reset(endpoint.transport)
            else:
                endpoint.lost = True
        self.endpoint_lost()

    def _flow_finished(self) -> None:
        if self.up.finished and self.down.finished:
            self.client.transport.close()
            self.upstream.transport.close()

    def endpoint_lost(self) -> None:
        if self.client.lost and self.upstream.lost:
            self._proxy.release(self)


class _Target:
    """One upstream address, its listener and its counters."""

    def __init__(self, name: str, address: Address) -> None:
        self.name = name
        self.address = address
        self.connections: dict[_Connection, None] = {}
        self.connections_total = 0
        self.refused_total = 0
        self.past_up_bytes = 0  # of connections that are gone
        self.past_down_bytes = 0

    def stats(self) -> TargetStats:
        return TargetStats(
            connections=len(self.connections),
            connections_total=self.connections_total,
            refused_total=self.refused_total,
            up_bytes=self.past_up_bytes + sum(c.up.delivered_bytes for c in self.connections),
            down_bytes=self.past_down_bytes + sum(c.down.delivered_bytes for c in self.connections),
        )


class LinkProxy:
    """The emulated link of one agent; construct it inside the running event loop.

    ``targets`` maps a name (of a plane, say) to the upstream ``(host, port)``. ``listen`` gives a
    target a fixed listening address instead of a free port of 127.0.0.1, so that a restarted proxy
    is found again. ``rng`` drives the jitter.
    """

    def __init__(
        self,
        profile: LinkProfile,
        targets: Mapping[str, Address],
        *,
        rng: random.Random,
        listen: Mapping[str, Address] | None = None,
    ) -> None:
        self.time = LinkTime()
        self.up = Lane(self.time, random.Random(rng.getrandbits(64)))  # noqa: S311 - no secret
        self.down = Lane(self.time, random.Random(rng.getrandbits(64)))  # noqa: S311
        self.addresses: dict[str, Address] = {}  # where each target is reached, after start
        self._listen = dict(listen or {})
        if unknown := sorted(set(self._listen) - set(targets)):
            raise ConfigError(
                f"a listening address is given for {unknown[0]!r}, which is no target"
            )
        self._targets = {name: _Target(name, address) for name, address in targets.items()}
        self._servers: list[asyncio.Server] = []
        self._dials: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._up_timer: asyncio.TimerHandle | None = None
        self._outage_timers: list[asyncio.TimerHandle] = []
        self._down_until = -math.inf
        self._outages_total = 0
        self._closing = False
        self._quiet = asyncio.Event()  # set whenever there is no connection
        self._quiet.set()
        self.set_profile(profile)

    async def start(self) -> dict[str, Address]:
        """Opens the listeners and returns where each target is reached.

        Raises ``ConfigError`` naming target and address when one cannot be bound.
        """
        for target in self._targets.values():
            sock = listening_socket(target.name, self._listen.get(target.name, ("127.0.0.1", 0)))
            self._servers.append(
                await self._loop.create_server(partial(self._accept, target), sock=sock)
            )
            host, port = sock.getsockname()[:2]
            self.addresses[target.name] = (host, port)
        return self.addresses

    async def close(self) -> None:
        """Closes listeners and connections (resets: what is under way is lost); idempotent."""
        self._closing = True
        for server in self._servers:
            server.close()
        for timer in self._outage_timers:
            timer.cancel()
        self._forget_up_timer()
        self.time.close()
        for dial in self._dials:
            dial.cancel()
        self._abort_all()
        if self._dials:
            await asyncio.wait(self._dials)
        await self._quiet.wait()
        for server in self._servers:
            await server.wait_closed()

    def set_profile(self, profile: LinkProfile) -> None:
        """From now on the link is like ``profile``; its outages count from now.

        What is in flight keeps its arrival times. A present outage goes on.
        """
        self._profile = profile
        for timer in self._outage_timers:
            timer.cancel()
        self.up.configure(profile, profile.rate_up_bits_per_s, profile.delay_up_s)
        self.down.configure(profile, profile.rate_down_bits_per_s, profile.delay_down_s)
        now = self._loop.time()
        self._outage_timers = [
            self._loop.call_at(now + outage.start_s, self._begin_outage, outage.duration_s)
            for outage in profile.outages
        ]

    def set_down(self, duration_s: float | None = None, *, reset: bool = False) -> None:
        """Breaks the link for ``duration_s`` from now, or until ``set_up``; the last call counts.

        ``reset`` also kills the existing connections. Raises ``ConfigError`` for a bad duration.
        """
        if duration_s is not None and not (math.isfinite(duration_s) and duration_s > 0):
            raise ConfigError(f"an outage of {duration_s!r} s is none; give a positive number")
        self._forget_up_timer()
        if self.time.stopped_at is None:
            self._outages_total += 1
            self.time.stop()
            _log.info("link.down", profile=self._profile.name, duration_s=duration_s, reset=reset)
        self._down_until = math.inf
        if duration_s is not None:
            self._down_until = self._loop.time() + duration_s
            self._up_timer = self._loop.call_at(self._down_until, self.set_up)
        if reset:
            self._abort_all()

    def set_up(self) -> None:
        """Ends the present outage; what was under way continues where it stood."""
        self._forget_up_timer()
        if self.time.stopped_at is None:
            return
        self.time.start()
        _log.info("link.up", profile=self._profile.name)
        for lane in (self.up, self.down):
            lane.serve()

    def stats(self) -> LinkStats:
        """Counters since the start and what is under way now."""
        stopped_at = self.time.stopped_at
        present_s = self._loop.time() - stopped_at if stopped_at is not None else 0.0
        return LinkStats(
            profile=self._profile.name,
            is_down=stopped_at is not None,
            outages_total=self._outages_total,
            outage_s=self.time.down_s + present_s,
            up=self.up.stats(),
            down=self.down.stats(),
            targets={name: target.stats() for name, target in self._targets.items()},
        )

    def admit(self, connection: _Connection) -> bool:
        """Takes a new connection into the books, or not, if there are too many."""
        open_now = sum(len(target.connections) for target in self._targets.values())
        if self._closing or open_now >= MAX_CONNECTIONS:
            _log.warning("link.connection_rejected", target=connection.target.name, open=open_now)
            return False
        connection.target.connections[connection] = None
        connection.target.connections_total += 1
        self._quiet.clear()
        return True

    def release(self, connection: _Connection) -> None:
        """Both ends of a connection are gone; idempotent."""
        target = connection.target
        if connection in target.connections:
            del target.connections[connection]
            target.past_up_bytes += connection.up.delivered_bytes
            target.past_down_bytes += connection.down.delivered_bytes
            if not any(other.connections for other in self._targets.values()):
                self._quiet.set()

    def dial(self, connection: _Connection) -> None:
        """Connects to the target in the background."""
        task = self._loop.create_task(self._dial(connection))
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    async def _dial(self, connection: _Connection) -> None:
        target = connection.target
        sock = small_socket(target.address[0])
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._loop.sock_connect(sock, target.address)
                await self._loop.create_connection(lambda: connection.upstream, sock=sock)
        except OSError as error:  # a timeout is one too
            target.refused_total += 1
            _log.info("link.target_refused", target=target.name, reason=str(error))
            connection.abort()
        finally:
            if not connection.upstream.connected:
                sock.close()

    def _accept(self, target: _Target) -> _Endpoint:
        return _Connection(self, target).client

    def _begin_outage(self, duration_s: float) -> None:
        """A scheduled outage does not shorten one that goes on for longer."""
        if self.time.stopped_at is None or self._down_until < self._loop.time() + duration_s:
            self.set_down(duration_s)

    def _forget_up_timer(self) -> None:
        if self._up_timer is not None:
            self._up_timer.cancel()
            self._up_timer = None

    def _abort_all(self) -> None:
        for target in self._targets.values():
            for connection in list(target.connections):
                connection.abort()
