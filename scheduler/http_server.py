"""What our HTTP servers have in common: who may connect for how long, and what a refusal is.

What always holds: connections are counted before a byte of theirs is looked at, together and by
their address (``http_addresses``), and one above either bound is closed; one that has asked for
nothing for a while is closed; a request that is not HTTP is one line in the log.
"""

import asyncio
import hmac
import logging
import os
import socket
import ssl
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog

from scheduler.http_addresses import SHARED, group_of, networks
from transport.errors import ConfigError

if TYPE_CHECKING:
    from aiohttp import web

FIRST_REQUEST_S: Final = 10.0
"""A connection that has asked for nothing after so long is closed, and so is one whose TLS is not
agreed on."""
KEEPALIVE_S: Final = 30.0
BACKLOG: Final = 128
MAX_PER_ADDRESS: Final = 64
TOO_MANY_S: Final = 60.0
"""How often a log names an address that is above its bound."""
STALLED_S: Final = 60.0
"""A reader that takes nothing for so long is cut off, by us or by the kernel."""

_log = structlog.get_logger()


class HttpRefused(Exception):
    """A request that gets an error: HTTP ``status``, stable ``code``, what to do, headers."""

    def __init__(self, status: int, code: str, text: str, **headers: str) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.headers = headers

    def response(self) -> "web.Response":
        """The answer: ``{"code", "message"}``."""
        return json_response(
            {"code": self.code, "message": str(self)}, self.status, headers=self.headers
        )


def json_response(
    data: Any, status: int = 200, *, headers: dict[str, str] | None = None
) -> "web.Response":
    """``data`` as msgspec writes it."""
    from aiohttp import web

    return web.Response(
        status=status,
        body=msgspec.json.encode(data),
        content_type="application/json",
        headers=headers,
    )


def bearer(request: "web.BaseRequest") -> str:
    """The token of the header ``Authorization: Bearer TOKEN``, "" without one."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def same_secret(given: str, secret: bytes) -> bool:
    """Compared in the same time wherever they differ."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), secret)


async def write(response: "web.StreamResponse", request: "web.BaseRequest", data: bytes) -> bool:
    """Write a piece; False when the reader took nothing for ``STALLED_S`` and was cut off."""
    try:
        async with asyncio.timeout(STALLED_S):
            await response.write(data)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        return False
    return True


