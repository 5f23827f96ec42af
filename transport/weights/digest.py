"""Digests of whole states, and the check that weights are finite.

    kind          = dtype | shape                                   lengths before every field
    tensor key    = first 8 bytes of SHA-256( tag | name | kind )   as a little-endian number
    tensor sum    = sum over all cells (``cell_sums.py``), 16 bytes; an empty tensor's is zero
    state digest  = SHA-256( tag | for each name, sorted: name | kind | tensor sum )
    full digest   = SHA-256( tag | for each name, sorted: name | SHA-256( tag | kind | data ) )

The **state digest** is what every version is compared by: updating it costs the changed cells,
and partial sums of shards add up to it. It finds accidents and mistakes: a wrong base, a lost or
doubled change, a wrong decoder, a flipped bit. It is *not* collision resistant: who may choose
weights can make two states of one state digest. A forger meets SHA-256 instead: the trainer signs
manifests with the SHA-256 of every file, and with the **full digest** of the state in those
versions where it computed it (that reads all bytes: about 1.5 GB/s a core).

What always holds: a digest depends on names, dtypes, shapes and bits and on nothing else (not on
sharding, file order or metadata).
"""

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from transport.errors import ModelError
from transport.weights.cell_sums import (
    SUM_BYTES,
    ZERO_SUM,
    add_sums,
    difference,
    list_sum,
    run_sum,
    subtract_sums,
)
from transport.weights.patch import CellRun, Patch, TensorChange
from transport.weights.tensors import Cells, TensorBytes

_TENSOR_TAG = b"farflow tensor 1\0"
_KEY_TAG = b"farflow tensor key 2\0"
_STATE_TAG = b"farflow state 2\0"
_FULL_TAG = b"farflow full state 1\0"
_MODEL_TAG = b"farflow model 1\0"


def _field(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def tensor_kind(dtype: str, shape: tuple[int, ...]) -> bytes:
    """What a tensor is besides its name and bits, as digests see it."""
    dimensions = struct.pack(f"<{len(shape)}Q", *shape)
    return _field(dtype.encode()) + _field(dimensions)


def _kind(tensor: TensorBytes) -> bytes:
    return tensor_kind(tensor.dtype, tensor.shape)


def read_kind(kind: bytes) -> tuple[str, tuple[int, ...]]:
    """dtype and shape, from what ``tensor_kind`` made."""
    (size,) = struct.unpack_from("<I", kind)
    dimensions = kind[8 + size :]
    return kind[4 : 4 + size].decode(), struct.unpack(f"<{len(dimensions) // 8}Q", dimensions)


def tensor_key(name: str, kind: bytes) -> int:
    """Number that tells the cells of tensors apart; ``kind`` as ``tensor_kind`` makes it."""
    key = hashlib.sha256(_KEY_TAG + _field(name.encode()) + kind).digest()
    return int.from_bytes(key[:8], "little")


def span_sum(key: int, start: int, cells: Cells) -> bytes:
    """Sum of a part of a tensor: consecutive cells from position ``start`` on. The sums of parts
    that make up the tensor add (``add_sums``) to ``tensor_sum``."""
    return run_sum(key, start, cells)


def tensor_sum(name: str, tensor: TensorBytes) -> bytes:
    """16 bytes over all cells."""
    return run_sum(tensor_key(name, _kind(tensor)), 0, tensor.cells())


def change_sum(key: int, change: TensorChange, before: Cells, *, compiled: bool = False) -> bytes:
    """How far ``change`` moves its tensor's sum. ``before`` has the old cells that it replaces, in
    its order; ``compiled`` as in ``list_sum``."""
    if isinstance(change, CellRun):
        old, new = (run_sum(key, change.start, cells) for cells in (before, change.values))
    else:
        old, new = (
            list_sum(key, change.positions, cells, compiled=compiled)
            for cells in (before, change.values)
        )
    return subtract_sums(new, old)


@dataclass(frozen=True, slots=True)
class StateDigest:
    """Digest of a whole state with what is needed to update it: each tensor's kind and sum."""

    sums: Mapping[str, bytes]
    kinds: Mapping[str, bytes]
    hex: str

    @classmethod
    def from_sums(cls, sums: Mapping[str, bytes], kinds: Mapping[str, bytes]) -> "StateDigest":
        """Raises ModelError when the two name different tensors or a sum has a wrong size."""
        if sums.keys() != kinds.keys() or any(len(s) != SUM_BYTES for s in sums.values()):
            raise ModelError("sums and kinds of a state do not belong together")
        state = hashlib.sha256(_STATE_TAG)
        for name in sorted(sums):
            state.update(_field(name.encode()) + kinds[name] + sums[name])
        return cls(sums, kinds, state.hexdigest())

    @classmethod
    def of(cls, tensors: Mapping[str, TensorBytes], *, threads: int = 1) -> "StateDigest":
        """Read all cells. ``threads`` help with large tensors."""
        names = sorted(tensors)
        sums = _each(lambda name: tensor_sum(name, tensors[name]), names, threads)
        kinds = {name: _kind(tensors[name]) for name in names}
        return cls.from_sums(dict(zip(names, sums, strict=True)), kinds)

    def moved(self, moves: Iterable[tuple[str, bytes]]) -> "StateDigest":
        """Digest after changes, in any order, that moved tensors' sums by so much
        (``change_sum``); a tensor may come several times, its changes must not overlap.

        Raises:
            ModelError: a tensor that the state does not have.
        """
        sums = dict(self.sums)
        for name, move in moves:
            if name not in sums:
                raise ModelError(f"the state has no tensor {name!r} to change")
            sums[name] = add_sums(sums[name], move)
        return StateDigest.from_sums(sums, self.kinds)


def zero_sums(tensors: Iterable[str]) -> dict[str, bytes]:
    """Where adding up the sums of shards starts."""
    return dict.fromkeys(tensors, ZERO_SUM)


def _each(work: Callable[[str], bytes], names: list[str], threads: int) -> list[bytes]:
    if threads <= 1 or len(names) < 2:
        return [work(name) for name in names]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, names))


