"""The relay daemon: chunks for the agents of a region, which cross the ocean once.

What always holds: it listens for keys of its own authorized folder and takes nothing from them but
requests for chunks; towards the weight store it is one more peer with a key of its own that may
ask for chunks; a disk that refuses costs the keeping of chunks, never their delivery; while the
weight store is out of reach for longer than ``GIVE_UP_S``, what is not kept is "not found".

Exit status: 0 asked to stop, 78 (from the command line) wrong configuration.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from transport.chunk_cache import ChunkCache
from transport.chunk_parts import SourceId
from transport.envelope import encode
from transport.errors import ConfigError, LinkError, StoreError
from transport.fair_sender import FairSender
from transport.keys import KeyPair
from transport.links import Network
from transport.messages import Chunk, ChunkRequest, Message, Plane, Role
from transport.permissions import may_send_at_relay
from transport.plane_hub import PlaneHub
from transport.plane_links import PlaneLinks
from transport.relay import Answer, Answers, Relay
from transport.relay_config import RelayConfig
from transport.runtime.clock import Clock, SystemClock
from transport.runtime.files import lock_folder, private_dir
from transport.server_keys import PinnedServerKeys
from transport.source_links import ORIGIN, SourceLinks

PLANE: Final = Plane.WEIGHTS
GIVE_UP_S: Final = 5.0
REPORT_S: Final = 60.0
RECENT_BYTES: Final = 64 * 2**20
"""Chunks in memory: those that were used last, and those that are still to be written."""

_log = structlog.get_logger()


class RelayService:
    """One life of a relay; made inside the running loop."""

    def __init__(
        self, config: RelayConfig, network: Network, clock: Clock, key: KeyPair, folder: Path
    ) -> None:
        """Listen.

        Raises:
            ConfigError: keys are missing, or the address cannot be used.
            StoreError: the cache cannot be opened.
        """
        table = config.relay
        transport = msgspec.structs.replace(config.transport, relays=())
        self._clock = clock
        self._cache = ChunkCache(folder / "chunks", table.cache_bytes)
        self.hub = PlaneHub(
            network,
            PLANE,
            msgspec.structs.replace(transport, host=table.host),
            port=table.port,
            port_file=folder / "port",
            clock=clock,
            key=key,
            may_say=may_send_at_relay,
        )
        server_key = PinnedServerKeys(Path(transport.keys))
        self._links = PlaneLinks(network, transport, key=key, server_key=server_key, planes=[PLANE])
        self._sources = SourceLinks(
            network,
            transport,
            self._links,
            key=key,
            server_key=server_key,
            window_bytes=table.window_bytes,
            clock=clock,
            arrived=self._from_origin,
            changed=self._source_changed,
        )
        self.relay = Relay(self._sources.sources())
        self.relay.source_down(ORIGIN)
        self._sender: FairSender[Answer] = FairSender(self.hub.send_frames, self._frames)
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="chunk-cache")
        self._recent: OrderedDict[bytes, bytes] = OrderedDict()
        self._recent_bytes = 0
        self._unwritten: OrderedDict[bytes, bytes] = OrderedDict()
        self._unwritten_bytes = 0
        self._written = asyncio.Event()
        self._work = asyncio.Event()
        self._up = False
        self._down_since_s = clock.monotonic_s()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``."""
        parts = [asyncio.create_task(part, name=name) for name, part in self._parts().items()]
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([stopping, *parts], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (stopping, *parts):
                task.cancel()
            outcomes = await asyncio.gather(*parts, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(
                outcome, asyncio.CancelledError
            ):
                raise outcome

    async def close(self) -> None:
        await self._sources.close()
        await self._links.close()
        await self.hub.close()
        while self._unwritten:
            await self._write_next()
        await asyncio.to_thread(self._disk.shutdown)

    def _parts(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {
            "requests": self._receive(),
            "keys": self.hub.keep_refreshing(),
            "answers": self._sender.run(),
            "origin": self._links.receive(PLANE, self._from_store),
            "origin's link": self._links.watch(PLANE, self._link_changed),
            "lanes": self._sources.run(),
            "asking": self._ask(),
            "writing": self._write(),
            "report": self._report(),
        }

    # ---- agents ------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            for arrival in await self.hub.recv():
                if isinstance(arrival.message, ChunkRequest):
                    self._answer(self.relay.ask(arrival.route, arrival.message, self._has))
                    self._work.set()

    def _has(self, digest: bytes) -> bool:
        return digest in self._recent or digest in self._unwritten or self._cache.has(digest)

    def _answer(self, answers: Answers) -> None:
        for route, answer in answers:
            self._sender.ask(route, answer)

    async def _frames(self, answer: Answer) -> Sequence[bytes]:
        data = await self._chunk(answer.chunk_digest) if answer.chunk_digest else None
        said = Chunk(
            digest=answer.file_digest,
            index=answer.number,
            part_bytes=answer.part_bytes,
            found=data is not None,
        )
        return encode(said, () if data is None else (data[answer.start : answer.stop],))

    async def _chunk(self, digest: bytes) -> bytes | None:
        data = self._recent.get(digest) or self._unwritten.get(digest)
        if data is None:
            loop = asyncio.get_running_loop()
            data = await loop.run_in_executor(self._disk, self._cache.read, digest)
        if data is not None:
            self._remember(digest, data)
        return data

    def _remember(self, digest: bytes, data: bytes) -> None:
        if digest in self._recent:
            self._recent.move_to_end(digest)
            return
        self._recent[digest] = data
        self._recent_bytes += len(data)
        while self._recent_bytes > RECENT_BYTES:
            _, oldest = self._recent.popitem(last=False)
            self._recent_bytes -= len(oldest)

    # ---- the weight store --------------------------------------------------------------------

    def _from_store(self, message: Message, payload: list[bytes]) -> None:
        if isinstance(message, Chunk):
            self._from_origin(ORIGIN, message, payload)

    def _from_origin(self, source: SourceId, chunk: Chunk, payload: list[bytes]) -> None:
        data = payload[0] if payload else b""
        fetched = self.relay.arrived(source, chunk, data, self._clock.monotonic_s())
        if fetched is not None:
            self._remember(fetched.chunk_digest, fetched.data)
            self._keep(fetched.chunk_digest, fetched.data)
            self._answer(fetched.answers)
        self._work.set()

    def _link_changed(self, plane: Plane, up: bool) -> None:
        self._source_changed(ORIGIN, up)

    def _source_changed(self, source: SourceId, up: bool) -> None:
        for known in self._sources.sources():
            if known.id == source and up:
                self.relay.add_source(known)
        if not up:
            self.relay.source_down(source)
        if source == ORIGIN:
            self._up, self._down_since_s = up, self._clock.monotonic_s()
        self._work.set()

    async def _ask(self) -> None:
        """Keep asking the weight store, and say what cannot be had."""
        while True:
            now = self._clock.monotonic_s()
            for source, request in self.relay.next_requests(now):
                try:
                    self._sources.send(source, request)
                except LinkError as error:
                    _log.debug("relay.not_asked", source=source, reason=str(error))
                    self.relay.source_down(source)
            self._sources.busy(not self.relay.idle)
            self._answer(self.relay.failed())
            if not self._up and now - self._down_since_s >= GIVE_UP_S:
                self._answer(self.relay.give_up())
            deadline = self.relay.next_deadline()
            wait_s = 1.0 if deadline is None else min(1.0, max(0.0, deadline - now))
            try:
                async with asyncio.timeout(wait_s):
                    await self._work.wait()
            except TimeoutError:
                self._revive()
            self._work.clear()

    def _revive(self) -> None:
        """A link that was full, not gone, is asked again."""
        for source in self._sources.sources():
            if self._sources.is_up(source.id) and not self.relay.is_up(source.id):
                self.relay.add_source(source)

    # ---- the disk ----------------------------------------------------------------------------

    def _keep(self, digest: bytes, data: bytes) -> None:
        if self._unwritten_bytes + len(data) > RECENT_BYTES:
            self.relay.counters["not_kept"] += 1  # the disk does not keep up
            return
        if digest not in self._unwritten:
            self._unwritten[digest] = data
            self._unwritten_bytes += len(data)
        self._written.set()

    async def _write(self) -> None:
        while True:
            if not self._unwritten:
                self._written.clear()
                await self._written.wait()
            await self._write_next()

    async def _write_next(self) -> None:
        digest, data = next(iter(self._unwritten.items()))
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._disk, self._cache.write, digest, data)
        except StoreError as error:
            self.relay.counters["not_kept"] += 1
            _log.error("relay.not_kept", reason=str(error))
        del self._unwritten[digest]
        self._unwritten_bytes -= len(data)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            _log.info(
                "relay.state",
                agents=self.hub.peers,
                chunks=len(self._cache),
                cache_bytes=self._cache.used_bytes,
                sent=self._sender.sent,
                down_bytes=self._links.bytes_down + self._sources.bytes_down,
                **self.relay.counters,
            )


def _own_folder(folder: str) -> Path:
    try:
        return private_dir(Path(folder))
    except StoreError as error:
        raise ConfigError(f"relay.folder: {error}") from error


async def run_daemon(
    config: RelayConfig,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[dict[str, Any]], None],
    network: Network | None = None,
    clock: Clock | None = None,
) -> int:
    """Serve until ``stop`` is set; returns the exit status. ``on_ready`` is called once agents can
    connect, whether or not the weight store answers yet.

    Raises:
        ConfigError: settings or keys are wrong.
        StoreError: the folder is in use, or the disk refused.
    """
    if not config.relay.key:
        raise ConfigError("relay.key: name the relay's key file, as in keys/NAME.toml")
    key = KeyPair.load(Path(config.relay.key), "farflow keys create FOLDER --relay NAME")
    if key.role is not Role.RELAY:
        raise ConfigError(
            f"{config.relay.key}: is the key of {key.role.value} {key.name!r}, relay.key needs a "
            "relay's"
        )
    clock = SystemClock() if clock is None else clock
    own_network = network is None
    if network is None:
        from transport.zmq_links import ZmqNetwork

        network = ZmqNetwork()
    try:
        folder = await asyncio.to_thread(_own_folder, config.relay.folder)
        with lock_folder(folder):
            service = RelayService(config, network, clock, key, folder)
            try:
                on_ready({"ready": True, "port": service.hub.port, "relay": key.name})
                _log.info("relay.ready", port=service.hub.port)
                await service.run(stop)
            finally:
                await service.close()
    finally:
        if own_network:
            await network.close()
    return 0
