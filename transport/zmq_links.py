"""Links over ZeroMQ: hubs are ROUTER sockets that bind, links DEALER sockets that connect.

What always holds, beside ``transport.links``: sockets are drained with NOBLOCK on the event loop
(``zmq.asyncio`` is three times slower and can lose a message when a receive is cancelled); with
keys, the identity of a message is what CURVE proved on the connection that it came from, read from
every message; peers cannot name their own routes.

Limits of libzmq that stay: MAXMSGSIZE bounds a frame before it is read, but nothing bounds the
frames of an unfinished message, so an authenticated peer can still cost memory; ``disconnect``
finds a connection by what it sent, so one that never sent anything stays open until its first
message, which is dropped.
"""

import asyncio
import errno
import os
import socket as sockets
from collections.abc import Sequence
from typing import NamedTuple

import zmq

from transport.errors import ConfigError, PeerUnreachable, WindowFull
from transport.keys import KeyPair, Peer
from transport.links import Authorise, Inbound, LinkOptions
from transport.zap import ZapHandler
from transport.zmq_socket import (
    BACKLOG,
    HANDSHAKE_FAILURES,
    MAX_SOCKETS,
    End,
    ZmqContext,
    ZmqSocket,
    apply_options,
    apply_reconnect,
    failure_text,
    require_loopback,
)

CLOSE_TIMEOUT_S = 1.0
"""Longest wait for a closed hub's port to be free again."""

AUTO_ROUTE_BYTES = 5
"""Routes that libzmq makes are a zero byte and a counter; peers' own names are anything else."""


class _Connection(NamedTuple):
    """Where a route's bytes come from. The inode tells whether the descriptor, which belongs to
    libzmq, still is that connection."""

    identity: str
    descriptor: int
    inode: int


class ZmqHub(End[Inbound]):
    """Made by ``ZmqNetwork.hub``."""

    def __init__(self, network: "ZmqNetwork", socket: ZmqSocket, options: LinkOptions) -> None:
        self._network = network
        self._authorise: Authorise | None = None
        self._domain = f"hub-{id(self):x}"
        self._connections: dict[bytes, _Connection] = {}
        self._routes: dict[int, bytes] = {}
        self._refused: set[str] = set()
        self._listener_closed = asyncio.Event()
        self._refused_key = ""
        super().__init__(
            network.context, socket, options, zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        )
        self.endpoint = ""
        self.port = 0

    @property
    def peers(self) -> int:
        return len(self._connections)

    def listen(self, endpoint: str, key: KeyPair | None, authorise: Authorise | None) -> None:
        """Called once, by the network."""
        if key is not None and authorise is not None:
            self._authorise = authorise
            self._network.zap.register(self._domain, self._authorise_noted)
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret_key.encode("ascii"))
            self._socket.setsockopt(zmq.ZAP_DOMAIN, self._domain.encode("ascii"))
            self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.BACKLOG, BACKLOG)
        self._socket.bind(endpoint)
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        self.port = int(self.endpoint.rpartition(":")[2])

    def send(self, route: bytes, frames: Sequence[bytes]) -> None:
        try:
            self._send((route,), frames)
        except zmq.Again as error:
            raise WindowFull(f"route {route.hex()} does not keep up") from error
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerUnreachable(f"no connection of route {route.hex()}") from error

    def disconnect(self, identity: str) -> None:
        if self._authorise is not None and self._authorise(identity) is None:
            self._refused.add(identity)
        for route, connection in list(self._connections.items()):
            if connection.identity == identity:
                self._cut(route)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._wake()
        self._socket.unbind(self.endpoint)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._listener_closed.wait()
        except TimeoutError:
            self.last_failure = f"{self.endpoint} was not freed within {CLOSE_TIMEOUT_S} s"
        finally:
            self.release()

    def release(self) -> None:
        """Free everything at once; the port may stay taken for a moment."""
        self._closed = True
        self._shut()
        self._network.forget(self, self._domain)

    def _accept(self, frames: list[zmq.Frame]) -> Inbound | None:
        head = frames[0]
        route = head.bytes
        try:
            identity = str(head.get("User-Id")) if self._authorise is not None else ""
        except zmq.ZMQError:
            # Cannot be with our ZAP handler; a message without a key is nobody's.
            return None
        known = self._connections.get(route)
        if (known is None or known.identity != identity) and not self._note(route, identity, head):
            return None
        if identity in self._refused:
            if self._authorise is not None and self._authorise(identity) is None:
                self._cut(route)
                return None
            self._refused.discard(identity)
        return Inbound(route, identity, [frame.bytes for frame in frames[1:]])

    def _note(self, route: bytes, identity: str, head: zmq.Frame) -> bool:
        """Remember whose connection this is; false for a route that the peer chose itself, which
        could be one that we still send another peer's messages to."""
        if len(route) != AUTO_ROUTE_BYTES or route[0] != 0:
            return False
        descriptor = int(head.get(zmq.SRCFD))
        try:
            inode = os.fstat(descriptor).st_ino
        except OSError:
            # Already closed; what it sent before is still good.
            return True
        stale = self._routes.get(descriptor)
        if stale is not None:
            self._connections.pop(stale, None)
        self._routes[descriptor] = route
        self._connections[route] = _Connection(identity, descriptor, inode)
        return True

    def _cut(self, route: bytes) -> None:
        """Shut a connection down under libzmq, which has no call for it; libzmq then sees the end
        of the stream and forgets the peer."""
        connection = self._connections.pop(route, None)
        if connection is None:
            return
        self._routes.pop(connection.descriptor, None)
        try:
            # The copy pins the descriptor, so that it cannot become another one meanwhile.
            with sockets.socket(fileno=os.dup(connection.descriptor)) as copy:
                if os.fstat(copy.fileno()).st_ino == connection.inode:
                    copy.shutdown(sockets.SHUT_RDWR)
        except OSError:
            return

    def _authorise_noted(self, key: str) -> Peer | None:
        peer = self._authorise(key) if self._authorise is not None else None
        if peer is None:
            self._refused_key = key
        return peer

    def _event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_CLOSED:
            self._listener_closed.set()
        elif event == zmq.EVENT_DISCONNECTED:
            route = self._routes.pop(value, None)
            if route is not None:
                self._connections.pop(route, None)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.handshake_failures += 1
            self.last_failure = f"key {self._refused_key} is not authorised"
        else:
            self.handshake_failures += 1
            self.last_failure = failure_text(event, value)


