"""Encode and decode one segment: the coder is chosen, the bits come back exactly.

What always holds: the changes that ``decode_segment`` gives make the old cells the new ones bit
for bit, whatever the patterns and sizes; they are absolute values, so writing them twice is
harmless; numba or not, the same segment gives the same bytes under the same coder; a hostile body
ends in an ``IntegrityError`` and costs no more memory than the segment and the stated number of
changes imply.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from transport.errors import IntegrityError, ModelError
from transport.weights import coders, kernels
from transport.weights.layout import MAX_SEGMENT_CELLS, class_layout
from transport.weights.patch import CellList, CellRun, TensorChange
from transport.weights.range_coder import decode_range, encode_range
from transport.weights.static_streams import (
    Packed,
    pack_gaps,
    pack_steps,
    unpack_gaps,
    unpack_steps,
)
from transport.weights.symbols import ClassSymbols, changes_of, symbols_of
from transport.weights.tensors import Cells

CODERS = (
    "same", "raw", "split.zstd", "list.zstd", "class.zstd", "class.range", "dense.zstd",
)  # fmt: skip
"""Every coder that can be decoded, by its name on the wire."""

CLASS_SHARE = 0.7
"""Above this share of changed cells, classes are not tried: the steps of all cells are smaller."""
DENSE_SHARE = 0.35
"""Below it, the steps of all cells are not tried."""

_BLOCK_CELLS = 1 << 14
_SAMPLED_CELLS = 1 << 22
_SAMPLE_STRIDE = 64

# Thread CPU seconds of the slower side, per cell and per change: a straight line through segments
# of 2-byte cells of which 1, 3 and 5 % change, on one core of an AMD EPYC (Zen 3) that others also
# use. Decoding is slower for classes, encoding for lists. They need only be right enough to tell a
# slow coder from a slow link.
_CLASS_CELL_S = 1.4e-9
_CLASS_CHANGE_S = 30e-9
_RANGE_CHANGE_S = 100e-9
"""What ``class.range`` takes more than ``class.zstd``."""
_LIST_CELL_S = 0.9e-9
_LIST_CHANGE_S = 32e-9
_LIST_BYTES = 0.8
"""Bytes per change of ``list.zstd`` beyond the value."""
_CLASS_BYTES = 0.8
"""Bytes per change of ``class.zstd``, for the choice alone."""
_RANGE_GAIN = 0.07
"""Share that ``class.range`` saves."""


@dataclass(frozen=True, slots=True)
class EncodedSegment:
    """A coder's name, how many cells changed, and the body; unchanged: ``same`` and empty."""

    coder: str
    changed: int
    body: bytes


class CodecSettings(msgspec.Struct, frozen=True):
    """How to choose a coder.

    ``small``: fewest bytes. ``fast``: static entropy coding. ``portable``: the same bytes without
    numba. ``absolute``: positions and values, whatever the old ones were. ``auto``: the lowest
    sum of the slower side's seconds and of bytes over ``link_bytes_s``.
    """

    coder: Literal["auto", "small", "fast", "portable", "absolute"] = "auto"
    link_bytes_s: float = 12.5e6


