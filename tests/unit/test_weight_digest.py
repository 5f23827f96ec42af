"""State digests, fingerprints and the finite check."""

import numpy as np
import pytest

from transport.weights.digest import (
    StateDigest,
    fingerprint,
    first_non_finite,
    is_finite,
    state_digest,
)
from transport.weights.tensors import ITEM_BYTES, TensorBytes


def f32(*values):
    return TensorBytes("F32", (len(values),), np.array(values, "<f4").tobytes())


def test_a_digest_sees_every_bit_and_what_the_bits_mean():
    states = [
        {"a": f32(0.0, 1.0)},
        {"a": f32(-0.0, 1.0)},
        {"b": f32(0.0, 1.0)},
        {"a": TensorBytes("F32", (2, 1), f32(0.0, 1.0).data)},
        {"a": TensorBytes("I32", (2,), f32(0.0, 1.0).data)},
        {"a": f32(0.0, 1.0), "b": f32()},
        {"a": f32(0.0), "ab": f32(1.0)},
        {"aa": f32(0.0), "b": f32(1.0)},
        {},
    ]
    assert len({state_digest(state) for state in states}) == len(states)


def test_a_digest_does_not_see_the_order_of_tensors():
    tensors = {"a": f32(1.0), "b": f32(2.0)}
    assert state_digest(tensors) == state_digest(dict(reversed(tensors.items())))


def test_updating_a_digest_equals_computing_it_and_hashes_only_what_changed():
    old = {"a": f32(1.0), "b": f32(2.0), "c": f32(3.0)}
    new = {**old, "b": f32(2.5)}
    before = StateDigest.of(old)
    after = before.updated({"b": new["b"]})
    assert after == StateDigest.of(new)
    assert after.tensors["a"] is before.tensors["a"]
    assert after.updated({"b": old["b"]}).hex == before.hex == state_digest(old)


def test_a_fingerprint_sees_names_types_and_shapes_but_no_values():
    base = fingerprint({"a": f32(1.0, 2.0)})
    assert base == fingerprint({"a": f32(3.0, 4.0)})
    assert base != fingerprint({"b": f32(1.0, 2.0)})
    assert base != fingerprint({"a": f32(1.0)})
    assert base != fingerprint({"a": TensorBytes("I32", (2,), bytes(8))})


NON_FINITE = {
    "F64": [0x7FF0 << 48, 0xFFF0 << 48, (0x7FF0 << 48) + 1],
    "F32": [0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00000],
    "F16": [0x7C00, 0xFC00, 0x7C01, 0xFE00],
    "BF16": [0x7F80, 0xFF80, 0x7F81, 0xFFC0],
    "F8_E5M2": [0x7C, 0xFC, 0x7D, 0xFF],
    "F8_E4M3": [0x7F, 0xFF],
    "F8_E8M0": [0xFF],
    "F8_E4M3FNUZ": [0x80],
    "F8_E5M2FNUZ": [0x80],
}
LARGEST = {
    "F64": 0x7FEF_FFFF_FFFF_FFFF,
    "F32": 0xFF7FFFFF,
    "F16": 0xFBFF,
    "BF16": 0xFF7F,
    "F8_E5M2": 0xFB,
    "F8_E4M3": 0xFE,
    "F8_E8M0": 0xFE,
    "F8_E4M3FNUZ": 0xFF,
    "F8_E5M2FNUZ": 0xFF,
}


@pytest.mark.parametrize("dtype", NON_FINITE)
def test_infinities_and_nans_of_every_type_are_seen(dtype):
    size = ITEM_BYTES[dtype]

    def tensor(bits):
        cells = [0, LARGEST[dtype], bits]
        return TensorBytes(dtype, (3,), b"".join(c.to_bytes(size, "little") for c in cells))

    assert is_finite({"w": tensor(LARGEST[dtype])})
    for bits in NON_FINITE[dtype]:
        assert not is_finite({"w": tensor(bits)}), hex(bits)


def test_a_late_nan_in_a_large_tensor_is_seen():
    values = np.zeros(600_000, "<f4")
    values[-1] = np.nan
    assert not is_finite({"w": TensorBytes("F32", (600_000,), values.tobytes())})


def test_both_parts_of_complex_numbers_count():
    cell = np.array([complex(1, np.inf)], "<c8").tobytes()
    assert not is_finite({"w": TensorBytes("C64", (1,), cell)})


def test_integers_and_empty_tensors_are_finite():
    tensors = {
        "i": TensorBytes("I16", (1,), b"\xff\x7f"),
        "b": TensorBytes("BOOL", (1,), b"\x01"),
        "e": TensorBytes("BF16", (0,), b""),
    }
    assert first_non_finite(tensors) is None


def test_the_first_bad_tensor_is_named():
    tensors = {"z": f32(np.nan), "m": f32(np.inf), "a": f32(1.0)}
    assert first_non_finite(tensors) == "m"
