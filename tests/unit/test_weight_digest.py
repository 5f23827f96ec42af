"""State digests, fingerprints and the finite check."""

import numpy as np
import pytest

from transport.errors import ModelError
from transport.weights import cell_sums, kernels
from transport.weights.cell_sums import ZERO_SUM, add_sums, difference, list_sum, subtract_sums
from transport.weights.digest import (
    StateDigest,
    change_sum,
    fingerprint,
    first_non_finite,
    first_non_finite_change,
    full_digest,
    is_finite,
    span_sum,
    state_digest,
    tensor_key,
    tensor_sum,
    zero_sums,
)
from transport.weights.patch import CellList, CellRun, patched, values_before, whole
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


def run(key, cells, start=0):
    return span_sum(key, start, cells)


def test_the_digest_after_changes_equals_the_one_of_the_new_state():
    rng = np.random.default_rng(0)
    state, moves = {}, []
    patch = {}
    for dtype, size in ITEM_BYTES.items():
        cells = rng.integers(0, 256, 300 * size, dtype="u1")
        state[dtype] = TensorBytes(dtype, (300,), cells.tobytes())
        values = rng.integers(0, 256, 10 * size, dtype="u1").view(f"<u{size}")
        where = np.sort(rng.choice(100, 10, replace=False)).astype(np.int32)
        patch[dtype] = (CellList(where, values), CellRun(200, values))
    before = StateDigest.of(state)
    for name, changes in patch.items():
        key = tensor_key(name, before.kinds[name])
        for change in changes:
            old = values_before(state[name].cells(), change)
            moves.append((name, change_sum(key, change, old)))
    new = {name: patched(tensor, patch[name]) for name, tensor in state.items()}
    after = before.moved(reversed(moves))
    assert after == StateDigest.of(new) == StateDigest.of(new, threads=2)
    assert before.moved([]) == before != after
    back = after.moved((name, subtract_sums(ZERO_SUM, move)) for name, move in moves)
    assert back.hex == state_digest(state)


def test_moves_of_unknown_tensors_and_sums_of_other_models_are_refused():
    digest = StateDigest.of({"a": f32(1.0)})
    with pytest.raises(ModelError, match="no tensor 'b'"):
        digest.moved([("b", ZERO_SUM)])
    with pytest.raises(ModelError):
        StateDigest.from_sums({"b": ZERO_SUM}, digest.kinds)
    with pytest.raises(ModelError):
        StateDigest.from_sums({"a": b"short"}, digest.kinds)


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<u4", "<u8"])
def test_parts_add_up_to_the_whole_in_any_order(dtype):
    cells = np.random.default_rng(1).integers(0, 255, 100_001, dtype=dtype)
    whole = run(7, cells)
    total = ZERO_SUM
    for start, end in ((40_000, 100_001), (0, 3), (3, 40_000)):
        total = add_sums(total, run(7, cells[start:end], start))
    assert total == whole != run(8, cells)
    assert subtract_sums(add_sums(whole, total), total) == whole
    mixed = np.random.default_rng(2).permutation(cells.size)
    assert list_sum(7, mixed, cells[mixed]) == whole


def test_a_tensors_sum_is_that_of_its_cells():
    tensor = f32(1.0, 2.0, 3.0)
    key = tensor_key("a", StateDigest.of({"a": tensor}).kinds["a"])
    assert tensor_sum("a", tensor) == span_sum(key, 0, tensor.cells())
    assert tensor_sum("a", tensor) != tensor_sum("b", tensor)
    assert tensor_sum("a", f32()) == ZERO_SUM == zero_sums(["a"])["a"]


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<u4", "<u8"])
def test_swapped_shifted_and_flipped_cells_move_both_halves_of_the_sum(dtype):
    cells = np.arange(200, dtype=dtype)
    whole = run(7, cells)
    others = [run(7, cells, start=1), run(7, np.roll(cells, 1)), run(7, cells[::-1].copy())]
    for i in range(199):
        swapped = cells.copy()
        swapped[[i, i + 1]] = swapped[[i + 1, i]]
        others.append(run(7, swapped))
    for bit in range(8 * cells.dtype.itemsize):
        flipped = cells.copy()
        flipped[11] ^= cells.dtype.type(1 << bit)
        others.append(run(7, flipped))
    for half in (slice(0, 8), slice(8, 16)):
        halves = {total[half] for total in others}
        assert len(halves) == len(others)
        assert whole[half] not in halves


