"""Sums over cells that a state's digest is made of: cheap to update, the same in any order.

    x  = rotl(position, 32) ^ bit pattern ^ tensor key          (cells of 8 bytes: two of 4)
    x ^= x >> 32; x *= M1; x ^= x >> 29; x *= M2; x ^= x >> 32  (a bijection of 64 bits)
    y  = (x ^ x >> 31) * M3; y ^= y >> 29
    sum = (sum of x mod 2^64, sum of y mod 2^64), 16 bytes little-endian

The finaliser has the shape of splitmix64's (Steele, Lea, Flood, OOPSLA 2014) with odd constants of
our own. It is a bijection, and positions below 2^32 are packed with the bit pattern without loss:
within a tensor no two (position, pattern) pairs give the same ``x``. So a single wrong cell always
changes the sum, and moved or swapped ones all but surely do.

What always holds: sums add (mod 2^64) over any partition of the cells, so shards and changes are
summed apart; the compiled and the array implementation give the same bits. **A sum is no defence
against a forger**: who may choose bit patterns can construct equal sums. It guards against
accidents and mistakes; forged bytes meet SHA-256 under a signature (``digest.py``).
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from transport.weights.kernels import KERNEL_CELLS, worthwhile
from transport.weights.kernels import compiled as machine_code
from transport.weights.tensors import Cells

SUM_BYTES = 16
ZERO_SUM = bytes(SUM_BYTES)
COMPILED_CELLS = KERNEL_CELLS
"""From this many cells on, compiled code is worth its import (and, once, compiling)."""
_BLOCK_CELLS = 1 << 15  # two temporaries of 256 KiB: they stay in the processor's cache
_LANE = (1 << 64) - 1

Words = npt.NDArray[np.uint64]
_Positions = npt.NDArray[np.signedinteger[Any]]
_U = np.uint64
_M1, _M2, _M3 = _U(0x9E6F0DBA6F2E4C35), _U(0xD1B54A32D192ED03), _U(0xAEF17502108EF2D9)
_S29, _S31, _S32 = _U(29), _U(31), _U(32)


def add_sums(a: bytes, b: bytes) -> bytes:
    """Sum of two sums; for a partition of a tensor's cells the sum of the whole."""
    return _pack(*(x + y for x, y in zip(_unpack(a), _unpack(b), strict=True)))


def subtract_sums(a: bytes, b: bytes) -> bytes:
    """``a`` less ``b``: how far a change moves a sum."""
    return _pack(*(x - y for x, y in zip(_unpack(a), _unpack(b), strict=True)))


def _pack(first: int, second: int) -> bytes:
    return (first & _LANE).to_bytes(8, "little") + (second & _LANE).to_bytes(8, "little")


def _unpack(total: bytes) -> tuple[int, int]:
    return int.from_bytes(total[:8], "little"), int.from_bytes(total[8:], "little")


def run_sum(key: int, start: int, cells: Cells) -> bytes:
    """Sum of consecutive cells of a tensor, the first of them at position ``start``."""
    if cells.dtype.itemsize == 8:
        return run_sum(key, 2 * start, cells.view("<u4"))
    if worthwhile(cells.size):
        x, y = machine_code(_run_lanes)(_frozen(cells), _U(start), _U(key))
        return _pack(int(x), int(y))
    first = second = 0
    for begin in range(0, cells.size, _BLOCK_CELLS):
        block = cells[begin : begin + _BLOCK_CELLS]
        places = np.arange(start + begin, start + begin + block.size, dtype=np.uint64)
        x, y = _lanes(places, block, key)
        first, second = first + x, second + y
    return _pack(first, second)


def list_sum(key: int, positions: _Positions, values: Cells, *, compiled: bool = False) -> bytes:
    """Sum of scattered cells with these ``positions`` (of any order) in the tensor.

    ``compiled`` asks for compiled code where it is installed even if there are few cells: for
    callers that go through many such lists.
    """
    if values.dtype.itemsize == 8:
        twice = np.repeat(positions.astype(np.int64) * 2, 2)
        twice[1::2] += 1
        halves = np.ascontiguousarray(values).view("<u4")
        return list_sum(key, twice, halves, compiled=compiled)
    if worthwhile(COMPILED_CELLS if compiled else values.size):
        x, y = machine_code(_list_lanes)(_frozen(positions), _frozen(values), _U(key))
        return _pack(int(x), int(y))
    first = second = 0
    for begin in range(0, values.size, _BLOCK_CELLS):
        block = values[begin : begin + _BLOCK_CELLS]
        places = positions[begin : begin + _BLOCK_CELLS].astype(np.uint64)
        x, y = _lanes(places, block, key)
        first, second = first + x, second + y
    return _pack(first, second)


class Difference(NamedTuple):
    """What differs between old and new cells: how far the sum moves, how many cells, and the
    largest of ``(new ^ flip) & mask`` among the changed ones (0 without any)."""

    move: bytes
    changed: int
    largest: int


