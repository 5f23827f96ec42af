"""Weights from the store into the engine: fetch, verify, swap, check, discard.

What always holds: everything about one policy happens one after the other, in the order of the
effects; the copies belong to one disk thread, arriving chunks are hashed and written in another and
decoded in further ones while they still come in, and the event loop waits for none of them; the
engine gets weights only after their digest was verified, and a policy that it loads from a folder
is read back and compared, or logged as unverified where the engine shows no weights; what it is not
known to hold it gets as a whole; whatever fails is reported with the error's code, for the core to
judge.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
import structlog

from edge_agent.bases import base_of, local_model
from edge_agent.core.effects import (
    CancelFetch,
    DiscardCopy,
    FetchPlan,
    OpenCopy,
    SwapWeights,
    VerifyWeights,
)
from edge_agent.core.events import (
    CopyDiscarded,
    CopyOpened,
    Event,
    PlanStaged,
    StageFailed,
    SwapFailed,
    VerifyFailed,
    WeightsSwapped,
    WeightsVerified,
)
from edge_agent.engine import Engine, WeightsHidden
from edge_agent.read_back import (
    EngineDrifted,
    Sample,
    compare_cells,
    drawn_cells,
    engine_digest,
    recent_cells,
)
from edge_agent.weight_copy import WeightCopies
from edge_agent.weight_download import ChunkSources, Downloads
from edge_agent.weight_staging import Intake, StagedVersion
from transport.chunk_parts import SourceId
from transport.chunks import ReceivedChunk
from transport.errors import EngineCrashed, FarflowError, StoreError, WeightApplyFailed
from transport.messages import Ahead, Chunk, PlanStep, VersionRef, WeightsPlan, WeightsRequest
from transport.runtime.clock import Clock
from transport.weights.manifest import SignedManifest, decode_manifest
from transport.weights.patch import whole

T = TypeVar("T")

WeightEffect = OpenCopy | FetchPlan | CancelFetch | SwapWeights | VerifyWeights | DiscardCopy

_log = structlog.get_logger()
LOADS = 16  # of a copy while its engine does not start, which waits longer and longer itself


class _Fetched(NamedTuple):
    staged: StagedVersion
    fetched_bytes: int
    fetch_s: float
    decode_cells_s: float


class WeightsClient:
    """Carries out the weight effects of one agent. ``local_models`` maps policy names or ids to
    folders; ``rng`` chooses the cells that are read back."""

    def __init__(
        self,
        engine: Engine,
        copies: WeightCopies,
        sources: ChunkSources,
        *,
        clock: Clock,
        rng: random.Random,
        feed: Callable[[Event], None],
        refresh_trust: Callable[[], None],
        local_models: Mapping[str, str],
    ) -> None:
        self._engine = engine
        self._copies = copies
        self._sources = sources
        self._clock = clock
        self._rng = rng
        self._feed = feed
        self._refresh_trust = refresh_trust
        self._local_models = local_models
        self._downloads = Downloads(sources, clock)
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="weight-copies")
        self._last: dict[str, asyncio.Task[None]] = {}
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._staged: dict[str, _Fetched] = {}
        self._serves: dict[str, VersionRef] = {}  # what the engine is known to hold
        self._recent: dict[str, Sample] = {}
        self._rate_bytes_s = 0.0

    def perform(self, effect: WeightEffect, tasks: asyncio.TaskGroup) -> None:
        """Carry out an effect, after what was begun before for its policy."""
        policy = effect.policy
        match effect:
            case OpenCopy():
                self._chain(policy, partial(self._open, policy), tasks)
            case FetchPlan(ticket=ticket, plan=plan):
                self._staged.pop(policy, None)
                work = partial(self._fetch, policy, ticket, plan, self._downloads.breaks)
                fetch = self._chain(policy, work, tasks)
                self._fetching[policy] = fetch
            case CancelFetch():
                fetching = self._fetching.pop(policy, None)
                if fetching is not None:
                    fetching.cancel()
            case SwapWeights(ticket=ticket):
                self._chain(policy, partial(self._swap, policy, ticket), tasks)
            case VerifyWeights():
                self._chain(policy, partial(self._verify, policy, effect), tasks)
            case DiscardCopy(unload=unload):
                self._chain(policy, partial(self._discard, policy, unload), tasks)

    def requesting(self, request: WeightsRequest) -> WeightsRequest:
        """The standing request with what may follow its plan unasked."""
        return self._downloads.requesting(request, policies=len(self._serves))

    def arrived(self, source: SourceId, chunk: Chunk, payload: Sequence[bytes]) -> None:
        """A chunk or a part of one came over a connection."""
        self._downloads.arrived(source, chunk, payload)

    def source_changed(self, source: SourceId, up: bool) -> None:
        """A connection that chunks come over is up or down."""
        self._downloads.changed(source, up)

    async def close(self) -> None:
        """Stop everything; what the threads are at is finished."""
        tasks = [task for task in self._last.values() if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._downloads.close)
        await self._on_disk(self._copies.close)
        await asyncio.to_thread(self._disk.shutdown)

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
                await self._load_patiently(policy, ref)
                version, digest = ref.version, ref.digest
        except FarflowError as error:
            _log.warning("weights.not_opened", policy=policy, code=error.code, reason=str(error))
            await self._throw_away(policy)
        self._feed(CopyOpened(policy=policy, version=version, digest=digest))

    async def _fetch(self, policy: str, ticket: int, plan: WeightsPlan, breaks: int) -> None:
        began_s = self._clock.monotonic_s()
        try:
            fetched = await self._fetched(plan, began_s, breaks)
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
        self._staged[policy] = fetched
        _log.info(
            "weights.staged",
            policy=policy,
            version=fetched.staged.version,
            fetched_bytes=fetched.fetched_bytes,
            fetch_s=round(fetched.fetch_s, 3),
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
                rate_bytes_s=self._rate_bytes_s,
                decode_cells_s=fetched.decode_cells_s,
                full_digest=staged.full_digest,
            )
        )

    async def _verify(self, policy: str, check: VerifyWeights) -> None:
        began_s = self._clock.monotonic_s()
        try:
            if check.rescan:
                await self._on_disk(self._copies.rescan, policy)
            read_back = check.read_back and await self._on_disk(self._read_back, policy)
        except FarflowError as error:
            _log.error("weights.drifted", policy=policy, code=error.code, reason=str(error))
            code, detail = error.code, str(error)
            self._feed(VerifyFailed(policy=policy, ticket=check.ticket, code=code, detail=detail))
            return
        if check.rescan or read_back:
            _log.info(
                "weights.verified",
                policy=policy,
                rescan=check.rescan,
                read_back=read_back,
                took_s=round(self._clock.monotonic_s() - began_s, 3),
            )
        self._feed(WeightsVerified(policy=policy, ticket=check.ticket))

    async def _discard(self, policy: str, unload: bool) -> None:
        self._staged.pop(policy, None)
        self._serves.pop(policy, None)
        self._recent.pop(policy, None)
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
        serves = self._serves.pop(policy, None)
        if self._engine.version(policy) is None:
            await self._on_disk(self._copies.commit, staged)
            await self._load_patiently(policy, staged.ref)
            return 0.0
        patch = staged.changed if serves == staged.replaces else whole(staged.arena.tensors)
        pause_s = await self._engine.apply(policy, staged.version, patch)
        self._recent[policy] = recent_cells(patch, self._rng)
        await self._on_disk(self._copies.commit, staged)
        self._serves[policy] = staged.ref
        return pause_s

    async def _load_patiently(self, policy: str, ref: VersionRef) -> None:
        """An engine that does not start says nothing against the copy, which was fetched far; only
        what is to be done next for the policy, as to discard it, ends the tries early."""
        for left in reversed(range(LOADS)):
            try:
                return await self._load(policy, ref)
            except EngineCrashed:
                if not left or self._last[policy] is not asyncio.current_task():
                    raise

    async def _load(self, policy: str, ref: VersionRef) -> None:
        folder = await self._on_disk(self._copies.folder, policy)
        base = await asyncio.to_thread(base_of, self._local_models, policy, folder)
        await self._engine.load_policy(policy, folder, ref.version, base)
        try:
            loaded = await asyncio.to_thread(engine_digest, self._engine, policy)
        except WeightsHidden as hidden:
            _log.warning("weights.unverified", policy=policy, version=ref.version, why=str(hidden))
            loaded = ref.digest
        if loaded != ref.digest:
            raise EngineDrifted(
                f"{policy} version {ref.version}: the engine holds {loaded[:12]} after loading, "
                f"expected {ref.digest[:12]}"
            )
        self._serves[policy] = ref

    def _read_back(self, policy: str) -> bool:
        """Whether the engine could be read; raises EngineDrifted when it is not as the copy is."""
        tensors = self._copies.tensors(policy)
        samples = (drawn_cells(tensors, self._rng), self._recent.get(policy, {}))
        try:
            compare_cells(self._engine, policy, tensors, samples)
        except WeightsHidden:  # said when they were loaded
            return False
        return True

    async def _fetched(self, plan: WeightsPlan, began_s: float, breaks: int) -> _Fetched:
        """The plan's version, verified; ``breaks`` as of when the plan came."""
        await asyncio.to_thread(self._refresh_trust)
        local = await self._local(plan)
        if local is not None:
            if local.version == plan.version or _brings_snapshot(plan.steps[1:]):
                # What the folder has is worth more than another snapshot: serve it, and ask for
                # the way from there.
                return _Fetched(local, 0, self._clock.monotonic_s() - began_s, 0.0)
            await self._on_disk(self._copies.commit, local)
            plan = msgspec.structs.replace(plan, steps=plan.steps[1:])
        intake = await self._on_disk(self._copies.begin, plan)
        try:
            coming = plan.ahead if breaks == self._downloads.breaks else ()
            fetched_bytes = await self._download(intake, coming)
            fetch_s = self._clock.monotonic_s() - began_s
            staged = await self._on_disk(self._copies.finish, intake)
        finally:
            intake.staging.stop()
        if fetched_bytes:
            self._rate_bytes_s = max(self._sources.rate_bytes_s, fetched_bytes / max(fetch_s, 1e-6))
        return _Fetched(staged, fetched_bytes, fetch_s, intake.staging.cells_s)

    async def _local(self, plan: WeightsPlan) -> StagedVersion | None:
        """The plan's first version if a configured folder is exactly that."""
        policy = plan.policy
        folder = local_model(self._local_models, policy)
        held = await self._on_disk(self._copies.held)
        first = plan.steps[0]
        if folder is None or policy in held or not first.key_id:
            return None
        if decode_manifest(first.manifest).is_adapter:  # what is there is the model below it
            return None
        signed = SignedManifest(
            manifest=first.manifest, signature=first.signature, key_id=first.key_id
        )
        return await self._on_disk(self._copies.match_local, policy, folder, signed)

    async def _download(self, intake: Intake, ahead: Sequence[Ahead]) -> int:
        if not intake.wanted:
            return 0
        blobs = await self._on_disk(self._copies.blobs, intake.policy)

        def keep(chunk: ReceivedChunk) -> None:
            blobs.write_chunk(chunk.entry, chunk.index, chunk.data)
            intake.staging.chunk_written(chunk.entry, chunk.index)

        return await self._downloads.fetch(intake.wanted, intake.present, keep, ahead)


def _brings_snapshot(steps: Sequence[PlanStep]) -> bool:
    return any(
        entry.kind == "snapshot" and entry.name in step.files
        for step in steps
        for entry in decode_manifest(step.manifest).files
    )
