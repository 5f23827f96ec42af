"""Loops over cells and symbols that numpy cannot express in one pass, compiled by numba.

What always holds: a kernel gives the very numbers of its numpy counterpart (`symbols.py`,
`static_streams.py`); it never reads or writes outside its arrays, whatever they hold; it releases
the GIL and keeps no state but its arguments, so one pass goes on over many spans and several
threads work on several segments.

Speed comes from small innermost loops for the common word, in which nothing changes: what happens
to the others stands outside them, or the compiler runs out of registers for both. Indices are
unsigned, which spares a test for negative ones at every access.

numba is optional and slow to import, so segments below ``KERNEL_CELLS`` never touch it; where it
cannot be imported, numpy does the work. Compiled code is cached on disk where that is possible.
Kernels over cells read 64-bit words, each of several cells (lanes of a word, lowest first), so that
one compiled form serves every dtype. Numbers in them are unsigned where they meet words: numba
makes floats of mixed signs.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from transport.weights.layout import ClassLayout

KERNEL_CELLS = 1 << 22
"""From this many cells on, a segment is worth compiled loops."""

COUNTERS = 4
"""Cells in turn count in tables of their own, one after the other in one array: counters of one
class in neighbouring cells would otherwise wait for each other."""

GAP_SYMBOLS = 240
"""As many symbols stand for 32-bit gaps (`static_streams.py`)."""

SPARE_WORDS = 2
"""32-bit words of extra bits beyond the full ones."""

NEVER = 1 << 62
"""Cells before the next change of a class that has none left."""

Kernel = Callable[..., Any]


@functools.cache
def _numba() -> tuple[Any, str]:
    """The module, or None and why; tried once a process."""
    try:
        import numba
    except Exception as error:  # noqa: BLE001 - another numpy or LLVM fails in its own way
        return None, f"{type(error).__name__}: {error}"
    return numba, ""


def available() -> bool:
    """Whether numba can be used; imports it, which may take seconds."""
    return not why_not()


def why_not() -> str:
    """Why numba cannot be used; empty when it can."""
    return _numba()[1]


def in_use() -> bool:
    """Whether this process has numba at work already: using it then costs no import."""
    return _numba.cache_info().currsize > 0 and available()


def worthwhile(cells: int) -> bool:
    """Whether a segment of so many cells goes through the kernels."""
    return cells >= KERNEL_CELLS and available()


class Compiled:
    """A kernel as machine code, compiled when it is first called."""

    def __init__(self, function: Kernel) -> None:
        self._function, self._njit = function, _numba()[0].njit
        try:
            self._kernel: Kernel = self._njit(nogil=True, cache=True)(function)
        except (OSError, RuntimeError):  # no folder to cache in
            self._kernel = self._njit(nogil=True)(function)

    def __call__(self, *args: Any) -> Any:
        try:
            return self._kernel(*args)
        except OSError:  # the cache's, before anything has run: kernels touch no files
            self._kernel = self._njit(nogil=True)(self._function)
            return self._kernel(*args)

    @property
    def signatures(self) -> Any:
        return self._kernel.signatures  # type: ignore[attr-defined]


@functools.cache
def compiled(function: Kernel) -> Compiled:
    """The kernel as machine code. Only where numba is ``available``."""
    return Compiled(function)


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

    ``seen`` (COUNTERS tables of 256) counts the cells of each class so far, ``last`` holds the
    rank of the class's last changed cell (-1: none); both go on from call to call. Stops before
    the outputs are full; returns the next word and ``filled``.
    """
    lanes, bits, cell, shift, mask = layout
    one, two, three = np.uint64(256), np.uint64(512), np.uint64(768)
    half = np.int64(1) << np.int64(bits - np.uint64(1))
    room = kinds.size - 8
    i, words = np.uint64(start), np.uint64(old.size)
    quads = lanes == np.uint64(4) and bits == np.uint64(16)
    while True:
        if quads:
            while i < words:
                word = old[i]
                if word != new[i]:
                    break
                word >>= shift
                seen[word & mask] += 1
                seen[one + ((word >> np.uint64(16)) & mask)] += 1
                seen[two + ((word >> np.uint64(32)) & mask)] += 1
                seen[three + ((word >> np.uint64(48)) & mask)] += 1
                i += np.uint64(1)
        else:
            while i < words and old[i] == new[i]:
                word = old[i]
                for lane in range(lanes):
                    seen[((lane & np.uint64(3)) << np.uint64(8)) + ((word >> shift) & mask)] += 1
                    word >>= bits
                i += np.uint64(1)
        if i >= words or filled > room:
            return int(i), filled
        word, other = old[i], new[i]
        for _ in range(lanes):
            kind = (word >> shift) & mask
            before, after = np.int64(word & cell), np.int64(other & cell)
            if before != after:
                rank = seen[kind] + seen[one + kind] + seen[two + kind] + seen[three + kind]
                change = ((after - before + half) & (2 * half - 1)) - half
                kinds[filled] = kind
                gaps[filled] = rank - last[kind] - 1
                steps[filled] = 2 * change if change >= 0 else -2 * change - 1
                last[kind] = rank
                filled += 1
            seen[kind] += 1
            word >>= bits
            other >>= bits
        i += np.uint64(1)