class ZmqLink(End[list[bytes]]):
    """Made by ``ZmqNetwork.link``.

    libzmq reconnects after a lost connection but gives an endpoint up for good after a refusal or
    a breach of protocol. It says CONNECT_RETRIED when it goes on, so a failure that is not
    followed by that is retried from here, with the same bounds.
    """

    def __init__(
        self, network: "ZmqNetwork", socket: ZmqSocket, endpoint: str, options: LinkOptions
    ) -> None:
        self.endpoint = endpoint
        self._network = network
        self._up = asyncio.Event()
        self._down = asyncio.Event()
        self._down.set()
        self._retry: asyncio.TimerHandle | None = None
        self._retry_s = options.reconnect_s
        super().__init__(
            network.context,
            socket,
            options,
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED,
        )

    @property
    def connected(self) -> bool:
        return self._up.is_set() and not self._closed

    async def wait_connected(self) -> None:
        self._require_open()
        await self._up.wait()
        self._require_open()

    async def wait_disconnected(self) -> None:
        self._require_open()
        await self._down.wait()
        self._require_open()

    def send(self, frames: Sequence[bytes]) -> None:
        self._require_open()
        if not self.connected:
            # libzmq's pipe outlives the connection by a moment and would swallow the message.
            raise PeerUnreachable(f"{self.endpoint} is not connected")
        try:
            self._send((), frames)
        except zmq.Again as error:
            raise WindowFull(f"{self.endpoint} does not keep up") from error

    def connect(self, key: KeyPair | None, server_key: str | None) -> None:
        """Called once, by the network."""
        if key is not None and server_key is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode("ascii"))
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public_key.encode("ascii"))
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret_key.encode("ascii"))
        apply_reconnect(self._socket, self._options)
        self._socket.connect(self.endpoint)

    async def close(self) -> None:
        if not self._closed:
            self.release()

    def release(self) -> None:
        """Free everything; what was sent has ``linger_s`` to leave."""
        self._closed = True
        self._wake()
        if self._retry is not None:
            self._retry.cancel()
        self._shut()
        self._up.set()
        self._down.set()
        self._network.forget(self)

    def _accept(self, frames: list[zmq.Frame]) -> list[bytes]:
        return [frame.bytes for frame in frames]

    def _event(self, event: int, value: int) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._retry_s = self._options.reconnect_s
            self._down.clear()
            self._up.set()
            return
        self._up.clear()
        self._down.set()
        if event & HANDSHAKE_FAILURES:
            self.handshake_failures += 1
            self.last_failure = failure_text(event, value)
        if event != zmq.EVENT_CONNECT_RETRIED:
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(self._retry_s, self._reconnect)

    def _reconnect(self) -> None:
        self._retry_s = min(2 * self._retry_s, self._options.reconnect_max_s)
        try:
            self._socket.disconnect(self.endpoint)
        except zmq.ZMQError as error:
            # Given up means that libzmq may not know the endpoint any more.
            if error.errno != errno.ENOENT:
                raise
        self._socket.connect(self.endpoint)


