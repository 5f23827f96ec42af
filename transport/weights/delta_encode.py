"""Make delta files: of two whole states, or of parts of them by several processes.

What always holds: the bytes of a file depend on old, new, plans and settings, not on threads or
processes; memory beyond the two states is the coded bytes twice and the temporaries of the
segments in work (``threads``), whatever the model's size. The base's digest moves by what changed:
nothing is hashed that did not.
"""

import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from transport.errors import IntegrityError, ModelError
from transport.weights.cell_sums import COMPILED_CELLS
from transport.weights.delta_format import (
    DeltaHeader,
    Row,
    check_spans,
    delta_metadata,
    segment_name,
)
from transport.weights.digest import (
    StateDigest,
    fingerprint_of_kinds,
    read_kind,
    span_difference,
    tensor_key,
)
from transport.weights.layout import SEGMENT_CELLS, SegmentPlan, plan_segments
from transport.weights.patch import CellRun
from transport.weights.segments import CodecSettings, decode_segment, encode_segment
from transport.weights.tensors import Cells, TensorBytes, safetensors_parts


class SegmentWork(NamedTuple):
    """A segment to encode: one array of old and one of new cells for each span of the plan."""

    plan: SegmentPlan
    olds: Sequence[Cells]
    news: Sequence[Cells]


class CodedSegment(msgspec.Struct, frozen=True):
    """An encoded segment and how far it moves the sums of its tensors; made by any process.
    ``non_finite`` is the first tensor that it gives an infinity or NaN."""

    plan: SegmentPlan
    coder: str
    changed: int
    body: bytes
    moves: tuple[tuple[str, bytes], ...]
    non_finite: str | None = None


@dataclass(frozen=True, slots=True)
class EncodedDelta:
    """A delta file and what was measured on the way: cells changed, bytes by coder, where the
    segments lie (offset, size), and the first tensor that got an infinity or NaN."""

    data: bytes
    header: DeltaHeader
    digests: StateDigest
    changed_cells: int
    total_cells: int
    coded_bytes: Mapping[str, int] = field(default_factory=dict)
    segments: tuple[tuple[int, int], ...] = ()
    non_finite: str | None = None


def encode_delta(
    old: Mapping[str, TensorBytes],
    new: Mapping[str, TensorBytes],
    *,
    run: str,
    policy: str,
    version: int,
    parent: int,
    base: StateDigest | None = None,
    settings: CodecSettings | None = None,
    threads: int = 1,
    segment_cells: int = SEGMENT_CELLS,
    plans: Sequence[SegmentPlan] | None = None,
) -> EncodedDelta:
    """The delta from ``old`` (version ``parent``) to ``new``; the same for a composite, whose
    ``parent`` is its base.

    ``base`` is the digest of ``old`` where the caller has it already; otherwise all of ``old`` is
    read once more. ``plans`` replace the canonical segments and must have every cell once.

    Raises:
        ModelError: names, dtypes or shapes differ between old and new; names the tensor.
        IntegrityError: ``plans`` do not fit the model.
    """
    _check_same_model(old, new)
    base = StateDigest.of(old, threads=threads) if base is None else base
    counts = _cell_counts(base)
    if plans is None:
        plans = plan_segments(counts, segment_cells=segment_cells)
    else:
        check_spans(plans, counts, "plans of a delta")
        planned, cells = sum(plan.cells for plan in plans), sum(n for _, n in counts.values())
        if planned != cells:
            raise IntegrityError(f"plans of a delta have {planned} of {cells} cells")
    coded = encode_segments(
        (_work(plan, old, new) for plan in plans), base.kinds, settings=settings, threads=threads
    )
    return assemble_delta(coded, base=base, run=run, policy=policy, version=version, parent=parent)


def encode_segments(
    work: Iterable[SegmentWork],
    kinds: Mapping[str, bytes],
    *,
    settings: CodecSettings | None = None,
    threads: int = 1,
    read_back: bool = False,
) -> Iterator[CodedSegment]:
    """Encode segments in their order, those without changes left out. ``work`` is drawn only as
    threads become free. ``kinds`` as in ``StateDigest``: of whole tensors, also where ``work`` has
    only one process's part of them.

    ``read_back`` decodes every body and compares: for files that nobody applies before they are
    offered. Iterating then raises IntegrityError for one that would not give the new cells.
    """
    settings = CodecSettings() if settings is None else settings

    def encode(segment: SegmentWork) -> CodedSegment | None:
        coded = _encode(segment, kinds, settings)
        if read_back and coded is not None:
            _read_back(segment, coded)
        return coded

    coded = map(encode, work) if threads <= 1 else _in_order(encode, work, threads)
    return (segment for segment in coded if segment is not None)


