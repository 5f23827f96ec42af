"""A plan on its way into an arena: files are decoded while they come in, step by step.

What always holds: a segment is decoded when all bytes before its end are on disk, against an arena
that nobody changes meanwhile; a step is applied when all its segments are decoded and the digest of
what they lead to is the signed one; what was applied can be taken back, from an undo log or (beyond
``UNDO_SHARE`` of the model) by reading the copy anew; the first failure stops everything and is
raised by ``finish``.

Memory beyond the arena: the segments in work (one a thread), the changes of the step in work, the
undo log, and which cells changed (``changed_cells``). Bodies are read from the disk when their turn
comes. Only while a snapshot replaces another copy there are two arenas.
"""

import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, ClassVar

import msgspec

from edge_agent.changed_cells import ChangedCells
from transport.errors import StoreError, TruncatedBlob
from transport.messages import VersionRef
from transport.runtime.clock import Clock
from transport.weights.blobs import BlobFolder, disk_errors
from transport.weights.delta_file import DeltaDecoder
from transport.weights.manifest import FileEntry, SignedManifest, VersionManifest
from transport.weights.manifest_folder import StoredManifest
from transport.weights.patch import Patch
from transport.weights.state import Undo, WeightArena

UNDO_SHARE = 0.5


class StagingStopped(StoreError):
    """The plan was given up while it was on its way."""

    code: ClassVar[str] = "store.staging_stopped"


class Edge(msgspec.Struct, frozen=True, kw_only=True):
    """One file that leads from a version to another one: a delta, or a composite of several.
    ``manifest`` has that file only, and for parent what the file is applied to; ``signed`` is the
    trainer's word on the digest of what it leads to."""

    manifest: VersionManifest
    signed: SignedManifest

    @property
    def file(self) -> FileEntry:
        return self.manifest.files[0]


class _Incoming:
    """The edge in work: its decoder and how far its file has come in."""

    def __init__(self, edge: Edge, arena: WeightArena) -> None:
        self.decoder = DeltaDecoder(arena, edge.manifest, edge.file, finite=True)
        self.file: BinaryIO | None = None
        self.opened = False
        self.asked = 0
        self.decoded = 0