def by_class(kinds: Any, gaps: Any, steps: Any, cursors: Any, to_gaps: Any, to_steps: Any) -> None:
    """Stable counting sort; ``cursors`` are where each class begins, and are used up."""
    for i in range(kinds.size):
        at = cursors[kinds[i]]
        cursors[kinds[i]] = at + 1
        to_gaps[at] = gaps[i]
        to_steps[at] = steps[i]


def scan_apply(
    old: Any, layout: Any, left: Any, cursors: Any, ends: Any,
    moves: Any, positions: Any, values: Any, filled: int,
) -> int:  # fmt: skip
    """Positions (in the cells of words) and new values of changed cells, from ``filled`` on.

    ``left`` counts down the cells of each class before its next change (``NEVER`` when all are
    done), ``cursors`` is that change among the ``moves`` (gap in the lower half, step in the
    upper), ``ends`` where the class's moves end; all go on from span to span. Returns ``filled``;
    stops early when the outputs are full.
    """
    lanes, bits, cell, shift, mask = layout
    one, zero, top = np.uint64(1), np.uint64(0), np.uint64(63)
    upper = np.uint64(32)
    i, words = zero, np.uint64(old.size)
    if lanes == np.uint64(4) and bits == np.uint64(16):
        while True:
            a, b, c, d = zero, zero, zero, zero
            left_a, left_b, left_c, left_d = 0, 0, 0, 0
            while i < words:
                word = old[i] >> shift
                a, b = word & mask, (word >> np.uint64(16)) & mask
                c, d = (word >> np.uint64(32)) & mask, (word >> np.uint64(48)) & mask
                left_a = left[a] - 1
                left[a] = left_a
                left_b = left[b] - 1
                left[b] = left_b
                left_c = left[c] - 1
                left[c] = left_c
                left_d = left[d] - 1
                left[d] = left_d
                if (left_a | left_b | left_c | left_d) < 0:
                    break
                i += one
            if i >= words:
                return filled
            # The first cell below zero changes; later ones of its class then count from there.
            while (left_a | left_b | left_c | left_d) < 0:
                below = np.uint64(left_a) >> top
                below |= (np.uint64(left_b) >> top) << one
                below |= (np.uint64(left_c) >> top) << np.uint64(2)
                below |= (np.uint64(left_d) >> top) << np.uint64(3)
                first = below & (zero - below)
                lane = (first >> one) - (first >> np.uint64(3))
                word = old[i] >> (lane << np.uint64(4))
                kind = (word >> shift) & mask
                symbol = np.uint64(cursors[kind])
                end = np.uint64(ends[kind])
                if filled >= positions.size or symbol >= end:
                    return filled
                step = moves[symbol] >> upper
                change = (step >> one) ^ (zero - (step & one))
                positions[np.uint64(filled)] = (i << np.uint64(2)) + lane
                values[np.uint64(filled)] = (word + change) & cell
                filled += 1
                symbol += one
                cursors[kind] = symbol
                ahead = np.int64(NEVER)
                if symbol < end:
                    ahead = np.int64(moves[symbol] & np.uint64(0xFFFFFFFF)) + 1
                left[kind] += ahead
                left_a += ahead * (a == kind)
                left_b += ahead * (b == kind)
                left_c += ahead * (c == kind)
                left_d += ahead * (d == kind)
            i += one
    while i < words:
        word = old[i]
        for place in range(lanes):
            kind = (word >> shift) & mask
            ahead = left[kind] - 1
            if ahead < 0:
                symbol = np.uint64(cursors[kind])
                end = np.uint64(ends[kind])
                if filled >= positions.size or symbol >= end:
                    return filled
                step = moves[symbol] >> upper
                change = (step >> one) ^ (zero - (step & one))
                positions[filled] = i * lanes + place
                values[filled] = ((word & cell) + change) & cell
                filled += 1
                symbol += one
                cursors[kind] = symbol
                ahead = np.int64(NEVER)
                if symbol < end:
                    ahead = np.int64(moves[symbol] & np.uint64(0xFFFFFFFF))
            left[kind] = ahead
            word >>= bits
        i += one
    return filled


