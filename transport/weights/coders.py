"""Bodies of segments: the bytes that stand for what changed, by coder.

What always holds: decoding gives back the very bits; it allocates only what the old cells and the
stated number of changes imply, and refuses any other body with an ``IntegrityError``; a coder's
name never changes its meaning, new coders get new names. All numbers are little-endian.

Coders of classes (changed cells as gaps and steps by old exponent, `symbols.py`) begin with a
table: u16 classes that changed, then per class, rising, u8 class and u32 changed cells.

    class.zstd   table, u32 size of frame 1, u32 size of frame 2, frame 1, frame 2, extra bits of
                 the gaps, extra bits of the steps; frame 1 has a byte per gap, frame 2 half a
                 byte per step (`static_streams.py`)
    class.range  table, then gaps and steps under adaptive models (`range_coder.py`)

Coders of absolute values and of all cells:

    raw          the new cells
    split.zstd   the new cells rotated left by one bit (the sign goes last), as byte planes: all
                 planes but the highest as they are, lowest first, then a frame of the highest,
                 which holds the exponents
    list.zstd    a frame of byte planes: of the u32 positions of changed cells, then of their values
    dense.zstd   a frame of the byte planes, lowest first, of the steps of all cells

Frames are zstd frames that state their content size. Level 1: higher levels look for matches that
weights do not have. A frame of classes has a block per ``_GROUP`` symbols at least, ending with a
class, so that every class gets an entropy table that fits it.
"""

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import zstandard

from transport.errors import ChecksumMismatch, IntegrityError, TruncatedBlob
from transport.weights.layout import ClassLayout
from transport.weights.static_streams import Packed, pair_bytes
from transport.weights.symbols import Bytes8, Counts, add_steps, steps_of
from transport.weights.tensors import Buffer, Cells

_LEVEL = 1
_GROUP = 1 << 12
_ENTRY = np.dtype([("kind", "<u1"), ("changed", "<u4")])
_FRAMES = struct.Struct("<II")


# Frames


def compress(data: Buffer) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data)


