"""The listening end of one plane: who speaks, and whether they may.

What always holds: what ``recv`` gives was said by a key of the authorized folder, is well-formed
and within the plane's limits, and is something the key's role may say here; everything else costs
a counter. A key that is taken out of the folder loses its connections within about a second. A
port chosen by the system is remembered, so that a restart is found where it was. A process that may
not open as many files as there are keys says so before it refuses anybody.
"""

import asyncio
import resource
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from transport.authorized import AllowList
from transport.envelope import LIMITS, decode, encode, peek
from transport.errors import (
    ConfigError,
    LinkError,
    LocalProtocolError,
    ProtocolError,
    StoreError,
    UnknownKind,
    VersionRefused,
)
from transport.keys import KeyPair, Peer
from transport.links import Hub, Network
from transport.messages import PROTOCOL_VERSION, Message, Plane, Refuse, Role
from transport.permissions import may_send
from transport.plane_links import bracketed, link_options
from transport.runtime.clock import Clock
from transport.runtime.files import atomic_write, read_limited
from transport.runtime.settings import TransportConfig

REFRESH_S: Final = 0.4
FILES_BESIDE: Final = 256
"""Open files of a daemon that are no connection of the plane: the store, logs, other sockets."""

MaySay = Callable[[Role, Plane, type[Message]], bool]

_log = structlog.get_logger()


class Arrival(NamedTuple):
    """A message that its sender may say."""

    route: bytes
    peer: Peer
    message: Message
    payload: list[bytes]


def server_key(transport: TransportConfig) -> KeyPair:
    """The key of every hub.

    Raises:
        ConfigError: no such key file.
    """
    return KeyPair.load(Path(transport.keys) / "server.toml")


