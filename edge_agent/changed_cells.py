"""Which cells changed, for an engine that is to be told of them once.

What always holds: values are those of the tensors that one asks with, so several changes of a cell
count once; memory is for positions only, at most for ``WHOLE_SHARE`` of a tensor's cells: above
that the tensor counts as changed whole.
"""

from collections.abc import Mapping

import numpy as np

from transport.weights.patch import CellList, CellRun, Patch, Positions, TensorChange
from transport.weights.tensors import TensorBytes

WHOLE_SHARE = 0.25


class ChangedCells:
    """Which cells of which tensors several steps changed."""

    def __init__(self) -> None:
        self._runs: dict[str, set[tuple[int, int]]] = {}
        self._lists: dict[str, Positions] = {}
        self._whole: set[str] = set()

    def add(self, patch: Patch, tensors: Mapping[str, TensorBytes]) -> None:
        for name, changes in patch.items():
            for change in changes:
                if name not in self._whole:
                    self._add(name, change)
                    self._bound(name, tensors[name].cells().size)

    def patch(self, tensors: Mapping[str, TensorBytes]) -> dict[str, tuple[TensorChange, ...]]:
        """These cells with the values that ``tensors`` have now (runs are views of them)."""
        found: dict[str, tuple[TensorChange, ...]] = {}
        for name in sorted({*self._runs, *self._lists, *self._whole}):
            cells = tensors[name].cells()
            if name in self._whole:
                found[name] = (CellRun(0, cells),)
                continue
            runs = self._runs.get(name, ())
            changes: list[TensorChange] = [
                CellRun(start, cells[start:end]) for start, end in sorted(runs)
            ]
            if name in self._lists:
                changes.append(CellList(self._lists[name], cells[self._lists[name]]))
            found[name] = tuple(changes)
        return found

    def _add(self, name: str, change: TensorChange) -> None:
        if isinstance(change, CellRun):
            run = (change.start, change.start + change.values.size)
            self._runs.setdefault(name, set()).add(run)
            return
        before = self._lists.get(name)
        self._lists[name] = (
            change.positions if before is None else np.union1d(before, change.positions)
        )

    def _bound(self, name: str, cells: int) -> None:
        count = sum(end - start for start, end in self._runs.get(name, ()))
        if name in self._lists:
            count += self._lists[name].size
        if count > WHOLE_SHARE * cells:
            self._whole.add(name)
            self._runs.pop(name, None)
            self._lists.pop(name, None)


def difference(
    new: Mapping[str, TensorBytes], old: Mapping[str, TensorBytes]
) -> dict[str, tuple[TensorChange, ...]]:
    """What makes ``old`` the ``new``; all of it where there is nothing alike."""
    found: dict[str, tuple[TensorChange, ...]] = {}
    for name, tensor in new.items():
        before, cells = old.get(name), tensor.cells()
        if before is None or (before.dtype, before.shape) != (tensor.dtype, tensor.shape):
            found[name] = (CellRun(0, cells),)
            continue
        positions = np.flatnonzero(before.cells() != cells)
        if positions.size > WHOLE_SHARE * cells.size:
            found[name] = (CellRun(0, cells),)
        elif positions.size:
            found[name] = (CellList(positions, cells[positions]),)
    return found