def difference(
    key: int,
    start: int,
    old: Cells,
    new: Cells,
    *,
    mask: int = 0,
    flip: int = 0,
    compiled: bool = False,
) -> Difference:
    """Compare the cells of a part of a tensor, the first of them at position ``start``. One pass;
    ``compiled`` as in ``list_sum``."""
    lanes = 8 // old.dtype.itemsize
    if lanes > 1 and worthwhile(COMPILED_CELLS if compiled else old.size):
        even = old.size - old.size % lanes
        words = (_frozen(cells[:even].view("<u8")) for cells in (old, new))
        bits = 64 // lanes
        x, y, changed, largest = machine_code(_difference_lanes)(
            *words, *map(_U, (bits, start, key, mask, flip))
        )
        rest = _difference(key, start + even, old[even:], new[even:], mask, flip)
        move = add_sums(_pack(int(x), int(y)), rest.move)
        return Difference(move, int(changed) + rest.changed, max(int(largest), rest.largest))
    return _difference(key, start, old, new, mask, flip)


def _difference(key: int, start: int, old: Cells, new: Cells, mask: int, flip: int) -> Difference:
    move, count, top = ZERO_SUM, 0, 0
    for begin in range(0, old.size, _BLOCK_CELLS):
        before, after = old[begin : begin + _BLOCK_CELLS], new[begin : begin + _BLOCK_CELLS]
        where = np.flatnonzero(before != after)
        if where.size:
            before, after = before[where], after[where]
            where += start + begin
            gain, loss = list_sum(key, where, after), list_sum(key, where, before)
            move = add_sums(move, subtract_sums(gain, loss))
            count += where.size
            after ^= after.dtype.type(flip)
            after &= after.dtype.type(mask)
            top = max(top, int(after.max()))
    return Difference(move, count, top)


def _lanes(places: Words, cells: Cells, key: int) -> tuple[int, int]:
    """Both lanes' sums of a block; overwrites ``places``."""
    x, y = places, np.right_shift(places, _S32)
    x <<= _S32
    x |= y
    x ^= cells
    x ^= _U(key)
    for multiplier, shift in ((_M1, _S32), (_M2, _S29)):
        np.right_shift(x, shift, out=y)
        x ^= y
        x *= multiplier
    np.right_shift(x, _S32, out=y)
    x ^= y
    np.right_shift(x, _S31, out=y)
    y ^= x
    y *= _M3
    first = int(np.add.reduce(x))
    np.right_shift(y, _S29, out=x)
    y ^= x
    return first, int(np.add.reduce(y))


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A read-only view: one compiled form serves writable and read-only arrays."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


# The functions below are compiled, never interpreted; every operand is a uint64, as numba would
# make a float of a mixed pair.


def _run_lanes(cells: Cells, start: np.uint64, key: np.uint64) -> tuple[np.uint64, np.uint64]:
    first, second = _U(0), _U(0)
    for i in range(cells.size):
        place = start + _U(i)
        x = (place << _S32 | place >> _S32) ^ _U(cells[i]) ^ key
        x = (x ^ x >> _S32) * _M1
        x = (x ^ x >> _S29) * _M2
        x ^= x >> _S32
        y = (x ^ x >> _S31) * _M3
        first += x
        second += y ^ y >> _S29
    return first, second


def _list_lanes(positions: _Positions, cells: Cells, key: np.uint64) -> tuple[np.uint64, np.uint64]:
    first, second = _U(0), _U(0)
    for i in range(cells.size):
        place = _U(positions[i])
        x = (place << _S32 | place >> _S32) ^ _U(cells[i]) ^ key
        x = (x ^ x >> _S32) * _M1
        x = (x ^ x >> _S29) * _M2
        x ^= x >> _S32
        y = (x ^ x >> _S31) * _M3
        first += x
        second += y ^ y >> _S29
    return first, second


def _difference_lanes(
    old: Words,
    new: Words,
    bits: np.uint64,
    start: np.uint64,
    key: np.uint64,
    mask: np.uint64,
    flip: np.uint64,
) -> tuple[np.uint64, np.uint64, int, np.uint64]:
    """``old`` and ``new`` as words of several cells of ``bits`` each, lowest first."""
    first, second, changed, largest = _U(0), _U(0), 0, _U(0)
    cells = _U(64) // bits
    cell = (_U(1) << bits) - _U(1)
    for i in range(old.size):
        before, after = old[i], new[i]
        if before == after:
            continue
        place = start + _U(i) * cells
        for _ in range(cells):
            if (before ^ after) & cell:
                changed += 1
                largest = max(largest, ((after & cell) ^ flip) & mask)
                base = (place << _S32 | place >> _S32) ^ key
                x = base ^ (after & cell)
                x = (x ^ x >> _S32) * _M1
                x = (x ^ x >> _S29) * _M2
                x ^= x >> _S32
                y = (x ^ x >> _S31) * _M3
                first += x
                second += y ^ y >> _S29
                x = base ^ (before & cell)
                x = (x ^ x >> _S32) * _M1
                x = (x ^ x >> _S29) * _M2
                x ^= x >> _S32
                y = (x ^ x >> _S31) * _M3
                first -= x
                second -= y ^ y >> _S29
            place += _U(1)
            before >>= bits
            after >>= bits
    return first, second, changed, largest