def state_digest(tensors: Mapping[str, TensorBytes]) -> str:
    """Hexadecimal digest of a whole state."""
    return StateDigest.of(tensors).hex


def full_digest(tensors: Mapping[str, TensorBytes], *, threads: int = 1) -> str:
    """Hexadecimal collision-resistant digest of a whole state; reads every byte."""
    names = sorted(tensors)
    state = hashlib.sha256(_FULL_TAG)
    digests = _each(lambda name: _tensor_digest(tensors[name]), names, threads)
    for name, digest in zip(names, digests, strict=True):
        state.update(_field(name.encode()) + digest)
    return state.hexdigest()


def _tensor_digest(tensor: TensorBytes) -> bytes:
    digest = hashlib.sha256(_TENSOR_TAG + _kind(tensor))
    digest.update(tensor.data)
    return digest.digest()


def fingerprint(tensors: Mapping[str, TensorBytes]) -> str:
    """Hexadecimal digest of names, dtypes and shapes: what a delta's two ends must share."""
    return fingerprint_of_kinds({name: _kind(tensor) for name, tensor in tensors.items()})


def fingerprint_of_kinds(kinds: Mapping[str, bytes]) -> str:
    """The same from ``StateDigest.kinds``."""
    model = hashlib.sha256(_MODEL_TAG)
    for name in sorted(kinds):
        model.update(_field(name.encode()) + kinds[name])
    return model.hexdigest()


class FiniteRule(NamedTuple):
    """Cells with ``(cell ^ flip) & mask >= limit`` are infinite or not a number."""

    mask: int
    limit: int
    flip: int = 0


# E4M3 has no infinities and one NaN per sign, E8M0 has neither and no sign, FNUZ types have one
# NaN (-0). A C64 is two F32.
_FINITE_RULES: dict[str, FiniteRule] = {
    "F64": FiniteRule(0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    "F32": FiniteRule(0x7FFF_FFFF, 0x7F80_0000),
    "C64": FiniteRule(0x7FFF_FFFF, 0x7F80_0000),
    "F16": FiniteRule(0x7FFF, 0x7C00),
    "BF16": FiniteRule(0x7FFF, 0x7F80),
    "F8_E5M2": FiniteRule(0x7F, 0x7C),
    "F8_E4M3": FiniteRule(0x7F, 0x7F),
    "F8_E8M0": FiniteRule(0xFF, 0xFF),
    "F8_E4M3FNUZ": FiniteRule(0xFF, 0xFF, 0x7F),
    "F8_E5M2FNUZ": FiniteRule(0xFF, 0xFF, 0x7F),
}
_NO_RULE = FiniteRule(0, 1)
_SCAN_CELLS = 1 << 18  # temporaries stay in the cache


class SpanDifference(NamedTuple):
    """How far a span moves its tensor's sum, whether any cell changes, and whether those that do
    are finite."""

    move: bytes
    changed: bool
    finite: bool


def span_difference(
    key: int, start: int, dtype: str, old: Cells, new: Cells, *, compiled: bool = False
) -> SpanDifference:
    """Compare old with new consecutive cells from position ``start`` of a tensor on. One pass;
    ``compiled`` as in ``list_sum``."""
    if dtype == "C64":
        old, new = (np.ascontiguousarray(cells).view("<u4") for cells in (old, new))
        start *= 2
    rule = _FINITE_RULES.get(dtype, _NO_RULE)
    found = difference(key, start, old, new, mask=rule.mask, flip=rule.flip, compiled=compiled)
    return SpanDifference(found.move, found.changed > 0, found.largest < rule.limit)


def finite_cells(dtype: str, cells: Cells) -> bool:
    """Whether none of these bit patterns of a ``dtype`` is infinite or not a number. Integers and
    booleans are finite."""
    rule = _FINITE_RULES.get(dtype)
    if rule is None:
        return True
    if dtype == "C64":
        cells = np.ascontiguousarray(cells).view("<u4")
    for start in range(0, cells.size, _SCAN_CELLS):
        block = cells[start : start + _SCAN_CELLS] ^ cells.dtype.type(rule.flip)
        block &= cells.dtype.type(rule.mask)
        if int(block.max()) >= rule.limit:
            return False
    return True


def first_non_finite(tensors: Mapping[str, TensorBytes]) -> str | None:
    """Name of the first tensor (canonical order) with an infinity or NaN, None when all are
    finite."""
    return next(
        (
            name
            for name in sorted(tensors)
            if not finite_cells(tensors[name].dtype, tensors[name].cells())
        ),
        None,
    )


def first_non_finite_change(patch: Patch, dtypes: Mapping[str, str]) -> str | None:
    """Name of the first tensor (canonical order) that ``patch`` gives an infinity or NaN; looks at
    the new values only. ``dtypes`` by tensor name."""
    for name in sorted(patch):
        if not all(finite_cells(dtypes[name], change.values) for change in patch[name]):
            return name
    return None


def is_finite(tensors: Mapping[str, TensorBytes]) -> bool:
    """Whether no floating-point cell is infinite or not a number."""
    return first_non_finite(tensors) is None
