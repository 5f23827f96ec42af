"""How other systems send changed weights: the wire formats that the delta bench compares with.

Written from their published descriptions. Each codes one tensor at a time and leaves out
everything that is not index or value (headers, names, checksums), which favours them.

What always holds: ``decode(old, encode(old, new))`` has the very bits of ``new``, whatever the
item size; bodies explain themselves, no count travels beside them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from transport.weights.tensors import Cells

_LEVEL = 1  # the level that these systems use
_GAP_MAX = 0xFFFF
_ROW_CELLS = 1024
_ROW_STEP_MAX = 0xFF


@dataclass(frozen=True)
class Reference:
    """One format; ``used_by`` names systems that have it."""

    name: str
    used_by: str
    encode: Callable[[Cells, Cells], bytes]
    decode: Callable[[Cells, bytes], Cells]


def _deflate(body: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(body)


def _inflate(body: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(body)


def _column(body: bytes, item: Any, count: int, offset: int) -> npt.NDArray[Any]:
    return np.frombuffer(body, item, count, offset)


def _index_list(old: Cells, new: Cells) -> bytes:
    """All int32 positions, then all new values."""
    where = np.flatnonzero(old != new)
    return where.astype("<i4").tobytes() + new[where].tobytes()


def _from_index_list(old: Cells, body: bytes) -> Cells:
    count = len(body) // (4 + old.itemsize)
    new = old.copy()
    new[_column(body, "<i4", count, 0)] = _column(body, old.dtype, count, 4 * count)
    return new


def _dense_xor(old: Cells, new: Cells) -> bytes:
    return _deflate((old ^ new).tobytes())


def _from_dense_xor(old: Cells, body: bytes) -> Cells:
    new: Cells = old ^ np.frombuffer(_inflate(body), old.dtype)
    return new


def _gap_xor(old: Cells, new: Cells) -> bytes:
    """u16 distances from one change to the next and XORs of the cells; a distance too far for u16
    is walked in entries that change nothing."""
    where = np.flatnonzero(old != new)
    gaps = np.diff(where, prepend=0)
    hops = gaps // _GAP_MAX
    last = np.cumsum(hops + 1) - 1
    count = int(last[-1]) + 1 if where.size else 0
    steps = np.full(count, _GAP_MAX, "<u2")
    steps[last] = gaps % _GAP_MAX
    values = np.zeros(count, old.dtype)
    values[last] = old[where] ^ new[where]
    return _deflate(steps.tobytes() + values.tobytes())


def _from_gap_xor(old: Cells, body: bytes) -> Cells:
    columns = _inflate(body)
    count = len(columns) // (2 + old.itemsize)
    where = np.cumsum(_column(columns, "<u2", count, 0), dtype=np.int64)
    values = _column(columns, old.dtype, count, 2 * count)
    real = values != 0
    new = old.copy()
    new[where[real]] ^= values[real]
    return new


def _coordinates(old: Cells, new: Cells) -> bytes:
    """u8 row steps, u16 column steps that start again in every row, and new values; a row too far
    away for u8 is walked in entries that repeat an unchanged cell."""
    where = np.flatnonzero(old != new)
    rows = where // _ROW_CELLS
    steps = np.diff(rows, prepend=0)
    fillers = [
        np.arange(rows[at] - steps[at] + _ROW_STEP_MAX, rows[at], _ROW_STEP_MAX) * _ROW_CELLS
        for at in np.flatnonzero(steps > _ROW_STEP_MAX)
    ]
    if fillers:
        where = np.union1d(where, np.concatenate(fillers))
    rows, columns = where // _ROW_CELLS, where % _ROW_CELLS
    steps = np.diff(rows, prepend=0)
    across = np.where(_row_starts(steps), columns, np.diff(columns, prepend=0))
    return _deflate(
        steps.astype("<u1").tobytes() + across.astype("<u2").tobytes() + new[where].tobytes()
    )


def _row_starts(steps: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    starts = steps > 0
    starts[:1] = True
    return starts


def _from_coordinates(old: Cells, body: bytes) -> Cells:
    packed = _inflate(body)
    count = len(packed) // (3 + old.itemsize)
    steps = _column(packed, "<u1", count, 0).astype(np.int64)
    across = np.cumsum(_column(packed, "<u2", count, count), dtype=np.int64)
    starts = np.flatnonzero(_row_starts(steps))
    # The column sums run over the whole tensor; each row takes off what stood before it.
    before = np.concatenate([[0], across])[starts]
    columns = across - np.repeat(before, np.diff(np.append(starts, count)))
    new = old.copy()
    new[np.cumsum(steps) * _ROW_CELLS + columns] = _column(packed, old.dtype, count, 3 * count)
    return new


REFERENCES = (
    Reference("int32 + bf16", "AstraFlow, TRL, verl", _index_list, _from_index_list),
    Reference(
        "int32 + bf16, zstd-1",
        "AReaL-DTE",
        lambda old, new: _deflate(_index_list(old, new)),
        lambda old, body: _from_index_list(old, _inflate(body)),
    ),
    Reference("dense XOR, zstd-1", "slime", _dense_xor, _from_dense_xor),
    Reference("u16 gap + xor16, zstd-1", "NeMo-DCR", _gap_xor, _from_gap_xor),
    Reference("COO u8 row + u16 column + bf16, zstd-1", "grail", _coordinates, _from_coordinates),
)
