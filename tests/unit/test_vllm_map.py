"""The map of a checkpoint's cells in vLLM's memory: boxes, types, and what a patch writes where."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.engines.vllm_map import (
    Storage,
    TensorForm,
    WorkerMap,
    box,
    check_maps,
    published_cells,
    widened,
    writes,
)
from transport.errors import ModelError, WeightApplyFailed
from transport.weights.patch import CellList, CellRun

FORMS = {"w": TensorForm("BF16", 24)}


def strides(shape):
    return tuple(int(np.prod(shape[place + 1 :])) for place in range(len(shape)))


def of(*boxes, dtype="BF16", cells=64, strange=()):
    return WorkerMap((Storage("p", dtype, cells),), {"w": boxes}, dict(strange))


def written(found, patch, forms=FORMS, cells=64):
    """A storage of zeros after the writes of a patch, done as a worker does them."""
    storage = np.zeros(cells, np.uint16)
    for write in writes(found, forms, patch, "v"):
        if write.box is not None:
            view, size = write.box, storage.itemsize
            to = np.lib.stride_tricks.as_strided(
                storage[view.target :], view.shape, [size * each for each in view.target_strides]
            )
            of_file = np.ascontiguousarray(write.values)
            to[...] = np.lib.stride_tricks.as_strided(
                of_file[view.source :], view.shape, [size * each for each in view.source_strides]
            )
        elif write.positions is None:
            storage[write.start : write.start + write.values.size] = write.values
        else:
            storage[write.positions] = write.values
    return storage


@st.composite
def copies(draw):
    """A slice of a tensor of three dimensions, copied into a permuted slice of a storage."""
    shape = draw(st.tuples(*[st.integers(1, 4)] * 3))
    begin = [draw(st.integers(0, size - 1)) for size in shape]
    end = [draw(st.integers(low + 1, size)) for low, size in zip(begin, shape, strict=True)]
    order = draw(st.permutations(range(3)))
    return shape, tuple(map(slice, begin, end)), order, draw(st.integers(0, 5))


@given(copies(), st.data())
def test_a_box_puts_each_cell_where_the_copy_puts_it(copied, data):
    shape, part, order, offset = copied
    cells = int(np.prod(shape))
    tensor = np.arange(1, cells + 1, dtype=np.uint16).reshape(shape)
    source = tensor[part]
    inner = tuple(source.shape[axis] for axis in order)
    to = np.empty(3, np.int64)
    to[list(order)] = strides(inner)
    found = box(
        0,
        source.shape,
        (source.__array_interface__["data"][0] - tensor.__array_interface__["data"][0]) // 2,
        [each // 2 for each in source.strides],
        offset,
        to.tolist(),
    )
    expected = np.zeros(offset + source.size, np.uint16)
    expected[offset:] = np.transpose(source, order).ravel()
    forms = {"w": TensorForm("BF16", cells)}
    worker = of(found, cells=expected.size)
    for patch in (
        (CellRun(0, tensor.ravel()),),
        (CellList(np.arange(cells), tensor.ravel()),),
        [CellRun(at, tensor.ravel()[at : at + 2]) for at in range(0, cells, 2)],
    ):
        assert (written(worker, {"w": patch}, forms, expected.size) == expected).all()
    chosen = np.array(sorted(data.draw(st.sets(st.integers(0, cells - 1)))), np.int64)
    inside, targets = found.targets(chosen)
    assert (expected[targets] == tensor.ravel()[chosen[inside]]).all()
    assert inside.sum() == np.isin(tensor.ravel()[chosen], expected).sum()


def test_a_copy_of_all_is_one_run_and_one_that_overlaps_itself_is_none():
    assert box(0, (4, 6), 0, (6, 1), 8, (6, 1)).is_run
    assert box(0, (4, 1, 6), 0, (6, 6, 1), 8, (6, 1, 1)).is_run
    assert not box(0, (4, 6), 0, (6, 1), 8, (8, 1)).is_run
    assert box(0, (4, 6), 0, (0, 1), 8, (6, 1)) is None
    assert box(0, (4, 6), 0, (3, 1), 8, (6, 1)) is None


def test_a_later_change_of_a_cell_is_a_later_write():
    one_two, three = np.array([1, 2], np.uint16), np.array([3], np.uint16)
    patch = {"w": (CellRun(0, one_two), CellList(np.array([1]), three))}
    found = of(box(0, (24,), 0, (1,), 5, (1,)))
    assert written(found, patch)[5:8].tolist() == [1, 3, 0]


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("x", CellRun(0, np.zeros(1, np.uint16)), "no tensor 'x'"),
        ("w", CellRun(20, np.zeros(5, np.uint16)), "from 20 on"),
        ("w", CellRun(0, np.zeros(1, np.uint8)), "uint8"),
        ("w", CellList(np.array([2, 1]), np.zeros(2, np.uint16)), "do not rise"),
        ("w", CellRun(0, np.array([0x7F80], np.uint16)), "not finite"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_name(name, change, why):
    found = of(box(0, (24,), 0, (1,), 0, (1,)))
    with pytest.raises(WeightApplyFailed, match=why):
        list(writes(found, FORMS, {name: (change,)}, "v"))


@pytest.mark.parametrize("published", ["BF16", "F16"])
def test_every_finite_bit_pattern_survives_a_wider_type(published):
    cells = np.arange(1 << 16, dtype=np.uint16)
    exponent = {"BF16": 0x7F80, "F16": 0x7C00}[published]
    cells = cells[(cells & exponent) != exponent]
    wide = widened(cells, published, "F32")
    assert wide.dtype == np.uint32
    assert (published_cells(wide, published, "F32") == cells).all()


def test_a_map_that_loses_cells_or_bits_is_refused():
    whole = box(0, (24,), 0, (1,), 0, (1,))
    check_maps(FORMS, [of(whole)])
    check_maps(FORMS, [of(whole, dtype="F32")])
    halves = [of(box(0, (12,), start, (1,), 0, (1,))) for start in (0, 12)]
    check_maps(FORMS, halves)
    with pytest.raises(ModelError, match="12 of the 24 cells"):
        check_maps(FORMS, halves[:1])
    with pytest.raises(ModelError, match="loses bits"):
        check_maps(FORMS, [of(whole, dtype="F16")])
    with pytest.raises(ModelError, match=r"more than copy tensor 'w': aten\.t"):
        check_maps(FORMS, [of(whole, strange={"w": "aten.t of it"}.items())])


@pytest.mark.parametrize(
    ("boxes", "wanted", "missing"),
    [
        ([], 8, 8),  # a head without a tensor
        ([(0, 24)], 24, 0),  # the padding is none that was wanted
        ([(0, 24)], 36, 12),  # q without k
        ([(0, 24), (24, 24)], 48, 0),
        ([(0, 24), (0, 24)], 24, 0),  # tied
    ],
)
def test_a_parameter_that_no_tensor_fills_is_refused_by_name(boxes, wanted, missing):
    """Or vLLM would draw with whatever was in that memory, and all that can be read be right."""
    storages = (Storage("w.weight", "BF16", 24), Storage("p.weight", "BF16", 64, wanted))
    own = box(0, (24,), 0, (1,), 0, (1,))
    there = [box(1, (size,), 0, (1,), start, (1,)) for start, size in boxes]
    found = WorkerMap(storages, {"w": (own, *there)}, {})
    if not missing:
        check_maps(FORMS, [found])
        return
    with pytest.raises(ModelError, match=f"fills {missing} of the {wanted} .*'p.weight'"):
        check_maps(FORMS, [found])
