"""The connections of an agent that chunks come over: the weights plane's own link, further lanes to
the same hub, and relays.

What always holds: lanes are opened and closed as ``transport.lanes`` says; over lanes and relays
nothing is said but requests for chunks, and nothing else is taken from them; a connection that
cannot be made costs nothing but a log line: its source is down and its chunks come over the others;
each connection keeps its window from one fetch to the next.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from transport.chunk_parts import ChunkSource, SourceId
from transport.delivery_window import DeliveryWindow
from transport.envelope import LIMITS, decode, encode, peek
from transport.errors import LinkClosed, PeerUnreachable, ProtocolError
from transport.keys import KeyPair, load_relay_key
from transport.lanes import LanePlan
from transport.links import Link, Network, ServerKeys
from transport.messages import Chunk, ChunkRequest, Plane
from transport.plane_links import BULK_MESSAGES, PlaneLinks, bracketed, link_options
from transport.reaching import Reaching, address_of, what_to_look_at
from transport.runtime.clock import Clock
from transport.runtime.settings import RelayAddress, TransportConfig

PLANE: Final = Plane.WEIGHTS
ORIGIN: Final = "origin"
"""The source that is the weights plane's own link."""
LOOK_S: Final = 0.5
RELAY_WINDOW_BYTES: Final = 4 << 20
"""Least on the way to a relay: what it has to fetch first must cross the ocean, whatever the round
trip to the relay itself is."""

MAX_AHEAD_BYTES: Final = 8 << 20

_log = structlog.get_logger()


class _Connection(NamedTuple):
    link: Link
    window: DeliveryWindow
    relay: bool
    tasks: tuple[asyncio.Task[None], ...]


