"""The bodies of segments, decoded as `docs/weight-format.md` says: a part of `independent_reader`.

What always holds: written from that page alone, like `independent_reader`; it imports nothing of
this project.
"""

import struct
from collections.abc import Iterator

import numpy as np
import zstandard

# dtype: bytes of a cell, shift, classes
DTYPES = {
    "BF16": (2, 7, 256),
    "F16": (2, 10, 32),
    "F32": (4, 23, 256),
    **dict.fromkeys(("F8_E4M3", "F8_E4M3FNUZ"), (1, 3, 16)),
    **dict.fromkeys(("F8_E5M2", "F8_E5M2FNUZ"), (1, 2, 32)),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E8M0"), (1, 0, 1)),
    **dict.fromkeys(("I16", "U16"), (2, 0, 1)),
    **dict.fromkeys(("I32", "U32"), (4, 0, 1)),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), (8, 0, 1)),
}


class Refused(ValueError):
    """The file is not what the page says."""


def check(holds: bool, what: str) -> None:
    if not holds:
        raise Refused(what)


def unframe(data: bytes, size: int) -> bytes:
    """What one zstandard frame of exactly `size` bytes holds, if nothing follows it."""
    try:
        check(zstandard.frame_content_size(data) == size, "a frame states another size")
        content = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Refused(f"a damaged frame: {error}") from error
    check(len(content) == size, "a frame has another size")
    return content


def planes(data: bytes, number: int, width: int) -> np.ndarray:
    """`number` numbers of `width` bytes from their byte planes."""
    rows = np.frombuffer(data, np.uint8).reshape(width, number)
    return np.ascontiguousarray(rows.T).view(f"<u{width}").reshape(number)


