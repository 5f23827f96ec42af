"""Coders of one block of cells: what changed between old and new bits.

What always holds: ``decode(encode(change), old)`` gives the new cells bit for bit, for every bit
pattern; decoding allocates only what the old cells' size implies; damaged bodies raise an
``IntegrityError`` or give cells that the caller's digest refuses, never more.

A *step* is the zigzag code of the difference of two bit patterns modulo 2^bits: +1 ulp is 2,
-1 ulp is 1. It holds the same information as an XOR in a far tighter histogram. All streams are
split into byte planes (all lowest bytes, then all second bytes, ...), which is what lets a
byte-wise entropy coder see the histogram. zstd level 1: higher levels look for matches that
weights do not have.

    same              no cell changed                    (no body)
    sparse.step.zstd  u32 changed cells, u8 gap bytes, zstd( gap planes | step planes )
    dense.step.zstd   zstd( step planes of all cells )
    raw               the new cells

Names are on the wire and in files: a coder's meaning never changes, new coders get new names.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import zstandard

from transport.errors import ChecksumMismatch, IntegrityError, TruncatedBlob
from transport.weights.tensors import Buffer, Cells

BLOCK_CELLS = 1 << 22
"""Cells coded as one block: bounds temporaries, whatever a tensor's size."""

_LEVEL = 1
_TRIAL_CELLS = 1 << 12
_SPARSE_HEADER = struct.Struct("<IB")


@dataclass(frozen=True)
class Change:
    """Old and new cells of a block (equal size and type) and what coders derive from them."""

    old: Cells
    new: Cells

    @cached_property
    def indices(self) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        """Positions of changed cells, rising."""
        return np.flatnonzero(self.old != self.new)

    @property
    def density(self) -> float:
        return len(self.indices) / max(1, self.new.size)

    @property
    def raw_bytes(self) -> int:
        return self.new.nbytes

    def part(self, cells: int) -> "Change":
        """The middle ``cells`` cells: a trial stands for its block."""
        start = (self.new.size - cells) // 2
        return Change(self.old[start : start + cells], self.new[start : start + cells])


class Coder(Protocol):
    """One way to code a block."""

    name: str

    def encode(self, change: Change) -> bytes: ...

    def decode(self, body: memoryview, old: Cells) -> Cells:
        """New cells, as many as ``old`` has.

        Raises:
            IntegrityError: the body is not one that ``encode`` makes for such cells.
        """
        ...


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


def _planes(values: Cells) -> Buffer:
    """Byte planes, lowest first. (Shifts: a strided transpose is three times slower.)"""
    planes = np.empty((values.dtype.itemsize, values.size), dtype=np.uint8)
    for byte, plane in enumerate(planes):
        np.right_shift(values, values.dtype.type(8 * byte), out=plane, casting="unsafe")
    return planes.reshape(-1).data


def _from_planes(planes: Buffer, dtype: "np.dtype[np.unsignedinteger[Any]]") -> Cells:
    item_bytes = dtype.itemsize
    flat = np.frombuffer(planes, dtype=np.uint8)
    values = np.empty(flat.size // item_bytes, dtype=dtype)
    spread = values.view(np.uint8)
    for byte, plane in enumerate(flat.reshape(item_bytes, values.size)):
        spread[byte::item_bytes] = plane
    return values


def _compress(data: Buffer) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data)