def _in_order(
    encode: Callable[[SegmentWork], CodedSegment | None],
    work: Iterable[SegmentWork],
    threads: int,
) -> Iterator[CodedSegment | None]:
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[CodedSegment | None]] = deque()
        try:
            for item in work:
                waiting.append(pool.submit(encode, item))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _encode(
    work: SegmentWork, kinds: Mapping[str, bytes], settings: CodecSettings
) -> CodedSegment | None:
    plan = work.plan
    compiled = plan.cells >= COMPILED_CELLS
    moves: list[tuple[str, bytes]] = []
    bad: list[str] = []
    for span, old, new in zip(plan.spans, work.olds, work.news, strict=True):
        key = tensor_key(span.tensor, kinds[span.tensor])
        found = span_difference(key, span.start, plan.dtype, old, new, compiled=compiled)
        if found.changed:
            moves.append((span.tensor, found.move))
        if not found.finite:
            bad.append(span.tensor)
    if not moves:
        return None
    coded = encode_segment(plan.dtype, work.olds, work.news, settings)
    return CodedSegment(
        plan, coded.coder, coded.changed, coded.body, tuple(moves), min(bad, default=None)
    )


def _read_back(work: SegmentWork, coded: CodedSegment) -> None:
    changes = decode_segment(
        coded.coder, work.plan.dtype, memoryview(coded.body), work.olds, coded.changed
    )
    found = 0
    for change, new in zip(changes, work.news, strict=True):
        if change is None:
            continue
        cells = new if isinstance(change, CellRun) else new[change.positions]
        if not np.array_equal(change.values, cells):
            raise IntegrityError(f"a {coded.coder} segment does not decode to what was encoded")
        found += coded.changed if isinstance(change, CellRun) else change.values.size
    if found < coded.changed:
        raise IntegrityError(f"a {coded.coder} segment decodes to {found} of {coded.changed} cells")


def assemble_delta(
    coded: Iterable[CodedSegment],
    *,
    base: StateDigest,
    run: str,
    policy: str,
    version: int,
    parent: int,
) -> EncodedDelta:
    """The delta file of segments that any processes made, in this order, over the state ``base``.

    Raises:
        IntegrityError: spans are not inside the model's tensors, or a cell is in two of them.
        SizeLimitExceeded: more segments than the format can name.
    """
    segments = list(coded)
    counts = _cell_counts(base)
    check_spans([segment.plan for segment in segments], counts, f"delta {version} of {policy}")
    digests = base.moved(move for segment in segments for move in segment.moves)
    header = DeltaHeader(
        run=run,
        policy=policy,
        version=version,
        parent=parent,
        base_digest=base.hex,
        digest=digests.hex,
        fingerprint=fingerprint_of_kinds(base.kinds),
    )
    rows: list[Row] = []
    bodies: dict[str, TensorBytes] = {}
    coded_bytes: dict[str, int] = {}
    for index, segment in enumerate(segments):
        body, plan = segment.body, segment.plan
        rows.append(
            Row(segment.coder, plan.dtype, plan.spans, segment.changed, len(body), zlib.crc32(body))
        )
        bodies[segment_name(index)] = TensorBytes("U8", (len(body),), body)
        coded_bytes[segment.coder] = coded_bytes.get(segment.coder, 0) + len(body)
    parts = list(safetensors_parts(bodies, delta_metadata(header, rows)))
    places: list[tuple[int, int]] = []
    offset = len(parts[0])
    for row in rows:
        places.append((offset, row.size_bytes))
        offset += row.size_bytes
    return EncodedDelta(
        data=b"".join(parts),
        header=header,
        digests=digests,
        changed_cells=sum(segment.changed for segment in segments),
        total_cells=sum(cells for _, cells in counts.values()),
        coded_bytes=dict(sorted(coded_bytes.items())),
        segments=tuple(places),
        non_finite=min((s.non_finite for s in segments if s.non_finite is not None), default=None),
    )


def _cell_counts(digests: StateDigest) -> dict[str, tuple[str, int]]:
    counts: dict[str, tuple[str, int]] = {}
    for name, kind in digests.kinds.items():
        dtype, shape = read_kind(kind)
        counts[name] = (dtype, math.prod(shape))
    return counts


def _work(
    plan: SegmentPlan, old: Mapping[str, TensorBytes], new: Mapping[str, TensorBytes]
) -> SegmentWork:
    return SegmentWork(plan, span_cells(plan, old), span_cells(plan, new))


def span_cells(plan: SegmentPlan, tensors: Mapping[str, TensorBytes]) -> list[Cells]:
    """Views of a plan's cells, one array per span."""
    return [tensors[s.tensor].cells()[s.start : s.start + s.cells] for s in plan.spans]


def _check_same_model(old: Mapping[str, TensorBytes], new: Mapping[str, TensorBytes]) -> None:
    if old.keys() != new.keys():
        names = sorted(old.keys() ^ new.keys())
        raise ModelError(f"old and new weights have different tensors: {', '.join(names[:5])}")
    for name, tensor in new.items():
        before = old[name]
        if (tensor.dtype, tensor.shape) != (before.dtype, before.shape):
            raise ModelError(
                f"tensor {name!r} was {before.dtype} {before.shape}, "
                f"is {tensor.dtype} {tensor.shape}; a delta needs both alike"
            )