# Extra bits are read and written 32 at a time. The float64 of a number has its bit length, plus
# 1022, as its exponent (0: much less).


def pack_gaps(gaps: Any, symbols: Any, extra: Any) -> int:
    """Symbols and extra bits of gaps; ``extra`` are words for 28 bits a gap and SPARE_WORDS more.
    Returns how many bits were written."""
    waiting = np.uint64(0)
    at, bits = 0, 0
    for i in range(gaps.size):
        gap = np.int64(gaps[i])
        shift: Any = max((np.float64(gap).view(np.int64) >> 52) - 1026, 0)
        symbols[i] = (gap >> shift) + 8 * shift
        waiting |= np.uint64(gap & ((1 << shift) - 1)) << np.uint64(bits)
        bits += shift
        extra[at] = waiting & np.uint64(0xFFFFFFFF)
        full = bits >> 5
        at += full
        waiting >>= np.uint64(full << 5)
        bits &= 31
    extra[at] = waiting & np.uint64(0xFFFFFFFF)
    return 32 * at + bits


def unpack_gaps(symbols: Any, extra: Any, limit: int, gaps: Any) -> int:
    """Inverse of ``pack_gaps``: bits that were read, more than ``limit`` when there are too few;
    -1 for a symbol that stands for no gap. ``extra`` has SPARE_WORDS behind ``limit`` bits."""
    used = 0
    for i in range(symbols.size):
        symbol: Any = np.int64(symbols[i])
        shift: Any = max(symbol >> 3, 1) - 1
        if symbol >= GAP_SYMBOLS:
            return -1
        if used + shift > limit:
            return int(used + shift)
        at = used >> 5
        pair = np.uint64(extra[at]) | (np.uint64(extra[at + 1]) << np.uint64(32))
        low = np.int64(pair >> np.uint64(used & 31)) & ((1 << shift) - 1)
        gaps[i] = ((symbol - 8 * shift) << shift) | low
        used += shift
    return used


def pack_steps(steps: Any, counts: Any, item_bits: int, symbols: Any, extra: Any) -> int:
    """Symbols, two a byte by class, and extra bits of steps; ``extra`` are words for 31 bits a
    step and SPARE_WORDS more. Returns how many bits were written."""
    waiting = np.uint64(0)
    at, bits, i, byte = 0, 0, 0, 0
    for kind in range(counts.size):
        upper = False
        for _ in range(counts[kind]):
            step = np.int64(steps[i])
            i += 1
            negative = step & 1
            reach = (step >> 1) - 1 + negative
            bucket: Any = min(max((np.float64(reach).view(np.int64) >> 52) - 1022, 0), 7)
            width = item_bits - 1 if bucket == 7 else max(bucket, 1) - 1
            if upper:
                symbols[byte] |= np.uint8((2 * bucket + negative) << 4)
                byte += 1
            else:
                symbols[byte] = 2 * bucket + negative
            upper = not upper
            waiting |= np.uint64(reach & ((1 << width) - 1)) << np.uint64(bits)
            bits += width
            extra[at] = waiting & np.uint64(0xFFFFFFFF)
            full = bits >> 5
            at += full
            waiting >>= np.uint64(full << 5)
            bits &= 31
        if upper:
            byte += 1
    extra[at] = waiting & np.uint64(0xFFFFFFFF)
    return 32 * at + bits


def unpack_steps(
    symbols: Any, extra: Any, limit: int, counts: Any, item_bits: int, steps: Any
) -> int:
    """Inverse of ``pack_steps``: bits that were read, more than ``limit`` when there are too few;
    -1 for a step that is too large. ``extra`` has SPARE_WORDS behind ``limit`` bits."""
    used, i, byte = 0, 0, 0
    for kind in range(counts.size):
        upper = False
        for _ in range(counts[kind]):
            symbol: Any = np.int64(symbols[byte])
            if upper:
                symbol >>= 4
                byte += 1
            upper = not upper
            negative, bucket = symbol & 1, (symbol >> 1) & 7
            width = item_bits - 1 if bucket == 7 else max(bucket, 1) - 1
            if used + width > limit:
                return int(used + width)
            at = used >> 5
            pair = np.uint64(extra[at]) | (np.uint64(extra[at + 1]) << np.uint64(32))
            reach = np.int64(pair >> np.uint64(used & 31)) & ((1 << width) - 1)
            used += width
            if bucket > 0 and bucket < 7:
                reach |= 1 << width
            step = 2 * reach + 2 - negative
            if step >> item_bits:
                return -1
            steps[i] = step
            i += 1
        if upper:
            byte += 1
    return used
