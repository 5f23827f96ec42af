"""The weight store: versions from trainers to disk, from there to agents. A process of its own, so
that no push ever holds up a decision.

What always holds: an agent's request stands until it was answered or the agent went away, so a new
version starts to flow the moment it is durable; chunks and plans go to the agents in turn, and one
that does not keep up delays nobody; the scheduler is told of every version until it has it in its
own store; of what is asked for, only what a link can take is held in memory.

Requests are answered with what is on disk; what is damaged there is not offered.
"""

import asyncio
import os
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog

from scheduler.config import SchedulerConfig
from scheduler.core.settings import WEIGHT_STORE
from scheduler.service import Surroundings, Worker, run_service
from scheduler.service_main import service_command
from scheduler.weight_http import weight_http
from scheduler.weight_intake import Intake, Trust
from scheduler.weight_keeper import Keeper
from scheduler.weight_plans import PlanFor, Planner
from scheduler.weight_versions import WeightVersions
from transport.chunk_parts import MAX_INDICES, ChunkKey, place_of
from transport.envelope import encode
from transport.errors import LocalProtocolError
from transport.fair_sender import FairSender
from transport.links import Network
from transport.messages import (
    Chunk,
    ChunkRequest,
    Message,
    Plane,
    VersionAccepted,
    VersionOffer,
    VersionStored,
    WeightsRequest,
)
from transport.plane_hub import Arrival
from transport.runtime.clock import Clock
from transport.runtime.files import private_dir
from transport.weights.manifest import VersionManifest

CACHE_BYTES: Final = 64 * 2**20
"""Chunks read lately: agents fetch the same version at about the same time."""

AHEAD_CHUNKS: Final = 4
"""Read before they are asked for."""

MAX_THREADS: Final = 4
"""For decoding a version that came in: agents wait for it."""

ANNOUNCE_WINDOW: Final = 64
ANNOUNCE_AGAIN_S: Final = 5.0

_log = structlog.get_logger()


class _PieceOf(NamedTuple):
    """A chunk, or the part of one that ``number`` is with ``part_bytes``."""

    digest: str
    number: int
    part_bytes: int


