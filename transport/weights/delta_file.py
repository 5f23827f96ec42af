"""Read delta files: what a version changes, as absolute values, checked all the way.

Checks in order: header, versions and digests against the manifest, base digest against the
arena's, CRC-32 of each segment, sizes and ranges in each coder, digest of the new state, changed
values finite (where asked).

What always holds: decoding reads the arena and never writes it; it gives values that the caller
may apply only if the digest of the new state is the manifest's, so a wrong base, a damaged file, a
wrong coder and a wrong apply all end in an error; applying the same delta twice to the same base
gives the same result. Segments are decoded in any order and by several threads, each as soon as
its bytes are there. Memory beyond the arena: the patch, and the temporaries of the segments in
work.
"""

import hashlib
import zlib
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from transport.errors import (
    BaseVersionMismatch,
    ChecksumMismatch,
    IntegrityError,
    SizeLimitExceeded,
    TruncatedBlob,
)
from transport.weights.cell_sums import COMPILED_CELLS, ZERO_SUM
from transport.weights.delta_encode import (
    CodedSegment,
    EncodedDelta,
    SegmentWork,
    assemble_delta,
    encode_delta,
    encode_segments,
)
from transport.weights.delta_format import (
    FORMAT,
    DeltaHeader,
    DeltaLayout,
    Row,
    check_header_size,
    read_delta,
    read_delta_table,
)
from transport.weights.digest import StateDigest, change_sum, finite_cells, tensor_key
from transport.weights.layout import Span
from transport.weights.manifest import FileEntry, VersionManifest
from transport.weights.patch import (
    CellList,
    CellRun,
    Patch,
    TensorChange,
    check_change,
    values_before,
)
from transport.weights.segments import CodecSettings, decode_segment
from transport.weights.state import WeightArena
from transport.weights.tensors import Buffer, Cells

__all__ = [
    "FORMAT",
    "CodecSettings",
    "CodedSegment",
    "DecodedDelta",
    "DeltaDecoder",
    "DeltaHeader",
    "EncodedDelta",
    "SegmentWork",
    "assemble_delta",
    "check_file",
    "decode_delta",
    "encode_delta",
    "encode_segments",
    "read_delta_table",
]


@dataclass(frozen=True, slots=True)
class DecodedDelta:
    """Absolute values of what changes, and the digest of the state that they make; ready for
    ``WeightArena.apply``."""

    patch: Patch
    digests: StateDigest


@dataclass(frozen=True, slots=True)
class _Decoded:
    changes: tuple[tuple[str, TensorChange], ...]
    moves: tuple[tuple[str, bytes], ...]
    non_finite: str | None