class PlaneHub:
    """A hub with its authorized peers; ``port`` 0 takes the remembered or any free one. ``key``
    and ``may_say`` are the scheduler's unless others are given."""

    def __init__(
        self,
        network: Network,
        plane: Plane,
        transport: TransportConfig,
        *,
        port: int,
        port_file: Path,
        clock: Clock,
        key: KeyPair | None = None,
        may_say: MaySay = may_send,
    ) -> None:
        """Listen.

        Raises:
            ConfigError: keys are missing, or the address cannot be used.
        """
        self.plane = plane
        self._limits = LIMITS[plane]
        self._clock = clock
        self.allowed = AllowList(Path(transport.keys) / "authorized", clock.monotonic_s())
        for warning in self.allowed.warnings:
            _log.warning("keys.skipped", reason=warning)
        self._warned_of_files = 0
        self._warn_of_few_files()
        self._options = link_options(transport, plane)
        self._key = server_key(transport) if key is None else key
        self._may_say = may_say
        self._hub = self._bind(network, transport.host, port, port_file)
        self.port = self._hub.port
        self.counters: Counter[str] = Counter()
        self.on_removed: Callable[[Peer], None] | None = None
        """Told whom each key stood for that was taken out of the folder, after its connections were
        closed."""

    def _bind(self, network: Network, host: str, port: int, port_file: Path) -> Hub:
        def bind(endpoint: str) -> Hub:
            return network.hub(
                endpoint, self._options, key=self._key, authorise=self.allowed.lookup
            )

        return listen(bind, host, port, port_file)

    @property
    def peers(self) -> int:
        return self._hub.peers

    def reachable(self, route: bytes) -> bool:
        """Whether the connection of a route that was heard is still up."""
        return self._hub.reachable(route)

    async def recv(self) -> list[Arrival]:
        """What has arrived; perhaps nothing, when none of it was allowed.

        Raises:
            LinkClosed: after ``close``.
        """
        arrivals = []
        for inbound in await self._hub.recv():
            arrival = self._check(inbound.route, inbound.identity, inbound.frames)
            if arrival is not None:
                arrivals.append(arrival)
        return arrivals

    def send(self, route: bytes, message: Message, payload: Sequence[bytes] = ()) -> bool:
        """Hand a message over; False when the peer is gone or does not keep up, which whoever
        waits for it makes good by asking again."""
        name = type(message).__name__
        try:
            self._hub.send(route, encode(message, payload, self._limits))
        except LinkError as error:
            self.counters[f"send.{error.code}"] += 1
            _log.debug("plane.not_sent", plane=self.plane.value, message=name, reason=str(error))
            return False
        except LocalProtocolError as error:
            self.counters["send.too_large"] += 1
            _log.error("plane.too_large", plane=self.plane.value, message=name, reason=str(error))
            return False
        return True

    def send_frames(self, route: bytes, frames: Sequence[bytes]) -> None:
        """As ``Hub.send``, raising what it raises."""
        self._hub.send(route, frames)

    async def keep_refreshing(self) -> None:
        """Follow the authorized folder, and say who was turned away, until cancelled."""
        failures = 0
        while True:
            await asyncio.sleep(REFRESH_S)
            if self._hub.hung_up:
                self.counters["received.hung_up"] = self._hub.hung_up
            if self._hub.handshake_failures > failures:
                more = self._hub.handshake_failures - failures
                failures = self._hub.handshake_failures
                self.counters["received.turned_away"] = failures
                _log.warning(
                    "plane.turned_away",
                    plane=self.plane.value,
                    connections=more,
                    reason=self._hub.last_failure,
                )
            refresh = await asyncio.to_thread(self.allowed.refresh, self._clock.monotonic_s())
            for warning in refresh.warnings:
                _log.warning("keys.skipped", reason=warning)
            if refresh.added:
                self._warn_of_few_files()
            for key in refresh.removed:
                _log.info("keys.removed", key=key)
                self._hub.disconnect(key)
            if self.on_removed is not None:
                for peer in refresh.gone:
                    self.on_removed(peer)

    async def close(self) -> None:
        await self._hub.close()

    def _warn_of_few_files(self) -> None:
        """Say it before connections are refused: each known key may hold one open file."""
        needed = len(self.allowed) + FILES_BESIDE
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if allowed < needed and needed > self._warned_of_files:
            self._warned_of_files = needed
            _log.warning(
                "plane.few_files", plane=self.plane.value, keys=len(self.allowed),
                open_files=allowed, needed=needed,
                remedy=f"raise the hard limit: LimitNOFILE={needed} in the unit,"
                f" or `ulimit -Hn {needed}` before the start",
            )  # fmt: skip

    def _check(self, route: bytes, identity: str, frames: list[bytes]) -> Arrival | None:
        peer = self.allowed.lookup(identity)
        if peer is None:  # taken out of the folder a moment ago
            self.counters["received.unknown_key"] += 1
            return None
        try:
            kind = peek(frames)
            if not self._may_say(peer.role, self.plane, kind):
                self.counters["received.not_allowed"] += 1
                _log.warning("plane.not_allowed", peer=peer.name, message=kind.__name__)
                if self.plane is not Plane.CONTROL:  # where a refusal ends an agent
                    text = f"a key of role {peer.role.value} may not say {kind.__name__} here"
                    self.send(route, Refuse(code="role.not_allowed", message=text))
                return None
            message, payload = decode(frames, self._limits)
        except VersionRefused as error:
            self.counters["received.other_version"] += 1
            text = f"{error}; install a farflow that speaks protocol {PROTOCOL_VERSION}"
            self.send(route, Refuse(code=error.code, message=text))
            return None
        except UnknownKind as error:
            self.counters["received.unknown_kind"] += 1
            _log.warning("plane.unknown_kind", peer=peer.name, reason=str(error))
            if self.plane is not Plane.CONTROL:
                text = f"{error} here; a newer farflow says it: upgrade the scheduler's host"
                self.send(route, Refuse(code=error.code, message=text))
            return None
        except ProtocolError as error:
            self.counters["received.malformed"] += 1
            _log.warning("plane.malformed", peer=peer.name, reason=str(error))
            return None
        return Arrival(route, peer, message, payload)


def listen(bind: Callable[[str], Hub], host: str, port: int, port_file: Path) -> Hub:
    """A hub on ``port``; 0 takes the remembered or any free one, and remembers it.

    Raises:
        ConfigError: the address cannot be used.
    """
    for candidate in [port] if port else [*remembered_ports(port_file), 0]:
        try:
            hub = bind(f"tcp://{bracketed(host)}:{candidate}")
        except ConfigError:
            if candidate == port:
                raise
            continue
        if not port:
            atomic_write(port_file, f"{hub.port}\n".encode())
        return hub
    raise ConfigError(f"host {host}: no port to listen on")


def reachable(host: str) -> str:
    """Where a process of this machine reaches what listens on ``host``."""
    return bracketed({"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}.get(host, host))  # noqa: S104


def remembered_ports(port_file: Path) -> list[int]:
    """The port that a file remembers, if any."""
    try:
        port = int(read_limited(port_file, 16))
    except (FileNotFoundError, StoreError, ValueError):
        return []
    return [port] if 0 < port < 65536 else []
