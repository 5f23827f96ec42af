"""The weight store: versions from trainers to disk, from there to agents. A process of its own, so
that no push ever holds up a decision.

What always holds: an agent's request stands until it was answered or the agent went away, so a new
version starts to flow the moment it is durable; chunks and plans go to the agents in turn, and one
that does not keep up delays nobody; the scheduler is told of every version until it has it in its
own store; of what is asked for, only what a link can take is held in memory.

Requests are answered with what is on disk; what is damaged there is not offered.
"""

import asyncio
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog

from scheduler.config import SchedulerConfig
from scheduler.fair_sender import FairSender
from scheduler.plane_hub import Arrival
from scheduler.service import Surroundings, Worker, run_service
from scheduler.service_main import service_command
from scheduler.weight_intake import Intake, Trust
from scheduler.weight_versions import WeightVersions
from transport.chunks import MAX_INDICES
from transport.envelope import LIMITS, encode
from transport.errors import LocalProtocolError, StoreError
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
from transport.runtime.clock import Clock
from transport.runtime.files import private_dir
from transport.weights.manifest import VersionManifest

NAME: Final = "weight-store"

CACHE_BYTES: Final = 64 * 2**20
"""Chunks read lately: agents fetch the same version at about the same time."""

CACHED_PLANS: Final = 256
FORGET_S: Final = 60.0
"""Agents repeat a standing request every few seconds; after so long it is not theirs any more."""

MAX_STANDING: Final = 100_000
ANNOUNCE_WINDOW: Final = 64
ANNOUNCE_AGAIN_S: Final = 5.0
MAINTAIN_S: Final = 5.0

_log = structlog.get_logger()


class _ChunkOf(NamedTuple):
    digest: str
    number: int


class _PlanFor(NamedTuple):
    """The answer to a route's standing request, worked out when it is its turn."""

    route: bytes
    policy: str


class _Standing(NamedTuple):
    request: WeightsRequest
    agent: str
    at_s: float


