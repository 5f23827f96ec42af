"""New versions on their way from the trainers into the weight store.

What always holds: only the trainer whose key is policy P's may bring versions of P; a manifest is
verified before the first byte of its files is asked for; one version per policy comes in at a
time, over the link that offered it last; what an earlier try left on disk is not asked for again;
the trainer hears ``VersionDurable`` after the version was verified and made durable, or why it
never will be; trouble that may pass (disk, damaged chunks) is answered by silence, and the offer
comes again.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog

from scheduler.service import Worker
from scheduler.weight_versions import WeightVersions
from transport.chunk_parts import ChunkSource
from transport.chunks import ChunkFetcher
from transport.delivery_window import MAX_WINDOW_BYTES, DeliveryWindow
from transport.errors import (
    AuthenticationFailed,
    ConfigError,
    FarflowError,
    IntegrityError,
    ParentLost,
    ProtocolError,
    RemoteProtocolError,
    StoreError,
)
from transport.keys import SignerKey, load_signers
from transport.messages import MAX_COUNT, Chunk, VersionDurable, VersionOffer, VersionRejected
from transport.plane_hub import PlaneHub
from transport.runtime.clock import Clock
from transport.weights.blobs import BlobFolder
from transport.weights.manifest import (
    SignedManifest,
    VersionManifest,
    decode_manifest,
    verify,
)

ABANDON_S: Final = 10.0
"""A version that was not offered again for so long makes room for another one of its policy."""

MAX_QUEUED_BYTES: Final = 2 * MAX_WINDOW_BYTES
"""Chunks of one policy that wait for the disk; more than was asked for is dropped."""

TRAINER: Final = "trainer"
"""The one source of an upload."""

SIGNERS_S: Final = 1.0
"""Shortest time between two looks at the signers' folder."""

_log = structlog.get_logger()


