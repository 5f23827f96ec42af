"""The file format of deltas and composites: metadata, its limits, and what it may say.

A delta is a valid safetensors file with one U8 tensor per segment, ``segment.000000`` and on, in
order; segments without changes are left out. ``__metadata__`` has

    format    "farflow.delta.2"
    header    JSON: run, policy, version, parent, base_digest, digest, fingerprint
    segments  JSON: [[coder, dtype, [[tensor, start, cells], ...], changed, size_bytes, crc32], ...]

What always holds: ``read_delta`` needs the file's first bytes only and returns rows that are
consistent with each other, with the file and with the model: spans lie inside tensors of the row's
dtype and no cell is in two of them. A header that is larger than any such model needs is refused
before it is read.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from transport.errors import IntegrityError, SizeLimitExceeded, TruncatedBlob
from transport.weights.layout import MAX_SEGMENT_CELLS, SegmentPlan, Span
from transport.weights.tensors import Buffer, header_bytes_needed, read_header

FORMAT = "farflow.delta.2"

MAX_SEGMENTS = 1_000_000
"""Names have six digits."""

_HEADER_BYTES = 1 << 20
_MAX_HEADER_BYTES = 64 << 20


class DeltaHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Which versions a delta joins."""

    run: str
    policy: str
    version: int
    parent: int
    base_digest: str
    digest: str
    fingerprint: str


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One segment: coder and dtype, spans, changed cells, size and CRC-32 of its bytes."""

    coder: str
    dtype: str
    spans: tuple[Span, ...]
    changed: int
    size_bytes: int
    crc32: int

    @property
    def cells(self) -> int:
        return sum(span.cells for span in self.spans)


@dataclass(frozen=True, slots=True)
class DeltaLayout:
    """What a delta file says about itself; ``segments`` are (offset in the file, size in bytes),
    one per row."""

    header: DeltaHeader
    rows: tuple[Row, ...]
    segments: tuple[tuple[int, int], ...]


def segment_name(index: int) -> str:
    return f"segment.{index:06d}"


def delta_metadata(header: DeltaHeader, rows: Sequence[Row]) -> dict[str, str]:
    """Raises SizeLimitExceeded for more segments than the format can name."""
    if len(rows) > MAX_SEGMENTS:
        raise SizeLimitExceeded(f"{len(rows)} segments, at most {MAX_SEGMENTS}: make them larger")
    return {
        "format": FORMAT,
        "header": msgspec.json.encode(header).decode(),
        "segments": msgspec.json.encode(rows).decode(),
    }


def check_header_size(prefix: Buffer, *, size_bytes: int, model_bytes: int, what: str) -> int:
    """How many of the file's first bytes ``read_delta`` needs, as far as ``prefix`` tells (8 until
    that many are there). ``size_bytes`` is of the file, ``model_bytes`` of all tensors.

    Raises:
        SizeLimitExceeded: the header is larger than a delta of such a model has.
        TruncatedBlob: it does not fit into the file.
    """
    needed = header_bytes_needed(prefix)
    limit = min(_MAX_HEADER_BYTES, _HEADER_BYTES + model_bytes // 64)
    if needed > limit:
        raise SizeLimitExceeded(f"{what}: header of {needed} bytes, at most {limit} are allowed")
    if needed > size_bytes:
        raise TruncatedBlob(f"{what}: header of {needed} bytes in a file of {size_bytes}")
    return needed


def read_delta(
    prefix: Buffer, *, size_bytes: int, kinds: Mapping[str, tuple[str, int]], what: str
) -> DeltaLayout:
    """Read and check the header of a delta file of ``size_bytes`` from its first bytes.

    ``kinds`` maps the model's tensors to dtype and number of cells.

    Raises:
        SizeLimitExceeded, TruncatedBlob, IntegrityError: not a delta file for such a model.
    """
    regions, metadata = read_header(prefix, size_bytes=size_bytes)
    header, rows = _parse(metadata, what)
    check_spans([SegmentPlan(row.dtype, row.spans) for row in rows], kinds, what)
    if len(regions) != len(rows):
        raise IntegrityError(f"{what}: {len(regions)} segments, {len(rows)} in its table")
    segments: list[tuple[int, int]] = []
    position = 0
    for index, row in enumerate(rows):
        name = segment_name(index)
        region = regions.get(name)
        if region is None or region.dtype != "U8" or region.start < position:
            raise IntegrityError(f"{what}: {name} is missing, not U8 or out of order")
        position = region.end
        if row.size_bytes != region.end - region.start or row.size_bytes < 1:
            raise IntegrityError(
                f"{what}: {name} has {region.end - region.start} bytes, its row says "
                f"{row.size_bytes}"
            )
        if not 1 <= row.changed <= row.cells:
            raise IntegrityError(f"{what}: {row.changed} of {row.cells} cells change in {name}")
        segments.append((region.start, row.size_bytes))
    return DeltaLayout(header, rows, tuple(segments))


def read_delta_table(data: Buffer) -> tuple[DeltaHeader, tuple[Row, ...]]:
    """Which versions a delta file joins and how its segments are coded, from its metadata alone.

    Raises:
        IntegrityError: not a delta file.
    """
    return _parse(read_header(data)[1], "delta")


def _parse(metadata: Mapping[str, str], what: str) -> tuple[DeltaHeader, tuple[Row, ...]]:
    if metadata.get("format") != FORMAT:
        raise IntegrityError(f"{what} is not a {FORMAT} file: format {metadata.get('format')!r}")
    try:
        header = msgspec.json.decode(metadata.get("header", ""), type=DeltaHeader)
        rows = msgspec.json.decode(metadata.get("segments", ""), type=tuple[Row, ...])
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise IntegrityError(f"{what}: metadata is malformed: {error}") from error
    return header, rows


def check_spans(
    plans: Sequence[SegmentPlan], kinds: Mapping[str, tuple[str, int]], what: str
) -> None:
    """Check that spans are inside the model's tensors and disjoint.

    Raises:
        IntegrityError: names the tensor.
    """
    by_tensor: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for plan in plans:
        if not plan.spans or plan.cells > MAX_SEGMENT_CELLS:
            raise IntegrityError(f"{what}: a segment has {plan.cells} cells")
        for span in plan.spans:
            dtype, cells = kinds.get(span.tensor, ("", 0))
            if dtype != plan.dtype:
                raise IntegrityError(f"{what}: no {plan.dtype} tensor {span.tensor!r} to change")
            if span.start < 0 or span.cells < 1 or span.start + span.cells > cells:
                raise IntegrityError(
                    f"{what}: cells {span.start} to {span.start + span.cells} of tensor "
                    f"{span.tensor!r}, which has {cells}"
                )
            by_tensor[span.tensor].append((span.start, span.start + span.cells))
    for tensor, ranges in by_tensor.items():
        ranges.sort()
        for (_, end), (start, _) in pairwise(ranges):
            if start < end:
                raise IntegrityError(f"{what}: cell {start} of tensor {tensor!r} is in two spans")