class DeltaDecoder:
    """One delta or composite, decoded as it arrives.

    ``open`` comes first, then ``decode`` for every segment, then ``finish``. The arena must not
    be written meanwhile. After an error start again with a new decoder.
    """

    def __init__(
        self,
        arena: WeightArena,
        expected: VersionManifest,
        entry: FileEntry,
        *,
        finite: bool = False,
    ) -> None:
        """``expected`` is the manifest of the version that the file leads to, with ``parent`` and
        ``base_digest`` of where it starts; ``entry`` the file in it. ``finite`` refuses changes to
        infinities and NaNs."""
        self._arena = arena
        self._expected = expected
        self._entry = entry
        self._finite = finite
        kind = "delta" if entry.kind == "delta" else f"composite from {expected.parent}"
        self._what = f"{kind} to version {expected.version} of {expected.policy}"
        self._layout: DeltaLayout | None = None
        self._decoded: dict[int, _Decoded] = {}

    def header_bytes_needed(self, prefix: Buffer) -> int:
        """How many of the file's first bytes ``open`` needs, as far as ``prefix`` tells: 8 at
        first.

        Raises:
            SizeLimitExceeded, TruncatedBlob: no delta of this model has such a header.
        """
        return check_header_size(
            prefix,
            size_bytes=self._entry.size_bytes,
            model_bytes=sum(tensor.size_bytes for tensor in self._arena.tensors.values()),
            what=self._what,
        )

    def open(self, prefix: Buffer) -> None:
        """Read the header; ``prefix`` has ``header_bytes_needed`` bytes or more.

        Raises:
            BaseVersionMismatch: the arena does not hold what the delta was made against.
            ChecksumMismatch, TruncatedBlob, SizeLimitExceeded, IntegrityError: the header is
                damaged, or belongs to another version or file.
        """
        needed = self.header_bytes_needed(prefix)
        if len(prefix) < needed:
            raise TruncatedBlob(f"{self._what}: {len(prefix)} bytes of a header of {needed}")
        layout = read_delta(
            prefix, size_bytes=self._entry.size_bytes, kinds=self._arena.kinds, what=self._what
        )
        expected = self._expected
        for name in DeltaHeader.__struct_fields__:
            here, there = getattr(layout.header, name), getattr(expected, name)
            if here != there:
                raise ChecksumMismatch(
                    f"{self._what}: {name} is {here!r}, its manifest says {there!r}"
                )
        if self._entry.segments and self._entry.segments != layout.segments:
            raise ChecksumMismatch(f"{self._what}: segments are not where its manifest says")
        if self._arena.digests.hex != layout.header.base_digest:
            raise BaseVersionMismatch(
                f"{self._what} needs version {expected.parent} with digest "
                f"{layout.header.base_digest[:12]}, the weights here have digest "
                f"{self._arena.digests.hex[:12]}"
            )
        self._layout = layout

    @property
    def segments(self) -> Sequence[tuple[int, int]]:
        """(offset in the file, size in bytes) of every segment; known once ``open``."""
        return self._opened().segments

    @property
    def missing(self) -> list[int]:
        """Segments that are not decoded yet, rising."""
        return [i for i in range(len(self.segments)) if i not in self._decoded]

    def _opened(self) -> DeltaLayout:
        if self._layout is None:
            raise TruncatedBlob(f"{self._what}: its header is not read yet")
        return self._layout

    def decode(self, index: int, body: Buffer) -> None:
        """Decode one segment; several threads may, in any order. Twice does no harm.

        Raises:
            ChecksumMismatch, TruncatedBlob, IntegrityError: not the bytes of this segment.
        """
        row = self._opened().rows[index]
        what = f"{self._what}, segment {index}"
        if len(body) != row.size_bytes:
            raise TruncatedBlob(f"{what} has {len(body)} of {row.size_bytes} bytes")
        if zlib.crc32(body) != row.crc32:
            raise ChecksumMismatch(f"{what}: CRC-32 differs")
        olds = [self._span(span) for span in row.spans]
        found = decode_segment(row.coder, row.dtype, memoryview(body), olds, row.changed)
        self._decoded[index] = self._in_tensors(row, olds, found)

    def _span(self, span: Span) -> Cells:
        return self._arena.tensors[span.tensor].cells()[span.start : span.start + span.cells]

    def _in_tensors(
        self, row: Row, olds: Sequence[Cells], found: Sequence[TensorChange | None]
    ) -> _Decoded:
        """Changes by span, as changes of tensors and moves of their sums."""
        compiled = row.cells >= COMPILED_CELLS
        kinds = self._arena.digests.kinds
        changes: list[tuple[str, TensorChange]] = []
        moves: list[tuple[str, bytes]] = []
        bad: list[str] = []
        for span, old, in_span in zip(row.spans, olds, found, strict=True):
            if in_span is None:
                continue
            check_change(old, in_span)
            change = _shifted(in_span, span.start, self._arena.kinds[span.tensor][1])
            key = tensor_key(span.tensor, kinds[span.tensor])
            before = values_before(old, in_span)
            move = change_sum(key, change, before, compiled=compiled)
            if move == ZERO_SUM and np.array_equal(before, change.values):
                continue  # coders of whole segments give unchanged spans too
            changes.append((span.tensor, change))
            moves.append((span.tensor, move))
            if self._finite and not finite_cells(row.dtype, change.values):
                bad.append(span.tensor)
        return _Decoded(tuple(changes), tuple(moves), min(bad, default=None))

    def finish(self) -> DecodedDelta:
        """What the whole file changes.

        Raises:
            TruncatedBlob: a segment is missing.
            ChecksumMismatch: the new state is not the one in the manifest.
            IntegrityError: a changed value is not finite, if that was asked; names the tensor.
        """
        if self.missing:
            raise TruncatedBlob(f"{self._what}: {len(self.missing)} segments are missing")
        decoded = [self._decoded[index] for index in range(len(self.segments))]
        digests = self._arena.digests.moved(move for part in decoded for move in part.moves)
        if digests.hex != self._expected.digest:
            raise ChecksumMismatch(
                f"{self._what}: the new state has digest {digests.hex[:12]}, "
                f"the manifest says {self._expected.digest[:12]}"
            )
        bad = min(
            (part.non_finite for part in decoded if part.non_finite is not None), default=None
        )
        if bad is not None:
            raise IntegrityError(f"{self._what}: tensor {bad!r} gets infinite or undefined values")
        patch: dict[str, list[TensorChange]] = defaultdict(list)
        for part in decoded:
            for name, change in part.changes:
                patch[name].append(change)
        return DecodedDelta({name: tuple(patch[name]) for name in sorted(patch)}, digests)