def apply_steps(old: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """New cells from old ones and steps of the same width; arithmetic wraps."""
    one = old.dtype.type(1)
    half = steps >> one
    return np.where(steps & one, old - half - one, old + half).astype(old.dtype)


def decode_raw(body: bytes, old: np.ndarray) -> np.ndarray:
    check(len(body) == old.nbytes, "raw: wrong size")
    return np.frombuffer(body, old.dtype)


def decode_split(body: bytes, old: np.ndarray) -> np.ndarray:
    number, width = old.size, old.dtype.itemsize
    plain = number * (width - 1)
    check(len(body) > plain, "split.zstd: too short")
    turned = planes(body[:plain] + unframe(body[plain:], number), number, width)
    one, rest = old.dtype.type(1), old.dtype.type(8 * width - 1)
    return (turned >> one) | (turned << rest)


def decode_dense(body: bytes, old: np.ndarray) -> np.ndarray:
    return apply_steps(old, planes(unframe(body, old.nbytes), old.size, old.dtype.itemsize))


def decode_list(body: bytes, old: np.ndarray, changed: int) -> np.ndarray:
    width = old.dtype.itemsize
    content = unframe(body, changed * (4 + width))
    positions = planes(content[: 4 * changed], changed, 4).astype(np.int64)
    check(bool((np.diff(positions) > 0).all()), "list.zstd: positions do not rise")
    check(positions[-1] < old.size, "list.zstd: a position outside the segment")
    new = old.copy()
    new[positions] = planes(content[4 * changed :], changed, width)
    return new


class Bits:
    """Bit strings whose first bit is the lowest one of the first byte."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, bits: int) -> int:
        end = self.at + bits
        check(end <= 8 * len(self.data), "class.zstd: too short")
        piece = int.from_bytes(self.data[self.at >> 3 : (end + 7) >> 3], "little")
        value = (piece >> (self.at & 7)) & ((1 << bits) - 1)
        self.at = end
        return value

    def align(self) -> None:
        check(self.take(-self.at % 8) == 0, "class.zstd: padding that is not zero")


def static_symbols(data: bytes, counts: list[int], cell_bits: int) -> Iterator[tuple[int, int]]:
    """Gaps and steps of `class.zstd`, `data` being what follows the table."""
    check(len(data) >= 8, "class.zstd: too short")
    size_1, size_2 = struct.unpack("<II", data[:8])
    check(8 + size_1 + size_2 <= len(data), "class.zstd: too short")
    gap_symbols = unframe(data[8 : 8 + size_1], sum(counts))
    halves = unframe(data[8 + size_1 :][:size_2], sum((count + 1) // 2 for count in counts))
    step_symbols: list[int] = []
    at = 0
    for count in counts:
        some = [
            half for byte in halves[at : at + (count + 1) // 2] for half in (byte & 15, byte >> 4)
        ]
        check(not any(some[count:]), "class.zstd: an unused half that is not zero")
        step_symbols += some[:count]
        at += (count + 1) // 2
    bits = Bits(data[8 + size_1 + size_2 :])
    gaps = []
    for symbol in gap_symbols:
        check(symbol < 240, "class.zstd: an unknown symbol of a gap")
        shift = max((symbol >> 3) - 1, 0)
        gaps.append(symbol if symbol < 16 else ((symbol - 8 * shift) << shift) | bits.take(shift))
    bits.align()
    steps = []
    for symbol in step_symbols:
        bucket = symbol >> 1
        if bucket < 2:
            reach = bucket
        elif bucket < 7:
            reach = (1 << (bucket - 1)) | bits.take(bucket - 1)
        else:
            reach = bits.take(cell_bits - 1)
        steps.append(2 * reach + 2 - (symbol & 1))
    bits.align()
    check(bits.at == 8 * len(bits.data), "class.zstd: too long")
    return zip(gaps, steps, strict=True)


class RangeDecoder:
    def __init__(self, data: bytes) -> None:
        check(len(data) >= 5, "class.range: too short")
        self.data, self.at = data, 5
        self.width, self.code = 2**32 - 1, int.from_bytes(data[1:5], "big")
        self.p, self.u = [2**21] * 205, [0] * 205

    def refill(self) -> None:
        while self.width < 2**24:
            check(self.at < len(self.data), "class.range: too short")
            self.width, self.code = self.width * 256, self.code * 256 + self.data[self.at]
            self.at += 1

    def bit(self, model: int) -> int:
        p, u = self.p[model], self.u[model]
        rate, self.u[model] = round(131072 / (2 * u + 3)), min(u + 1, 159)
        bound = (self.width >> 16) * ((p >> 6) | 1)
        bit = int(self.code >= bound)
        if bit:
            self.code, self.width = self.code - bound, self.width - bound
            self.p[model] -= (p * rate) >> 16
        else:
            self.width = bound
            self.p[model] += ((2**22 - p) * rate) >> 16
        self.refill()
        return bit

    def plain(self, number: int, bits: int) -> int:
        """`number`, and `bits` plain bits behind it."""
        for some in [8] * (bits // 8) + [bits % 8] * (bits % 8 > 0):
            self.width >>= some
            value = min(self.code // self.width, 2**some - 1)
            self.code -= value * self.width
            number = (number << some) | value
            self.refill()
        return number

    def unary(self, first: int, limit: int) -> int:
        for height in range(limit):
            if not self.bit(first + height):
                return height
        return limit

    def gap(self) -> int:
        height = self.unary(0, 32)
        check(height < 32, "class.range: a height of 32")
        number = 1
        for _ in range(min(height, 2)):
            number = 2 * number + self.bit(32 + 4 * height + number)
        return self.plain(number, max(height - 2, 0)) - 1

    def step(self) -> int:
        negative = self.bit(160)
        reach = self.unary(161, 12)
        if reach == 12:
            height = self.unary(173, 32)
            check(height < 32, "class.range: a height of 32")
            reach = 11 + self.plain(1, height)
        return 2 * reach + 2 - negative

    def symbols(self, counts: list[int]) -> Iterator[tuple[int, int]]:
        for count in counts:
            self.u = [min(u, 6) for u in self.u]
            for _ in range(count):
                gap = self.gap()
                yield gap, self.step()
        check(self.at == len(self.data), "class.range: too long")


def decode_classes(
    body: bytes, old: np.ndarray, dtype: str, coder: str, changed: int
) -> np.ndarray:
    width, shift, number = DTYPES[dtype]
    check(width <= 4, f"{coder} has no cells of 8 bytes")
    check(len(body) >= 2, f"{coder}: too short")
    rows = int.from_bytes(body[:2], "little")
    check(len(body) >= 2 + 5 * rows, f"{coder}: too short")
    table = list(struct.iter_unpack("<BI", body[2 : 2 + 5 * rows]))
    names, counts = [row[0] for row in table], [row[1] for row in table]
    check(names == sorted(set(names)) and 0 not in counts, f"{coder}: a wrong table")
    check(sum(counts) == changed, f"{coder}: the table has another number of changes")
    rest = body[2 + 5 * rows :]
    static = coder == "class.zstd"
    symbols = (
        static_symbols(rest, counts, 8 * width) if static else RangeDecoder(rest).symbols(counts)
    )
    found = list(symbols)
    classes = (old >> old.dtype.type(shift)) & old.dtype.type(number - 1)
    new, at = old.copy(), 0
    for name, count in table:
        part = found[at : at + count]
        at += count
        ranks = np.cumsum([gap + 1 for gap, _ in part]) - 1
        cells = np.flatnonzero(classes == name)
        check(int(ranks[-1]) < cells.size, f"{coder}: a gap leads out of the class")
        check(all(step < 1 << 8 * width for _, step in part), f"{coder}: a step is too wide")
        steps = np.array([step for _, step in part], old.dtype)
        new[cells[ranks]] = apply_steps(old[cells[ranks]], steps)
    return new


def decode_body(body: bytes, old: np.ndarray, dtype: str, coder: str, changed: int) -> np.ndarray:
    simple = {"raw": decode_raw, "split.zstd": decode_split, "dense.zstd": decode_dense}
    if coder in simple:
        return simple[coder](body, old)
    if coder == "list.zstd":
        return decode_list(body, old, changed)
    check(coder in ("class.zstd", "class.range"), f"unknown coder {coder}")
    return decode_classes(body, old, dtype, coder, changed)
