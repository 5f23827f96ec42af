"""Patches: absolute values, checked before anything is written, undone exactly."""

import numpy as np
import pytest

from transport.errors import IntegrityError
from transport.weights.patch import (
    CellList,
    CellRun,
    changed_cells,
    patch_bytes,
    patched,
    whole,
    write_change,
)
from transport.weights.tensors import TensorBytes


def cells(*values, dtype="<u2"):
    return np.array(values, dtype)


def positions(*values, dtype=np.int32):
    return np.array(values, dtype)


CHANGES = [
    CellRun(2, cells(90, 91)),
    CellRun(5, cells()),
    CellList(positions(0, 4), cells(80, 81)),
    CellList(positions(3, dtype=np.int64), cells(70)),
    CellList(positions(), cells()),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_written_and_undone_and_twice_is_the_same_as_once(change):
    before = cells(1, 2, 3, 4, 5)
    now = before.copy()
    undo = write_change(now, change)
    once = now.copy()
    again = write_change(now, change)
    assert np.array_equal(now, once)
    write_change(now, again)
    write_change(now, undo)
    assert np.array_equal(now, before)
    assert type(undo) is type(change)


def test_changes_are_written_in_order():
    tensor = TensorBytes("U16", (5,), cells(1, 2, 3, 4, 5).tobytes())
    after = patched(tensor, CHANGES)
    assert after.cells().tolist() == [80, 2, 90, 70, 81]
    assert (after.dtype, after.shape) == ("U16", (5,))
    assert tensor.cells().tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "change",
    [
        CellRun(-1, cells(9)),
        CellRun(4, cells(9, 9)),
        CellRun(6, cells()),
        CellRun(0, cells(9, dtype="<u4")),
        CellRun(0, np.zeros((1, 1), "<u2")),
        CellList(positions(-1), cells(9)),
        CellList(positions(5), cells(9)),
        CellList(positions(1, 1), cells(9, 9)),
        CellList(positions(2, 1), cells(9, 9)),
        CellList(positions(1, 2), cells(9)),
        CellList(positions(1), cells(9, dtype="u1")),
        CellList(np.array([1], np.uint32), cells(9)),
        CellList(np.array([1.0]), cells(9)),
    ],
)
def test_a_change_that_does_not_fit_writes_nothing(change):
    now = cells(1, 2, 3, 4, 5)
    with pytest.raises(IntegrityError):
        write_change(now, change)
    assert now.tolist() == [1, 2, 3, 4, 5]


def test_a_scalar_and_an_empty_tensor_are_patched_as_any():
    scalar = TensorBytes("F32", (), bytes(4))
    assert patched(scalar, [CellRun(0, cells(7, dtype="<u4"))]).cells().tolist() == [7]
    empty = TensorBytes("F32", (0, 3), b"")
    assert patched(empty, [CellRun(0, cells(dtype="<u4"))]) == empty


def test_whole_tensors_are_patches_and_patches_are_measured():
    tensors = {"a": TensorBytes("U16", (3,), cells(1, 2, 3).tobytes())}
    patch = whole(tensors)
    zero = TensorBytes("U16", (3,), bytes(6))
    assert patched(zero, patch["a"]) == tensors["a"]
    both = {**patch, "b": (CellList(positions(1, 2), cells(5, 6)),)}
    assert changed_cells(both) == 5
    assert patch_bytes(both) == 6 + 8 + 4