def _shifted(change: TensorChange, start: int, cells: int) -> TensorChange:
    """A span's change as one of its tensor, which has ``cells``; positions as small as they go."""
    if isinstance(change, CellRun):
        return CellRun(start + change.start, change.values)
    small = cells <= np.iinfo(np.int32).max
    if small and start == 0 and change.positions.dtype == np.int32:
        return change
    dtype = np.int32 if small else np.int64
    return CellList(np.add(change.positions, start, dtype=dtype), change.values)


def decode_delta(
    arena: WeightArena,
    data: Buffer,
    expected: VersionManifest,
    entry: FileEntry,
    *,
    threads: int = 1,
    finite: bool = False,
) -> DecodedDelta:
    """Decode a whole file; arguments as of ``DeltaDecoder``. Compares size and SHA-256 with
    ``entry`` before anything else.

    Raises:
        BaseVersionMismatch: the arena does not hold what the delta was made against.
        ChecksumMismatch, TruncatedBlob, SizeLimitExceeded, IntegrityError: the file is damaged or
            belongs to another version.
    """
    what = f"{entry.name} of version {expected.version} of {expected.policy}"
    check_file(data, size_bytes=entry.size_bytes, digest=entry.digest, what=what)
    decoder = DeltaDecoder(arena, expected, entry, finite=finite)
    view = memoryview(data)
    decoder.open(view)
    bodies = [view[offset : offset + size] for offset, size in decoder.segments]
    if threads <= 1 or len(bodies) < 2:
        for index, body in enumerate(bodies):
            decoder.decode(index, body)
        return decoder.finish()
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[None]] = deque(
            pool.submit(decoder.decode, index, body) for index, body in enumerate(bodies)
        )
        try:
            while waiting:
                waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
    return decoder.finish()


def check_file(data: Buffer, *, size_bytes: int, digest: str, what: str) -> None:
    """Compare a file with its manifest entry.

    Raises:
        TruncatedBlob, SizeLimitExceeded, ChecksumMismatch: shorter, longer, other contents.
    """
    if len(data) < size_bytes:
        raise TruncatedBlob(f"{what} has {len(data)} of {size_bytes} bytes")
    if len(data) > size_bytes:
        raise SizeLimitExceeded(f"{what} has {len(data)} bytes, its manifest says {size_bytes}")
    if hashlib.sha256(data).hexdigest() != digest:
        raise ChecksumMismatch(f"{what}: SHA-256 is not the one in the manifest")
