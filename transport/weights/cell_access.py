"""Reading and writing scattered cells, compiled by numba where numba is in use anyway.

What always holds: compiled or not, the same cells are read and written; nothing is read or written
outside the arrays: positions that do not rise within the cells are refused before anything is
written; a process that has not imported numba does not import it for this.

numpy takes 30 ns for a scattered cell that is read, then written, mostly for the cache line that is
not there; one loop that does both waits once.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from transport.weights import kernels
from transport.weights.tensors import Cells

LEAST_CELLS = 1 << 12
"""Fewer scattered cells are no matter."""

Positions = npt.NDArray[np.int32] | npt.NDArray[np.int64]


def _compiled(positions: Positions, compiled: bool | None) -> bool:
    if compiled is None:
        return positions.size >= LEAST_CELLS and kernels.in_use()
    return compiled


def rising(positions: Positions, cells: int, *, compiled: bool | None = None) -> bool:
    """Whether ``positions`` rise strictly and lie within so many cells."""
    if positions.size == 0:
        return True
    if positions[0] < 0 or positions[-1] >= cells:
        return False
    if _compiled(positions, compiled):
        return bool(kernels.compiled(_rising)(_frozen(positions)))
    return bool((positions[1:] > positions[:-1]).all())


def take(cells: Cells, positions: Positions, *, compiled: bool | None = None) -> Cells:
    """Copies of the cells at ``positions``, which are ``rising``."""
    if not _compiled(positions, compiled):
        taken: Cells = cells[positions]
        return taken
    out: Cells = np.empty(positions.size, cells.dtype)
    kernels.compiled(_take)(_frozen(cells), _frozen(positions), out)
    return out


def exchange(
    cells: Cells, positions: Positions, values: Cells, *, compiled: bool | None = None
) -> Cells:
    """Write ``values`` to ``positions``, which are ``rising``; what was there before."""
    if not _compiled(positions, compiled):
        taken: Cells = cells[positions]
        cells[positions] = values
        return taken
    out: Cells = np.empty(positions.size, cells.dtype)
    kernels.compiled(_exchange)(cells, _frozen(positions), _frozen(values), out)
    return out


def _frozen(array: Any) -> Any:
    """A read-only view: one compiled form serves writable and read-only arrays."""
    view = array.view()
    view.flags.writeable = False
    return view


def _rising(positions: Any) -> bool:
    falls = 0
    for i in range(1, positions.size):
        falls += positions[i] <= positions[i - 1]
    return falls == 0


def _take(cells: Any, positions: Any, out: Any) -> None:
    for i in range(positions.size):
        out[i] = cells[np.uint64(positions[i])]


def _exchange(cells: Any, positions: Any, values: Any, out: Any) -> None:
    for i in range(positions.size):
        at = np.uint64(positions[i])
        out[i] = cells[at]
        cells[at] = values[i]
