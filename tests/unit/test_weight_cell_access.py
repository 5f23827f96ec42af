"""Scattered cells are read and written alike by numba and by numpy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.weights import kernels
from transport.weights.cell_access import LEAST_CELLS, exchange, rising, take

NUMBA = [
    pytest.mark.skipif(not kernels.available(), reason="numba is not installed"),
    pytest.mark.timeout(180),  # the first use compiles the kernels
]
PATHS = [False, pytest.param(True, marks=NUMBA)]


@pytest.mark.parametrize("compiled", PATHS)
@settings(deadline=None)
@given(
    kind=st.sampled_from(["<u1", "<u2", "<u4", "<u8"]),
    index=st.sampled_from([np.int32, np.int64]),
    where=st.sets(st.integers(0, 299), max_size=80),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_was_there_comes_back_and_nothing_else_changes(compiled, kind, index, where, seed):
    rng = np.random.default_rng(seed)
    top = np.iinfo(kind).max
    cells = rng.integers(0, top, 300, np.dtype(kind), endpoint=True)
    values = rng.integers(0, top, len(where), np.dtype(kind), endpoint=True)
    positions = np.array(sorted(where), index)
    wanted = cells.copy()
    wanted[positions] = values
    before = cells[positions]
    assert rising(positions, cells.size, compiled=compiled)
    assert np.array_equal(take(cells, positions, compiled=compiled), before)
    assert np.array_equal(exchange(cells, positions, values, compiled=compiled), before)
    assert np.array_equal(cells, wanted)


@pytest.mark.parametrize("compiled", PATHS)
@pytest.mark.parametrize("positions", [[-1], [-1, 2], [5], [0, 5], [1, 1], [2, 1], [0, 3, 2, 4]])
def test_positions_that_fall_or_lie_outside_are_told(compiled, positions):
    assert not rising(np.array(positions, np.int32), 5, compiled=compiled)


@pytest.mark.parametrize("compiled", PATHS)
def test_read_only_views_are_read(compiled):
    cells = np.arange(8, dtype=np.uint16)
    cells.flags.writeable = False
    positions = np.array([1, 6], np.int32)
    positions.flags.writeable = False
    assert take(cells, positions, compiled=compiled).tolist() == [1, 6]


@pytest.mark.parametrize("many", [1, LEAST_CELLS])
def test_the_choice_changes_no_result(many):
    cells = np.zeros(3 * many, np.uint16)
    positions = np.arange(0, 3 * many, 3, dtype=np.int32)
    assert rising(positions, cells.size)
    assert not exchange(cells, positions, np.full(many, 7, np.uint16)).any()
    assert take(cells, positions).tolist() == [7] * many
    assert int(cells.sum()) == 7 * many
