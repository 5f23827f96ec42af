"""Gaps and steps as bytes that a static entropy coder packs well.

What always holds: packing is exact for every 32-bit gap and every non-zero step; unpacking
allocates what the number of symbols implies and refuses what packing never makes.

Both kinds of number are split into a symbol, skewed and worth modelling, and extra bits that are
as good as uniform and are stored as they are, lowest bit first.

A gap below 16 is its own symbol. Above, with its highest bit at ``h``, the symbol is
``8 * (h - 3) + (gap >> (h - 3))``, that is the place of the highest bit and the three bits below
it, and the lowest ``h - 3`` bits are extra (the buckets of HDR histograms and of many LZ formats'
lengths).

A step is a sign and a distance. The symbol is ``2 * bucket + negative`` with ``bucket`` the bit
length of ``distance - 1``, at most 7: it fits four bits, so two symbols of one class share a byte,
which spares a code of whole bits most of its loss. Extra bits: those below the highest bit for
buckets 2 to 6, all of ``distance - 1`` (item bits less one) for bucket 7.
"""

from typing import NamedTuple

import numpy as np

from transport.errors import IntegrityError
from transport.weights import kernels
from transport.weights.symbols import Bytes8, Counts, Words

LAST_BUCKET = 7


class Packed(NamedTuple):
    """One kind of symbol of a segment: a byte or half a byte each, and their extra bits."""

    symbols: Bytes8
    extra: Bytes8


def pair_bytes(counts: Counts) -> Counts:
    """Bytes of the steps' symbols, by class: two a byte."""
    sizes: Counts = (counts + 1) >> 1
    return sizes


def _bit_lengths(values: Words) -> Bytes8:
    return np.frexp(values.astype(np.float64))[1].astype(np.uint8)


def _pack_bits(values: Words, widths: Bytes8) -> Bytes8:
    starts = np.cumsum(widths, dtype=np.int64) - widths
    bits = np.zeros(int(widths.sum(dtype=np.int64)), np.uint8)
    for bit in range(int(widths.max(initial=0))):
        (wide,) = np.nonzero(widths > bit)
        bits[starts[wide] + bit] = (values[wide] >> np.uint32(bit)) & np.uint32(1)
    return np.packbits(bits, bitorder="little")


def _unpack_bits(data: Bytes8, widths: Bytes8) -> Words:
    """The lowest ``widths`` bits of each value; ``data`` has at least as many bits."""
    total = int(widths.sum(dtype=np.int64))
    values = np.zeros(widths.size, np.uint32)
    starts = np.cumsum(widths, dtype=np.int64) - widths
    bits = np.unpackbits(data, count=total, bitorder="little")
    for bit in range(int(widths.max(initial=0))):
        (wide,) = np.nonzero(widths > bit)
        values[wide] |= bits[starts[wide] + bit].astype(np.uint32) << np.uint32(bit)
    return values


def _room(numbers: int) -> Words:
    """Words that the kernels write extra bits to; what stays unused costs no memory."""
    return np.empty(numbers + kernels.SPARE_WORDS, np.uint32)


def _written(words: Words, bits: int) -> Bytes8:
    """The bytes that extra bits fill, without the room behind them."""
    return words.view(np.uint8)[: (bits + 7) >> 3].copy()


def _padded(data: Bytes8) -> Words:
    """Extra bits as the kernels read them: whole words, and some behind them."""
    words = np.zeros((data.size >> 2) + 1 + kernels.SPARE_WORDS, np.uint32)
    words.view(np.uint8)[: data.size] = data
    return words


def _bytes_of(bits: int, data: Bytes8) -> int:
    """Bytes that extra bits fill, of those in ``data``."""
    if bits > 8 * data.size:
        raise IntegrityError(f"{data.size} bytes of extra bits, symbols ask for {bits} bits")
    return (bits + 7) >> 3


def _check_all(bits: int, data: Bytes8) -> None:
    if data.size != _bytes_of(bits, data):
        raise IntegrityError(f"{data.size} bytes of extra bits, symbols ask for {bits} bits")


def pack_gaps(gaps: Words, compiled: bool = False) -> Packed:
    if compiled:
        symbols, extra = np.empty(gaps.size, np.uint8), _room(gaps.size)
        bits = kernels.compiled(kernels.pack_gaps)(gaps, symbols, extra)
        return Packed(symbols, _written(extra, bits))
    shifts = np.maximum(_bit_lengths(gaps), 4) - np.uint8(4)
    symbols = (gaps >> shifts).astype(np.uint8) + np.uint8(8) * shifts
    return Packed(symbols, _pack_bits(gaps, shifts))