class ZmqNetwork:
    """Hubs and links of one process: one libzmq context and one ZAP handler, on one event loop."""

    def __init__(self, *, io_threads: int = 1) -> None:
        self.context: ZmqContext = zmq.Context(io_threads)
        self.context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._zap: ZapHandler | None = None
        self._ends: dict[ZmqHub | ZmqLink, None] = {}

    @property
    def zap(self) -> ZapHandler:
        """Started with the first hub that has keys."""
        if self._zap is None:
            self._zap = ZapHandler(self.context)
        return self._zap

    def hub(
        self,
        endpoint: str,
        options: LinkOptions,
        *,
        key: KeyPair | None = None,
        authorise: Authorise | None = None,
    ) -> ZmqHub:
        if (key is None) != (authorise is None):
            raise ConfigError(f"hub {endpoint}: give both key and authorise, or none")
        if key is None:
            require_loopback(endpoint)
        hub = ZmqHub(self, self._socket(zmq.ROUTER, endpoint, options), options)
        self._ends[hub] = None
        try:
            hub.listen(endpoint, key, authorise)
        except zmq.ZMQError as error:
            hub.release()
            raise ConfigError(
                f"hub {endpoint}: {error.strerror}; choose another address or port"
            ) from error
        return hub

    def link(
        self,
        endpoint: str,
        options: LinkOptions,
        *,
        key: KeyPair | None = None,
        server_key: str | None = None,
    ) -> ZmqLink:
        if (key is None) != (server_key is None):
            raise ConfigError(f"link {endpoint}: give both key and server_key, or none")
        if key is None:
            require_loopback(endpoint)
        link = ZmqLink(self, self._socket(zmq.DEALER, endpoint, options), endpoint, options)
        self._ends[link] = None
        try:
            link.connect(key, server_key)
        except (zmq.ZMQError, UnicodeEncodeError) as error:
            link.release()
            raise ConfigError(f"link {endpoint}: {error}; check address and server key") from error
        return link

    def forget(self, end: ZmqHub | ZmqLink, domain: str = "") -> None:
        """Called by what closes itself."""
        self._ends.pop(end, None)
        if self._zap is not None:
            self._zap.unregister(domain)

    async def close(self) -> None:
        """Close every hub and link, then wait at most their ``linger_s`` for what they sent."""
        for end in list(self._ends):
            await end.close()
        if self._zap is not None:
            self._zap.close()
            self._zap = None
        # Blocks while the I/O thread flushes; destroy also takes a socket that a failed
        # construction may have left, which would block it for ever.
        await asyncio.to_thread(self.context.destroy, 0)

    def _socket(self, kind: int, endpoint: str, options: LinkOptions) -> ZmqSocket:
        socket = self.context.socket(kind)
        try:
            apply_options(socket, endpoint, options)
        except ConfigError:
            socket.close(0)
            raise
        return socket
