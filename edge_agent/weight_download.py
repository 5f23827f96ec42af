"""Chunks of a plan's files, from whoever has them, into a callback.

What always holds: what a chunk must hash to comes from the plan, so nobody who delivers one is
believed; relays are asked before the origin; one that lied or did not answer is named in the log
and left alone for a while, and costs at most ``RELAY_PATIENCE_S``; what arrives while nobody can
take it is dropped and asked for again; the event loop waits for no hash and no disk.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, NamedTuple, Protocol

import msgspec
import structlog

from transport.chunk_parts import ChunkSource, SourceId
from transport.chunks import ChunkFetcher, ReceivedChunk
from transport.errors import LinkError
from transport.messages import Ahead, Chunk, ChunkRequest, WeightsRequest
from transport.runtime.clock import Clock
from transport.source_links import ORIGIN
from transport.weights.manifest import FileEntry

STALL_S = 120.0
"""A fetch in which nothing arrives for so long fails; the core asks for another plan."""
RELAY_PATIENCE_S = 8.0
RELAY_LIED_S = 600.0
RELAY_SILENT_S = 60.0
"""For how long a relay is left alone after it delivered a wrong chunk, or nothing."""

EARLY_BYTES = 16 << 20
"""Pieces that were sent unasked and came before their fetch began."""

_MAX_WAITING_CHUNKS = 256
_MAX_WRITING = 8
"""Chunks that wait for their hash and the disk, while further ones are asked for."""
_RETRY_S = 0.2
_SILENT = "relay.no_answer"

_log = structlog.get_logger()


class FetchFailed(LinkError):
    """The store's chunks do not arrive."""

    code: ClassVar[str] = "link.fetch"


class ChunkSources(Protocol):
    """Where chunks come from (``transport.source_links``)."""

    @property
    def rate_bytes_s(self) -> float: ...

    def sources(self) -> list[ChunkSource]: ...

    def ahead(self) -> tuple[int, int]: ...

    def is_up(self, source: SourceId) -> bool: ...

    def send(self, source: SourceId, request: ChunkRequest) -> None: ...

    def busy(self, busy: bool) -> None: ...


class _Arrival(NamedTuple):
    source: SourceId
    chunk: Chunk
    data: bytes
    at_s: float


class _Inbox:
    """What happened that one fetch, of ``files``, has not seen yet. News of sources are never
    dropped."""

    def __init__(self, files: frozenset[str]) -> None:
        self.files = files
        self.chunks: deque[_Arrival] = deque()
        self.changes: deque[tuple[SourceId, bool]] = deque()
        self.wake = asyncio.Event()

    def put(self, arrival: _Arrival) -> None:
        if len(self.chunks) < _MAX_WAITING_CHUNKS:
            self.chunks.append(arrival)
            self.wake.set()


