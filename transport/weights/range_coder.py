"""Gaps and steps under adaptive binary models: the body of ``class.range`` behind its table.

What always holds: encoder and decoder keep equal models, so decoding is exact; compiled and
interpreted code give the same bytes (whole numbers below 2^62 only); the decoder stops at the end
of its bytes and at symbols that no encoder writes, and says so.

Range coding after Martin (1979), binary and with the carry kept back as in the LZMA SDK's
description: 32-bit range, renormalised below 2^24, five bytes at the end.

Class by class, each symbol is its gap, then its step. Models are those of the class before, with
little confidence left, so that they adapt at once.

    gap    with r = gap + 1 and h the place of its highest bit: h in unary, then the two bits below
           the highest (model by h and the bit above), then the rest as plain bits
    step   sign; distance - 1 in unary up to 12, then r = distance - 12 as for gaps, but without
           modelled bits

A model is the probability of a zero in 22 bits and how often it was used: the more often, the
slower it moves, down to 1/RATES of the error.
"""

from typing import Any

import numpy as np

from transport.errors import IntegrityError
from transport.weights import kernels
from transport.weights.symbols import Bytes8, Counts, Words

_RATES = 160
_KEPT = 6
"""Uses that a model keeps from the class before."""
_HEIGHTS = 32
_MANTISSA = _HEIGHTS
_SIGN = _MANTISSA + 4 * _HEIGHTS
_UNARY = _SIGN + 1
_TAIL = _UNARY + 12
_MODELS = _TAIL + _HEIGHTS
_ONE = 1 << 22


def _rates() -> list[int]:
    return [min(round(65536 / (used + 1.5)), 65535) for used in range(_RATES)]


def encode_symbols(
    counts: Any, gaps: Any, steps: Any, rates: Any, zero: Any, used: Any, out: Any
) -> int:
    """Bytes written to ``out``; -1 when they do not fit. ``zero`` and ``used`` are the models."""

    def put_byte(
        low: int, cache: int, pending: int, at: int, out: Any
    ) -> tuple[int, int, int, int]:
        if low < 0xFF000000 or low > 0xFFFFFFFF:
            carry = low >> 32
            while pending > 0:
                if at < len(out):
                    out[at] = (cache + carry) & 255
                at += 1
                cache = 255
                pending -= 1
            cache = (low >> 24) & 255
        return (low & 0xFFFFFF) << 8, cache, pending + 1, at

    low, width, cache, pending, at = 0, 0xFFFFFFFF, 0, 1, 0
    symbol = 0
    for kind in range(len(counts)):
        if counts[kind] == 0:
            continue
        for model in range(len(used)):
            used[model] = min(used[model], _KEPT)
        end = symbol + counts[kind]
        while symbol < end:
            # What is coded of the symbol: 0 height, 1 mantissa, 2 sign, 3 unary, 4 tail's height.
            number = int(gaps[symbol]) + 1
            height = 0
            while number >> (height + 1):
                height += 1
            place, part = 0, 0
            above = 1
            step = int(steps[symbol])
            reach = (step >> 1) - 1 + (step & 1)
            while part < 5:
                plain = 0
                if part == 0:
                    model = place
                    bit = 1 if place < height else 0
                    place += 1
                    if bit == 0:
                        part = 1
                        place = height
                        if height == 0:
                            part = 2
                elif part == 1:
                    place -= 1
                    model = _MANTISSA + 4 * height + above
                    bit = (number >> place) & 1
                    above = 2 * above + bit
                    if above >= 4 or place == 0:
                        plain = place
                        part = 2
                elif part == 2:
                    model = _SIGN
                    bit = step & 1
                    part = 3
                    place = 0
                elif part == 3:
                    model = _UNARY + place
                    bit = 1 if place < reach else 0
                    place += 1
                    if bit == 0:
                        part = 5
                    elif place == 12:
                        part = 4
                        place = 0
                        number = reach - 11
                        height = 0
                        while number >> (height + 1):
                            height += 1
                else:
                    model = _TAIL + place
                    bit = 1 if place < height else 0
                    place += 1
                    if bit == 0:
                        plain = height
                        part = 5
                chance = zero[model]
                rate = rates[used[model]]
                if used[model] + 1 < len(rates):
                    used[model] += 1
                bound = (width >> 16) * ((chance >> 6) | 1)
                if bit == 0:
                    width = bound
                    zero[model] = chance + (((_ONE - chance) * rate) >> 16)
                else:
                    low += bound
                    width -= bound
                    zero[model] = chance - ((chance * rate) >> 16)
                while True:
                    if width < 0x1000000:
                        width <<= 8
                        low, cache, pending, at = put_byte(low, cache, pending, at, out)
                    elif plain > 0:
                        some = min(plain, 8)
                        plain -= some
                        width >>= some
                        low += width * ((number >> plain) & ((1 << some) - 1))
                    else:
                        break
            symbol += 1
        if at > len(out):
            return -1
    for _ in range(5):
        low, cache, pending, at = put_byte(low, cache, pending, at, out)
    return at if at <= len(out) else -1