class HttpListener:
    """Listens and hands requests to ``handle``, which must call ``heard`` first. ``setting`` names
    the place of the port in the configuration, ``counters`` gets ``too_many_connections`` and
    ``too_many_of_address``. Of ``max_connections`` one address has ``max_per_address`` at most, but
    for those of ``shared`` and this machine's."""

    def __init__(
        self,
        handle: "Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]",
        *,
        host: str,
        tls: ssl.SSLContext | None,
        max_connections: int,
        counters: Counter[str],
        setting: str,
        max_per_address: int = MAX_PER_ADDRESS,
        shared: Sequence[str] = (),
    ) -> None:
        self._handle = handle
        self._host = host
        self._tls = tls
        self._counters = counters
        self._setting = setting
        self._silent: dict[Any, asyncio.TimerHandle] = {}
        self._taken: weakref.WeakKeyDictionary[socket.socket, str] = weakref.WeakKeyDictionary()
        """Connections, and the groups of their addresses."""
        self._max_per_address = max_per_address
        self._shared = networks(shared)
        self._said_s = -TOO_MANY_S
        self.max_connections = max_connections

    async def run(self, ports: Sequence[int], listening: Callable[[int], None]) -> None:
        """Serve until cancelled on the first of ``ports`` that is free (0: any); ``listening`` is
        told which.

        Raises:
            ConfigError: the address cannot be used.
        """
        from aiohttp import web

        outer, loop = self, asyncio.get_running_loop()

        class Server(web.Server):
            """Bounds how long a connection may say or take nothing."""

            def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
                super().connection_made(handler, transport)
                _bound_stall(transport.get_extra_info("socket"))
                outer._silent[handler] = loop.call_later(FIRST_REQUEST_S, transport.abort)

            def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
                outer.heard(handler)
                super().connection_lost(handler, exc)

        logger = logging.getLogger(__name__)
        logger.addFilter(_without_nonsense)
        runner = web.ServerRunner(
            Server(
                self._handle,
                access_log=None,
                keepalive_timeout=KEEPALIVE_S,
                logger=logger,
                auto_decompress=False,  # what is small may unfold to anything
            ),
            shutdown_timeout=1.0,
        )
        await runner.setup()
        listeners: list[asyncio.Server] | None = None
        try:
            for port in ports:
                listeners = await self._listen(runner.server, port, last=port == ports[-1])
                if listeners is not None:
                    listening(int(listeners[0].sockets[0].getsockname()[1]))
                    break
            await asyncio.Event().wait()
        finally:
            for listener in listeners or ():
                listener.close()
            await runner.cleanup()

    async def _listen(self, server: "web.Server | None", port: int, *, last: bool) -> Any:
        """Who listens, on an address each; None when the port is taken and is not the last to try;
        raises as ``run``."""
        assert server is not None  # noqa: S101 - it was set up
        starting = asyncio.ensure_future(self._start(server, port))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait({starting})  # half started, its socket would stay open
            if not starting.cancelled() and starting.exception() is None:
                for listener in starting.result():
                    listener.close()
            raise
        except (OSError, OverflowError) as error:
            if not last:
                return None
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"{self._setting}: {self._host}:{port}: {reason}; choose another port"
            ) from error

    async def _start(self, server: "web.Server", port: int) -> list[asyncio.Server]:
        """asyncio finds the addresses and binds; what then listens counts (``_Counted``)."""
        loop = asyncio.get_running_loop()
        bound = await loop.create_server(server, self._host, port, start_serving=False)
        sockets = [_Counted(self._has_room, sock.fileno()) for sock in bound.sockets]
        bound.close()
        try:
            return [
                await loop.create_server(
                    server,
                    sock=sock,
                    ssl=self._tls,
                    ssl_handshake_timeout=FIRST_REQUEST_S if self._tls else None,
                    backlog=BACKLOG,
                )
                for sock in sockets
            ]
        except BaseException:
            for sock in sockets:
                loop.remove_reader(sock)
                sock.close()
            raise

    @property
    def connections(self) -> int:
        """How many there are now."""
        return len(self._open())

    def group(self, address: str) -> str:
        """With whom one from ``address`` is counted, "" where it is not told apart."""
        return group_of(address, self._shared)

    def _open(self) -> list[str]:
        return [group for taken, group in self._taken.items() if taken.fileno() >= 0]

    def _has_room(self, sock: socket.socket, address: str) -> bool:
        """Whether a connection that was made is one of those that may be; counts it then."""
        group, taken = self.group(address), self._open()
        if len(taken) >= self.max_connections:
            self._counters["too_many_connections"] += 1
            return False
        if group != SHARED and taken.count(group) >= self._max_per_address:
            self._counters["too_many_of_address"] += 1
            now_s = asyncio.get_running_loop().time()
            if now_s - self._said_s >= TOO_MANY_S:
                self._said_s = now_s
                _log.warning("http.too_many_of_address", address=group, most=self._max_per_address)
            return False
        self._taken[sock] = group
        return True

    def heard(self, handler: Any) -> None:
        """``request.protocol`` of a request that came: its connection is not silent."""
        timer = self._silent.pop(handler, None)
        if timer is not None:
            timer.cancel()


class _Counted(socket.socket):
    """A socket that listens and hangs up where there ``has_room`` for no more. Protocols learn of a
    connection only after the TLS handshake, for which asyncio keeps hundreds of kilobytes."""

    def __init__(self, has_room: Callable[[socket.socket, str], bool], descriptor: int) -> None:
        super().__init__(fileno=os.dup(descriptor))
        self._has_room = has_room

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises ConnectionAbortedError, which is none to asyncio, for one too many."""
        taken, address = super().accept()
        if not self._has_room(taken, str(address[0])):
            taken.close()
            raise ConnectionAbortedError
        return taken, address


def _bound_stall(sock: socket.socket | None) -> None:
    """Whole answers are written without ``write``: nobody waits for them in vain but the kernel.
    TCP_USER_TIMEOUT (tcp(7)) also ends what a reader's full window holds up."""
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if sock is not None and option is not None:
        sock.setsockopt(socket.IPPROTO_TCP, option, round(1000 * STALLED_S))


def _without_nonsense(record: logging.LogRecord) -> bool:
    """A log filter: requests that are not HTTP are one line, not a traceback of the parser's."""
    from aiohttp.http_exceptions import HttpProcessingError

    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, HttpProcessingError):
        return True
    _log.debug("http.malformed", reason=f"{type(error).__name__}, status {error.code}")
    return False