class WeightStore:
    """The service's work; see ``scheduler.service``."""

    def __init__(self, surroundings: Surroundings) -> None:
        """Load what is on disk, which may take a while.

        Raises:
            StoreError: the folder is used by another process, or the disk refuses.
            ConfigError: the files over HTTP are asked for and cannot be served.
        """
        config = surroundings.config
        folder = private_dir(surroundings.folder / "versions")
        self._hub = surroundings.hub
        self._clock = surroundings.clock
        self._tell = surroundings.tell
        trust = Trust(Path(config.transport.keys) / "signers", self._clock)
        trust.look()
        self._versions = WeightVersions(
            folder,
            trusted=trust.signers,
            cumulative_every=config.scheduler.cumulative_every_versions,
            keep_versions=config.scheduler.keep_versions,
            keep_versions_max=config.scheduler.keep_versions_max,
            threads=min(MAX_THREADS, os.cpu_count() or 1),
        )
        self._http = weight_http(config.scheduler, surroundings.folder, self._versions.is_damaged)
        self._library = Worker("weight-library")
        self._reader = Worker("weight-reader")
        self._intake = Intake(
            self._hub, self._versions, self._library, trust, self._clock, self._on_durable
        )
        self._sender: FairSender[_PieceOf | PlanFor] = FairSender(
            self._hub.send_frames, self._frames, self._on_sent
        )
        cpu_share = config.scheduler.composite_cpu_share
        self._planner = Planner(
            self._versions,
            self._library,
            self._clock,
            ready=lambda key: self._sender.ask(key.route, key),
            trouble=lambda policy, urgent: self._keeper.has_changed(policy, urgent=urgent),
            bridges=cpu_share > 0,
        )
        self._keeper = Keeper(
            self._versions,
            self._library,
            self._planner,
            self._clock,
            cpu_share=cpu_share,
            uploading=self._intake.uploading,
        )
        self._chunks: OrderedDict[ChunkKey, bytes] = OrderedDict()
        self._chunk_bytes = 0
        self._ahead: dict[ChunkKey, asyncio.Task[bytes | None]] = {}
        self._unaccepted: dict[tuple[str, int], VersionStored] = {}
        self._announced: dict[tuple[str, int], float] = {}
        self.counters: Counter[str] = Counter()
        for policy in self._versions.policies():
            self._keeper.has_changed(policy)
            for manifest in self._versions.versions(policy):
                self._unaccepted[policy, manifest.version] = _stored(manifest)
        self._keeper.log_warnings()
        _log.info("weight_store.opened", versions=len(self._unaccepted))

    # ---- what arrives -------------------------------------------------------------------------

    def arrived(self, arrival: Arrival) -> None:
        peer = arrival.peer
        match arrival.message:
            case WeightsRequest() as request:
                self._planner.request(arrival.route, peer.name, request)
            case ChunkRequest(digest=digest, indices=indices, part_bytes=part_bytes):
                for index in indices[:MAX_INDICES]:
                    self._sender.ask(arrival.route, _PieceOf(digest, index, part_bytes))
            case VersionOffer() as offer if peer.policy is not None:
                self._intake.offered(arrival.route, peer.policy, offer)
            case Chunk() as chunk if peer.policy is not None:
                self._intake.chunk_arrived(peer.policy, chunk, arrival.payload)
            case _:
                self.counters["not_understood"] += 1

    async def has_room(self) -> None:
        """Everything that arrives is bounded where it is kept."""

    def welcomed(self) -> None:
        self._announced.clear()
        self._announce()

    def from_scheduler(self, message: Message) -> None:
        match message:
            case VersionAccepted(policy=policy, version=version):
                self._unaccepted.pop((policy, version), None)
                self._announced.pop((policy, version), None)
                self._announce()
            case _:
                self.counters["not_understood"] += 1

    def _on_durable(self, manifest: VersionManifest) -> None:
        self._keeper.used(manifest.policy)
        self._keeper.has_changed(manifest.policy)
        self._unaccepted[manifest.policy, manifest.version] = _stored(manifest)
        self._announce()
        self._planner.changed(manifest.policy)

    # ---- answers ------------------------------------------------------------------------------

    async def _frames(self, piece: _PieceOf | PlanFor) -> Sequence[bytes]:
        if isinstance(piece, PlanFor):
            return self._planner.frames(piece)
        data = await self._piece(piece)
        found = bool(data)
        if not found:
            self.counters["chunk_not_found"] += 1
        answer = Chunk(
            digest=piece.digest, index=piece.number, found=found, part_bytes=piece.part_bytes
        )
        return encode(answer, (data,) if found else ())

    async def _piece(self, piece: _PieceOf) -> bytes:
        """Its bytes, none when there is no such piece (any more). Chunks are read whole, so that
        what is sent was verified."""
        chunk_bytes = self._versions.chunk_bytes(piece.digest)
        place = place_of(piece.number, piece.part_bytes, chunk_bytes or 0)
        if not chunk_bytes or place is None:
            return b""
        key = (piece.digest, place.number)
        data = self._chunks.get(key)
        if data is None:
            reading = self._ahead.pop(key, None) or self._read(key)
            following = (piece.digest, place.number + 1)
            if following not in self._chunks and following not in self._ahead:
                self._ahead[following] = self._read(following)  # while this one is sent
            while len(self._ahead) > AHEAD_CHUNKS:
                del self._ahead[next(iter(self._ahead))]
            data = await reading
            if data is None:
                self._keeper.look_after_damage()
                return b""
            self._keep(key, data)
        else:
            self._chunks.move_to_end(key)
        return data[place.start : place.stop] if piece.part_bytes else data

    def _read(self, key: ChunkKey) -> asyncio.Task[bytes | None]:
        loop = asyncio.get_running_loop()
        return loop.create_task(self._reader.run(self._versions.read_chunk, *key), name="read")

    def _keep(self, key: ChunkKey, data: bytes) -> None:
        self._chunks[key] = data
        self._chunk_bytes += len(data)
        while self._chunk_bytes > CACHE_BYTES:
            _, oldest = self._chunks.popitem(last=False)
            self._chunk_bytes -= len(oldest)

    def _on_sent(self, piece: _PieceOf | PlanFor) -> None:
        if isinstance(piece, PlanFor):
            for ahead in self._planner.sent(piece):
                for index in ahead.indices:
                    wanted = _PieceOf(ahead.digest, index, ahead.part_bytes)
                    self._sender.ask(piece.route, wanted)

    # ---- the background -----------------------------------------------------------------------

    def parts(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {
            "answers": self._sender.run(),
            "announcements": self._announce_again(),
            "plans": self._planner.run(),
            "upkeep": self._keeper.run(),
            **self._intake.parts(),
            **({} if self._http is None else {"http": self._http.run()}),
        }

    async def close(self) -> None:
        await self._intake.close()
        await self._keeper.close()
        await asyncio.gather(*self._ahead.values(), return_exceptions=True)
        await asyncio.to_thread(self._library.close)
        await asyncio.to_thread(self._reader.close)

    async def _announce_again(self) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_AGAIN_S)
            before = self._clock.monotonic_s() - ANNOUNCE_AGAIN_S
            for key in [key for key, at_s in self._announced.items() if at_s <= before]:
                del self._announced[key]
            self._announce()

    def _announce(self) -> None:
        now = self._clock.monotonic_s()
        for key, stored in list(islice(self._unaccepted.items(), 2 * ANNOUNCE_WINDOW)):
            if len(self._announced) >= ANNOUNCE_WINDOW:
                return
            if key in self._announced:
                continue
            try:
                if not self._tell(stored):
                    return
            except LocalProtocolError as error:  # it must not silence the others
                _log.error("version.not_announced", version=stored.version, reason=str(error))
                del self._unaccepted[key]
                continue
            self._announced[key] = now


def _stored(manifest: VersionManifest) -> VersionStored:
    return VersionStored(
        policy=manifest.policy,
        version=manifest.version,
        parent=manifest.parent,
        step=manifest.step,
        digest=manifest.digest,
        delta_bytes=sum(entry.size_bytes for entry in manifest.of_kind("delta")),
        full_bytes=manifest.full_bytes,
    )


async def serve(
    config: SchedulerConfig,
    *,
    network: Network,
    clock: Clock,
    rng: random.Random,
    stop: asyncio.Event,
    on_ready: Callable[[dict[str, Any]], None],
) -> int:
    """Run the weight store until ``stop``; see ``run_service``."""
    return await run_service(
        WEIGHT_STORE,
        Plane.WEIGHTS,
        config,
        WeightStore,
        port=config.transport.weights_port,
        network=network,
        clock=clock,
        rng=rng,
        stop=stop,
        on_ready=on_ready,
    )


if __name__ == "__main__":
    service_command(WEIGHT_STORE, serve)()
