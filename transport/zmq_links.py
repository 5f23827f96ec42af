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
import os
import socket as sockets
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import zmq

from transport.errors import (
    ConfigError,
    LinkClosed,
    LocalProtocolError,
    PeerUnreachable,
    WindowFull,
)
from transport.keys import KeyPair
from transport.links import Authorise, Inbound, LinkOptions, check_frames
from transport.zap import ZapHandler
from transport.zmq_socket import (
    BACKLOG,
    HANDSHAKE_FAILURES,
    MAX_SOCKETS,
    Monitor,
    Readiness,
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

_MORE = zmq.SNDMORE | zmq.NOBLOCK

T = TypeVar("T")


class _End(Generic[T]):
    """What both ends share: draining one socket for one receiver, and counting failures."""

    def __init__(
        self, context: ZmqContext, socket: ZmqSocket, options: LinkOptions, events: int
    ) -> None:
        self._socket = socket
        self._options = options
        self._closed = False
        self._receiving = False
        self._waiter: asyncio.Future[None] | None = None
        self.handshake_failures = 0
        self.last_failure = ""
        self._readiness = Readiness(socket, self._wake)
        self._monitor = Monitor(context, socket, events | HANDSHAKE_FAILURES, self._event)

    async def recv(self) -> list[T]:
        if self._receiving:
            raise LocalProtocolError("two tasks receive on one link")
        self._receiving = True
        try:
            while True:
                # One turn for everybody else per batch: a flood must not starve the loop.
                await asyncio.sleep(0)
                self._require_open()
                batch, empty = self._drain()
                if batch:
                    return batch
                if empty:
                    await self._wait()
        finally:
            self._receiving = False

    def _drain(self) -> tuple[list[T], bool]:
        """Up to ``max_batch`` messages, and whether the socket ran empty. No await in here or
        after it, so a cancelled receive holds nothing that it could lose."""
        batch: list[T] = []
        receive = self._socket.recv
        most = self._options.max_frames + 1
        for _ in range(self._options.max_batch):
            try:
                frame = receive(zmq.NOBLOCK, False)
            except zmq.Again:
                return batch, True
            frames = [frame]
            count = 1
            while frame.more:
                frame = receive(zmq.NOBLOCK, False)
                count += 1
                if count <= most:
                    frames.append(frame)
            message = self._accept(frames) if count <= most else None
            if message is not None:
                batch.append(message)
        return batch, False

    async def _wait(self) -> None:
        """Only after a receive that found nothing (see ``transport.zmq_socket``)."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _send(self, head: Sequence[bytes], frames: Sequence[bytes]) -> None:
        self._require_open()
        check_frames(frames, self._options)
        send = self._socket.send
        try:
            for frame in head:
                send(frame, _MORE)
            for frame in frames[:-1]:
                send(frame, _MORE)
            send(frames[-1], zmq.NOBLOCK)
        finally:
            if self._waiter is not None:
                # Sending reads the socket's mailbox: the receiver's edge may be gone.
                self._readiness.check()

    def _require_open(self) -> None:
        if self._closed:
            raise LinkClosed("the link is closed")

    def _shut(self) -> None:
        """Free the socket; what was sent has ``linger_s`` to leave."""
        self._readiness.close()
        self._monitor.close()
        self._socket.close()

    def _accept(self, frames: list[zmq.Frame]) -> T | None:
        raise NotImplementedError

    def _event(self, event: int, value: int) -> None:
        raise NotImplementedError


class _Connection(NamedTuple):
    """Where a route's bytes come from. The inode tells whether the descriptor, which belongs to
    libzmq, still is that connection."""

    identity: str
    descriptor: int
    inode: int


class ZmqHub(_End[Inbound]):
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
        self.endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
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
        if self._authorise is None or self._authorise(identity) is None:
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
        identity = str(head.get("User-Id")) if self._authorise is not None else ""
        known = self._connections.get(route)
        if (known is None or known.identity != identity) and not self._note(route, identity, head):
            return None
        if identity in self._refused:
            if self._authorise is None or self._authorise(identity) is None:
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

    def _authorise_noted(self, key: str) -> object | None:
        return None

    def _event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_CLOSED:
            self._listener_closed.set()
