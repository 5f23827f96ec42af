"""What a link is: one hub (cloud side) and many links to it (outbound from agents and trainers).

What always holds, for every implementation (``tests/contract/test_links.py``):

- a message arrives whole, once or not at all, in the order of sending between one link and its
  hub; nothing is promised across a reconnect: what must arrive is acknowledged by the layers above;
- ``send`` never waits: it takes the message or raises. The windows behind it are bounded;
- ``recv`` gives other tasks a turn before it looks, so that a flood cannot starve the loop, and a
  cancelled ``recv`` loses nothing. One task receives at a time;
- a route names one connection of one peer. A reconnected peer has another route, and is answered
  on the route that it was last heard from;
- ``identity`` is the public key that the connection was authenticated with, given with every
  message; "" on a link without authentication;
- a link reconnects by itself until it is closed, also after it was refused;
- after ``close`` both calls raise ``LinkClosed``; closing twice is harmless.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from transport.envelope import LIMITS
from transport.errors import LocalProtocolError, SizeLimitExceeded
from transport.messages import Plane

if TYPE_CHECKING:
    from transport.keys import KeyPair, Peer

Authorise = Callable[[str], "Peer | None"]
"""Public key -> who that is, or None to refuse. Called on the event loop: must not block."""


Admit = Callable[[str], bool]
"""Address of a peer (no port) -> whether it may try now; asked before ``Authorise``."""


class ServerKeys(Protocol):
    """The server keys that a link may find, while they are being changed."""

    def candidates(self) -> tuple[str, ...]:
        """At least one key, in the order in which to try them."""

    def used(self, key: str) -> None:
        """A hub has proved that it holds ``key``."""


def key_candidates(server_key: "str | ServerKeys | None") -> tuple[str, ...]:
    """The keys to try; none on an open link."""
    if server_key is None:
        return ()
    return (server_key,) if isinstance(server_key, str) else server_key.candidates()


class Inbound(NamedTuple):
    """One message as a hub receives it."""

    route: bytes
    identity: str
    frames: list[bytes]


class LinkOptions(NamedTuple):
    """What both ends of a plane's links agree on; ``for_plane`` gives the defaults.

    ``window_messages`` bounds each direction of each connection in messages, so bulk planes have
    a small one: 16 messages of 4 MiB are 64 MiB per peer. The interval between heartbeats of the
    connection itself is apart from what the layers above send: it finds dead NAT entries. A frame
    that takes longer than ``heartbeat_timeout_s`` on the wire is never delivered. A hub with
    ``max_connections`` (0: no bound) keeps each connection for ``connection_s`` at most, and takes
    at most about ``connection_bytes`` from it.
    """

    max_frame_bytes: int
    max_frames: int
    window_messages: int
    max_batch: int = 256
    linger_s: float = 1.0
    handshake_s: float = 15.0
    heartbeat_s: float = 10.0
    heartbeat_timeout_s: float = 30.0
    reconnect_s: float = 0.2
    reconnect_max_s: float = 30.0
    max_connections: int = 0
    connection_s: float = 30.0
    connection_bytes: int = 64 * 1024

    @classmethod
    def for_plane(cls, plane: Plane) -> "LinkOptions":
        limits = LIMITS[plane]
        return cls(
            max_frame_bytes=limits.frame_bytes,
            max_frames=limits.frames,
            window_messages=1000 if plane is Plane.CONTROL else 16,
        )


class Hub(Protocol):
    """The listening end."""

    endpoint: str
    port: int

    @property
    def peers(self) -> int:
        """Connections that are up now."""

    @property
    def handshake_failures(self) -> int:
        """Connections refused, or whose handshake broke the protocol, since the start."""

    @property
    def hung_up(self) -> int:
        """Connections that the other side ended, or let time out, before they were up, since the
        start: port scans, health checks, ``farflow agent doctor``, peers that stopped just then."""

    @property
    def last_failure(self) -> str:
        """Why the latest of them failed, for people; "" before the first."""

    @property
    def dropped(self) -> int:
        """Messages received and not passed on: of a key that is no longer known, with too many
        frames, or from a peer that names its own route."""

    def send(self, route: bytes, frames: Sequence[bytes]) -> None:
        """Hand one message to the peer behind ``route``.

        Raises:
            PeerUnreachable: no connection of that route now.
            WindowFull: the peer does not keep up.
            SizeLimitExceeded, LocalProtocolError: the message breaks the link's limits.
            LinkClosed: after ``close``.
        """

    async def recv(self) -> list[Inbound]:
        """At least one message, at most ``max_batch``.

        Raises:
            LinkClosed: after or during ``close``.
        """

    def reachable(self, route: bytes) -> bool:
        """Whether the connection of a route that something was received from is still up."""

    def disconnect(self, identity: str) -> None:
        """Close the connections of a key. A key that ``authorise`` no longer knows is not heard
        again, whatever it had sent before; one that it knows may come back."""

    async def close(self) -> None:
        """Stop listening and drop all connections, after at most ``linger_s``."""


class Link(Protocol):
    """The connecting end."""

    @property
    def connected(self) -> bool:
        """Whether the connection is up, authenticated and usable."""

    @property
    def handshake_failures(self) -> int:
        """Attempts refused or broken before the connection was up, since the start."""

    @property
    def last_failure(self) -> str:
        """Why there is no connection, for people; "" while there is one and before the first try
        has failed."""

    async def why(self) -> str:
        """Why there is no connection, looked into where ``last_failure`` says little; "" when that
        tells nothing either."""

    async def wait_connected(self) -> None:
        """Return once ``connected`` is true.

        Raises:
            LinkClosed: after or during ``close``.
        """

    async def wait_disconnected(self) -> None:
        """Return once ``connected`` is false; raises as ``wait_connected`` does."""

    def send(self, frames: Sequence[bytes]) -> None:
        """Hand one message to the hub; raises as ``Hub.send`` does."""

    async def recv(self) -> list[list[bytes]]:
        """At least one message, at most ``max_batch``; raises as ``Hub.recv`` does."""

    async def close(self) -> None:
        """Give what was sent ``linger_s`` to leave, then drop the connection."""


class Network(Protocol):
    """Makes hubs and links that reach each other."""

    def hub(
        self,
        endpoint: str,
        options: LinkOptions,
        *,
        key: "KeyPair | None" = None,
        authorise: Authorise | None = None,
        admit: Admit | None = None,
    ) -> Hub:
        """Listen on ``endpoint``. With ``key`` and ``authorise`` every peer proves its key;
        without both the hub is open, which is only allowed where nobody else can connect.
        ``admit`` may put a peer off by where it comes from; it then tries again.

        Raises:
            ConfigError: the endpoint cannot be used, or would be open to others.
        """

    def link(
        self,
        endpoint: str,
        options: LinkOptions,
        *,
        key: "KeyPair | None" = None,
        server_key: str | ServerKeys | None = None,
    ) -> Link:
        """Connect to ``endpoint`` as ``key``, to nobody but the holder of ``server_key``; of
        several, the next one is tried when a handshake has failed with one.

        Raises:
            ConfigError: as for ``hub``.
        """

    async def close(self) -> None:
        """Close every hub and link, then the network."""


def check_frames(frames: Sequence[bytes], options: LinkOptions) -> None:
    """Refuse a message that the other end would refuse, before a part of it is on the way.

    Raises:
        LocalProtocolError: no frames, or too many.
        SizeLimitExceeded: a frame above ``max_frame_bytes``.
    """
    if not 0 < len(frames) <= options.max_frames:
        raise LocalProtocolError(f"{len(frames)} frames, 1 to {options.max_frames} are possible")
    for index, frame in enumerate(frames):
        size_bytes = len(frame) if type(frame) is bytes else memoryview(frame).nbytes
        if size_bytes > options.max_frame_bytes:
            raise SizeLimitExceeded(
                f"frame {index} of {size_bytes} bytes is above {options.max_frame_bytes}"
            )
