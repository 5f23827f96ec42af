"""Fetches files chunk by chunk from one or several sources, without sockets and clocks.

What always holds: what ``transport.chunk_exchange`` promises; files are asked for in their order;
what was on disk before is not asked for.

Both directions use it: an agent fetches a plan's files from the weight store and its relays, the
weight store fetches a version's files from the trainer that offers it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from transport.chunk_exchange import MAX_ATTEMPTS, ChunkExchange
from transport.chunk_parts import ChunkSource, FetchCounters, SourceId, WantedChunk
from transport.messages import Ahead, ChunkRequest
from transport.weights.manifest import FileEntry, chunk_digest
from transport.weights.tensors import Buffer


@dataclass(frozen=True, slots=True)
class AcceptedChunk:
    """A whole, verified chunk to be written; ``file_complete`` says that it was the file's last."""

    entry: FileEntry
    index: int
    data: Buffer
    file_complete: bool


@dataclass(frozen=True, slots=True)
class ReceivedChunk:
    """A whole chunk of which nobody knows yet whether it is right."""

    entry: FileEntry
    wanted: WantedChunk
    data: Buffer

    @property
    def index(self) -> int:
        return self.wanted.number

    def matches(self) -> bool:
        """Whether it is right; hashes it, in any thread."""
        return chunk_digest(self.data) == self.wanted.chunk_digest


@dataclass(frozen=True, slots=True)
class FetchProgress:
    have_bytes: int
    total_bytes: int
    have_files: int
    total_files: int


@dataclass(slots=True)
class _File:
    entry: FileEntry
    missing: set[int]
    restarts: int = 0

    def wanted(self, index: int) -> WantedChunk:
        entry = self.entry
        return WantedChunk(
            entry.digest, index, entry.size_bytes, entry.chunk_bytes, entry.chunk_digests[index]
        )


class ChunkFetcher:
    """Fetches the chunks of some files, in the order of ``entries``.

    ``present`` gives, by file digest, chunks that are on disk and verified. ``sources`` are up
    until ``source_down`` says otherwise.
    """

    def __init__(
        self,
        entries: Iterable[FileEntry],
        present: Mapping[str, Collection[int]] | None = None,
        *,
        sources: Iterable[ChunkSource],
        max_attempts: int = MAX_ATTEMPTS,
    ) -> None:
        present = present or {}
        self._exchange = ChunkExchange(sources, max_attempts=max_attempts)
        self._files: dict[str, _File] = {}
        for entry in entries:
            if entry.digest not in self._files:
                held = present.get(entry.digest, ())
                missing = [i for i in range(len(entry.chunk_digests)) if i not in held]
                file = self._files[entry.digest] = _File(entry, set(missing))
                for index in missing:
                    self._exchange.want(file.wanted(index))

    @property
    def done(self) -> bool:
        """Every chunk of every file is there."""
        return not any(file.missing for file in self._files.values())

    @property
    def failed(self) -> str | None:
        """Stable code once the fetch is hopeless: ``chunk.attempts`` or ``chunk.not_found``."""
        return next(iter(self._exchange.failed.values()), None)

    @property
    def idle(self) -> bool:
        """Everything that is missing is on its way: the sources have room for more."""
        return self._exchange.idle

    @property
    def dropped(self) -> Mapping[SourceId, str]:
        """Relays that are not used any more in this fetch, and why: ``relay.wrong_chunk`` or
        ``relay.no_answer``."""
        return self._exchange.dropped

    @property
    def counters(self) -> FetchCounters:
        return self._exchange.counters

    def progress(self) -> FetchProgress:
        have_bytes = total_bytes = have_files = 0
        for file in self._files.values():
            total_bytes += file.entry.size_bytes
            have_files += not file.missing
            have_bytes += file.entry.size_bytes - sum(
                file.entry.chunk_size_bytes(index) for index in file.missing
            )
        return FetchProgress(have_bytes, total_bytes, have_files, len(self._files))

    def missing(self, digest: str) -> frozenset[int]:
        """Chunks of a file that have not arrived."""
        file = self._files.get(digest)
        return frozenset() if file is None else frozenset(file.missing)

    def add_source(self, source: ChunkSource) -> None:
        """One more source, which is up."""
        self._exchange.add_source(source)

    def coming(self, source: SourceId, ahead: Ahead, now: float) -> None:
        """Pieces that the origin sends unasked."""
        self._exchange.coming(source, ahead, now)

    def source_up(self, source: SourceId) -> None:
        """A link is there (again); what was under way on it before is lost."""
        self._exchange.source_up(source)

    def source_down(self, source: SourceId) -> None:
        """Nothing on the way there will arrive: it is asked for elsewhere, without blame."""
        self._exchange.source_down(source)

    def outstanding_bytes(self, source: SourceId) -> int:
        """What is on the way on one source."""
        return self._exchange.outstanding_bytes(source)

    def next_requests(self, now: float) -> list[tuple[SourceId, ChunkRequest]]:
        """What to ask for now and where. Call after every arrival and at ``next_deadline``;
        asking is assumed to happen at ``now``."""
        return [] if self.failed is not None else self._exchange.next_requests(now)

    def next_deadline(self) -> float | None:
        """When the next piece on the way is given up, None with nothing on the way."""
        return self._exchange.next_deadline()

    def chunk_arrived(
        self, source: SourceId, digest: str, index: int, part_bytes: int, data: Buffer, now: float
    ) -> AcceptedChunk | None:
        """Take a piece; the chunk that it completed, or None (a counter says why where the piece
        was of no use)."""
        found = self.chunk_received(source, digest, index, part_bytes, data, now)
        return None if found is None else self.chunk_verified(found, found.matches())

    def chunk_received(
        self, source: SourceId, digest: str, index: int, part_bytes: int, data: Buffer, now: float
    ) -> ReceivedChunk | None:
        """As ``chunk_arrived``, without the hash: ``chunk_verified`` takes its result, any time."""
        found = self._exchange.received(source, digest, index, part_bytes, data, now)
        if found is None:
            return None
        wanted, whole = found
        return ReceivedChunk(self._files[wanted.file_digest].entry, wanted, whole)

    def chunk_verified(self, chunk: ReceivedChunk, right: bool) -> AcceptedChunk | None:
        """What becomes of a chunk whose hash was compared."""
        if not self._exchange.verified(chunk.wanted, chunk.data, right):
            return None
        file = self._files[chunk.entry.digest]
        file.missing.discard(chunk.index)
        return AcceptedChunk(file.entry, chunk.index, chunk.data, not file.missing)

    def chunk_not_found(self, source: SourceId, digest: str, index: int, part_bytes: int) -> None:
        """The source does not have it. From a relay that is no error: the origin is asked. From
        the origin: the plan is out of date, the fetch fails."""
        self._exchange.not_found(source, digest, index, part_bytes)

    def restart_file(self, digest: str) -> None:
        """Fetch a file again: it turned out damaged on disk. Counts as one more attempt each."""
        file = self._files[digest]
        file.restarts += 1
        file.missing.update(range(len(file.entry.chunk_digests)))
        for index in sorted(file.missing):
            self._exchange.want(file.wanted(index), failures=file.restarts)
