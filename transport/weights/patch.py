"""Changes of weights as absolute values: what a decoder gives and an engine or arena takes.

What always holds: a patch says what cells become, never by how much, so applying it twice is the
same as applying it once; writing a change first checks all of it (type, range, order) and gives
back the change that restores the former bits exactly.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from transport.errors import IntegrityError
from transport.weights.cell_access import Positions as Positions
from transport.weights.cell_access import exchange, rising, take
from transport.weights.tensors import Cells, TensorBytes


@dataclass(frozen=True, slots=True)
class CellRun:
    """New bit patterns of the cells from ``start`` on: 1-D unsigned integers of the tensor's
    item size."""

    start: int
    values: Cells

    @property
    def size_bytes(self) -> int:
        return self.values.nbytes


@dataclass(frozen=True, slots=True)
class CellList:
    """New bit patterns of scattered cells; ``positions`` are strictly rising cell numbers in the
    tensor, as many as ``values``."""

    positions: Positions
    values: Cells

    @property
    def size_bytes(self) -> int:
        return self.positions.nbytes + self.values.nbytes


TensorChange = CellRun | CellList

Patch = Mapping[str, tuple[TensorChange, ...]]
"""Changes by tensor, written one after the other."""


def check_change(cells: Cells, change: TensorChange) -> None:
    """Whether ``change`` fits a tensor with these cells.

    Raises:
        IntegrityError: another item size, cells outside the tensor, or positions that do not rise.
    """
    values = change.values
    if values.ndim != 1 or values.dtype != cells.dtype:
        raise IntegrityError(
            f"change of {values.ndim}-D {values.dtype} cells for a tensor of {cells.dtype} cells"
        )
    if isinstance(change, CellRun):
        if not 0 <= change.start <= cells.size - values.size:
            raise IntegrityError(
                f"change of {values.size} cells from {change.start} on, in {cells.size}"
            )
        return
    positions = change.positions
    if positions.dtype not in (np.int32, np.int64) or positions.shape != values.shape:
        raise IntegrityError(
            f"{positions.shape} positions of type {positions.dtype} for {values.shape} values"
        )
    if not rising(positions, cells.size):
        raise IntegrityError(
            f"positions of a change do not rise: cells {positions[0]} to {positions[-1]}, "
            f"in {cells.size}"
        )


def values_before(cells: Cells, change: TensorChange) -> Cells:
    """A copy of what ``cells`` hold where ``change`` would write; the change must fit."""
    if isinstance(change, CellRun):
        return cells[change.start : change.start + change.values.size].copy()
    return take(cells, change.positions)


def write_change(cells: Cells, change: TensorChange) -> TensorChange:
    """Write a change in place and return the one that undoes it.

    Raises:
        IntegrityError: as ``check_change``; nothing was written.
    """
    check_change(cells, change)
    if isinstance(change, CellRun):
        before = values_before(cells, change)
        cells[change.start : change.start + change.values.size] = change.values
        return CellRun(change.start, before)
    return CellList(change.positions, exchange(cells, change.positions, change.values))


def patched(tensor: TensorBytes, changes: Iterable[TensorChange]) -> TensorBytes:
    """A new tensor: ``tensor`` with the changes written one after the other.

    Raises:
        IntegrityError: as ``check_change``.
    """
    cells = tensor.cells().copy()
    for change in changes:
        write_change(cells, change)
    return TensorBytes(tensor.dtype, tensor.shape, cells.view(np.uint8).data.toreadonly())


def whole(tensors: Mapping[str, TensorBytes]) -> Patch:
    """Every tensor's contents as a patch (views, not copies)."""
    return {name: (CellRun(0, tensor.cells()),) for name, tensor in tensors.items()}


def patch_bytes(patch: Patch) -> int:
    """Memory that a patch's positions and values take."""
    return sum(change.size_bytes for changes in patch.values() for change in changes)


def changed_cells(patch: Patch) -> int:
    """Cells that a patch writes, counted once for every change."""
    return sum(change.values.size for changes in patch.values() for change in changes)
