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
from collections.abc import Sequence

import zmq

from transport.errors import ConfigError, PeerUnreachable, WindowFull
from transport.keys import KeyPair
from transport.links import (
    Admit,
    Authorise,
    LinkOptions,
    ServerKeys,
    key_candidates,
)
from transport.reaching import why_no_tcp
from transport.zap import ZapHandler
from transport.zmq_hub import ZmqHub
from transport.zmq_socket import (
    CONNECTION_LOST,
    HANDSHAKE_FAILURES,
    MAX_SOCKETS,
    NOBODY_LISTENS,
    End,
    ZmqContext,
    ZmqSocket,
    apply_options,
    apply_reconnect,
    failure_text,
    require_loopback,
)


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
        self._server_keys: ServerKeys | None = None
        self._tried = ""
        self._following = ""
        self._switching = False
        self._hung_up = False
        super().__init__(
            network.context,
            socket,
            options,
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_CONNECT_RETRIED
            | zmq.EVENT_CLOSED,
        )

    @property
    def connected(self) -> bool:
        return self._up.is_set() and not self._closed

    async def why(self) -> str:
        said = self.last_failure
        if self.connected or (said and said not in (NOBODY_LISTENS, CONNECTION_LOST)):
            return said
        # libzmq tells neither that a name is unknown nor the error of a connection.
        return await why_no_tcp(self.endpoint) or said

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

    def connect(self, key: KeyPair | None, server_key: str | ServerKeys | None) -> None:
        """Called once, by the network."""
        if key is not None and server_key is not None:
            self._server_keys = None if isinstance(server_key, str) else server_key
            self._tried = key_candidates(server_key)[0]
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, self._tried.encode("ascii"))
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
        if event == zmq.EVENT_CLOSED:
            # Of a connecting socket: TCP did not get through. What failed before is over.
            if not self._up.is_set() and not self._hung_up:
                self.last_failure = NOBODY_LISTENS
            return
        self._hung_up = False
        up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        # libzmq goes on with the key that it began with, and must not put the other one off.
        if self._retry is not None and (up or not self._switching):
            self._retry.cancel()
            self._retry = None
        if up:
            self._retry_s = self._options.reconnect_s
            self._switching = False
            self._down.clear()
            self._up.set()
            self.last_failure = ""
            if self._server_keys is not None:
                self._server_keys.used(self._tried)
            return
        if self._up.is_set():
            self.last_failure = CONNECTION_LOST
        self._up.clear()
        self._down.set()
        if event & HANDSHAKE_FAILURES:
            self.handshake_failures += 1
            self.last_failure = failure_text(event, value)
            if event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._try_another_key()
        if self._retry is None and (self._switching or event != zmq.EVENT_CONNECT_RETRIED):
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(self._retry_s, self._reconnect)

    def _try_another_key(self) -> None:
        if self._server_keys is None or self._switching:
            return
        keys = key_candidates(self._server_keys)
        at = keys.index(self._tried) if self._tried in keys else -1
        self._following = keys[(at + 1) % len(keys)]
        self._switching = self._following != self._tried

    def _reconnect(self) -> None:
        self._retry = None
        if self._switching:
            self._switching = False
            self._tried = self._following
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, self._tried.encode("ascii"))
        self._retry_s = min(2 * self._retry_s, self._options.reconnect_max_s)
        self._hung_up = True
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
        admit: Admit | None = None,
    ) -> ZmqHub:
        if (key is None) != (authorise is None):
            raise ConfigError(f"hub {endpoint}: give both key and authorise, or none")
        if key is None:
            require_loopback(endpoint)
        hub = ZmqHub(self, self._socket(zmq.ROUTER, endpoint, options), options)
        self._ends[hub] = None
        try:
            hub.listen(endpoint, key, authorise, admit)
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
        server_key: str | ServerKeys | None = None,
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