class SourceLinks:
    """``arrived`` and ``changed`` hear of chunks and of connections that come and go, the plane's
    own link excepted: what arrives there comes through ``PlaneLinks``. Made inside the running
    loop; ``window_bytes`` bounds what is on the way over lanes, and over each relay.

    Raises:
        ConfigError: there is no key of a configured relay.
    """

    def __init__(
        self,
        network: Network,
        transport: TransportConfig,
        links: PlaneLinks,
        *,
        key: KeyPair | None,
        server_key: str | ServerKeys | None,
        window_bytes: int,
        clock: Clock,
        arrived: Callable[[SourceId, Chunk, list[bytes]], None],
        changed: Callable[[SourceId, bool], None],
    ) -> None:
        self._network = network
        self._transport = transport
        self._links = links
        self._key = key
        self._server_key = server_key
        self._clock = clock
        self._arrived = arrived
        self._changed = changed
        self._lane_bytes = max(1, window_bytes // transport.weights_lanes)
        self._window = DeliveryWindow(max_window_bytes=self._lane_bytes)
        self._plan = LanePlan(transport.weights_lanes)
        self._connections: dict[SourceId, _Connection] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._busy = False
        self.counters: Counter[str] = Counter()
        self.bytes_down = 0
        for relay in transport.relays:
            self._connect_relay(relay, window_bytes)

    @property
    def rate_bytes_s(self) -> float:
        """What is measured over the lanes to the origin together."""
        return sum(window.rate_bytes_s for window in self._lanes())

    def sources(self) -> list[ChunkSource]:
        """Every source; those that are not connected are down (``is_up``)."""
        return [
            ChunkSource(ORIGIN, self._window),
            *(
                ChunkSource(name, connection.window, connection.relay)
                for name, connection in self._connections.items()
            ),
        ]

    def ahead(self) -> tuple[int, int]:
        """How many bytes the origin may send unasked, and in what pieces: as many as would be
        asked for at once. None where relays are asked first."""
        if self._transport.relays:
            return 0, 0
        return min(self._window.limit_bytes(), MAX_AHEAD_BYTES), self._window.piece_bytes()

    def is_up(self, source: SourceId) -> bool:
        if source == ORIGIN:
            return self._links.connected(PLANE)
        connection = self._connections.get(source)
        return connection is not None and connection.link.connected

    def send(self, source: SourceId, request: ChunkRequest) -> None:
        """Raises ``LinkError`` when that is not possible now."""
        if source == ORIGIN:
            self._links.send_or_raise(PLANE, request)
            return
        connection = self._connections.get(source)
        if connection is None:
            raise PeerUnreachable(f"{source} is closed")
        connection.link.send(encode(request, limits=LIMITS[PLANE]))

    def busy(self, busy: bool) -> None:
        """Say after asking whether the origin's lanes limit the fetch: all of them are full."""
        self._busy = self._busy or busy

    async def run(self) -> None:
        """Open and close lanes until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            busy, self._busy = self._busy, False
            self._keep_lanes(
                self._plan.wanted(self._lanes(), busy=busy, now=self._clock.monotonic_s())
            )

    async def close(self) -> None:
        for name in list(self._connections):
            self._disconnect(name)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _lanes(self) -> list[DeliveryWindow]:
        return [
            self._window,
            *(c.window for c in self._connections.values() if not c.relay and c.link.connected),
        ]

    def _keep_lanes(self, wanted: int) -> None:
        lanes = [name for name, c in self._connections.items() if not c.relay]
        for name in lanes[wanted - 1 :]:
            self._disconnect(name)
        for number in range(len(lanes) + 1, wanted):
            t = self._transport
            self._connect(
                f"lane {number}",
                f"tcp://{bracketed(t.host)}:{t.weights_port}",
                self._server_key,
                DeliveryWindow(max_window_bytes=self._lane_bytes),
                relay=False,
            )

    def _connect_relay(self, relay: RelayAddress, window_bytes: int) -> None:
        folder = Path(self._transport.keys)
        self._connect(
            f"relay {relay.name}",
            f"tcp://{bracketed(relay.host)}:{relay.port}",
            None if self._key is None else load_relay_key(folder, relay.name),
            DeliveryWindow(
                max_window_bytes=window_bytes,
                min_window_bytes=min(RELAY_WINDOW_BYTES, window_bytes),
            ),
            relay=True,
        )

    def _connect(
        self,
        name: str,
        endpoint: str,
        peer_key: str | ServerKeys | None,
        window: DeliveryWindow,
        *,
        relay: bool,
    ) -> None:
        options = link_options(self._transport, PLANE)._replace(window_messages=BULK_MESSAGES)
        link = self._network.link(endpoint, options, key=self._key, server_key=peer_key)
        reaching = Reaching(partial(_say_why, name, address_of(endpoint), relay))
        loop = asyncio.get_running_loop()
        tasks = (
            loop.create_task(self._receive(name, link), name=f"receive {name}"),
            loop.create_task(self._watch(name, link, reaching), name=f"watch {name}"),
        )
        self._connections[name] = _Connection(link, window, relay, tasks)
        _log.info("source.opened", source=name, address=address_of(endpoint))

    def _disconnect(self, name: SourceId) -> None:
        connection = self._connections.pop(name)
        self._changed(name, False)
        task = asyncio.get_running_loop().create_task(_closed(connection), name=f"close {name}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        _log.info("source.closed", source=name)

    async def _receive(self, name: SourceId, link: Link) -> None:
        while True:
            try:
                batch = await link.recv()
            except LinkClosed:
                return
            for frames in batch:
                self.bytes_down += sum(map(len, frames))
                try:
                    if peek(frames) is not Chunk:
                        self.counters["received.not_allowed"] += 1
                        continue
                    message, payload = decode(frames, LIMITS[PLANE])
                except ProtocolError as error:
                    self.counters["received.malformed"] += 1
                    _log.warning("source.malformed", source=name, reason=str(error))
                    continue
                if isinstance(message, Chunk):
                    self._arrived(name, message, payload)

    async def _watch(self, name: SourceId, link: Link, reaching: Reaching) -> None:
        while True:
            try:
                await reaching.connected(link)
                _log.info("source.up", source=name)
                self._changed(name, True)
                await link.wait_disconnected()
            except LinkClosed:
                return
            _log.warning("source.down", source=name, reason=link.last_failure)
            self._changed(name, False)


def _say_why(name: SourceId, address: str, relay: bool, reason: str) -> None:
    table, port = ("transport.relays", "port") if relay else ("transport", "weights_port")
    remedy = what_to_look_at(reason, f"{table}.host", f"{table}.{port}")
    _log.warning(
        "source.not_connected", source=name, address=address, reason=reason,
        remedy=f"{remedy} Weights come over the other connections meanwhile.",
    )  # fmt: skip


async def _closed(connection: _Connection) -> None:
    await connection.link.close()
    for task in connection.tasks:
        task.cancel()
    await asyncio.gather(*connection.tasks, return_exceptions=True)
