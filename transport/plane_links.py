"""A daemon's outbound links, one per plane.

What always holds: only messages that the hub of a plane may say are handed on, what is malformed is
counted and dropped; a renewed link is replaced at once, everything queued in the old one is given
up and its end waited for in the background; what cannot be sent now is reported or raised, never
kept: everything that matters is said again.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import structlog

from transport.envelope import LIMITS, decode, encode, peek
from transport.errors import LinkClosed, LinkError, ProtocolError
from transport.keys import KeyPair
from transport.links import Link, LinkOptions, Network, ServerKeys
from transport.messages import WORK_PLANES, Message, Plane
from transport.permissions import HUB_ROLE, may_send
from transport.reaching import Reaching, what_to_look_at
from transport.runtime.settings import TransportConfig

_HEARTBEATS_MISSED = 3
BULK_MESSAGES = 1000
"""What is under way on the bulk planes is bounded in bytes, by credits; small requests for it must
not be refused because sixteen of them, a plane's own window, are."""

_log = structlog.get_logger()


def link_options(transport: TransportConfig, plane: Plane) -> LinkOptions:
    """The plane's defaults with the deployment's own durations."""
    return LinkOptions.for_plane(plane)._replace(
        heartbeat_s=transport.socket_heartbeat_s,
        heartbeat_timeout_s=_HEARTBEATS_MISSED * transport.socket_heartbeat_s,
        reconnect_max_s=transport.reconnect_max_s,
    )


def bracketed(host: str) -> str:
    """``host`` as it stands before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


class PlaneLinks:
    """One link per plane of ``planes``, to the hubs that ``transport`` names; made inside the
    running loop. ``key`` and ``server_key`` are both None on an open network inside one process."""

    def __init__(
        self,
        network: Network,
        transport: TransportConfig,
        *,
        key: KeyPair | None,
        server_key: str | ServerKeys | None,
        planes: Iterable[Plane] = WORK_PLANES,
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
        self._links: dict[Plane, Link] = {plane: self._open(plane) for plane in planes}
        self._closing: set[asyncio.Task[None]] = set()
        self.counters: Counter[str] = Counter()
        self.bytes_up = 0
        self.bytes_down = 0

    def send(self, plane: Plane, message: Message, payload: Sequence[bytes] = ()) -> bool:
        """Hand a message over; False when that is not possible now."""
        try:
            self.send_or_raise(plane, message, payload)
        except LinkError as error:
            self.counters[f"send.{error.code}"] += 1
            name = type(message).__name__
            _log.debug("link.not_sent", plane=plane.value, message=name, reason=str(error))
            return False
        return True

    def send_or_raise(self, plane: Plane, message: Message, payload: Sequence[bytes] = ()) -> None:
        """Raises what ``Link.send`` raises."""
        frames = encode(message, payload, LIMITS[plane])
        self._links[plane].send(frames)
        self.bytes_up += sum(map(len, frames))

    def connected(self, plane: Plane) -> bool:
        """Whether the plane's link is up now."""
        return self._links[plane].connected

    async def receive(self, plane: Plane, arrived: Callable[[Message, list[bytes]], None]) -> None:
        """Hand on what arrives and may be said here, until the links are closed."""
        while True:
            link = self._links[plane]
            try:
                batch = await link.recv()
            except LinkClosed:
                if self._links[plane] is link:
                    return
                continue
            for frames in batch:
                checked = self._checked(plane, frames)
                if checked is not None:
                    arrived(*checked)

    async def watch(
        self, plane: Plane, changed: Callable[[Plane, bool], None] | None = None
    ) -> None:
        """Report whether the link is up, at first and whenever that changes, until closed; the log
        hears as well, and now and then why a link is not."""
        tell = changed or (lambda _plane, _up: None)
        address = self._address(plane)
        reaching = Reaching(lambda reason: self._not_connected(plane, reason))
        while True:
            link = self._links[plane]
            try:
                if not link.connected:
                    tell(plane, False)
                await reaching.connected(link)
                _log.info("link.up", plane=plane.value, address=address)
                tell(plane, True)
                await link.wait_disconnected()
                _log.warning(
                    "link.down", plane=plane.value, address=address, reason=link.last_failure
                )
            except LinkClosed:
                if self._links[plane] is link:
                    return

    def _not_connected(self, plane: Plane, reason: str) -> None:
        _log.warning(
            "link.not_connected",
            plane=plane.value,
            address=self._address(plane),
            reason=reason,
            remedy=what_to_look_at(reason, "transport.host", f"transport.{plane.value}_port"),
        )

    def renew(self, plane: Plane) -> None:
        """Start again with a new connection."""
        old, self._links[plane] = self._links[plane], self._open(plane)
        # Of one that never was, ``watch`` says more, and more rarely.
        say = _log.warning if old.connected else _log.debug
        say("link.renewed", plane=plane.value, address=self._address(plane))
        task = asyncio.get_running_loop().create_task(old.close(), name=f"close {plane.value}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Give what was sent a moment to leave, then close all."""
        await asyncio.gather(*self._closing, *(link.close() for link in self._links.values()))

    def _checked(self, plane: Plane, frames: list[bytes]) -> tuple[Message, list[bytes]] | None:
        self.bytes_down += sum(map(len, frames))
        try:
            if may_send(HUB_ROLE[plane], plane, peek(frames)):
                return decode(frames, LIMITS[plane])
            self.counters["received.not_allowed"] += 1
        except ProtocolError as error:
            self.counters["received.malformed"] += 1
            _log.warning("link.malformed", plane=plane.value, reason=str(error))
        return None

    def _address(self, plane: Plane) -> str:
        return f"{bracketed(self._transport.host)}:{self._ports[plane]}"

    def _open(self, plane: Plane) -> Link:
        options = link_options(self._transport, plane)
        return self._network.link(
            f"tcp://{self._address(plane)}",
            options._replace(window_messages=BULK_MESSAGES),
            key=self._key,
            server_key=self._server_key,
        )
