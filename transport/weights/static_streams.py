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
GAP_SYMBOLS = 240


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


def _pack_bits(values: Words, widths: Bytes8, compiled: bool) -> Bytes8:
    bits_total = int(widths.sum(dtype=np.int64))
    if compiled:
        packed = np.zeros((bits_total + 7) >> 3, np.uint8)
        kernels.compiled(kernels.pack_bits)(values, widths, packed)
        return packed
    starts = np.cumsum(widths, dtype=np.int64) - widths
    bits = np.zeros(bits_total, np.uint8)
    for bit in range(int(widths.max(initial=0))):
        (wide,) = np.nonzero(widths > bit)
        bits[starts[wide] + bit] = (values[wide] >> np.uint32(bit)) & np.uint32(1)
    return np.packbits(bits, bitorder="little")


def _unpack_bits(data: Bytes8, widths: Bytes8, compiled: bool) -> Words:
    total = int(widths.sum(dtype=np.int64))
    check_extra(data, total)
    values = np.zeros(widths.size, np.uint32)
    if compiled:
        kernels.compiled(kernels.unpack_bits)(np.require(data, requirements="A"), widths, values)
        return values
    starts = np.cumsum(widths, dtype=np.int64) - widths
    bits = np.unpackbits(data, count=total, bitorder="little")
    for bit in range(int(widths.max(initial=0))):
        (wide,) = np.nonzero(widths > bit)
        values[wide] |= bits[starts[wide] + bit].astype(np.uint32) << np.uint32(bit)
    return values


def check_extra(data: Bytes8, bits: int) -> None:
    """Refuse extra bits that are not as many as their symbols ask for."""
    if data.size != (bits + 7) >> 3:
        raise IntegrityError(f"{data.size} bytes of extra bits, symbols ask for {bits} bits")


def extra_bytes(gap_symbols: Bytes8) -> int:
    """How many bytes the extra bits of gaps fill."""
    widths = np.maximum(gap_symbols >> np.uint8(3), 1) - np.uint8(1)
    return (int(widths.sum(dtype=np.int64)) + 7) >> 3


def pack_gaps(gaps: Words, compiled: bool = False) -> Packed:
    shifts = np.maximum(_bit_lengths(gaps), 4) - np.uint8(4)
    symbols = (gaps >> shifts).astype(np.uint8) + np.uint8(8) * shifts
    return Packed(symbols, _pack_bits(gaps, shifts, compiled))


def unpack_gaps(packed: Packed, compiled: bool = False) -> Words:
    """Raises:
    IntegrityError: a symbol that stands for no 32-bit gap, or another number of extra bits.
    """
    symbols = packed.symbols
    if symbols.size and symbols.max() >= GAP_SYMBOLS:
        raise IntegrityError(f"gap symbol {symbols.max()}, the highest is {GAP_SYMBOLS - 1}")
    shifts = np.maximum(symbols >> np.uint8(3), 1) - np.uint8(1)
    tops = (symbols - np.uint8(8) * shifts).astype(np.uint32)
    gaps: Words = (tops << shifts) | _unpack_bits(packed.extra, shifts, compiled)
    return gaps


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
    negative = (steps & np.uint32(1)).astype(np.uint8)
    reach = (steps >> np.uint32(1)) - (np.uint32(1) - (steps & np.uint32(1)))
    buckets = np.minimum(_bit_lengths(reach), np.uint8(LAST_BUCKET))
    halves = np.zeros(2 * int(pair_bytes(counts).sum()), np.uint8)
    halves[_pair_places(counts)] = 2 * buckets + negative
    symbols = halves[0::2] | (halves[1::2] << np.uint8(4))
    return Packed(symbols, _pack_bits(reach, _step_widths(buckets, item_bits), compiled))


def unpack_steps(packed: Packed, counts: Counts, item_bits: int, compiled: bool = False) -> Words:
    """``packed.symbols`` are as long as ``pair_bytes(counts)`` says.

    Raises:
        IntegrityError: another number of extra bits.
    """
    halves = np.empty(2 * packed.symbols.size, np.uint8)
    halves[0::2] = packed.symbols & np.uint8(15)
    halves[1::2] = packed.symbols >> np.uint8(4)
    symbols = halves[_pair_places(counts)]
    buckets = symbols >> np.uint8(1)
    widths = _step_widths(buckets, item_bits)
    reach = _unpack_bits(packed.extra, widths, compiled)
    tops = (buckets > 1) & (buckets < LAST_BUCKET)
    reach[tops] |= np.uint32(1) << widths[tops]
    reach[buckets == 1] = 1
    negative = (symbols & np.uint8(1)).astype(np.uint32)
    steps: Words = (reach << np.uint32(1)) + np.uint32(2) - negative
    return steps