def _decompress(body: memoryview, size_bytes: int) -> bytes:
    """Contents of one zstd frame that must hold exactly ``size_bytes``."""
    try:
        # The size in the frame decides what zstandard allocates, so it is checked before.
        claimed = zstandard.get_frame_parameters(body).content_size
        if claimed != size_bytes:
            raise IntegrityError(f"zstd frame claims {claimed} bytes, {size_bytes} expected")
        return zstandard.ZstdDecompressor().decompress(
            body, max_output_size=size_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise ChecksumMismatch(f"zstd frame is damaged: {error}") from error


class Same:
    name = "same"

    def encode(self, change: Change) -> bytes:
        return b""

    def decode(self, body: memoryview, old: Cells) -> Cells:
        if len(body):
            raise IntegrityError("an unchanged block has a body")
        return old


class Raw:
    name = "raw"

    def encode(self, change: Change) -> bytes:
        return change.new.tobytes()

    def decode(self, body: memoryview, old: Cells) -> Cells:
        if len(body) != old.nbytes:
            raise TruncatedBlob(f"raw block has {len(body)} bytes, {old.nbytes} expected")
        cells: Cells = np.frombuffer(body, dtype=old.dtype)
        return cells


class DenseStep:
    name = "dense.step.zstd"

    def encode(self, change: Change) -> bytes:
        return _compress(_planes(steps_of(change.old, change.new)))

    def decode(self, body: memoryview, old: Cells) -> Cells:
        return add_steps(old, _from_planes(_decompress(body, old.nbytes), old.dtype))


class SparseStep:
    name = "sparse.step.zstd"

    def encode(self, change: Change) -> bytes:
        indices = change.indices
        gaps = np.diff(indices, prepend=-1)
        gaps -= 1
        gap_bytes = _gap_bytes(int(gaps.max(initial=0)))
        steps = steps_of(change.old[indices], change.new[indices])
        planes = b"".join((_planes(gaps.astype(f"<u{gap_bytes}")), _planes(steps)))
        return _SPARSE_HEADER.pack(len(indices), gap_bytes) + _compress(planes)

    def decode(self, body: memoryview, old: Cells) -> Cells:
        if len(body) < _SPARSE_HEADER.size:
            raise TruncatedBlob(f"sparse block has {len(body)} bytes")
        changed, gap_bytes = _SPARSE_HEADER.unpack_from(body)
        if changed > old.size or gap_bytes not in (1, 2, 4):
            raise IntegrityError(f"{changed} changes with {gap_bytes}-byte gaps in {old.size}")
        split = changed * gap_bytes
        planes = memoryview(
            _decompress(body[_SPARSE_HEADER.size :], split + changed * old.dtype.itemsize)
        )
        indices = _from_planes(planes[:split], np.dtype(f"<u{gap_bytes}")).astype(np.int64)
        indices += 1
        np.cumsum(indices, out=indices)
        indices -= 1
        if changed and indices[-1] >= old.size:
            raise IntegrityError(f"change at cell {indices[-1]} of {old.size}")
        cells = old.copy()
        cells[indices] = add_steps(old[indices], _from_planes(planes[split:], old.dtype))
        return cells


def _gap_bytes(largest: int) -> int:
    return 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4


SAME, RAW, DENSE, SPARSE = Same(), Raw(), DenseStep(), SparseStep()

CODERS: dict[str, Coder] = {coder.name: coder for coder in (SAME, RAW, DENSE, SPARSE)}
"""Every coder that can be decoded, by the name in the file."""


def _candidates(change: Change) -> Sequence[Coder]:
    """Coders that may be the smallest, by share of changed cells: outside the middle range the
    other one saves four percent at best (steps of many sizes) and mostly loses, so it is not
    tried."""
    if change.density < 0.4:
        return (SPARSE,)
    if change.density > 0.62:
        return (DENSE,)
    return (SPARSE, DENSE)


def encode_block(change: Change) -> tuple[Coder, bytes]:
    """The smallest coding of a block, by measured size; ``raw`` when nothing is smaller.

    In large blocks the candidates are compared on a part of the block.
    """
    if not len(change.indices):
        return SAME, b""
    candidates = _candidates(change)
    if len(candidates) > 1 and change.new.size > 2 * _TRIAL_CELLS:
        trial = change.part(_TRIAL_CELLS)
        candidates = [min(candidates, key=lambda coder: len(coder.encode(trial)))]
    coder, body = min(
        ((coder, coder.encode(change)) for coder in candidates), key=lambda pair: len(pair[1])
    )
    if len(body) >= change.raw_bytes:
        return RAW, RAW.encode(change)
    return coder, body


def decode_block(name: str, body: memoryview, old: Cells) -> Cells:
    """New cells of a block coded by the coder called ``name``.

    Raises:
        IntegrityError: no such coder, or a body that it refuses.
    """
    coder = CODERS.get(name)
    if coder is None:
        raise IntegrityError(f"coder {name!r} is unknown; known: {', '.join(CODERS)}")
    return coder.decode(body, old)