def test_one_bit_more_or_less_moves_half_of_all_bits_of_the_sum():
    share = []
    for position in (0, 1, 1000, 1 << 31, 1 << 33):
        for bit in range(16):
            cell = np.array([0x3C00], "<u2")
            a = run(7, cell, position)
            b = run(7, cell ^ np.uint16(1 << bit), position)
            share.append((int.from_bytes(a, "little") ^ int.from_bytes(b, "little")).bit_count())
    assert 58 < np.mean(share) < 70
    assert min(share) > 35


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<u4", "<u8"])
def test_compiled_and_array_sums_are_the_same_bits(dtype, monkeypatch):
    pytest.importorskip("numba")
    rng = np.random.default_rng(3)
    cells = rng.integers(0, 255, 70_001, dtype=dtype)
    where = np.flatnonzero(rng.random(cells.size) < 0.1).astype(np.int32)
    far = where.astype(np.int64) + (1 << 33)
    new = cells.copy()
    new[where] ^= cells.dtype.type(1)
    new[-1] ^= cells.dtype.type(3)

    def sums(compiled):
        key = (1 << 64) - 3
        return (
            run(key, cells, (1 << 33) - 50_000),
            list_sum(key, where, cells[where], compiled=compiled),
            list_sum(key, far, cells[where], compiled=compiled),
            difference(key, 5, cells, new, mask=0x7F, flip=3, compiled=compiled),
            difference(key, 5, cells[1:], new[1:], compiled=compiled),
            difference(key, 5, cells, cells, mask=0x7F, compiled=compiled),
        )

    arrays = sums(compiled=False)
    old_sum, new_sum = run((1 << 64) - 3, cells, 5), run((1 << 64) - 3, new, 5)
    assert arrays[3].move == subtract_sums(new_sum, old_sum)
    assert arrays[3].changed == np.count_nonzero(cells != new)
    assert arrays[5] == (ZERO_SUM, 0, 0)
    monkeypatch.setattr(kernels, "KERNEL_CELLS", 1)
    monkeypatch.setattr(cell_sums, "COMPILED_CELLS", 1)
    assert sums(compiled=True) == arrays


def test_full_digests_see_every_bit_whatever_the_threads():
    state = {"a": f32(1.0, 2.0), "b": f32(3.0)}
    assert full_digest(state) == full_digest(dict(reversed(state.items())), threads=2)
    others = [
        {"a": f32(1.0, -2.0), "b": f32(3.0)},
        {"a": f32(1.0, 2.0), "c": f32(3.0)},
        {"a": f32(1.0, 2.0, 3.0), "b": f32()},
        {"a": f32(1.0, 2.0)},
    ]
    assert len({full_digest(s) for s in (state, *others)}) == 5
    assert full_digest(state) != state_digest(state)


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


def test_only_the_new_values_of_a_change_are_looked_at():
    dtypes = {"a": "F32", "b": "F32", "i": "I32"}
    bad = whole({"b": f32(1.0, np.nan), "i": f32(np.inf), "a": f32(1.0)})
    assert first_non_finite_change(bad, dtypes) == "b"
    good = {"a": (CellList(np.array([3], np.int32), np.array([0x3F800000], "<u4")),)}
    assert first_non_finite_change(good, dtypes) is None
    cell = np.array([complex(1, np.inf)], "<c8").view("<u8")
    assert first_non_finite_change({"c": (CellRun(0, cell),)}, {"c": "C64"}) == "c"
