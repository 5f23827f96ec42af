"""What every ZeroMQ socket of ours needs inside asyncio: options, wake-ups, monitor, draining.

What always holds: no threads; no descriptor edge is lost. libzmq signals a socket's descriptor
only when its mailbox turns from empty to filled, and *any* call on the socket may empty it. So
whoever waits checks the socket's EVENTS after each of his own calls (``Readiness.check``), and may
wait without a check only after a receive that found nothing.
"""

import asyncio
import errno
import resource
import struct
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import zmq

from transport.errors import ConfigError, LinkClosed, LocalProtocolError
from transport.links import LinkOptions, check_frames

ZmqSocket = zmq.Socket[bytes]
ZmqContext = zmq.Context[ZmqSocket]

MONITOR_BATCH = 256
MAX_SOCKETS = 32_768
"""Per context; each link takes three with its monitor."""

BACKLOG = 1024
KEEPALIVE_IDLE_S = 60
CURVE_OVERHEAD_BYTES = 64
"""CURVE wraps a frame in 33 more bytes; MAXMSGSIZE counts them."""

BUSY_STATUS = 500
"""ZAP status of a peer that is put off (``transport.zap``)."""

HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

_EVENT = struct.Struct("=HI")
_MORE = zmq.SNDMORE | zmq.NOBLOCK

T = TypeVar("T")


class Readiness:
    """Calls ``on_ready`` from the event loop whenever ``socket`` may have something to read."""

    def __init__(self, socket: ZmqSocket, on_ready: Callable[[], None]) -> None:
        self._socket = socket
        self._on_ready = on_ready
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self.check)
        self.check_soon()

    def check(self) -> None:
        """Reading EVENTS also empties the mailbox, so the loop does not spin on the descriptor."""
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._on_ready()

    def check_soon(self) -> None:
        """Check on the loop's next turn; for what was left over by a bounded drain."""
        self._loop.call_soon(self._check_open)

    def _check_open(self) -> None:
        if not self._socket.closed:
            self.check()

    def close(self) -> None:
        """Must come before the socket is closed."""
        self._loop.remove_reader(self._descriptor)


class Monitor:
    """Calls ``on_event(event, value)`` for each event of ``socket`` in ``events``."""

    def __init__(
        self,
        context: ZmqContext,
        socket: ZmqSocket,
        events: int,
        on_event: Callable[[int, int], None],
    ) -> None:
        self._socket = socket
        self._on_event = on_event
        address = f"inproc://farflow-monitor-{id(socket):x}-{int(socket.getsockopt(zmq.FD))}"
        socket.monitor(address, events)
        self._pair: ZmqSocket = context.socket(zmq.PAIR)
        # No bound: libzmq's I/O thread blocks on a full monitor and with it every plane.
        # The queue grows by ~20 bytes per connection attempt while the loop is held up.
        self._pair.setsockopt(zmq.RCVHWM, 0)
        self._pair.setsockopt(zmq.LINGER, 0)
        self._pair.connect(address)
        self._readiness = Readiness(self._pair, self.drain)

    def drain(self) -> None:
        """Deliver what is there now, up to a bound, the rest on the loop's next turn."""
        for _ in range(MONITOR_BATCH):
            if self._pair.closed:
                return
            try:
                frame = self._pair.recv(zmq.NOBLOCK)
                self._pair.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            event, value = _EVENT.unpack(frame)
            self._on_event(event, value)
        self._readiness.check_soon()

    def close(self) -> None:
        """Must come before the monitored socket is closed."""
        self._readiness.close()
        self._socket.disable_monitor()
        self._pair.close(0)


class End(Generic[T]):
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
        self.dropped = 0
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
            if message is None:
                self.dropped += 1
            else:
                batch.append(message)
        return batch, False

    async def _wait(self) -> None:
        """Only after a receive that found nothing (see the top)."""
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


NOBODY_LISTENS = "nobody listens there, or nothing gets through"
CONNECTION_LOST = "the connection was lost"


def failure_text(event: int, value: int) -> str:
    """A handshake failure in words; ``value`` is a ZAP status, protocol error or errno."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value == BUSY_STATUS:
        return "the hub takes no more connections from here just now"
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return f"the hub refused our key (status {value}): is it in the authorized folder?"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            return "cryptographic failure: the peer expects another server key"
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return "one side uses CURVE and the other does not"
        return f"the other side broke the handshake's protocol (0x{value:08x})"
    name = errno.errorcode.get(value, str(value))
    return (
        f"the other side hung up during the handshake ({name}): it has stopped, or it has another"
        " server key than ours"
    )


def host_of(endpoint: str) -> str:
    """Host of ``tcp://HOST:PORT``.

    Raises:
        ConfigError: any other form.
    """
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme == "tcp" and parts.hostname and parts.port is not None
    except ValueError as error:
        raise ConfigError(f"endpoint {endpoint!r}: {error}; write tcp://HOST:PORT") from error
    if not valid or parts.hostname is None:
        raise ConfigError(f"endpoint {endpoint!r} is not of the form tcp://HOST:PORT")
    return parts.hostname


def require_loopback(endpoint: str) -> None:
    """An endpoint without keys may not be reachable from elsewhere.

    Raises:
        ConfigError: the host is not a loopback address.
    """
    host = host_of(endpoint)
    try:
        loopback = ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback:
        raise ConfigError(
            f"endpoint {endpoint!r} without keys is only allowed on a loopback address; "
            "make keys with `farflow keys create FOLDER` or use 127.0.0.1"
        )


def apply_options(socket: ZmqSocket, endpoint: str, options: LinkOptions) -> None:
    """Everything whose default would be wrong across the internet."""
    settings: dict[int, Any] = {
        zmq.MAXMSGSIZE: options.max_frame_bytes + CURVE_OVERHEAD_BYTES,
        zmq.SNDHWM: options.window_messages,
        zmq.RCVHWM: options.window_messages,
        zmq.LINGER: _ms(options.linger_s),
        zmq.HANDSHAKE_IVL: _ms(options.handshake_s),
        zmq.HEARTBEAT_IVL: _ms(options.heartbeat_s),
        zmq.HEARTBEAT_TIMEOUT: _ms(options.heartbeat_timeout_s),
        zmq.HEARTBEAT_TTL: _ms(options.heartbeat_timeout_s),
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: KEEPALIVE_IDLE_S,
        zmq.IPV6: 1 if ":" in host_of(endpoint) else 0,
    }
    for option, value in settings.items():
        socket.setsockopt(option, value)


def apply_reconnect(socket: ZmqSocket, options: LinkOptions) -> None:
    """Back off so that a restarted hub is not run over, and queue nothing for a connection that
    never was."""
    socket.setsockopt(zmq.RECONNECT_IVL, _ms(options.reconnect_s))
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _ms(options.reconnect_max_s))
    socket.setsockopt(zmq.IMMEDIATE, 1)


def raise_file_limit() -> int:
    """Lift this process's soft limit of open files to the hard one; returns the limit now.

    A connection costs one descriptor, a link three more. Where the system refuses (macOS caps
    below an unlimited hard limit) the limit stays as it was.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):
            return soft
    return hard


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
