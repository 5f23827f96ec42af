"""What changed in a segment, as symbols that both ends can rank by the old exponent.

What always holds: ``changes_of(symbols_of(olds, news), olds)`` gives the new bits of exactly the
changed cells; the numba and the numpy implementation give the same symbols and the same changes;
symbols that do not fit the old cells end in an ``IntegrityError``.

A segment's cells run over its spans back to back. Every changed cell has a *class* (the exponent
of its old value, `layout.py`), a *gap* (cells of its class since the last changed one of that
class) and a *step* (zigzag code of the difference of the bit patterns: +1 ulp is 2, -1 ulp is 1).
Symbols are ordered by class, then by position. Gaps within a class are nearly geometric, because
cells of one exponent change with nearly equal probability: that is where the bytes are saved.

Temporaries: numpy, of one block (``_BLOCK_CELLS``); numba, nothing per cell. Both: a few bytes per
changed cell.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from transport.errors import IntegrityError
from transport.weights import kernels
from transport.weights.kernels import Lanes
from transport.weights.layout import ClassLayout
from transport.weights.patch import CellList
from transport.weights.tensors import Cells

_BLOCK_CELLS = 1 << 17
_FIRST_ROOM = 1 << 16

Counts = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]
Bytes8 = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ClassSymbols:
    """Changed cells of a segment, by class: ``counts`` of every class of the layout, and the gaps
    and steps of all classes one after the other (each as long as ``counts.sum()``)."""

    counts: Counts
    gaps: Words
    steps: Words


def steps_of(old: Cells, new: Cells) -> Cells:
    """Zigzag codes of the differences; ``old`` and ``new`` are unsigned and of one type."""
    bits = old.dtype.itemsize * 8
    steps = new - old
    sign = (steps.view(f"<i{old.dtype.itemsize}") >> (bits - 1)).view(old.dtype)
    steps <<= old.dtype.type(1)
    steps ^= sign
    return steps


def add_steps(old: Cells, steps: Cells) -> Cells:
    """Inverse of ``steps_of``."""
    one = old.dtype.type(1)
    difference = steps >> one
    difference ^= np.negative(steps & one)  # all ones for odd codes, which stand for negatives
    difference += old
    return difference


def class_of(cells: Cells, layout: ClassLayout) -> Bytes8:
    classes = cells >> cells.dtype.type(layout.shift)
    classes &= cells.dtype.type(layout.mask)
    return classes.astype(np.uint8, copy=False)


def _blocks(cells: int) -> Iterator[slice]:
    for start in range(0, cells, _BLOCK_CELLS):
        yield slice(start, min(start + _BLOCK_CELLS, cells))


def class_starts(counts: Counts) -> Counts:
    """Where each class begins in a stream that is ordered by class."""
    starts: Counts = np.cumsum(counts) - counts
    return starts


def symbols_of(
    olds: Sequence[Cells], news: Sequence[Cells], layout: ClassLayout, compiled: bool = False
) -> ClassSymbols:
    """Symbols of a segment, one array of old and of new cells (1, 2 or 4 bytes) per span;
    ``compiled``: by the kernels, else by numpy."""
    return _scan(olds, news, layout) if compiled else _sort(olds, news, layout)


Words64 = npt.NDArray[np.uint64]


def _words(lanes: Lanes, *spans: Cells) -> Iterator[tuple[int, Lanes, list[Words64]]]:
    """Spans of one size as words for the kernels, run by run: the cell a run begins at, how cells
    lie in its words, and its words of every span. Whole words come first, then one that is not
    full. Only spans that are not aligned are copied, a block at a time."""
    cells, per_word = spans[0].size, 8 // spans[0].dtype.itemsize
    whole = cells - cells % per_word
    aligned = all(span.flags.c_contiguous and span.ctypes.data % 8 == 0 for span in spans)
    size = max(whole, 1) if aligned else _BLOCK_CELLS
    for start in range(0, whole, size):
        parts = [span[start : min(start + size, whole)] for span in spans]
        yield start, lanes, [_as_words(part if aligned else part.copy()) for part in parts]
    if whole < cells:
        rests = [np.zeros(per_word, span.dtype) for span in spans]
        for rest, span in zip(rests, spans, strict=True):
            rest[: cells - whole] = span[whole:]
        shorter = lanes._replace(lanes=np.uint64(cells - whole))
        yield whole, shorter, [_as_words(rest) for rest in rests]


def _as_words(cells: Cells) -> Words64:
    words = cells.view(np.uint64)
    words.flags.writeable = False  # one kind of array, so that kernels are compiled once
    return words


def _scan(olds: Sequence[Cells], news: Sequence[Cells], layout: ClassLayout) -> ClassSymbols:
    scan, sort = (kernels.compiled(kernel) for kernel in (kernels.scan_changes, kernels.by_class))
    lanes = kernels.lanes_of(olds[0].dtype.itemsize, layout)
    seen = np.zeros(kernels.COUNTERS * 256, np.int32)
    last = np.full(256, -1, np.int64)
    room = _FIRST_ROOM
    kinds, gaps, steps = (np.empty(room, kind) for kind in (np.uint8, np.uint32, np.uint32))
    filled = 0
    for old_span, new_span in zip(olds, news, strict=True):
        for _, shape, (old, new) in _words(lanes, old_span, new_span):
            word = 0
            while True:
                word, filled = scan(old, new, word, shape, seen, last, kinds, gaps, steps, filled)
                if word == old.size:
                    break
                room *= 2
                kinds, gaps, steps = (np.resize(a, room) for a in (kinds, gaps, steps))
    kinds = kinds[:filled]
    counts = np.bincount(kinds, minlength=layout.classes)
    by_class = ClassSymbols(counts, np.empty(filled, np.uint32), np.empty(filled, np.uint32))
    sort(kinds, gaps, steps, class_starts(counts), by_class.gaps, by_class.steps)
    return by_class


def _sort(olds: Sequence[Cells], news: Sequence[Cells], layout: ClassLayout) -> ClassSymbols:
    """The same by numpy.

    Within a block a stable sort by class puts cells in the order of their ranks; ranks go on
    from block to block and from span to span.
    """
    seen = np.zeros(layout.classes, np.int64)
    found: list[tuple[Bytes8, Indices, Words]] = []
    for old_span, new_span in zip(olds, news, strict=True):
        for part in _blocks(old_span.size):
            old, new = old_span[part], new_span[part]
            classes = class_of(old, layout)
            in_block = np.bincount(classes, minlength=layout.classes)
            changed = old != new
            if changed.any():
                order = np.argsort(classes, kind="stable")
                places = np.flatnonzero(changed[order])
                cells = order[places]
                kinds = classes[cells]
                ranks = places + (seen - class_starts(in_block))[kinds]
                found.append((kinds, ranks, steps_of(old[cells], new[cells]).astype(np.uint32)))
            seen += in_block
    if not found:
        nothing = np.zeros(0, np.uint32)
        return ClassSymbols(np.zeros(layout.classes, np.int64), nothing, nothing)
    kinds = np.concatenate([block[0] for block in found])
    ranks = np.concatenate([block[1] for block in found])
    steps = np.concatenate([block[2] for block in found])
    order = np.argsort(kinds, kind="stable")
    counts = np.bincount(kinds, minlength=layout.classes)
    gaps = np.diff(ranks[order], prepend=-1) - 1
    firsts = class_starts(counts)[counts > 0]
    gaps[firsts] = ranks[order[firsts]]
    return ClassSymbols(counts, gaps.astype(np.uint32), steps[order])


def changes_of(
    symbols: ClassSymbols, olds: Sequence[Cells], layout: ClassLayout, compiled: bool = False
) -> list[CellList | None]:
    """New values of the changed cells, per span and relative to its start.

    Raises:
        IntegrityError: a class ends before its changes do.
    """
    return (_count_down if compiled else _select)(symbols, olds, layout)


def _count_down(
    symbols: ClassSymbols, olds: Sequence[Cells], layout: ClassLayout
) -> list[CellList | None]:
    apply = kernels.compiled(kernels.scan_apply)
    lanes = kernels.lanes_of(olds[0].dtype.itemsize, layout)
    cursors, ends, left = (np.zeros(256, np.int64) for _ in range(3))
    cursors[: layout.classes] = class_starts(symbols.counts)
    ends[: layout.classes] = np.cumsum(symbols.counts)
    busy = cursors[: layout.classes] < ends[: layout.classes]
    left.fill(kernels.NEVER)
    left[: layout.classes][busy] = symbols.gaps[cursors[: layout.classes][busy]]
    moves = np.empty(symbols.gaps.size, np.uint64)
    kernels.compiled(_side_by_side)(symbols.gaps, symbols.steps, moves)
    positions = np.empty(symbols.gaps.size, np.int32)
    values = np.empty(symbols.gaps.size, np.uint32)
    changes: list[CellList | None] = []
    filled = 0
    for span in olds:
        first = filled
        for start, shape, (words,) in _words(lanes, span):
            begin = filled
            filled = apply(words, shape, left, cursors, ends, moves, positions, values, filled)
            if start:
                positions[begin:filled] += start
        changes.append(
            CellList(positions[first:filled], values[first:filled].astype(span.dtype))
            if filled > first
            else None
        )
    check_all_found(cursors, ends)
    return changes


def _side_by_side(gaps: Any, steps: Any, moves: Any) -> None:
    """Compiled; gap and step of a change are read together."""
    for i in range(moves.size):
        moves[i] = np.uint64(gaps[i]) | (np.uint64(steps[i]) << np.uint64(32))


def _select(
    symbols: ClassSymbols, olds: Sequence[Cells], layout: ClassLayout
) -> list[CellList | None]:
    """The same by numpy."""
    counts, starts = symbols.counts, class_starts(symbols.counts)
    totals = np.cumsum(symbols.gaps.astype(np.int64) + 1)
    before = np.concatenate((np.zeros(1, np.int64), totals))[starts]
    ranks = totals - np.repeat(before, counts) - 1
    cursors, ends = starts.copy(), starts + counts
    seen = np.zeros(layout.classes, np.int64)
    changes: list[CellList | None] = []
    for span in olds:
        positions: list[npt.NDArray[np.int32]] = []
        values: list[Cells] = []
        for part in _blocks(span.size):
            old = span[part]
            classes = class_of(old, layout)
            in_block = np.bincount(classes, minlength=layout.classes)
            here: list[Indices] = []
            for kind in np.flatnonzero((cursors < ends) & (in_block > 0)):
                begin, end = cursors[kind], ends[kind]
                reached = begin + np.searchsorted(ranks[begin:end], seen[kind] + in_block[kind])
                if reached > begin:
                    here.append(np.arange(begin, reached))
                    cursors[kind] = reached
            if here:
                symbol = np.concatenate(here)
                order = np.argsort(classes, kind="stable")
                # Which class a symbol is of follows from its place in the streams.
                kinds = np.searchsorted(ends, symbol, side="right")
                cells = order[ranks[symbol] + (class_starts(in_block) - seen)[kinds]]
                rising = np.argsort(cells)
                cells, symbol = cells[rising], symbol[rising]
                steps = symbols.steps[symbol].astype(old.dtype)
                positions.append((cells + part.start).astype(np.int32))
                values.append(add_steps(old[cells], steps))
            seen += in_block
        if positions:
            changes.append(CellList(np.concatenate(positions), np.concatenate(values)))
        else:
            changes.append(None)
    check_all_found(cursors, ends)
    return changes


def check_all_found(cursors: Counts, ends: Counts) -> None:
    missing = int((ends - cursors).sum())
    if missing:
        raise IntegrityError(f"{missing} changes lie behind the end of the segment")