class Downloads:
    """All fetches of one agent. ``close`` after the last one."""

    def __init__(self, sources: ChunkSources, clock: Clock) -> None:
        self._sources = sources
        self._clock = clock
        self._inboxes: set[_Inbox] = set()
        self._avoided: dict[SourceId, float] = {}
        self._early: deque[_Arrival] = deque()
        self.early_bytes = 0
        self._cut = False
        self.breaks = 0
        """How often the origin's connection went down."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="weight-chunks")

    def arrived(self, source: SourceId, chunk: Chunk, payload: Sequence[bytes]) -> None:
        """A chunk or part came; every fetch that waits for its file gets it, or one that begins
        soon."""
        data, now = payload[0] if payload else b"", self._clock.monotonic_s()
        arrival = _Arrival(source, chunk, data, now)
        wanted = False
        for inbox in self._inboxes:
            if chunk.digest in inbox.files:
                inbox.put(arrival)
                wanted = True
        if not wanted:
            self._early.append(arrival)
            self.early_bytes += len(data)
            while self.early_bytes > EARLY_BYTES or len(self._early) > _MAX_WAITING_CHUNKS:
                self.early_bytes -= len(self._early.popleft().data)

    def requesting(self, request: WeightsRequest, *, policies: int) -> WeightsRequest:
        """With what may follow the plan unasked, where ``policies`` share the connection. Nothing
        after a fetch that was cut: some of it is on disk."""
        if request.have_version is None or self._cut:
            return request
        ahead_bytes, piece_bytes = self._sources.ahead()
        return msgspec.structs.replace(
            request, ahead_bytes=ahead_bytes // max(1, policies), ahead_piece_bytes=piece_bytes
        )

    def changed(self, source: SourceId, up: bool) -> None:
        """A connection came up or went down: what was on the way there is lost."""
        self.breaks += source == ORIGIN and not up
        for inbox in self._inboxes:
            inbox.changes.append((source, up))
            inbox.wake.set()

    def close(self) -> None:
        """Wait for the chunk that is being written."""
        self._writer.shutdown()

    async def fetch(
        self,
        entries: Sequence[FileEntry],
        present: Mapping[str, frozenset[int]],
        keep: Callable[[ReceivedChunk], None],
        coming: Sequence[Ahead] = (),
    ) -> int:
        """Fetch what is not ``present``; ``keep`` gets each verified chunk, in a thread of ours.
        ``coming`` are pieces that the origin sends unasked. Returns how many bytes were fetched.

        Raises:
            FetchFailed: the origin cannot give all of it, or nothing arrives.
            StoreError: from ``keep``.
        """
        inbox = _Inbox(frozenset(entry.digest for entry in entries))
        self._take_early(inbox)
        self._inboxes.add(inbox)
        self._cut = True
        try:
            fetcher = ChunkFetcher(entries, present, sources=())
            fetch = _Fetch(
                fetcher, self._sources, inbox, self._avoided, self._writer, keep, self._clock
            )
            fetch.expect(coming)
            try:
                fetched_bytes = await fetch.run()
            finally:
                fetch.stop()
            self._cut = False
            return fetched_bytes
        finally:
            self._inboxes.discard(inbox)

    def _take_early(self, inbox: _Inbox) -> None:
        others: deque[_Arrival] = deque()
        for arrival in self._early:
            if arrival.chunk.digest in inbox.files:
                inbox.put(arrival)
                self.early_bytes -= len(arrival.data)
            else:
                others.append(arrival)
        self._early = others


class _Fetch:
    """One fetch on its way."""

    def __init__(
        self,
        fetcher: ChunkFetcher,
        sources: ChunkSources,
        inbox: _Inbox,
        avoided: dict[SourceId, float],
        writer: ThreadPoolExecutor,
        keep: Callable[[ReceivedChunk], None],
        clock: Clock,
    ) -> None:
        self._fetcher = fetcher
        self._sources = sources
        self._inbox = inbox
        self._avoided = avoided
        self._writer = writer
        self._keep = keep
        self._clock = clock
        self._known: dict[SourceId, ChunkSource] = {}
        self._named: set[SourceId] = set()
        self._asked_s: dict[SourceId, float] = {}  # relays that owe us something, since when
        self._retry: set[SourceId] = set()
        self._writing: deque[tuple[ReceivedChunk, asyncio.Future[bool]]] = deque()

    def expect(self, coming: Sequence[Ahead]) -> None:
        """Before ``run``: what need not be asked for."""
        for source in self._sources.sources():
            self._add(source)
        now = self._clock.monotonic_s()
        for ahead in coming:
            self._fetcher.coming(ORIGIN, ahead, now)

    async def run(self) -> int:
        fetched_bytes = 0
        progress_s = self._clock.monotonic_s()
        while not self._fetcher.done:
            now = self._clock.monotonic_s()
            if now - progress_s > STALL_S:
                raise FetchFailed(f"no chunk arrived for {STALL_S:g} s")
            self._inbox.wake.clear()
            self._take_changes()
            wait_s = self._ask(now)
            if self._fetcher.failed is not None:
                raise FetchFailed(f"the store cannot give all of it: {self._fetcher.failed}")
            if self._inbox.chunks or self._written():
                # In this order: what stays in the inbox waits for a writing that is still to end.
                fetched_bytes += self._take_written()
                while self._inbox.chunks and len(self._writing) < _MAX_WRITING:
                    self._take(self._inbox.chunks.popleft())
                progress_s = self._clock.monotonic_s()
                wait_s = self._ask(progress_s)
            if not self._fetcher.done:
                await self._wait(wait_s)
        return fetched_bytes

    def stop(self) -> None:
        """Keep nothing more; a chunk that is being written is finished."""
        for _, writing in self._writing:
            if not writing.cancel() and not writing.cancelled():
                writing.exception()  # of a fetch that has failed already

    async def _wait(self, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                await self._inbox.wake.wait()
        except TimeoutError:
            for source in self._retry:
                if self._sources.is_up(source):
                    self._fetcher.source_up(source)
            self._retry.clear()

    # ---- sources -----------------------------------------------------------------------------

    def _add(self, source: ChunkSource) -> None:
        if self._clock.monotonic_s() < self._avoided.get(source.id, 0.0):
            return
        self._known[source.id] = source
        self._fetcher.add_source(source)
        if not self._sources.is_up(source.id):
            self._fetcher.source_down(source.id)

    def _take_changes(self) -> None:
        while self._inbox.changes:
            name, up = self._inbox.changes.popleft()
            self._asked_s.pop(name, None)
            if not up:
                self._fetcher.source_down(name)
            elif name in self._known:
                self._fetcher.source_up(name)
            else:
                for source in self._sources.sources():
                    if source.id == name:
                        self._add(source)

    def _ask(self, now: float) -> float:
        """Send what is to be asked for now; returns how long to wait for an answer at most."""
        self._drop_silent(now)
        for source, request in self._fetcher.next_requests(now):
            try:
                self._sources.send(source, request)
            except LinkError:
                self._fetcher.source_down(source)
                self._retry.add(source)
            else:
                if self._known[source].relay:
                    self._asked_s.setdefault(source, now)
        for name, reason in self._fetcher.dropped.items():
            self._avoid(name, reason, now)
        self._sources.busy(self._lanes_are_full())
        due = [asked_s + RELAY_PATIENCE_S for asked_s in self._asked_s.values()]
        deadline = self._fetcher.next_deadline()
        if deadline is not None:
            due.append(deadline)
        if self._retry or not due:
            due.append(now + _RETRY_S)
        return max(0.0, min(due) - now)

    def _drop_silent(self, now: float) -> None:
        for name, asked_s in tuple(self._asked_s.items()):
            if not self._fetcher.outstanding_bytes(name):
                del self._asked_s[name]
            elif now - asked_s >= RELAY_PATIENCE_S:
                self._fetcher.source_down(name)
                self._avoid(name, _SILENT, now)

    def _avoid(self, name: SourceId, reason: str, now: float) -> None:
        self._asked_s.pop(name, None)
        if name in self._named:
            return
        self._named.add(name)
        self._known.pop(name, None)
        for_s = RELAY_SILENT_S if reason == _SILENT else RELAY_LIED_S
        self._avoided[name] = now + for_s
        _log.warning("relay.left_alone", source=str(name), reason=reason, for_s=for_s)

    def _lanes_are_full(self) -> bool:
        lanes = [s for s in self._known.values() if not s.relay and self._sources.is_up(s.id)]
        return bool(lanes) and all(
            self._fetcher.outstanding_bytes(lane.id) + lane.window.piece_bytes()
            > lane.window.limit_bytes()
            for lane in lanes
        )

    # ---- chunks ------------------------------------------------------------------------------

    def _take(self, arrival: _Arrival) -> None:
        """Account for a piece; a chunk that it completed goes to the writer."""
        source, chunk, data, at_s = arrival
        if source in self._asked_s:
            self._asked_s[source] = at_s
        if not chunk.found:
            self._fetcher.chunk_not_found(source, chunk.digest, chunk.index, chunk.part_bytes)
            return
        received = self._fetcher.chunk_received(
            source, chunk.digest, chunk.index, chunk.part_bytes, data, at_s
        )
        if received is None:
            return
        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(self._writer, self._verify_and_keep, received)
        writing.add_done_callback(lambda _: self._inbox.wake.set())
        self._writing.append((received, writing))

    def _verify_and_keep(self, chunk: ReceivedChunk) -> bool:
        right = chunk.matches()
        if right:
            self._keep(chunk)
        return right

    def _written(self) -> bool:
        return bool(self._writing) and self._writing[0][1].done()

    def _take_written(self) -> int:
        """Bytes of the chunks that are verified and kept since the last call."""
        written_bytes = 0
        while self._written():
            chunk, writing = self._writing.popleft()
            if self._fetcher.chunk_verified(chunk, writing.result()) is not None:
                written_bytes += len(chunk.data)
        return written_bytes