def encode_segment(
    dtype: str,
    olds: Sequence[Cells],
    news: Sequence[Cells],
    settings: CodecSettings,
    *,
    compiled: bool | None = None,
) -> EncodedSegment:
    """Code what changed between old and new cells: one array each per span, of one unsigned type.

    ``compiled`` forces numba (True) or numpy (False); by itself, large segments use numba where
    it is installed.

    Raises:
        ModelError: old and new cells differ in type or size, or are too many for one segment.
    """
    cells = sum(old.size for old in olds)
    if cells > MAX_SEGMENT_CELLS:
        raise ModelError(f"segment of {cells} cells; one has at most {MAX_SEGMENT_CELLS}")
    if len(olds) != len(news) or any(
        (old.dtype, old.size) != (new.dtype, new.size) or old.dtype != olds[0].dtype
        for old, new in zip(olds, news, strict=True)
    ):
        raise ModelError("old and new cells of a segment differ in type or size")
    share = _share(olds, news, cells)
    if not share:
        return EncodedSegment("same", 0, b"")
    item_bytes = olds[0].dtype.itemsize
    if compiled is None:
        compiled = settings.coder != "portable" and kernels.worthwhile(cells)
    absolute = settings.coder == "absolute" or (
        settings.coder == "auto" and _prefers_list(settings, cells, share * cells, item_bytes)
    )
    found: list[EncodedSegment] = []
    if absolute or item_bytes == 8:
        found.append(_absolute(olds, news))
    elif share <= CLASS_SHARE:
        found.append(_classes(dtype, olds, news, settings, compiled))
    changed = found[0].changed if found else _count(olds, news)
    if not absolute and changed >= DENSE_SHARE * cells:
        found.append(EncodedSegment("dense.zstd", changed, coders.encode_dense(olds, news)))
    if min(len(coded.body) for coded in found) >= 0.6 * cells * item_bytes:
        new = np.concatenate(news)
        found.append(EncodedSegment("split.zstd", changed, coders.encode_split(new)))
        found.append(EncodedSegment("raw", changed, coders.encode_raw(new)))
    return min(found, key=lambda coded: len(coded.body))


def _count(olds: Sequence[Cells], news: Sequence[Cells], stride: int = 1) -> int:
    """Changed cells of every ``stride``-th block of each span."""
    return sum(
        int(np.count_nonzero(old[at : at + _BLOCK_CELLS] != new[at : at + _BLOCK_CELLS]))
        for old, new in zip(olds, news, strict=True)
        for at in range(0, old.size, stride * _BLOCK_CELLS)
    )


def _share(olds: Sequence[Cells], news: Sequence[Cells], cells: int) -> float:
    """Share of changed cells: of a sample where that will do, as counting all of a large segment
    takes as long as coding it. Exact if 0, or if it says that most cells changed."""
    if cells >= _SAMPLED_CELLS:
        sampled = sum(
            min(_BLOCK_CELLS, old.size - at)
            for old in olds
            for at in range(0, old.size, _SAMPLE_STRIDE * _BLOCK_CELLS)
        )
        share = _count(olds, news, _SAMPLE_STRIDE) / sampled
        if 0 < share <= CLASS_SHARE:
            return share
    return _count(olds, news) / max(cells, 1)


def _prefers_list(settings: CodecSettings, cells: int, changed: float, item_bytes: int) -> bool:
    """Whether the link is so fast that ranking cells by class costs more than it saves."""
    listed = cells * _LIST_CELL_S + changed * (
        _LIST_CHANGE_S + (_LIST_BYTES + item_bytes) / settings.link_bytes_s
    )
    classed = cells * _CLASS_CELL_S + changed * (
        _CLASS_CHANGE_S + _CLASS_BYTES / settings.link_bytes_s
    )
    return listed < classed


def _absolute(olds: Sequence[Cells], news: Sequence[Cells]) -> EncodedSegment:
    positions, values, start = [], [], 0
    for old, new in zip(olds, news, strict=True):
        for at in range(0, old.size, _BLOCK_CELLS):
            block = new[at : at + _BLOCK_CELLS]
            (here,) = np.nonzero(old[at : at + _BLOCK_CELLS] != block)
            positions.append((here + (start + at)).astype(np.uint32))
            values.append(block[here])
        start += old.size
    changed = sum(here.size for here in positions)
    body = coders.encode_list(np.concatenate(positions), np.concatenate(values))
    return EncodedSegment("list.zstd", changed, body)