class Trust:
    """The signers' folder as ``verify`` wants it; looks again when a key is unknown."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        self._looked_s = float("-inf")
        self.signers: dict[str, SignerKey] = {}

    def look(self, for_key_id: str = "") -> None:
        """Read the folder, unless the key is known or the last look was a moment ago."""
        now = self._clock.monotonic_s()
        if for_key_id in self.signers or now - self._looked_s < SIGNERS_S:
            return
        self._looked_s = now
        try:
            found = load_signers(self._folder)
        except ConfigError as error:
            _log.warning("signers.not_read", reason=str(error))
            return
        self.signers.clear()
        self.signers.update(found)


class _Offer(NamedTuple):
    route: bytes
    policy: str
    signed: SignedManifest


@dataclass(slots=True)
class _Upload:
    """One version coming in."""

    manifest: VersionManifest
    signed: SignedManifest
    route: bytes
    offered_s: float
    relinked: bool = False
    chunks: deque[tuple[Chunk, bytes]] = field(default_factory=deque)
    queued_bytes: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Intake:
    """``library`` is the thread that ``versions`` belongs to; ``on_durable`` is called on the loop
    with every new version."""

    def __init__(
        self,
        hub: PlaneHub,
        versions: WeightVersions,
        library: Worker,
        trust: Trust,
        clock: Clock,
        on_durable: Callable[[VersionManifest], None],
    ) -> None:
        self._hub = hub
        self._versions = versions
        self._library = library
        self._trust = trust
        self._clock = clock
        self._on_durable = on_durable
        self._disk = Worker("weight-intake")
        self._offers: dict[str, _Offer] = {}  # the latest of each policy
        self._offered = asyncio.Event()
        self._uploads: dict[str, _Upload] = {}
        self._windows: dict[str, DeliveryWindow] = {}

    def offered(self, route: bytes, policy: str, offer: VersionOffer) -> None:
        """``policy`` is the offering key's own."""
        signed = SignedManifest(
            manifest=offer.manifest, signature=offer.signature, key_id=offer.key_id
        )
        self._offers[policy] = _Offer(route, policy, signed)
        self._offered.set()

    def chunk_arrived(self, policy: str, chunk: Chunk, payload: list[bytes]) -> None:
        upload = self._uploads.get(policy)
        data = payload[0] if payload else b""
        if upload is None or upload.queued_bytes + len(data) > MAX_QUEUED_BYTES:
            return  # asked for again if it is still wanted
        upload.chunks.append((chunk, data))
        upload.queued_bytes += len(data)
        upload.wake.set()

    def uploading(self, policy: str) -> list[str]:
        """Digests of the files that are coming in."""
        upload = self._uploads.get(policy)
        return [] if upload is None else [entry.digest for entry in upload.manifest.files]

    def parts(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {"offers": self._consider_offers()}

    async def close(self) -> None:
        await asyncio.to_thread(self._disk.close)

    # ---- offers -------------------------------------------------------------------------------

    async def _consider_offers(self) -> None:
        async with asyncio.TaskGroup() as uploads:  # a bug in one ends the process, not only it
            while True:
                await self._offered.wait()
                self._offered.clear()
                offers, self._offers = list(self._offers.values()), {}
                for offer in offers:
                    await self._consider(offer, uploads)

    async def _consider(self, offer: _Offer, uploads: asyncio.TaskGroup) -> None:
        upload = self._uploads.get(offer.policy)
        now = self._clock.monotonic_s()
        if upload is not None and upload.signed.manifest == offer.signed.manifest:
            upload.offered_s = now
            if upload.route != offer.route:
                upload.route, upload.relinked = offer.route, True
                upload.wake.set()
            return
        if upload is not None and now - upload.offered_s < ABANDON_S:
            return
        try:
            manifest, durable = await self._library.run(self._check, offer)
        except (ProtocolError, IntegrityError) as error:
            self._reject(offer, error)
            return
        if durable:
            self._say_durable(offer.route, manifest)
            return
        if upload is not None and upload.task is not None:
            _log.warning("version.abandoned", policy=offer.policy, version=upload.manifest.version)
            upload.task.cancel()
            await asyncio.gather(upload.task, return_exceptions=True)
        upload = _Upload(manifest, offer.signed, offer.route, now)
        self._uploads[offer.policy] = upload
        upload.task = uploads.create_task(self._bring_in(upload), name=f"upload {offer.policy}")

    def _check(self, offer: _Offer) -> tuple[VersionManifest, bool]:
        """In the library's thread: the manifest, and whether the version is there already."""
        self._trust.look(offer.signed.key_id)
        manifest = verify(offer.signed, self._trust.signers)
        if manifest.policy != offer.policy:
            raise AuthenticationFailed(
                f"the key is policy {offer.policy!r}'s, the manifest of {manifest.policy!r}"
            )
        numbers = (manifest.version, manifest.step, manifest.parent or 0, manifest.full_bytes)
        if not all(0 <= number <= MAX_COUNT for number in numbers):
            raise RemoteProtocolError(
                f"version {manifest.version} of {manifest.policy}: a number is not within 0 and"
                f" {MAX_COUNT}"
            )
        known = {stored.version: stored for stored in self._versions.versions(manifest.policy)}
        same = known.get(manifest.version)
        if same is not None and same.digest == manifest.digest:
            return manifest, not self._versions.awaits_whole(manifest)
        used = known and manifest.version <= max(known)
        if used and not self._versions.awaits_whole(manifest):
            raise RemoteProtocolError(
                f"version {manifest.version} of {manifest.policy}: the number is used; "
                f"the next one is {max(known) + 1}"
            )
        return manifest, False

    def _reject(self, offer: _Offer, error: FarflowError) -> None:
        _log.warning("version.rejected", policy=offer.policy, code=error.code, reason=str(error))
        self._hub.send(
            offer.route,
            VersionRejected(
                policy=offer.policy,
                version=_claimed_version(offer.signed),
                code=error.code,
                message=str(error),
            ),
        )

    def _say_durable(self, route: bytes, manifest: VersionManifest) -> None:
        self._hub.send(route, VersionDurable(policy=manifest.policy, version=manifest.version))

    # ---- one upload ---------------------------------------------------------------------------

    async def _bring_in(self, upload: _Upload) -> None:
        manifest = upload.manifest
        offer = _Offer(upload.route, manifest.policy, upload.signed)
        try:
            if not await self._fetch(upload):
                return
            added = await self._library.run(self._versions.add_version, upload.signed)
        except (ProtocolError, IntegrityError) as error:
            if error.retryable:
                _log.warning("version.damaged", policy=manifest.policy, reason=str(error))
            else:
                self._reject(offer._replace(route=upload.route), error)
        except ParentLost as error:
            self._reject(offer._replace(route=upload.route), error)
        except StoreError as error:
            _log.error("version.not_stored", policy=manifest.policy, reason=str(error))
        else:
            _log.info("version.durable", policy=added.policy, version=added.version)
            self._say_durable(upload.route, added)
            self._on_durable(added)
        finally:
            if self._uploads.get(manifest.policy) is upload:
                del self._uploads[manifest.policy]

    async def _fetch(self, upload: _Upload) -> bool:
        """Get the files; False when the trainer does not give them."""
        manifest = upload.manifest
        blobs = await self._library.run(self._versions.blobs, manifest.policy)
        present = await self._disk.run(_present, blobs, manifest)
        window = self._windows.setdefault(manifest.policy, DeliveryWindow())
        fetcher = ChunkFetcher(manifest.files, present, sources=[ChunkSource(TRAINER, window)])
        while not fetcher.done:
            if upload.relinked:
                fetcher.source_up(TRAINER)
                upload.relinked = False
            now = self._clock.monotonic_s()
            for _, request in fetcher.next_requests(now):
                self._hub.send(upload.route, request)
            if fetcher.failed is not None:
                _log.warning("version.not_fetched", policy=manifest.policy, code=fetcher.failed)
                return False
            deadline = fetcher.next_deadline()
            timeout_s = ABANDON_S if deadline is None else max(0.0, deadline - now)
            await _wait(upload.wake, timeout_s)
            while upload.chunks:
                chunk, data = upload.chunks.popleft()
                upload.queued_bytes -= len(data)
                await self._disk.run(_take, fetcher, blobs, chunk, data, self._clock)
        return True


def _present(blobs: BlobFolder, manifest: VersionManifest) -> Mapping[str, frozenset[int]]:
    """Chunks on disk; files that have all of theirs are completed."""
    present = {}
    for entry in manifest.files:
        chunks = blobs.present(entry)
        if len(chunks) == len(entry.chunk_digests) and not blobs.has(entry.digest):
            try:
                blobs.complete(entry)
            except IntegrityError:
                chunks = frozenset()
        present[entry.digest] = chunks
    return present


def _take(
    fetcher: ChunkFetcher, blobs: BlobFolder, chunk: Chunk, data: bytes, clock: Clock
) -> None:
    """In the disk's thread: verify a chunk, write it, and complete its file."""
    if not chunk.found:
        fetcher.chunk_not_found(TRAINER, chunk.digest, chunk.index, chunk.part_bytes)
        return
    accepted = fetcher.chunk_arrived(
        TRAINER, chunk.digest, chunk.index, chunk.part_bytes, data, clock.monotonic_s()
    )
    if accepted is None:
        return
    blobs.write_chunk(accepted.entry, accepted.index, accepted.data)
    if accepted.file_complete:
        try:
            blobs.complete(accepted.entry)
        except IntegrityError as error:
            _log.warning("version.file_damaged", digest=chunk.digest, reason=str(error))
            fetcher.restart_file(chunk.digest)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
    event.clear()


def _claimed_version(signed: SignedManifest) -> int:
    """What an unverified manifest says its number is, for the trainer's bookkeeping alone; -1 when
    it cannot be read."""
    try:
        return decode_manifest(signed.manifest).version
    except (ProtocolError, IntegrityError):
        return -1