def unpack_gaps(packed: Packed, compiled: bool = False) -> tuple[Words, int]:
    """Gaps, and how many bytes of ``packed.extra`` they took: others may follow.

    Raises:
        IntegrityError: a symbol that stands for no 32-bit gap, or too few extra bits.
    """
    symbols, extra = packed
    if compiled:
        gaps = np.empty(symbols.size, np.uint32)
        unpack = kernels.compiled(kernels.unpack_gaps)
        bits = unpack(symbols, _padded(extra), 8 * extra.size, gaps)
        if bits < 0:
            raise IntegrityError(f"gap symbol above {kernels.GAP_SYMBOLS - 1}")
        return gaps, _bytes_of(bits, extra)
    if symbols.size and symbols.max() >= kernels.GAP_SYMBOLS:
        raise IntegrityError(f"gap symbol above {kernels.GAP_SYMBOLS - 1}")
    shifts = np.maximum(symbols >> np.uint8(3), 1) - np.uint8(1)
    taken = _bytes_of(int(shifts.sum(dtype=np.int64)), extra)
    tops = (symbols - np.uint8(8) * shifts).astype(np.uint32)
    return (tops << shifts) | _unpack_bits(extra, shifts), taken


def _step_widths(buckets: Bytes8, item_bits: int) -> Bytes8:
    widths = np.maximum(buckets, 1) - np.uint8(1)
    widths[buckets == LAST_BUCKET] = item_bits - 1
    return widths


def _pair_places(counts: Counts) -> Counts:
    """The half byte of every symbol: classes begin at whole bytes."""
    starts = 2 * (np.cumsum(pair_bytes(counts)) - pair_bytes(counts))
    firsts = np.cumsum(counts) - counts
    places: Counts = np.arange(int(counts.sum())) + np.repeat(starts - firsts, counts)
    return places


def pack_steps(steps: Words, counts: Counts, item_bits: int, compiled: bool = False) -> Packed:
    """``counts`` are the symbols per class; none of the steps is zero."""
    if compiled:
        symbols, extra = np.empty(int(pair_bytes(counts).sum()), np.uint8), _room(steps.size)
        pack = kernels.compiled(kernels.pack_steps)
        return Packed(symbols, _written(extra, pack(steps, counts, item_bits, symbols, extra)))
    negative = (steps & np.uint32(1)).astype(np.uint8)
    reach = (steps >> np.uint32(1)) - (np.uint32(1) - (steps & np.uint32(1)))
    buckets = np.minimum(_bit_lengths(reach), np.uint8(LAST_BUCKET))
    halves = np.zeros(2 * int(pair_bytes(counts).sum()), np.uint8)
    halves[_pair_places(counts)] = 2 * buckets + negative
    symbols = halves[0::2] | (halves[1::2] << np.uint8(4))
    return Packed(symbols, _pack_bits(reach, _step_widths(buckets, item_bits)))


def unpack_steps(packed: Packed, counts: Counts, item_bits: int, compiled: bool = False) -> Words:
    """``packed.symbols`` are as long as ``pair_bytes(counts)`` says.

    Raises:
        IntegrityError: another number of extra bits, or a step of more than ``item_bits``.
    """
    extra = packed.extra
    if compiled:
        steps = np.empty(int(counts.sum()), np.uint32)
        unpack = kernels.compiled(kernels.unpack_steps)
        bits = unpack(packed.symbols, _padded(extra), 8 * extra.size, counts, item_bits, steps)
        if bits < 0:
            raise IntegrityError(f"a step of more than {item_bits} bits")
        _check_all(bits, extra)
        return steps
    halves = np.empty(2 * packed.symbols.size, np.uint8)
    halves[0::2] = packed.symbols & np.uint8(15)
    halves[1::2] = packed.symbols >> np.uint8(4)
    symbols = halves[_pair_places(counts)]
    buckets = symbols >> np.uint8(1)
    widths = _step_widths(buckets, item_bits)
    _check_all(int(widths.sum(dtype=np.int64)), extra)
    reach = _unpack_bits(extra, widths)
    tops = (buckets > 1) & (buckets < LAST_BUCKET)
    reach[tops] |= np.uint32(1) << widths[tops]
    reach[buckets == 1] = 1
    negative = (symbols & np.uint8(1)).astype(np.uint32)
    if ((reach >= np.uint32((1 << (item_bits - 1)) - 1)) & (negative == 0)).any():
        raise IntegrityError(f"a step of more than {item_bits} bits")
    return (reach << np.uint32(1)) + np.uint32(2) - negative