def _classes(
    dtype: str,
    olds: Sequence[Cells],
    news: Sequence[Cells],
    settings: CodecSettings,
    compiled: bool,
) -> EncodedSegment:
    item_bits = 8 * olds[0].dtype.itemsize
    symbols = symbols_of(olds, news, class_layout(dtype), compiled)
    changed = symbols.gaps.size
    body = coders.static_body(
        symbols.counts,
        pack_gaps(symbols.gaps, compiled),
        pack_steps(symbols.steps, symbols.counts, item_bits, compiled),
    )
    saved_s = _RANGE_GAIN * len(body) / settings.link_bytes_s
    if settings.coder == "small" or (
        settings.coder == "auto" and compiled and saved_s > changed * _RANGE_CHANGE_S
    ):
        table = coders.table_bytes(symbols.counts)
        limit = max(0, len(body) - len(table))
        coded = encode_range(symbols.counts, symbols.gaps, symbols.steps, limit, compiled)
        if coded is not None:
            return EncodedSegment("class.range", changed, table + coded)
    return EncodedSegment("class.zstd", changed, body)


def decode_segment(
    coder: str,
    dtype: str,
    body: memoryview,
    olds: Sequence[Cells],
    changed: int,
    *,
    compiled: bool | None = None,
) -> list[TensorChange | None]:
    """What becomes of each span, relative to its start; None where nothing changes.

    Raises:
        IntegrityError: unknown coder, or a body that is not one of ``changed`` changes in these
            old cells.
    """
    cells = sum(old.size for old in olds)
    if not 0 <= changed <= cells:
        raise IntegrityError(f"{changed} changes in a segment of {cells} cells")
    if compiled is None:
        compiled = kernels.worthwhile(cells)
    if coder == "same":
        if changed or len(body):
            raise IntegrityError("an unchanged segment has changes or a body")
        return [None] * len(olds)
    if not changed:
        raise IntegrityError(f"a {coder!r} segment has no changes")
    kind = olds[0].dtype
    if coder in ("class.zstd", "class.range"):
        if kind.itemsize == 8:
            raise IntegrityError(f"{coder} codes no {dtype} cells")
        layout = class_layout(dtype)
        symbols = _read_classes(coder, dtype, body, 8 * kind.itemsize, changed, compiled)
        return list(changes_of(symbols, olds, layout, compiled))
    if coder == "list.zstd":
        return _read_list(body, olds, changed)
    if coder == "dense.zstd":
        return [_run(new) for new in coders.decode_dense(body, olds)]
    if coder in ("raw", "split.zstd"):
        decode = coders.decode_raw if coder == "raw" else coders.decode_split
        values = decode(body, cells, kind)
        ends = np.cumsum([old.size for old in olds])
        return [_run(part) for part in np.split(values, ends[:-1])]
    raise IntegrityError(f"coder {coder!r} is unknown; known: {', '.join(CODERS)}")


def _run(values: Cells) -> CellRun | None:
    return CellRun(0, values) if values.size else None


def _read_classes(
    coder: str, dtype: str, body: memoryview, item_bits: int, changed: int, compiled: bool
) -> ClassSymbols:
    layout = class_layout(dtype)
    if coder == "class.range":
        counts, rest = coders.read_table(body, layout, changed)
        return ClassSymbols(counts, *decode_range(rest, counts, item_bits, compiled))
    counts, gaps, steps, extra = coders.read_static(body, layout, changed)
    ranks, taken = unpack_gaps(Packed(gaps, extra), compiled)
    moves = unpack_steps(Packed(steps, extra[taken:]), counts, item_bits, compiled)
    return ClassSymbols(counts, ranks, moves)


def _read_list(body: memoryview, olds: Sequence[Cells], changed: int) -> list[TensorChange | None]:
    cells = sum(old.size for old in olds)
    positions, values = coders.decode_list(body, cells, olds[0].dtype, changed)
    changes: list[TensorChange | None] = []
    start = 0
    for old in olds:
        first, end = np.searchsorted(positions, (start, start + old.size))
        here = CellList(positions[first:end] - np.int32(start), values[first:end])
        changes.append(here if end > first else None)
        start += old.size
    return changes