def compress_groups(data: Bytes8, sizes: Counts) -> bytes:
    """One frame; ``sizes`` are the bytes of each class, after which a block may end."""
    frame = zstandard.ZstdCompressor(level=_LEVEL).compressobj(size=data.size)
    parts: list[bytes] = []
    start = end = 0
    for size in sizes[sizes > 0].tolist():
        end += size
        if end - start >= _GROUP and end < data.size:
            parts.append(frame.compress(data[start:end].data))
            parts.append(frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
            start = end
    parts.append(frame.compress(data[start:].data))
    parts.append(frame.flush())
    return b"".join(parts)


def decompress(body: memoryview, size_bytes: int) -> Bytes8:
    """Contents of one frame that must hold exactly ``size_bytes``."""
    try:
        # The size in the frame decides what zstandard allocates, so it is checked before.
        claimed = zstandard.get_frame_parameters(body).content_size
        if claimed != size_bytes:
            raise IntegrityError(f"zstd frame claims {claimed} bytes, {size_bytes} expected")
        data = zstandard.ZstdDecompressor().decompress(
            body, max_output_size=size_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise ChecksumMismatch(f"zstd frame is damaged: {error}") from error
    return np.frombuffer(data, np.uint8)


def _planes(values: Cells) -> list[Bytes8]:
    """Byte planes, lowest first. (Shifts: a strided transpose is three times slower.)"""
    planes = []
    for byte in range(values.dtype.itemsize):
        plane = np.empty(values.size, np.uint8)
        np.right_shift(values, values.dtype.type(8 * byte), out=plane, casting="unsafe")
        planes.append(plane)
    return planes


def _from_planes(planes: Bytes8, dtype: np.dtype[np.unsignedinteger]) -> Cells:
    values: Cells = np.empty(planes.size // dtype.itemsize, dtype)
    spread = values.view(np.uint8)
    for byte, plane in enumerate(planes.reshape(dtype.itemsize, values.size)):
        spread[byte :: dtype.itemsize] = plane
    return values


# Class table


def table_bytes(counts: Counts) -> bytes:
    (kinds,) = np.nonzero(counts)
    table = np.empty(kinds.size, _ENTRY)
    table["kind"], table["changed"] = kinds, counts[kinds]
    return struct.pack("<H", kinds.size) + table.tobytes()


def read_table(body: memoryview, layout: ClassLayout, changed: int) -> tuple[Counts, memoryview]:
    """Changed cells per class, and what follows the table.

    Raises:
        TruncatedBlob, IntegrityError: not a table, or not of ``changed`` cells.
    """
    if len(body) < 2:
        raise TruncatedBlob(f"body of {len(body)} bytes has no class table")
    (entries,) = struct.unpack_from("<H", body)
    end = 2 + entries * _ENTRY.itemsize
    if len(body) < end:
        raise TruncatedBlob(f"class table of {entries} classes in {len(body)} bytes")
    table = np.frombuffer(body, _ENTRY, entries, 2)
    kinds, sizes = table["kind"].astype(np.int64), table["changed"].astype(np.int64)
    if (kinds[1:] <= kinds[:-1]).any() or (entries and kinds[-1] >= layout.classes):
        raise IntegrityError(f"classes of the table do not rise below {layout.classes}")
    if int(sizes.sum()) != changed or not sizes.all():
        raise IntegrityError(f"class table has {sizes.sum()} changes, {changed} expected")
    counts = np.zeros(layout.classes, np.int64)
    counts[kinds] = sizes
    return counts, body[end:]


# class.zstd


def static_body(counts: Counts, gaps: Packed, steps: Packed) -> bytes:
    gap_frame = compress_groups(gaps.symbols, counts)
    step_frame = compress_groups(steps.symbols, pair_bytes(counts))
    return b"".join(
        (
            table_bytes(counts),
            _FRAMES.pack(len(gap_frame), len(step_frame)),
            gap_frame,
            step_frame,
            gaps.extra.data,
            steps.extra.data,
        )
    )


def read_static(
    body: memoryview, layout: ClassLayout, changed: int
) -> tuple[Counts, Bytes8, Bytes8, Bytes8]:
    """Changed cells per class, symbols of the gaps, symbols of the steps, extra bits of both."""
    counts, rest = read_table(body, layout, changed)
    if len(rest) < _FRAMES.size:
        raise TruncatedBlob("class.zstd body ends in its table")
    gap_bytes, step_bytes = _FRAMES.unpack_from(rest)
    rest = rest[_FRAMES.size :]
    if len(rest) < gap_bytes + step_bytes:
        raise TruncatedBlob(f"frames of {gap_bytes} and {step_bytes} bytes in {len(rest)}")
    gaps = decompress(rest[:gap_bytes], changed)
    steps = decompress(rest[gap_bytes : gap_bytes + step_bytes], int(pair_bytes(counts).sum()))
    return counts, gaps, steps, np.frombuffer(rest[gap_bytes + step_bytes :], np.uint8)


# Absolute values, and all cells


def encode_raw(new: Cells) -> bytes:
    return new.tobytes()


def decode_raw(body: memoryview, cells: int, dtype: np.dtype[np.unsignedinteger]) -> Cells:
    if len(body) != cells * dtype.itemsize:
        raise TruncatedBlob(f"raw body of {len(body)} bytes, {cells * dtype.itemsize} expected")
    values: Cells = np.frombuffer(body, dtype).copy()
    return values


def encode_split(new: Cells) -> bytes:
    one, rest = new.dtype.type(1), new.dtype.type(8 * new.dtype.itemsize - 1)
    planes = _planes((new << one) | (new >> rest))
    return b"".join((*(plane.data for plane in planes[:-1]), compress(planes[-1].data)))


def decode_split(body: memoryview, cells: int, dtype: np.dtype[np.unsignedinteger]) -> Cells:
    plain = cells * (dtype.itemsize - 1)
    if len(body) < plain:
        raise TruncatedBlob(f"split.zstd body of {len(body)} bytes, {plain} and a frame expected")
    top = decompress(body[plain:], cells)
    values = _from_planes(np.concatenate((np.frombuffer(body[:plain], np.uint8), top)), dtype)
    one, rest = dtype.type(1), dtype.type(8 * dtype.itemsize - 1)
    turned = values << rest
    values >>= one
    values |= turned
    return values


def encode_list(positions: npt.NDArray[np.uint32], values: Cells) -> bytes:
    return compress(np.concatenate(_planes(positions) + _planes(values)).data)


def decode_list(
    body: memoryview, cells: int, dtype: np.dtype[np.unsignedinteger], changed: int
) -> tuple[npt.NDArray[np.int32], Cells]:
    planes = decompress(body, changed * (4 + dtype.itemsize))
    positions = _from_planes(planes[: 4 * changed], np.dtype("<u4"))
    if (positions[1:] <= positions[:-1]).any() or (changed and positions[-1] >= cells):
        raise IntegrityError(f"positions do not rise, or are not within {cells} cells")
    return positions.astype(np.int32), _from_planes(planes[4 * changed :], dtype)


def encode_dense(olds: Sequence[Cells], news: Sequence[Cells]) -> bytes:
    steps = [steps_of(old, new) for old, new in zip(olds, news, strict=True)]
    return compress(np.concatenate(_planes(np.concatenate(steps))).data)


def decode_dense(body: memoryview, olds: Sequence[Cells]) -> list[Cells]:
    """New cells of every span."""
    cells, dtype = sum(old.size for old in olds), olds[0].dtype
    steps = _from_planes(decompress(body, cells * dtype.itemsize), dtype)
    ends = np.cumsum([old.size for old in olds])
    parts = np.split(steps, ends[:-1])
    return [add_steps(old, part) for old, part in zip(olds, parts, strict=True)]
