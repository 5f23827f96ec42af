"""Loops over cells and symbols that numpy cannot express in one pass, compiled by numba.

What always holds: a kernel gives the very numbers of its numpy counterpart (`symbols.py`,
`static_streams.py`); it never reads or writes outside its arrays, whatever they hold; it releases
the GIL and keeps no state but its arguments, so one pass goes on over many spans and several
threads work on several segments.

numba is optional and slow to import, so segments below ``KERNEL_CELLS`` never touch it. Compiled
code is cached on disk where that is possible. Kernels over cells read 64-bit words, each of
several cells (lanes of a word, lowest first), so that one compiled form serves every dtype.
Numbers in them are unsigned where they meet words: numba makes floats of mixed signs.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from transport.weights.layout import ClassLayout

KERNEL_CELLS = 1 << 22
"""From this many cells on, a segment is worth compiled loops."""

COUNTERS = 4
"""Cells in turn count in tables of their own: counters of one class in neighbouring cells would
otherwise wait for each other."""

NEVER = 1 << 62
"""Cells before the next change of a class that has none left."""

Kernel = Callable[..., Any]


@functools.cache
def available() -> bool:
    """Whether numba is installed; does not import it."""
    return importlib.util.find_spec("numba") is not None


def worthwhile(cells: int) -> bool:
    """Whether a segment of so many cells goes through the kernels."""
    return cells >= KERNEL_CELLS and available()


@functools.cache
def compiled(function: Kernel) -> Kernel:
    """The kernel as machine code, compiled when it is first called."""
    import numba

    try:
        kernel: Kernel = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder to cache in
        kernel = numba.njit(nogil=True)(function)
    return kernel


class Lanes(NamedTuple):
    """How cells lie in words, as unsigned numbers for the kernels."""

    lanes: np.uint64
    bits: np.uint64
    cell: np.uint64
    """All ones of the lowest lane."""
    shift: np.uint64
    mask: np.uint64


def lanes_of(item_bytes: int, layout: ClassLayout) -> Lanes:
    """Lanes of cells of 1, 2 or 4 bytes."""
    bits = 8 * item_bytes
    numbers = (64 // bits, bits, (1 << bits) - 1, layout.shift, layout.mask)
    return Lanes(*(np.uint64(number) for number in numbers))


def scan_changes(
    old: Any, new: Any, start: int, layout: Any,
    seen: Any, last: Any, kinds: Any, gaps: Any, steps: Any, filled: int,
) -> tuple[int, int]:  # fmt: skip
    """Class, gap and step of the changed cells of words, from word ``start`` on, by position.

    ``seen`` (COUNTERS x 256) counts the cells of each class so far, ``last`` holds the rank of
    the class's last changed cell (-1: none); both go on from call to call. Stops before the
    outputs are full; returns the next word and ``filled``.

    Comparing and counting have loops of their own, which keeps both in registers.
    """
    lanes, bits, cell, shift, mask = layout
    shift1, shift2, shift3 = shift + bits, shift + bits + bits, shift + bits + bits + bits
    half = np.int64(1) << np.int64(bits - np.uint64(1))
    room = kinds.size - 8
    words = old.size
    i = start
    while i < words:
        stop = min(i + 512, words)
        same = i
        while same < stop and old[same] == new[same]:
            same += 1
        part = old[i:same]
        if lanes == np.uint64(4):
            for j in range(part.size):
                word = part[j]
                seen[0, (word >> shift) & mask] += 1
                seen[1, (word >> shift1) & mask] += 1
                seen[2, (word >> shift2) & mask] += 1
                seen[3, (word >> shift3) & mask] += 1
        else:
            for j in range(part.size):
                word = part[j]
                for lane in range(lanes):
                    seen[lane & 3, (word >> shift) & mask] += 1
                    word >>= bits
        i = same
        if same == stop:
            continue
        if filled > room:
            return i, filled
        word, other = old[i], new[i]
        for _ in range(lanes):
            kind = (word >> shift) & mask
            before, after = np.int64(word & cell), np.int64(other & cell)
            if before != after:
                rank = seen[0, kind] + seen[1, kind] + seen[2, kind] + seen[3, kind]
                change = ((after - before + half) & (2 * half - 1)) - half
                kinds[filled] = kind
                gaps[filled] = rank - last[kind] - 1
                steps[filled] = 2 * change if change >= 0 else -2 * change - 1
                last[kind] = rank
                filled += 1
            seen[0, kind] += 1
            word >>= bits
            other >>= bits
        i += 1
    return words, filled


def by_class(kinds: Any, gaps: Any, steps: Any, cursors: Any, to_gaps: Any, to_steps: Any) -> None:
    """Stable counting sort; ``cursors`` are where each class begins, and are used up."""
    for i in range(kinds.size):
        at = cursors[kinds[i]]
        cursors[kinds[i]] = at + 1
        to_gaps[at] = gaps[i]
        to_steps[at] = steps[i]


def scan_apply(
    old: Any, layout: Any, left: Any, cursors: Any, ends: Any,
    gaps: Any, steps: Any, positions: Any, values: Any, filled: int,
) -> int:  # fmt: skip
    """Positions (in the cells of words) and new values of changed cells, from ``filled`` on.

    ``left`` counts down the cells of each class before its next change (``NEVER`` when all are
    done), ``cursors`` is that change in the streams, ``ends`` where the class's changes end; all
    go on from span to span. Returns ``filled``; stops early when the outputs are full.
    """
    lanes, bits, cell, shift, mask = layout
    shift1, shift2, shift3 = shift + bits, shift + bits + bits, shift + bits + bits + bits
    one, zero = np.uint64(1), np.uint64(0)
    for i in range(old.size):
        word = old[i]
        if lanes == np.uint64(4):
            a, b = (word >> shift) & mask, (word >> shift1) & mask
            c, d = (word >> shift2) & mask, (word >> shift3) & mask
            left_a = left[a] - 1
            left[a] = left_a
            left_b = left[b] - 1
            left[b] = left_b
            left_c = left[c] - 1
            left[c] = left_c
            left_d = left[d] - 1
            left[d] = left_d
            if (left_a | left_b | left_c | left_d) >= 0:
                continue
            left[a] += 1
            left[b] += 1
            left[c] += 1
            left[d] += 1
        for lane in range(lanes):
            kind = (word >> shift) & mask
            ahead = left[kind] - 1
            if ahead < 0:
                symbol = cursors[kind]
                if filled >= positions.size or symbol >= ends[kind]:
                    return filled
                step = np.uint64(steps[symbol])
                change = (step >> one) ^ (zero - (step & one))
                positions[filled] = i * np.int64(lanes) + np.int64(lane)
                values[filled] = ((word & cell) + change) & cell
                filled += 1
                symbol += 1
                cursors[kind] = symbol
                ahead = np.int64(gaps[symbol]) if symbol < ends[kind] else np.int64(NEVER)
            left[kind] = ahead
            word >>= bits
    return filled


def pack_bits(values: Any, widths: Any, out: Any) -> None:
    """The lowest ``widths`` (0..32) bits of ``values``, back to back, lowest bit first; ``out``
    has as many bytes as they fill."""
    waiting = np.uint64(0)
    bits = 0
    at = 0
    for i in range(values.size):
        width = np.uint64(widths[i])
        value = np.uint64(values[i]) & ((np.uint64(1) << width) - np.uint64(1))
        waiting |= value << np.uint64(bits)
        bits += int(width)
        while bits >= 8:
            if at < out.size:
                out[at] = waiting & np.uint64(255)
            at += 1
            waiting >>= np.uint64(8)
            bits -= 8
    if bits > 0 and at < out.size:
        out[at] = waiting & np.uint64(255)


def unpack_bits(data: Any, widths: Any, values: Any) -> None:
    """Inverse of ``pack_bits``; bits behind the end of ``data`` are zero."""
    waiting = np.uint64(0)
    bits = 0
    at = 0
    for i in range(values.size):
        width = int(widths[i])
        while bits < width:
            if at < data.size:
                waiting |= np.uint64(data[at]) << np.uint64(bits)
            at += 1
            bits += 8
        values[i] = waiting & ((np.uint64(1) << np.uint64(width)) - np.uint64(1))
        waiting >>= np.uint64(width)
        bits -= width