class Staging:
    """Takes ``edges`` in order. Any thread may report chunks; the rest is for the thread that the
    copies belong to."""

    def __init__(
        self,
        edges: Iterable[Edge],
        blobs: BlobFolder,
        *,
        threads: int,
        clock: Clock,
    ) -> None:
        self.edges = tuple(edges)
        self.changed = ChangedCells()
        self._arena: WeightArena | None = None
        self._decode_s = 0.0
        self._decoded_cells = 0
        self._blobs = blobs
        self._clock = clock
        self._threads = threads
        self._lock = threading.Condition()
        self._chunks: dict[str, set[int]] = {}
        self._prefix: dict[str, int] = {}
        self._at = 0
        self._incoming: _Incoming | None = None
        self._busy = 0
        self._error: Exception | None = None
        self._stopped = False
        self._all_here = False
        self._undos: list[Undo] | None = []
        self._undo_bytes = 0
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weight-decode")

    # ---- while it comes in -------------------------------------------------------------------

    def begin(self, arena: WeightArena, present: Mapping[str, Collection[int]]) -> None:
        """Apply to ``arena``, from now on; ``present`` are chunks that are on disk already."""
        with self._lock:
            self._arena = arena
            for digest, indices in present.items():
                self._chunks.setdefault(digest, set()).update(indices)
        self._pump()

    def chunk_written(self, entry: FileEntry, index: int) -> None:
        """A chunk is on disk. Never waits for a decoder."""
        with self._lock:
            self._chunks.setdefault(entry.digest, set()).add(index)
        self._pump()

    def stop(self) -> None:
        """Begin nothing more; what is in work ends soon. Does not wait."""
        with self._lock:
            self._stopped = True

    # ---- the end -----------------------------------------------------------------------------

    def finish(self) -> tuple[WeightArena, Patch]:
        """Wait for all steps, whose files are complete now. The arena, which is at the last one,
        and what changed in it (values may be views of it).

        Raises:
            IntegrityError, StoreError: what stopped it; see ``take_back``.
        """
        with self._lock:
            self._all_here = True
            for edge in self.edges:
                self._chunks[edge.file.digest] = set(range(len(edge.file.chunk_digests)))
        self._pump()
        self._wait(lambda: self._at == len(self.edges))
        if self._error is not None:
            raise self._error
        if self._arena is None or self._stopped:
            raise StagingStopped("the plan was given up")
        return self._arena, self.changed.patch(self._arena.tensors)

    @property
    def progress(self) -> tuple[int, int]:
        """Steps applied, and segments of the next one decoded."""
        with self._lock:
            return self._at, 0 if self._incoming is None else self._incoming.decoded

    @property
    def cells_s(self) -> float:
        """Cells of the model that a second of decoding and applying went over; 0 if unknown."""
        return self._decoded_cells / self._decode_s if self._decode_s > 0 else 0.0

    @property
    def failed_edge(self) -> Edge | None:
        """The step that stopped it."""
        return self.edges[self._at] if self._error and self._at < len(self.edges) else None

    def take_back(self) -> bool:
        """Make the arena what it was; False when it has to be read anew. Waits for what is in
        work."""
        self.close()
        if self._undos is None:
            return False
        while self._undos and self._arena is not None:
            self._arena.undo(self._undos.pop())
        return True

    def close(self) -> None:
        """End the threads; what was applied stays."""
        self.stop()
        self._pool.shutdown()
        with self._lock:
            self._close_file()

    def _wait(self, over: Callable[[], bool]) -> None:
        with self._lock:
            self._lock.wait_for(
                lambda: not self._busy and (over() or self._stopped or self._error is not None)
            )

    # ---- inside ------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Give the threads all that can be decoded now."""
        with self._lock:
            try:
                self._begin_jobs()
            except Exception as error:  # noqa: BLE001 - for ``finish`` to raise
                self._failed(error)

    def _begin_jobs(self) -> None:
        if self._stopped or self._error or self._arena is None or self._at == len(self.edges):
            return
        edge = self.edges[self._at]
        have_bytes = self._have_bytes(edge.file)
        if self._incoming is None:
            self._incoming = _Incoming(edge, self._arena)
        incoming = self._incoming
        if not incoming.opened and not self._open(incoming, edge, have_bytes):
            return
        segments = incoming.decoder.segments
        while incoming.asked < len(segments):
            offset, size_bytes = segments[incoming.asked]
            if offset + size_bytes > have_bytes and not self._all_here:
                return
            self._busy += 1
            self._pool.submit(self._decode, incoming, incoming.asked, offset, size_bytes)
            incoming.asked += 1

    def _open(self, incoming: _Incoming, edge: Edge, have_bytes: int) -> bool:
        """Read the header once it is there."""
        if not have_bytes and not self._all_here:
            return False
        if incoming.file is None:
            incoming.file = self._blobs.open_incoming(edge.file)
        prefix = _read(incoming.file, 0, min(8, have_bytes))
        needed = incoming.decoder.header_bytes_needed(prefix)
        if needed > have_bytes and not self._all_here:
            return False
        incoming.decoder.open(_read(incoming.file, 0, needed))
        incoming.opened = True
        if not incoming.decoder.segments:
            self._busy += 1
            self._pool.submit(self._apply, incoming)
        return True

    def _decode(self, incoming: _Incoming, index: int, offset: int, size_bytes: int) -> None:
        began_s = self._clock.monotonic_s()
        last = False
        try:
            if not self._stopped and incoming.file is not None:
                body = _read(incoming.file, offset, size_bytes)
                incoming.decoder.decode(index, body)
                with self._lock:
                    incoming.decoded += 1
                    last = incoming.decoded == len(incoming.decoder.segments)
                    self._decode_s += (self._clock.monotonic_s() - began_s) / self._threads
        except Exception as error:  # noqa: BLE001 - for ``finish`` to raise
            self._failed(error)
        if last:
            self._apply(incoming)
        else:
            self._job_over()

    def _apply(self, incoming: _Incoming) -> None:
        """All segments of the step are decoded: nobody else uses the arena now."""
        began_s = self._clock.monotonic_s()
        try:
            edge, arena = self.edges[self._at], self._arena
            if not self._stopped and self._error is None and arena is not None:
                decoded = incoming.decoder.finish()
                undo = arena.apply(decoded.patch, edge.manifest.version, decoded.digests)
                self._log(undo, edge.manifest.full_bytes)
                self.changed.add(decoded.patch, arena.tensors)
                with self._lock:
                    self._at += 1
                    self._close_file()
                    self._incoming = None
                    self._decode_s += self._clock.monotonic_s() - began_s
                    self._decoded_cells += sum(t.cells().size for t in arena.tensors.values())
        except Exception as error:  # noqa: BLE001 - for ``finish`` to raise
            self._failed(error)
        self._pump()
        self._job_over()

    def _log(self, undo: Undo, full_bytes: int) -> None:
        """Keep the way back, unless reading the copy anew takes less memory."""
        if self._undos is None:
            return
        self._undos.append(undo)
        self._undo_bytes += sum(change.values.nbytes for _, change in undo.changes)
        if self._undo_bytes > UNDO_SHARE * full_bytes:
            self._undos = None

    def _job_over(self) -> None:
        with self._lock:
            self._busy -= 1
            self._lock.notify_all()

    def _failed(self, error: Exception) -> None:
        with self._lock:
            self._error = self._error or error
            self._lock.notify_all()

    def _have_bytes(self, entry: FileEntry) -> int:
        """Bytes of a file that are there without a gap."""
        chunks, at = self._chunks.get(entry.digest, set()), self._prefix.get(entry.digest, 0)
        while at in chunks:
            at += 1
        self._prefix[entry.digest] = at
        return min(at * entry.chunk_bytes, entry.size_bytes)

    def _close_file(self) -> None:
        if self._incoming is not None and self._incoming.file is not None:
            self._incoming.file.close()
            self._incoming.file = None


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A verified version that is not in use yet. ``changed`` has the values of every cell that
    differs from version ``replaces`` (of all cells when there was none); its arrays are good until
    something else is done with the copies."""

    policy: str
    version: int
    digest: str
    changed: Patch = field(repr=False)
    arena: WeightArena = field(repr=False)
    replaces: VersionRef | None
    base: StoredManifest | None = field(repr=False)
    edges: tuple[Edge, ...] = field(repr=False)
    artefacts: tuple[FileEntry, ...] = field(repr=False)
    local: Path | None = None

    @property
    def ref(self) -> VersionRef:
        return VersionRef(version=self.version, digest=self.digest)

    @property
    def full_digest(self) -> bool:
        """Whether a full digest is signed that the weights were not compared with yet: those of a
        snapshot or folder were, when it was opened."""
        return bool(self.edges) and self.edges[-1].manifest.full_digest is not None


@dataclass(frozen=True, slots=True)
class Intake:
    """A plan on its way in: the files to fetch, in order, and the chunks of them that are on disk
    already (by file digest). Tell ``staging`` of every chunk that is written."""

    policy: str
    wanted: tuple[FileEntry, ...]
    present: Mapping[str, frozenset[int]]
    staging: Staging
    base: StoredManifest | None
    artefacts: tuple[FileEntry, ...]


def _read(file: BinaryIO, offset: int, size_bytes: int) -> bytes:
    with disk_errors("reading what came in"):
        data = os.pread(file.fileno(), size_bytes, offset)
    if len(data) < size_bytes:
        raise TruncatedBlob(f"{len(data)} of {size_bytes} bytes at {offset} are on disk")
    return data
