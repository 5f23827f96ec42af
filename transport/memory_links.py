"""Links inside one process: queues with the rules of ``transport.links`` and no sockets.

For tests and for running daemons on a virtual clock. What a real link does by the network's doing
happens at once here: a message is in the other end's queue when ``send`` returns, a closed end is
unreachable immediately. Keys are compared, not proved.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from transport.errors import (
    ConfigError,
    LinkClosed,
    LocalProtocolError,
    PeerUnreachable,
    WindowFull,
)
from transport.keys import KeyPair
from transport.links import (
    Admit,
    Authorise,
    Inbound,
    LinkOptions,
    ServerKeys,
    check_frames,
    key_candidates,
)

ADDRESS = "memory"
"""Where every peer of this network is."""

T = TypeVar("T")


class _Inbox(Generic[T]):
    """A queue with one receiver."""

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._waiting: deque[T] = deque()
        self._filled = asyncio.Event()
        self._receiving = False
        self.closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, message: T) -> None:
        self._waiting.append(message)
        self._filled.set()

    def keep(self, wanted: Callable[[T], bool]) -> int:
        """Drop the rest; returns how many."""
        before = len(self._waiting)
        self._waiting = deque(message for message in self._waiting if wanted(message))
        return before - len(self._waiting)

    async def get(self) -> list[T]:
        if self._receiving:
            raise LocalProtocolError("two tasks receive on one link")
        self._receiving = True
        try:
            while True:
                await asyncio.sleep(0)
                self.require_open()
                if self._waiting:
                    count = min(len(self._waiting), self._max_batch)
                    return [self._waiting.popleft() for _ in range(count)]
                self._filled.clear()
                await self._filled.wait()
        finally:
            self._receiving = False

    def close(self) -> None:
        self.closed = True
        self._filled.set()

    def require_open(self) -> None:
        if self.closed:
            raise LinkClosed("the link is closed")


class MemoryHub:
    """Made by ``MemoryNetwork.hub``."""

    def __init__(
        self,
        network: "MemoryNetwork",
        endpoint: str,
        port: int,
        options: LinkOptions,
        key: KeyPair | None,
        authorise: Authorise | None,
        admit: Admit | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.port = port
        self.handshake_failures = 0
        self.hung_up = 0
        self.last_failure = ""
        self.dropped = 0
        self._network = network
        self._options = options
        self._key = key
        self._authorise = authorise
        self._admit = admit
        self._inbox: _Inbox[Inbound] = _Inbox(options.max_batch)
        self._links: dict[bytes, MemoryLink] = {}
        self._queued: dict[bytes, int] = {}

    @property
    def peers(self) -> int:
        return len(self._links)

    def reachable(self, route: bytes) -> bool:
        return route in self._links

    def send(self, route: bytes, frames: Sequence[bytes]) -> None:
        self._inbox.require_open()
        check_frames(frames, self._options)
        link = self._links.get(route)
        if link is None:
            raise PeerUnreachable(f"no connection of route {route.hex()}")
        link.deliver(frames)

    async def recv(self) -> list[Inbound]:
        batch = await self._inbox.get()
        for message in batch:
            if message.route in self._queued:
                self._queued[message.route] -= 1
        return batch

    def disconnect(self, identity: str) -> None:
        for link in [link for link in self._links.values() if link.identity == identity]:
            link.drop()
        if self._authorise is not None and self._authorise(identity) is None:
            self.dropped += self._inbox.keep(lambda message: message.identity != identity)

    async def close(self) -> None:
        if self._inbox.closed:
            return
        self._inbox.close()
        self._network.forget_hub(self)
        for link in list(self._links.values()):
            link.drop()

    # ---- called by the links

    def refusal(self, identity: str, server_keys: tuple[str, ...]) -> str:
        """Why this key may not connect; "" when it may."""
        if (not server_keys) != (self._key is None):
            return "one side uses keys and the other does not"
        if self._key is not None and self._key.public_key not in server_keys:
            return "the hub has another server key"
        if self._admit is not None and not self._admit(ADDRESS):
            return "too many connections; try later"
        if self._authorise is not None and self._authorise(identity) is None:
            return f"key {identity} is not authorised"
        return ""

    def refuse(self, reason: str) -> None:
        self.handshake_failures += 1
        self.last_failure = reason

    def attach(self, route: bytes, link: "MemoryLink") -> None:
        self._links[route] = link
        self._queued[route] = 0

    def detach(self, route: bytes) -> None:
        self._links.pop(route, None)
        self._queued.pop(route, None)

    def deliver(self, route: bytes, identity: str, frames: Sequence[bytes]) -> None:
        if self._queued[route] >= self._options.window_messages:
            raise WindowFull(f"{self.endpoint} does not keep up")
        self._queued[route] += 1
        self._inbox.put(Inbound(route, identity, [bytes(frame) for frame in frames]))


class MemoryLink:
    """Made by ``MemoryNetwork.link``."""

    def __init__(
        self,
        network: "MemoryNetwork",
        endpoint: str,
        options: LinkOptions,
        key: KeyPair | None,
        server_key: str | ServerKeys | None,
    ) -> None:
        self.endpoint = endpoint
        self.identity = key.public_key if key is not None else ""
        self.handshake_failures = 0
        self.last_failure = ""
        self._network = network
        self._options = options
        self._server_key = server_key
        self._inbox: _Inbox[list[bytes]] = _Inbox(options.max_batch)
        self._hub: MemoryHub | None = None
        self._route = b""
        self._up = asyncio.Event()
        self._down = asyncio.Event()
        self._down.set()
        self._retry: asyncio.TimerHandle | None = None
        self._retry_s = options.reconnect_s

    @property
    def connected(self) -> bool:
        return self._hub is not None

    async def why(self) -> str:
        return self.last_failure

    async def wait_connected(self) -> None:
        self._inbox.require_open()
        await self._up.wait()
        self._inbox.require_open()

    async def wait_disconnected(self) -> None:
        self._inbox.require_open()
        await self._down.wait()
        self._inbox.require_open()

    def send(self, frames: Sequence[bytes]) -> None:
        self._inbox.require_open()
        check_frames(frames, self._options)
        if self._hub is None:
            raise PeerUnreachable(f"{self.endpoint} is not connected")
        self._hub.deliver(self._route, self.identity, frames)

    async def recv(self) -> list[list[bytes]]:
        return await self._inbox.get()

    async def close(self) -> None:
        if self._inbox.closed:
            return
        self._inbox.close()
        self.drop()
        self._up.set()
        self._network.forget_link(self)

    # ---- called by the hub and the network

    def connect(self) -> None:
        """Connect now, or again after a growing delay."""
        self._retry = None
        hub = self._network.hub_at(self.endpoint)
        if hub is not None:
            reason = hub.refusal(self.identity, key_candidates(self._server_key))
            if not reason:
                self._hub = hub
                self._route = self._network.next_route()
                self._retry_s = self._options.reconnect_s
                hub.attach(self._route, self)
                self._down.clear()
                self._up.set()
                return
            hub.refuse(reason)
            self.handshake_failures += 1
            self.last_failure = reason
        self._connect_later()

    def drop(self) -> None:
        """Lose the connection and, unless closed, try again."""
        if self._retry is not None:
            self._retry.cancel()
        if self._hub is not None:
            self._hub.detach(self._route)
        self._hub = None
        self._up.clear()
        self._down.set()
        if not self._inbox.closed:
            self._connect_later()

    def deliver(self, frames: Sequence[bytes]) -> None:
        if len(self._inbox) >= self._options.window_messages:
            raise WindowFull(f"route {self._route.hex()} does not keep up")
        self._inbox.put([bytes(frame) for frame in frames])

    def _connect_later(self) -> None:
        self._retry = asyncio.get_running_loop().call_later(self._retry_s, self.connect)
        self._retry_s = min(2 * self._retry_s, self._options.reconnect_max_s)


class MemoryNetwork:
    """Hubs and links of one event loop, by endpoint; any text is an endpoint."""

    def __init__(self) -> None:
        self._hubs: dict[str, MemoryHub] = {}
        self._links: dict[MemoryLink, None] = {}
        self._last_route = 0
        self._last_port = 0

    def hub(
        self,
        endpoint: str,
        options: LinkOptions,
        *,
        key: KeyPair | None = None,
        authorise: Authorise | None = None,
        admit: Admit | None = None,
    ) -> MemoryHub:
        if (key is None) != (authorise is None):
            raise ConfigError(f"hub {endpoint}: give both key and authorise, or none")
        self._last_port += 1
        if endpoint.endswith(":0"):
            endpoint = f"{endpoint[:-1]}{self._last_port}"
        if endpoint in self._hubs:
            raise ConfigError(f"hub {endpoint}: in use; choose another address or port")
        hub = MemoryHub(self, endpoint, self._last_port, options, key, authorise, admit)
        self._hubs[endpoint] = hub
        return hub

    def link(
        self,
        endpoint: str,
        options: LinkOptions,
        *,
        key: KeyPair | None = None,
        server_key: str | ServerKeys | None = None,
    ) -> MemoryLink:
        if (key is None) != (server_key is None):
            raise ConfigError(f"link {endpoint}: give both key and server_key, or none")
        link = MemoryLink(self, endpoint, options, key, server_key)
        self._links[link] = None
        link.connect()
        return link

    async def close(self) -> None:
        for link in list(self._links):
            await link.close()
        for hub in list(self._hubs.values()):
            await hub.close()

    # ---- called by hubs and links

    def hub_at(self, endpoint: str) -> MemoryHub | None:
        return self._hubs.get(endpoint)

    def next_route(self) -> bytes:
        self._last_route += 1
        return b"\0" + self._last_route.to_bytes(4, "big")

    def forget_hub(self, hub: MemoryHub) -> None:
        self._hubs.pop(hub.endpoint, None)

    def forget_link(self, link: MemoryLink) -> None:
        self._links.pop(link, None)