def decode_symbols(
    counts: Any, gaps: Any, steps: Any, rates: Any, zero: Any, used: Any, body: Any,
    largest: int,
) -> int:  # fmt: skip
    """Bytes of ``body`` that were read; -1 for what no encoder writes (a gap of more than 32 bits
    or a step above ``largest``)."""
    size = len(body)
    code, width, at = 0, 0xFFFFFFFF, 0
    for _ in range(5):
        code = ((code << 8) | (int(body[at]) if at < size else 0)) & 0xFFFFFFFF
        at += 1
    symbol = 0
    for kind in range(len(counts)):
        if counts[kind] == 0:
            continue
        for model in range(len(used)):
            used[model] = min(used[model], _KEPT)
        end = symbol + counts[kind]
        while symbol < end:
            place, height, part = 0, 0, 0
            number, sign = 1, 0
            while part < 5:
                if part == 0:
                    model = place
                elif part == 1:
                    model = _MANTISSA + 4 * height + number
                elif part == 2:
                    model = _SIGN
                elif part == 3:
                    model = _UNARY + place
                else:
                    model = _TAIL + place
                chance = zero[model]
                rate = rates[used[model]]
                if used[model] + 1 < len(rates):
                    used[model] += 1
                bound = (width >> 16) * ((chance >> 6) | 1)
                if code < bound:
                    bit = 0
                    width = bound
                    zero[model] = chance + (((_ONE - chance) * rate) >> 16)
                else:
                    bit = 1
                    code -= bound
                    width -= bound
                    zero[model] = chance - ((chance * rate) >> 16)
                plain = 0
                last = part
                if part == 0:
                    if bit == 1:
                        place += 1
                        if place == _HEIGHTS:
                            return -1
                    else:
                        height = place
                        part = 1 if height > 0 else 2
                elif part == 1:
                    place -= 1
                    number = 2 * number + bit
                    if number >= 4 or place == 0:
                        plain = place
                        part = 2
                elif part == 2:
                    sign = bit
                    part = 3
                    place = 0
                elif part == 3:
                    if bit == 0:
                        part = 5
                    else:
                        place += 1
                        if place == 12:
                            part = 4
                            place = 0
                elif bit == 1:
                    place += 1
                    if place == _HEIGHTS:
                        return -1
                else:
                    plain = place
                    number = 1
                    part = 5
                while True:
                    if width < 0x1000000:
                        width <<= 8
                        code = ((code << 8) | (int(body[at]) if at < size else 0)) & 0xFFFFFFFF
                        at += 1
                    elif plain > 0:
                        some = min(plain, 8)
                        plain -= some
                        width >>= some
                        value = min(code // width, (1 << some) - 1)
                        code -= value * width
                        number = (number << some) | value
                    else:
                        break
                if part == 2 and last < 2:
                    gaps[symbol] = number - 1
                elif part == 5:
                    reach = number + 11 if last == 4 else place
                    step = 2 * reach + 2 - sign
                    if step > largest:
                        return -1
                    steps[symbol] = step
            symbol += 1
        if at > size:
            return -1
    return at


def _models() -> tuple[list[int], list[int], list[int]]:
    return _rates(), [_ONE // 2] * _MODELS, [0] * _MODELS


def encode_range(
    counts: Counts, gaps: Words, steps: Words, limit: int, compiled: bool
) -> bytes | None:
    """The coded symbols, or None when they need more than ``limit`` bytes."""
    if compiled:
        out = np.empty(limit, np.uint8)
        models = [np.array(numbers, np.int64) for numbers in _models()]
        size = kernels.compiled(encode_symbols)(counts, gaps, steps, *models, out)
        return None if size < 0 else out[:size].tobytes()
    room = bytearray(limit)
    size = encode_symbols(counts.tolist(), gaps.tolist(), steps.tolist(), *_models(), room)
    return None if size < 0 else bytes(room[:size])


def decode_range(
    body: memoryview, counts: Counts, item_bits: int, compiled: bool
) -> tuple[Words, Words]:
    """Gaps and steps of all classes.

    Raises:
        IntegrityError: not what ``encode_range`` writes for so many symbols.
    """
    total = int(counts.sum())
    gaps, steps = np.zeros(total, np.uint32), np.zeros(total, np.uint32)
    largest = (1 << item_bits) - 1
    if compiled:
        data: Bytes8 = np.frombuffer(body, np.uint8).copy()
        models = [np.array(numbers, np.int64) for numbers in _models()]
        size = kernels.compiled(decode_symbols)(counts, gaps, steps, *models, data, largest)
    else:
        size = decode_symbols(counts.tolist(), gaps, steps, *_models(), bytes(body), largest)
    if size != len(body):
        raise IntegrityError(f"range coded body of {len(body)} bytes does not fit {total} changes")
    return gaps, steps
