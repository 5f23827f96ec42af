"""Weights from the store into the engine: fetch, verify, swap, discard.

What always holds: everything about one policy happens one after the other, in the order of the
effects; the copies belong to one disk thread, arriving chunks are hashed and written in another,
and the event loop waits for neither; the engine gets weights only after their digest was verified,
and a policy that it loads from a folder is read back and compared; whatever fails is reported with
the error's code, for the core to judge.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec
import structlog

from edge_agent.core.effects import CancelFetch, DiscardCopy, FetchPlan, OpenCopy, SwapWeights
from edge_agent.core.events import (
    CopyDiscarded,
    CopyOpened,
    Event,
    PlanStaged,
    StageFailed,
    SwapFailed,
    WeightsSwapped,
)
from edge_agent.engine import Engine
from edge_agent.weight_copy import StagedVersion, WeightCopies
from transport.chunks import ChunkFetcher, DeliveryWindow
from transport.errors import FarflowError, LinkError, StoreError, WeightApplyFailed
from transport.ids import policy_name
from transport.messages import Chunk, Message, WeightsPlan
from transport.runtime.clock import Clock
from transport.weights.blobs import BlobFolder
from transport.weights.digest import state_digest
from transport.weights.manifest import FileEntry, SignedManifest

T = TypeVar("T")

WeightEffect = OpenCopy | FetchPlan | CancelFetch | SwapWeights | DiscardCopy

_MAX_WAITING_CHUNKS = 256
_RETRY_S = 0.2
STALL_S = 120.0
"""A fetch in which no chunk arrives for so long fails; the core asks for another plan."""

_log = structlog.get_logger()


class FetchFailed(LinkError):
    """The store's chunks do not arrive."""

    code: ClassVar[str] = "link.fetch"


class _Fetched(NamedTuple):
    staged: StagedVersion
    fetched_bytes: int
    fetch_s: float


