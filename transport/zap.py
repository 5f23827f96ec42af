"""Decides which public keys may connect: the ZAP 1.0 handler of one ZeroMQ context.

What always holds: a key is refused unless the hub's own ``authorise`` knows it; the User-Id of an
accepted connection is its public key (z85), which libzmq attaches to every frame received on it;
a hub without a registered domain accepts nobody; a hub may put peers off by their address. Requests
are answered on the event loop, so a handshake waits while the loop is held up.

libzmq asks over ``inproc://zeromq.zap.01`` with the frames (RFC 27)

    version  request id  domain  address  routing id  mechanism  credentials

and takes (version, request id, status code, status text, user id, metadata).
"""

import zmq
from zmq.utils import z85

from transport.links import Admit, Authorise
from transport.zmq_socket import Readiness, ZmqContext, ZmqSocket

ENDPOINT = "inproc://zeromq.zap.01"
VERSION = b"1.0"
BATCH = 64

_REQUEST_FRAMES = 6
_KEY_BYTES = 32
_REFUSED = (b"400", b"key not authorised", b"")
# Not 300: libzmq then keeps the connection, without a word, until the handshake's time is over.
_LATER = (b"500", b"too many connections", b"")


class ZapHandler:
    """One per context; hubs register under a domain of their own."""

    def __init__(self, context: ZmqContext) -> None:
        self._domains: dict[bytes, tuple[Authorise, Admit | None]] = {}
        # A ROUTER, not a REP: a question left unanswered must not block the next one.
        self._socket: ZmqSocket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        self._readiness = Readiness(self._socket, self._drain)

    def register(self, domain: str, authorise: Authorise, admit: Admit | None = None) -> None:
        self._domains[domain.encode()] = (authorise, admit)

    def unregister(self, domain: str) -> None:
        self._domains.pop(domain.encode(), None)

    def close(self) -> None:
        self._readiness.close()
        self._socket.close(0)

    def _drain(self) -> None:
        for _ in range(BATCH):
            try:
                request = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._answer(request)
        self._readiness.check_soon()

    def _answer(self, request: list[bytes]) -> None:
        route, delimiter, version, request_id, *rest = request
        self._socket.send_multipart(
            [route, delimiter, VERSION, request_id, *self._status(version, rest), b""], zmq.NOBLOCK
        )

    def _status(self, version: bytes, rest: list[bytes]) -> tuple[bytes, bytes, bytes]:
        """Status, its text and the user id: the z85 key when the connection may go on."""
        if version != VERSION or len(rest) + 2 <= _REQUEST_FRAMES:
            return _REFUSED
        domain, address, _routing_id, mechanism, credentials = rest[:5]
        authorise, admit = self._domains.get(domain, (None, None))
        if authorise is None or mechanism != b"CURVE" or len(credentials) != _KEY_BYTES:
            return _REFUSED
        if admit is not None and not admit(address.decode("ascii", "replace")):
            return _LATER
        key: bytes = z85.encode(credentials)
        return (b"200", b"OK", key) if authorise(key.decode("ascii")) is not None else _REFUSED
