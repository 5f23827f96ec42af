"""The listening end over ZeroMQ: a ROUTER that knows whose bytes each connection brings.

What always holds: with keys, the identity of a message is what CURVE proved on the connection that
it came from, read from every message; peers cannot name their own routes; a connection that is cut
is shut at the operating system, under libzmq.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import zmq

from transport.errors import PeerUnreachable, WindowFull
from transport.keys import KeyPair, Peer
from transport.links import Admit, Authorise, Inbound, LinkOptions
from transport.zmq_limits import ConnectionLimits, inode_of, shut_down
from transport.zmq_socket import BACKLOG, End, ZmqSocket, failure_text

if TYPE_CHECKING:
    from transport.zmq_links import ZmqNetwork

CLOSE_TIMEOUT_S = 1.0
"""Longest wait for a closed hub's port to be free again."""

MAX_ENDED = 4096
"""Routes of connections that are over, of which messages may still be waiting to be read."""

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
        self._ended: dict[bytes, None] = {}
        self._refused: set[str] = set()
        self._listener_closed = asyncio.Event()
        self._refused_key = ""
        self.hung_up = 0
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        if options.max_connections:
            events |= zmq.EVENT_ACCEPTED
        super().__init__(network.context, socket, options, events)
        self.limits: ConnectionLimits | None = None
        if options.max_connections:
            self.limits = ConnectionLimits(
                options.max_connections,
                options.connection_s,
                options.connection_bytes,
                self._monitor.drain,
            )
        self.endpoint = ""
        self.port = 0

    @property
    def peers(self) -> int:
        return len(self._connections)

    def listen(
        self,
        endpoint: str,
        key: KeyPair | None,
        authorise: Authorise | None,
        admit: Admit | None,
    ) -> None:
        """Called once, by the network."""
        if key is not None and authorise is not None:
            self._authorise = authorise
            self._network.zap.register(self._domain, self._authorise_noted, admit)
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret_key.encode("ascii"))
            self._socket.setsockopt(zmq.ZAP_DOMAIN, self._domain.encode("ascii"))
            self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.BACKLOG, BACKLOG)
        self._socket.bind(endpoint)
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        self.port = int(self.endpoint.rpartition(":")[2])

    def reachable(self, route: bytes) -> bool:
        return route in self._connections

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
        if self.limits is not None:
            self.limits.close()
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
        unknown = known is None or known.identity != identity
        # What waited while its connection ended says a descriptor that may be another's by now.
        if unknown and route not in self._ended and not self._note(route, identity, head):
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
        inode = inode_of(descriptor)
        if inode is None:
            # Already closed; what it sent before is still good.
            return True
        stale = self._routes.get(descriptor)
        if stale is not None:
            self._drop(stale)
        self._routes[descriptor] = route
        self._connections[route] = _Connection(identity, descriptor, inode)
        return True

    def _cut(self, route: bytes) -> None:
        connection = self._connections.pop(route, None)
        if connection is None:
            return
        self._routes.pop(connection.descriptor, None)
        self._end(route)
        shut_down(connection.descriptor, connection.inode)

    def _drop(self, route: bytes) -> None:
        """Its connection is over, or an event of the one that had its descriptor before is read
        only now. In the second case its next message makes it known again."""
        connection = self._connections.pop(route, None)
        if connection is not None and inode_of(connection.descriptor) != connection.inode:
            self._end(route)

    def _end(self, route: bytes) -> None:
        self._ended[route] = None
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def _authorise_noted(self, key: str) -> Peer | None:
        peer = self._authorise(key) if self._authorise is not None else None
        if peer is None:
            self._refused_key = key
        return peer

    def _event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_CLOSED:
            self._listener_closed.set()
        elif event == zmq.EVENT_ACCEPTED:
            if self.limits is not None:
                self.limits.accepted(value)
        elif event == zmq.EVENT_DISCONNECTED:
            if self.limits is not None:
                self.limits.gone(value)
            route = self._routes.pop(value, None)
            if route is not None:
                self._drop(route)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.handshake_failures += 1
            self.last_failure = f"key {self._refused_key} is not authorised"
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self.hung_up += 1
        else:
            self.handshake_failures += 1
            self.last_failure = failure_text(event, value)
