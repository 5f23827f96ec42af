"""The agent's three outbound links, by plane, and the bodies that leave over one of them.

What always holds: only messages that the other end may say are handed on, what is malformed is
counted and dropped; a renewed link replaces the old one at once and everything queued in the old
one is given up; a body is read from the spool, in a thread, when its turn comes, so that nothing
but the window is in memory.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence

import structlog

from edge_agent.core.events import BodyLost, Event, SendFailed
from edge_agent.spool import Spool
from transport.envelope import LIMITS, decode, encode, peek
from transport.errors import FarflowError, LinkClosed, LinkError, ProtocolError
from transport.keys import KeyPair
from transport.links import Link, LinkOptions, Network
from transport.messages import GroupSummary, Message, Plane, TrajectoryPut
from transport.permissions import HUB_ROLE, may_send
from transport.runtime.settings import TransportConfig

_HEARTBEATS_MISSED = 3

_log = structlog.get_logger()


class AgentLinks:
    """One link per plane; made inside the running loop."""

    def __init__(
        self, network: Network, transport: TransportConfig, *, key: KeyPair, server_key: str
    ) -> None:
        self._network = network
        self._transport = transport
        self._key = key
        self._server_key = server_key
        self._ports = {
            Plane.CONTROL: transport.control_port,
            Plane.TRAJECTORIES: transport.trajectories_port,
            Plane.WEIGHTS: transport.weights_port,
        }
        self._links: dict[Plane, Link] = {plane: self._open(plane) for plane in Plane}
        self._closing: set[asyncio.Task[None]] = set()
        self.counters: Counter[str] = Counter()
        self.bytes_up = 0
        self.bytes_down = 0

    def send(self, plane: Plane, message: Message, payload: Sequence[bytes] = ()) -> None:
        """Hand one message to the link.

        Raises:
            LinkError: it does not take it now.
        """
        frames = encode(message, payload, LIMITS[plane])
        self._links[plane].send(frames)
        self.bytes_up += sum(map(len, frames))

    async def receive(self, plane: Plane, arrived: Callable[[Message, list[bytes]], None]) -> None:
        """Hand on what arrives until the links are closed."""
        while True:
            link = self._links[plane]
            try:
                batch = await link.recv()
            except LinkClosed:
                if self._links[plane] is link:
                    return
                continue
            for frames in batch:
                self.bytes_down += sum(map(len, frames))
                try:
                    if may_send(HUB_ROLE[plane], plane, peek(frames)):
                        arrived(*decode(frames, LIMITS[plane]))
                    else:
                        self.counters["received.not_allowed"] += 1
                except ProtocolError as error:
                    self.counters["received.malformed"] += 1
                    _log.warning("link.malformed", plane=plane.value, reason=str(error))

    async def watch(self, plane: Plane, changed: Callable[[Plane, bool], None]) -> None:
        """Report whether the link is up, at first and whenever that changes, until closed."""
        while True:
            link = self._links[plane]
            try:
                if not link.connected:
                    changed(plane, False)
                await link.wait_connected()
                _log.info("link.up", plane=plane.value)
                changed(plane, True)
                await link.wait_disconnected()
                _log.warning("link.down", plane=plane.value, reason=link.last_failure)
            except LinkClosed:
                if self._links[plane] is link:
                    return

    def renew(self, plane: Plane) -> None:
        """Start again with a new connection."""
        old, self._links[plane] = self._links[plane], self._open(plane)
        task = asyncio.get_running_loop().create_task(old.close(), name=f"close {plane.value}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        _log.info("link.renewed", plane=plane.value)

    async def close(self) -> None:
        """Give what was sent a moment to leave, then close all."""
        await asyncio.gather(*self._closing, *(link.close() for link in self._links.values()))

    def _open(self, plane: Plane) -> Link:
        transport = self._transport
        options = LinkOptions.for_plane(plane)._replace(
            # What is under way is bounded by our credits, in bytes; small requests must not be
            # refused because sixteen of them are.
            window_messages=1000,
            heartbeat_s=transport.socket_heartbeat_s,
            heartbeat_timeout_s=_HEARTBEATS_MISSED * transport.socket_heartbeat_s,
            reconnect_max_s=transport.reconnect_max_s,
        )
        host = f"[{transport.host}]" if ":" in transport.host else transport.host
        return self._network.link(
            f"tcp://{host}:{self._ports[plane]}",
            options,
            key=self._key,
            server_key=self._server_key,
        )


class Uploader:
    """Sends spooled bodies in the order asked for; what does not work out comes back as an event.

    The core never has more than its window under way, so the queue is bounded by that.
    """

    def __init__(self, links: AgentLinks, spool: Spool, feed: Callable[[Event], None]) -> None:
        self._links = links
        self._spool = spool
        self._feed = feed
        self._queue: deque[GroupSummary] = deque()
        self._filled = asyncio.Event()

    def put(self, summary: GroupSummary) -> None:
        """Send this body in its turn."""
        self._queue.append(summary)
        self._filled.set()

    def clear(self) -> None:
        """The link is new: what was to be sent is asked for again."""
        self._queue.clear()

    async def run(self) -> None:
        """Send, until cancelled."""
        while True:
            self._filled.clear()
            while self._queue:
                await self._send(self._queue.popleft())
            await self._filled.wait()

    async def _send(self, summary: GroupSummary) -> None:
        message = TrajectoryPut(summary=summary)
        try:
            body = await asyncio.to_thread(self._spool.read, summary.digest)
            self._links.send(Plane.TRAJECTORIES, message, (body,))
        except LinkError:
            self._feed(SendFailed(plane=Plane.TRAJECTORIES, message=message))
        except FarflowError as error:
            if not self._spool.has(summary.digest):
                return  # dropped while it waited here
            _log.error("spool.body_lost", attempt=summary.attempt, reason=str(error))
            self._feed(
                BodyLost(
                    attempt=summary.attempt,
                    digest=summary.digest,
                    code=error.code,
                    detail=str(error),
                )
            )
