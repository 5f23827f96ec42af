"""Digests of whole states, and the check that weights are finite.

    tensor digest = SHA-256( tag | dtype | shape | data )          lengths before every field
    state digest  = SHA-256( tag | for each name, sorted: name | tensor digest )

What always holds: a state digest depends on names, dtypes, shapes and bits and on nothing else
(not on sharding, file order or metadata); updating one costs the changed tensors. SHA-256 because
processors have instructions for it: about 1.5 GB/s a core where BLAKE2b makes 0.6.
"""

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from transport.weights.tensors import ITEM_BYTES, TensorBytes

_TENSOR_TAG = b"farflow tensor 1\0"
_STATE_TAG = b"farflow state 1\0"
_MODEL_TAG = b"farflow model 1\0"


def _field(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def _kind(tensor: TensorBytes) -> bytes:
    shape = struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape)
    return _field(tensor.dtype.encode()) + _field(shape)


def tensor_digest(tensor: TensorBytes) -> bytes:
    """32 bytes over dtype, shape and data."""
    digest = hashlib.sha256(_TENSOR_TAG + _kind(tensor))
    digest.update(tensor.data)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class StateDigest:
    """Digest of a whole state with what is needed to update it: each tensor's digest."""

    tensors: Mapping[str, bytes]
    hex: str

    @classmethod
    def from_digests(cls, digests: Mapping[str, bytes]) -> "StateDigest":
        state = hashlib.sha256(_STATE_TAG)
        for name in sorted(digests):
            state.update(_field(name.encode()) + digests[name])
        return cls(digests, state.hexdigest())

    @classmethod
    def of(cls, tensors: Mapping[str, TensorBytes]) -> "StateDigest":
        return cls.from_digests({name: tensor_digest(t) for name, t in tensors.items()})

    def updated(self, changed: Mapping[str, TensorBytes]) -> "StateDigest":
        """Digest after the tensors in ``changed`` took new values; hashes only those."""
        digests = {name: tensor_digest(tensor) for name, tensor in changed.items()}
        return StateDigest.from_digests({**self.tensors, **digests})


def state_digest(tensors: Mapping[str, TensorBytes]) -> str:
    """Hexadecimal digest of a whole state."""
    return StateDigest.of(tensors).hex


def fingerprint(tensors: Mapping[str, TensorBytes]) -> str:
    """Hexadecimal digest of names, dtypes and shapes: what a delta's two ends must share."""
    model = hashlib.sha256(_MODEL_TAG)
    for name in sorted(tensors):
        model.update(_field(name.encode()) + _kind(tensors[name]))
    return model.hexdigest()


# (mask, limit): cells with (cell & mask) >= limit are infinite or not a number. E4M3 has no
# infinities and one NaN per sign, E8M0 has neither and no sign, FNUZ types have one NaN (-0).
_NON_FINITE: dict[str, tuple[int, int]] = {
    "F64": (0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    "F32": (0x7FFF_FFFF, 0x7F80_0000),
    "C64": (0x7FFF_FFFF, 0x7F80_0000),
    "F16": (0x7FFF, 0x7C00),
    "BF16": (0x7FFF, 0x7F80),
    "F8_E5M2": (0x7F, 0x7C),
    "F8_E4M3": (0x7F, 0x7F),
    "F8_E8M0": (0xFF, 0xFF),
}
_SINGLE_NAN = {"F8_E4M3FNUZ": 0x80, "F8_E5M2FNUZ": 0x80}
_SCAN_CELLS = 1 << 18  # temporaries stay in the cache


def _finite(tensor: TensorBytes) -> bool:
    if tensor.dtype in _SINGLE_NAN:
        return _SINGLE_NAN[tensor.dtype] not in tensor.cells()
    if tensor.dtype not in _NON_FINITE:
        return True
    mask, limit = _NON_FINITE[tensor.dtype]
    item_bytes = 4 if tensor.dtype == "C64" else ITEM_BYTES[tensor.dtype]
    cells = np.frombuffer(tensor.data, dtype=f"<u{item_bytes}")
    for start in range(0, cells.size, _SCAN_CELLS):
        block = cells[start : start + _SCAN_CELLS]
        if int((block & cells.dtype.type(mask)).max()) >= limit:
            return False
    return True


def first_non_finite(tensors: Mapping[str, TensorBytes]) -> str | None:
    """Name of the first tensor (canonical order) with an infinity or NaN, None when all are
    finite. Integer and boolean tensors are finite."""
    return next((name for name in sorted(tensors) if not _finite(tensors[name])), None)


def is_finite(tensors: Mapping[str, TensorBytes]) -> bool:
    """Whether no floating-point cell is infinite or not a number."""
    return first_non_finite(tensors) is None
