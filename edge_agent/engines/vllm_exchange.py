"""Files through which an agent and the workers of its vLLM hand cells to each other.

What always holds: a file is private, belongs to one call and is gone after it; it lies in memory
where the system has a place for that. The worker maps it, so nothing is copied into messages, and
nobody unpickles anything.
"""

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from edge_agent.engines.private_folder import PrivateFolder
from edge_agent.engines.vllm_map import (
    Box,
    TensorForm,
    WorkerMap,
    Write,
    kept_type,
)
from transport.errors import StoreError
from transport.weights.tensors import ITEM_BYTES, Cells

_ALIGNED: Final = 64
_PREFIX: Final = "farflow-vllm-"
_IN_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - a folder of our own in it, closed to others


class Exchange:
    """A private folder for such files, in ``place`` if one is named.

    Raises:
        StoreError: there is no place for it.
    """

    def __init__(self, place: Path | None = None) -> None:
        if place is None and os.access(_IN_MEMORY, os.W_OK):
            place = _IN_MEMORY
        self._folder = PrivateFolder(_PREFIX, place)
        self._numbers = itertools.count()

    def close(self) -> None:
        """Remove the folder."""
        self._folder.close()

    @contextlib.contextmanager
    def writes(
        self, of_ranks: Sequence[Iterable[Write]]
    ) -> Iterator[tuple[str, list[list[dict[str, Any]]]]]:
        """A file with the values of what each rank is to write, and the entries about them; the
        file is gone afterwards.

        Raises:
            StoreError: there is no room for it.
        """
        with self._file() as path:
            entries: list[list[dict[str, Any]]] = []
            try:
                with path.open("wb") as file:
                    entries += ([_written(file, one) for one in writes] for writes in of_ranks)
                    file.write(bytes(_ALIGNED))  # never empty
            except OSError as error:
                raise StoreError(f"{path.parent}: {error}: no room for new weights") from error
            yield str(path), entries

    @contextlib.contextmanager
    def room(
        self, name: str, form: TensorForm, maps: Sequence[WorkerMap]
    ) -> Iterator[tuple[str, list[list[Box]], "_Room"]]:
        """A file for workers to put their cells of a tensor into, and which boxes each has."""
        asked = [list(found.boxes.get(name, ())) for found in maps]
        kept = kept_type(name, form, maps)
        with self._file() as path:
            try:
                with path.open("wb") as file:
                    file.truncate(form.cells * ITEM_BYTES[kept] + _ALIGNED)  # never empty
            except OSError as error:
                raise StoreError(f"{path.parent}: {error}: no room to read weights") from error
            yield str(path), asked, _Room(path, kept, form.cells)

    @contextlib.contextmanager
    def _file(self) -> Iterator[Path]:
        path = self._folder.path / str(next(self._numbers))
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


class _Room:
    """The cells of one tensor, once they are in the file."""

    def __init__(self, path: Path, kept: str, cells: int) -> None:
        self._path = path
        self._kept = kept
        self._cells = cells

    def cells(self) -> Cells:
        """In the type that the workers keep."""
        cells: Cells = np.fromfile(self._path, f"<u{ITEM_BYTES[self._kept]}", count=self._cells)
        return cells


def _written(file: Any, write: Write) -> dict[str, Any]:
    return {
        "storage": write.storage,
        "start": write.start,
        "count": int(write.values.size),
        "values": _append(file, write.values),
        "positions": None if write.positions is None else _append(file, write.positions),
        "box": None if write.box is None else msgspec.to_builtins(write.box),
    }


def _append(file: Any, array: np.ndarray[Any, Any]) -> int:
    """Where the array lies in the file now."""
    start = file.tell()
    beyond = -start % _ALIGNED
    file.write(bytes(beyond))
    file.write(np.ascontiguousarray(array).view(np.uint8).data)
    return int(start + beyond)