class WeightsClient:
    """Carries out the weight effects of one agent. ``send`` hands a message to the weights link
    and raises ``LinkError``; ``local_models`` maps policy names or ids to folders."""

    def __init__(
        self,
        engine: Engine,
        copies: WeightCopies,
        *,
        clock: Clock,
        feed: Callable[[Event], None],
        send: Callable[[Message], None],
        refresh_trust: Callable[[], None],
        local_models: Mapping[str, str],
        window_bytes: int,
    ) -> None:
        self._engine = engine
        self._copies = copies
        self._clock = clock
        self._feed = feed
        self._send = send
        self._refresh_trust = refresh_trust
        self._local_models = local_models
        self._window = DeliveryWindow(max_window_bytes=window_bytes)
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="weight-copies")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="weight-chunks")
        self._last: dict[str, asyncio.Task[None]] = {}
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._inboxes: dict[str, asyncio.Queue[tuple[Chunk, bytes] | None]] = {}
        self._staged: dict[str, _Fetched] = {}

    def perform(self, effect: WeightEffect, tasks: asyncio.TaskGroup) -> None:
        """Carry out an effect, after what was begun before for its policy."""
        policy = effect.policy
        match effect:
            case OpenCopy():
                self._chain(policy, partial(self._open, policy), tasks)
            case FetchPlan(ticket=ticket, plan=plan):
                self._staged.pop(policy, None)
                fetch = self._chain(policy, partial(self._fetch, policy, ticket, plan), tasks)
                self._fetching[policy] = fetch
            case CancelFetch():
                fetching = self._fetching.pop(policy, None)
                if fetching is not None:
                    fetching.cancel()
            case SwapWeights(ticket=ticket):
                self._chain(policy, partial(self._swap, policy, ticket), tasks)
            case DiscardCopy(unload=unload):
                self._chain(policy, partial(self._discard, policy, unload), tasks)

    def arrived(self, chunk: Chunk, payload: list[bytes]) -> None:
        """A chunk came; every fetch that waits for its file gets it."""
        data = payload[0] if payload else b""
        for inbox in self._inboxes.values():
            if not inbox.full():
                inbox.put_nowait((chunk, data))

    def link_up(self) -> None:
        """Chunks that were on the way are lost: ask again."""
        for inbox in self._inboxes.values():
            if not inbox.full():
                inbox.put_nowait(None)

    async def close(self) -> None:
        """Stop everything; what the threads are at is finished."""
        tasks = [task for task in self._last.values() if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pool in (self._writer, self._disk):
            await asyncio.to_thread(pool.shutdown)

    # ---- order -------------------------------------------------------------------------------

    def _chain(
        self,
        policy: str,
        work: Callable[[], Coroutine[Any, Any, None]],
        tasks: asyncio.TaskGroup,
    ) -> asyncio.Task[None]:
        before = self._last.get(policy)

        async def in_turn() -> None:
            if before is not None and not before.done():
                await asyncio.wait({before})
            await work()

        task = tasks.create_task(in_turn(), name=f"weights of {policy}")
        self._last[policy] = task
        return task

    async def _on_disk(self, function: Callable[..., T], *arguments: object) -> T:
        """Run ``function`` in the thread that the copies belong to; log what it warns about."""

        def call() -> tuple[T, list[str]]:
            result = function(*arguments)
            warnings = list(self._copies.warnings)
            self._copies.warnings.clear()
            return result, warnings

        result, warnings = await asyncio.get_running_loop().run_in_executor(self._disk, call)
        for warning in warnings:
            _log.warning("weights.copy", reason=warning)
        return result

    # ---- effects -----------------------------------------------------------------------------

    async def _open(self, policy: str) -> None:
        version, digest = None, ""
        try:
            ref = (await self._on_disk(self._copies.held)).get(policy)
            if ref is not None:
                await self._load(policy, ref.version, ref.digest)
                version, digest = ref.version, ref.digest
        except FarflowError as error:
            _log.warning("weights.not_opened", policy=policy, code=error.code, reason=str(error))
            await self._throw_away(policy)
        self._feed(CopyOpened(policy=policy, version=version, digest=digest))

    async def _fetch(self, policy: str, ticket: int, plan: WeightsPlan) -> None:
        began_s = self._clock.monotonic_s()
        try:
            staged, fetched_bytes = await self._fetched(plan)
        except FarflowError as error:
            _log.warning(
                "weights.not_staged",
                policy=policy,
                version=plan.version,
                code=error.code,
                reason=str(error),
            )
            failed = StageFailed(policy=policy, ticket=ticket, code=error.code, detail=str(error))
            self._feed(failed)
            return
        took_s = self._clock.monotonic_s() - began_s
        self._staged[policy] = _Fetched(staged, fetched_bytes, took_s)
        _log.info(
            "weights.staged",
            policy=policy,
            version=staged.version,
            fetched_bytes=fetched_bytes,
            fetch_s=round(took_s, 3),
        )
        self._feed(PlanStaged(policy=policy, ticket=ticket))

    async def _swap(self, policy: str, ticket: int) -> None:
        fetched = self._staged.pop(policy, None)
        try:
            if fetched is None:
                raise WeightApplyFailed(f"nothing is staged for {policy}")
            pause_s = await self._put_into_engine(policy, fetched.staged)
        except FarflowError as error:
            _log.error("weights.not_swapped", policy=policy, code=error.code, reason=str(error))
            failed = SwapFailed(policy=policy, ticket=ticket, code=error.code, detail=str(error))
            self._feed(failed)
            return
        staged = fetched.staged
        _log.info("weights.swapped", policy=policy, version=staged.version, pause_s=pause_s)
        self._feed(
            WeightsSwapped(
                policy=policy,
                ticket=ticket,
                version=staged.version,
                digest=staged.digest,
                pause_s=pause_s,
                fetched_bytes=fetched.fetched_bytes,
                fetch_s=fetched.fetch_s,
            )
        )

    async def _discard(self, policy: str, unload: bool) -> None:
        self._staged.pop(policy, None)
        if unload:
            await self._engine.unload_policy(policy)
        await self._throw_away(policy)
        _log.info("weights.discarded", policy=policy)
        self._feed(CopyDiscarded(policy=policy))

    async def _throw_away(self, policy: str) -> None:
        try:
            await self._on_disk(self._copies.discard, policy)
        except StoreError as error:
            # The copy counts as gone; its files are removed with the next one.
            _log.warning("weights.not_removed", policy=policy, reason=str(error))

    # ---- steps -------------------------------------------------------------------------------

    async def _put_into_engine(self, policy: str, staged: StagedVersion) -> float:
        """Returns the pause in seconds. The copy is committed after the engine has taken the
        weights, except where the engine reads them from the committed copy."""
        if self._engine.version(policy) is not None:
            pause_s = await self._engine.apply(policy, staged.version, staged.changed)
            await self._on_disk(self._copies.commit, staged)
            return pause_s
        await self._on_disk(self._copies.commit, staged)
        await self._load(policy, staged.version, staged.digest)
        return 0.0

    async def _load(self, policy: str, version: int, digest: str) -> None:
        folder = await self._on_disk(self._copies.folder, policy)
        await self._engine.load_policy(policy, folder, version)
        loaded = await asyncio.to_thread(
            lambda: state_digest(dict(self._engine.read_weights(policy)))
        )
        if loaded != digest:
            raise WeightApplyFailed(
                f"{policy} version {version}: the engine holds {loaded[:12]} after loading, "
                f"expected {digest[:12]}"
            )

    async def _fetched(self, plan: WeightsPlan) -> tuple[StagedVersion, int]:
        """The plan's version, verified, and how many bytes came over the network."""
        await asyncio.to_thread(self._refresh_trust)
        local = await self._local(plan)
        if local is not None:
            if local.version == plan.version:
                return local, 0
            await self._on_disk(self._copies.commit, local)
            plan = msgspec.structs.replace(plan, steps=plan.steps[1:])
        entries = await self._on_disk(self._copies.wanted, plan)
        fetched_bytes = await self._download(plan.policy, entries) if entries else 0
        return await self._on_disk(self._copies.stage, plan), fetched_bytes

    async def _local(self, plan: WeightsPlan) -> StagedVersion | None:
        """The plan's first version if a configured folder is exactly that."""
        policy = plan.policy
        folder = self._local_models.get(policy) or self._local_models.get(policy_name(policy))
        held = await self._on_disk(self._copies.held)
        first = plan.steps[0]
        if not folder or policy in held or not first.key_id:
            return None
        signed = SignedManifest(
            manifest=first.manifest, signature=first.signature, key_id=first.key_id
        )
        return await self._on_disk(self._copies.match_local, policy, Path(folder), signed)

    async def _download(self, policy: str, entries: list[FileEntry]) -> int:
        blobs = await self._on_disk(self._copies.blobs, policy)
        present = {entry.digest: await self._on_disk(blobs.present, entry) for entry in entries}
        fetcher = ChunkFetcher(entries, present, window=self._window)
        inbox: asyncio.Queue[tuple[Chunk, bytes] | None] = asyncio.Queue(_MAX_WAITING_CHUNKS)
        self._inboxes[policy] = inbox
        try:
            fetched_bytes = await self._receive_chunks(fetcher, inbox, blobs)
        finally:
            if self._inboxes.get(policy) is inbox:
                del self._inboxes[policy]
        for entry in entries:
            await self._on_disk(blobs.complete, entry)
        return fetched_bytes

    async def _receive_chunks(
        self,
        fetcher: ChunkFetcher,
        inbox: asyncio.Queue[tuple[Chunk, bytes] | None],
        blobs: BlobFolder,
    ) -> int:
        fetched_bytes = 0
        progress_s = self._clock.monotonic_s()
        while not fetcher.done:
            now = self._clock.monotonic_s()
            if now - progress_s > STALL_S:
                raise FetchFailed(f"no chunk arrived for {STALL_S:g} s")
            wait_s = self._ask(fetcher, now)
            if fetcher.failed is not None:
                raise FetchFailed(f"the store cannot give all of it: {fetcher.failed}")
            try:
                async with asyncio.timeout(wait_s):
                    arrival = await inbox.get()
            except TimeoutError:
                continue
            if arrival is None:
                fetcher.link_cut()
                continue
            chunk, data = arrival
            if not chunk.found:
                fetcher.chunk_not_found(chunk.digest, chunk.index)
            elif await self._write(fetcher, blobs, chunk, data):
                fetched_bytes += len(data)
                progress_s = self._clock.monotonic_s()
        return fetched_bytes

    def _ask(self, fetcher: ChunkFetcher, now: float) -> float:
        """Send what is to be asked for now; returns how long to wait for an answer at most."""
        try:
            for request in fetcher.next_requests(now):
                self._send(request)
        except LinkError:
            fetcher.link_cut()
            return _RETRY_S
        deadline = fetcher.next_deadline()
        return _RETRY_S if deadline is None else max(0.0, deadline - now)

    async def _write(
        self, fetcher: ChunkFetcher, blobs: BlobFolder, chunk: Chunk, data: bytes
    ) -> bool:
        """Verify and write a chunk; false when it is of no use. Nobody else uses the fetcher
        meanwhile: we wait here."""
        now = self._clock.monotonic_s()

        def take() -> bool:
            accepted = fetcher.chunk_arrived(chunk.digest, chunk.index, data, now)
            if accepted is None:
                return False
            blobs.write_chunk(accepted.entry, accepted.index, data)
            return True

        return await asyncio.get_running_loop().run_in_executor(self._writer, take)