class WeightStore:
    """The service's work; see ``scheduler.service``."""

    def __init__(self, surroundings: Surroundings) -> None:
        """Load what is on disk, which may take a while.

        Raises:
            StoreError: the folder is used by another process, or the disk refuses.
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
            snapshot_every=config.scheduler.cumulative_every_versions,
            keep_versions=config.scheduler.keep_versions,
        )
        self._library = Worker("weight-library")
        self._reader = Worker("weight-reader")
        self._intake = Intake(
            self._hub, self._versions, self._library, trust, self._clock, self._on_durable
        )
        self._sender: FairSender[_ChunkOf | _PlanFor] = FairSender(
            self._hub.send_frames, self._frames, self._on_sent
        )
        self._standing: dict[_PlanFor, _Standing] = {}
        self._held: dict[tuple[str, str], tuple[int | None, float]] = {}  # by policy and agent
        self._plans: OrderedDict[tuple[object, ...], list[bytes]] = OrderedDict()
        self._changes = 0
        self._chunks: OrderedDict[_ChunkOf, bytes] = OrderedDict()
        self._chunk_bytes = 0
        self._unaccepted: dict[tuple[str, int], VersionStored] = {}
        self._announced: dict[tuple[str, int], float] = {}
        self._dirty: set[str] = set()
        self.counters: Counter[str] = Counter()
        for policy in self._versions.policies():
            self._dirty.add(policy)
            for manifest in self._versions.versions(policy):
                self._unaccepted[policy, manifest.version] = _stored(manifest)
        self._log_warnings()
        _log.info("weight_store.opened", versions=len(self._unaccepted))

    # ---- what arrives -------------------------------------------------------------------------

    def arrived(self, arrival: Arrival) -> None:
        peer = arrival.peer
        match arrival.message:
            case WeightsRequest() as request:
                self._request(arrival.route, peer.name, request)
            case ChunkRequest(digest=digest, indices=indices):
                for index in indices[:MAX_INDICES]:
                    self._sender.ask(arrival.route, _ChunkOf(digest, index))
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

    def _request(self, route: bytes, agent: str, request: WeightsRequest) -> None:
        key = _PlanFor(route, request.policy)
        if key not in self._standing and len(self._standing) >= MAX_STANDING:
            self.counters["too_many_requests"] += 1
            return
        now = self._clock.monotonic_s()
        self._standing[key] = _Standing(request, agent, now)
        self._held[request.policy, agent] = (request.have_version, now)
        self._sender.ask(route, key)

    def _on_durable(self, manifest: VersionManifest) -> None:
        self._changed()
        self._dirty.add(manifest.policy)
        self._unaccepted[manifest.policy, manifest.version] = _stored(manifest)
        self._announce()
        for key in self._standing:
            if key.policy == manifest.policy:
                self._sender.ask(key.route, key)

    # ---- answers ------------------------------------------------------------------------------

    async def _frames(self, piece: _ChunkOf | _PlanFor) -> Sequence[bytes]:
        if isinstance(piece, _PlanFor):
            return await self._plan_frames(piece)
        data = self._chunks.get(piece)
        if data is None:
            data = await self._reader.run(self._versions.read_chunk, piece.digest, piece.number)
            if data is None:
                self.counters["chunk_not_found"] += 1
                return encode(Chunk(digest=piece.digest, index=piece.number, found=False))
            self._keep(piece, data)
        else:
            self._chunks.move_to_end(piece)
        return encode(Chunk(digest=piece.digest, index=piece.number), (data,))

    def _keep(self, piece: _ChunkOf, data: bytes) -> None:
        self._chunks[piece] = data
        self._chunk_bytes += len(data)
        while self._chunk_bytes > CACHE_BYTES:
            _, oldest = self._chunks.popitem(last=False)
            self._chunk_bytes -= len(oldest)

    async def _plan_frames(self, piece: _PlanFor) -> Sequence[bytes]:
        """Frames of the plan that a standing request is due, none when there is nothing new."""
        while (standing := self._standing.get(piece)) is not None:
            asked = standing.request
            key = (asked.policy, asked.have_version, asked.have_digest, asked.upto)
            frames = self._plans.get(key)
            if frames is not None:
                return frames
            changes = self._changes
            frames = await self._library.run(self._make_plan, asked)
            if changes == self._changes:  # else what was worked out is out of date
                self._plans[key] = frames
                if len(self._plans) > CACHED_PLANS:
                    self._plans.popitem(last=False)
        return ()

    def _changed(self) -> None:
        """There is something new to plan with, or less of the old."""
        self._changes += 1
        self._plans.clear()

    def _make_plan(self, asked: WeightsRequest) -> list[bytes]:
        """In the library's thread."""
        try:
            plan = self._versions.plan(
                asked.policy, asked.have_version, asked.have_digest, asked.upto
            )
            return [] if plan is None else encode(plan, limits=LIMITS[Plane.WEIGHTS])
        except (StoreError, LocalProtocolError) as error:
            _log.warning("weights.no_plan", policy=asked.policy, upto=asked.upto, reason=str(error))
            return []

    def _on_sent(self, piece: _ChunkOf | _PlanFor) -> None:
        if isinstance(piece, _PlanFor):
            # The agent asks again when it has applied the plan, or when the plan got lost.
            self._standing.pop(piece, None)

    # ---- the background -----------------------------------------------------------------------

    def parts(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {
            "answers": self._sender.run(),
            "announcements": self._announce_again(),
            "upkeep": self._maintain(),
            **self._intake.parts(),
        }

    async def close(self) -> None:
        await self._intake.close()
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

    async def _maintain(self) -> None:
        """Snapshots and retention, apart from the arrival of versions."""
        while True:
            await asyncio.sleep(MAINTAIN_S)
            self._forget_silent()
            policies, self._dirty = sorted(self._dirty), set()
            for policy in policies:
                await self._library.run(self._maintain_policy, policy)
            if policies:
                self._changed()
            self._log_warnings()

    def _maintain_policy(self, policy: str) -> None:
        """In the library's thread."""
        held = [version for (of, _), (version, _) in list(self._held.items()) if of == policy]
        oldest = min((version for version in held if version is not None), default=None)
        try:
            removed = self._versions.maintain(
                policy, min_acked=oldest, uploading=self._intake.uploading(policy)
            )
        except StoreError as error:
            _log.error("weights.not_maintained", policy=policy, reason=str(error))
        else:
            _log.debug("weights.maintained", policy=policy, removed=removed)

    def _forget_silent(self) -> None:
        before = self._clock.monotonic_s() - FORGET_S
        for key in [key for key, standing in self._standing.items() if standing.at_s < before]:
            del self._standing[key]
        for holder in [holder for holder, (_, at_s) in self._held.items() if at_s < before]:
            del self._held[holder]

    def _log_warnings(self) -> None:
        warnings, self._versions.warnings[:] = list(self._versions.warnings), []
        for warning in warnings:
            _log.error("weights.damaged", reason=warning)


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
        NAME,
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
    service_command(NAME, serve)()
