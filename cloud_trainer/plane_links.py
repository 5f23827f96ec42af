"""The trainer's three links, by plane.

What always holds: only messages that the other end may say are handed on; a link that is renewed
is closed in the background and its successor is used at once; what cannot be sent now is dropped
and counted, because everything that matters is said again.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import structlog

from transport.envelope import LIMITS, decode, encode, peek
from transport.errors import ConfigError, LinkClosed, LinkError, ProtocolError
from transport.keys import KeyPair, PublicKey, SigningKey, load_toml, trainer_name
from transport.links import Link, LinkOptions, Network
from transport.messages import Message, Plane
from transport.permissions import HUB_ROLE, may_send
from transport.runtime.settings import TransportConfig
from transport.weights.manifest import SigningKey as ManifestSigner

_HEARTBEATS_MISSED = 3

_log = structlog.get_logger()


class TrainerKeys(NamedTuple):
    """Our own pair and the scheduler's public key (both None on an open network inside one
    process), and what signs manifests."""

    link: KeyPair | None
    server: str | None
    signer: ManifestSigner


def load_keys(transport: TransportConfig, policy: str, *, link: str, signing: str) -> TrainerKeys:
    """The keys of the trainer of ``policy``; empty paths mean the usual files in the keys folder.

    Raises:
        ConfigError: a file is missing, or belongs to another policy.
    """
    folder, name = Path(transport.keys), trainer_name(policy)
    signing_path = Path(signing) if signing else folder / "signing" / f"{name}.toml"
    signing_key = SigningKey.load(signing_path)
    if signing_key.policy != policy:
        raise ConfigError(
            f"{signing_path}: signs for {signing_key.policy}, trainer.policy is {policy}"
        )
    signer = ManifestSigner(signing_key.secret_key)
    link_path = Path(link) if link else folder / f"{name}.toml"
    pair = KeyPair.load(link_path)
    if pair.policy != policy:
        raise ConfigError(f"{link_path}: is the key of {pair.policy}, trainer.policy is {policy}")
    server = load_toml(folder / "server.public.toml", PublicKey).public_key
    return TrainerKeys(pair, server, signer)


class PlaneLinks:
    """One link per plane; made inside the running loop."""

    def __init__(self, network: Network, transport: TransportConfig, keys: TrainerKeys) -> None:
        self._network = network
        self._transport = transport
        self._keys = keys
        self._ports = {
            Plane.CONTROL: transport.control_port,
            Plane.TRAJECTORIES: transport.trajectories_port,
            Plane.WEIGHTS: transport.weights_port,
        }
        self._links: dict[Plane, Link] = {plane: self._open(plane) for plane in Plane}
        self._closing: set[asyncio.Task[None]] = set()
        self.counters: Counter[str] = Counter()

    def send(self, plane: Plane, message: Message) -> bool:
        """Hand a message over; False when that is not possible now."""
        try:
            self.send_or_raise(plane, message)
        except LinkError as error:
            self.counters[f"send.{error.code}"] += 1
            _log.debug(
                "link.not_sent", plane=plane.value, message=type(message).__name__,
                reason=str(error),
            )  # fmt: skip
            return False
        return True

    def send_or_raise(self, plane: Plane, message: Message, payload: Sequence[bytes] = ()) -> None:
        """Raises what ``Link.send`` raises."""
        self._links[plane].send(encode(message, payload, LIMITS[plane]))

    async def receive(self, plane: Plane) -> list[tuple[Message, list[bytes]]]:
        """At least nothing: what arrived and may be said here.

        Raises:
            LinkClosed: after ``close``.
        """
        link = self._links[plane]
        try:
            batch = await link.recv()
        except LinkClosed:
            if self._links[plane] is link:
                raise
            return []
        arrived = []
        for frames in batch:
            try:
                if not may_send(HUB_ROLE[plane], plane, peek(frames)):
                    self.counters["received.not_allowed"] += 1
                    continue
                arrived.append(decode(frames, LIMITS[plane]))
            except ProtocolError as error:
                self.counters["received.malformed"] += 1
                _log.warning("link.malformed", plane=plane.value, reason=str(error))
        return arrived

    def renew(self, plane: Plane) -> None:
        """Start again with a new connection."""
        old, self._links[plane] = self._links[plane], self._open(plane)
        task = asyncio.get_running_loop().create_task(old.close(), name=f"close {plane.value}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Give what was sent a moment to leave, then close all."""
        await asyncio.gather(*self._closing, *(link.close() for link in self._links.values()))

    def _open(self, plane: Plane) -> Link:
        transport = self._transport
        options = LinkOptions.for_plane(plane)._replace(
            # What we say on the bulk planes are small requests, or chunks that the store's credit
            # bounds; in a window of sixteen, bodies asked for one by one had no room under load.
            window_messages=1000,
            heartbeat_s=transport.socket_heartbeat_s,
            heartbeat_timeout_s=_HEARTBEATS_MISSED * transport.socket_heartbeat_s,
            reconnect_max_s=transport.reconnect_max_s,
        )
        host = f"[{transport.host}]" if ":" in transport.host else transport.host
        return self._network.link(
            f"tcp://{host}:{self._ports[plane]}",
            options,
            key=self._keys.link,
            server_key=self._keys.server,
        )
