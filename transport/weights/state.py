"""A version's weights in memory, changed in place from version to version.

What always holds: an arena was verified against a manifest when it was made; it takes one times
the model (files are mapped copy-on-write: pages that no delta touched cost nothing and the files
stay as they are); a change is written completely or not at all, and undoing it restores the very
bits. One thread at a time writes, and nobody reads while it writes.
"""

import itertools
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from transport.errors import (
    ChecksumMismatch,
    FarflowError,
    IntegrityError,
    InvariantViolation,
    ModelError,
)
from transport.messages import VersionRef
from transport.weights.blobs import BlobFolder, disk_errors
from transport.weights.digest import StateDigest, full_digest
from transport.weights.folder import shard_names
from transport.weights.manifest import INDEX_NAME, VersionManifest
from transport.weights.patch import Patch, TensorChange, write_change
from transport.weights.tensors import Cells, TensorBytes, read_header


@dataclass(frozen=True, slots=True)
class Undo:
    """What takes an arena back to before one ``apply``: about as large as its patch."""

    version: int
    digests: StateDigest
    changes: tuple[tuple[str, TensorChange], ...]  # in the order to be written
    number: int
    before: int


class WeightArena:
    """The tensors of one version, writable through ``apply`` and ``undo`` only."""

    def __init__(self, version: int, tensors: Mapping[str, TensorBytes]) -> None:
        """For the class methods below, which verify. Takes over writable memory, copies other."""
        self.version = version
        self._cells: dict[str, Cells] = {}
        self._views: dict[str, TensorBytes] = {}
        self._kinds: dict[str, tuple[str, int]] = {}
        shared = _sharing(tensors)
        for name in sorted(tensors):
            tensor = tensors[name]
            cells = tensor.cells()
            if name in shared or not cells.flags.writeable or not cells.flags.aligned:
                cells = cells.copy()
            self._cells[name] = cells
            data = cells.view(np.uint8).data.toreadonly()
            self._views[name] = TensorBytes(tensor.dtype, tensor.shape, data)
            self._kinds[name] = (tensor.dtype, cells.size)
        self._numbers = itertools.count(1)
        self._number = 0
        self.digests = StateDigest.from_sums({}, {})

    @classmethod
    def of(
        cls, tensors: Mapping[str, TensorBytes], manifest: VersionManifest, *, threads: int = 1
    ) -> "WeightArena":
        """Tensors from anywhere as the state that ``manifest`` describes. Writable memory becomes
        the arena's own; read-only, shared (tied) and unaligned memory is copied.

        Raises:
            ChecksumMismatch: they are another state.
        """
        arena = cls(manifest.version, tensors)
        arena.digests = StateDigest.of(arena.tensors, threads=threads)
        what = f"weights for version {manifest.version} of {manifest.policy}"
        if arena.digests.hex != manifest.digest:
            raise ChecksumMismatch(
                f"{what} have digest {arena.digests.hex[:12]}, "
                f"the manifest says {manifest.digest[:12]}"
            )
        if manifest.full_digest is not None:
            full = full_digest(arena.tensors, threads=threads)
            if full != manifest.full_digest:
                raise ChecksumMismatch(
                    f"{what} have full digest {full[:12]}, "
                    f"the manifest says {manifest.full_digest[:12]}"
                )
        return arena

    @classmethod
    def from_snapshot(
        cls, blobs: BlobFolder, manifest: VersionManifest, *, threads: int = 1
    ) -> "WeightArena":
        """The state in a manifest's snapshot files, mapped.

        Raises:
            IntegrityError: a file is malformed, or another state than the manifest says.
            StoreError: a file is not there.
        """
        tensors: dict[str, TensorBytes] = {}
        for entry in manifest.of_kind("snapshot"):
            if entry.name != INDEX_NAME:
                path = blobs.path(entry.digest)
                with disk_errors(f"reading {path}"):
                    tensors.update(_mapped(path))
        return cls.of(tensors, manifest, threads=threads)

    @classmethod
    def from_folder(
        cls, folder: Path, manifest: VersionManifest, *, threads: int = 1
    ) -> "WeightArena":
        """The state in a Hugging Face model folder, mapped: nobody may write its files in place
        afterwards (replacing them is fine).

        Raises:
            ModelError: the folder does not load; names the file.
            ChecksumMismatch: it has another state.
        """
        tensors: dict[str, TensorBytes] = {}
        for name in shard_names(folder):
            try:
                tensors.update(_mapped(folder / name))
            except (OSError, FarflowError) as error:
                raise ModelError(f"{folder / name}: {error}") from error
        return cls.of(tensors, manifest, threads=threads)

    @property
    def tensors(self) -> Mapping[str, TensorBytes]:
        """Read-only views in canonical order that always show the current content."""
        return self._views

    @property
    def kinds(self) -> Mapping[str, tuple[str, int]]:
        """dtype and number of cells of every tensor."""
        return self._kinds

    @property
    def ref(self) -> VersionRef:
        """Number and digest, as peers name a version to each other."""
        return VersionRef(version=self.version, digest=self.digests.hex)

    def apply(self, patch: Patch, version: int, digests: StateDigest) -> Undo:
        """Write a patch in place. ``digests`` is the digest of the state that this makes, as the
        decoder computed and compared it.

        Raises:
            IntegrityError: a change does not fit; the arena is as it was.
        """
        undone: list[tuple[str, TensorChange]] = []
        try:
            for name, changes in patch.items():
                cells = self._cells.get(name)
                if cells is None:
                    raise IntegrityError(f"the weights have no tensor {name!r} to change")
                # Even if a change is refused, the list has what was written before it.
                undone.extend((name, write_change(cells, change)) for change in changes)
        except BaseException:
            self._write(reversed(undone))
            raise
        undo = Undo(
            self.version, self.digests, tuple(reversed(undone)), next(self._numbers), self._number
        )
        self.version, self.digests, self._number = version, digests, undo.number
        return undo

    def undo(self, undo: Undo) -> None:
        """Take back the latest ``apply`` that is not taken back yet.

        Raises:
            InvariantViolation: ``undo`` is of another one; nothing was written.
        """
        if undo.number != self._number:
            raise InvariantViolation(
                f"undo {undo.number} does not belong to the weights' last change {self._number}"
            )
        self._write(undo.changes)
        self.version, self.digests, self._number = undo.version, undo.digests, undo.before

    def _write(self, changes: Iterable[tuple[str, TensorChange]]) -> None:
        for name, change in changes:
            write_change(self._cells[name], change)

    def rescan(self, *, threads: int = 1) -> StateDigest:
        """The digest of what the memory holds now, from all of its cells. Differs from
        ``digests`` only if memory or a decoder failed."""
        return StateDigest.of(self._views, threads=threads)


def _mapped(path: Path) -> dict[str, TensorBytes]:
    """Tensors of a safetensors file as private writable views: changes stay in this process."""
    with open(path, "rb") as file:
        size_bytes = file.seek(0, 2)
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size_bytes else b""
    view = memoryview(data)
    regions, _ = read_header(view)
    return {
        name: TensorBytes(region.dtype, region.shape, view[region.start : region.end])
        for name, region in regions.items()
    }


def _sharing(tensors: Mapping[str, TensorBytes]) -> set[str]:
    """Tensors whose memory begins within that of another one: changing one would change both."""
    places: list[tuple[int, int, str]] = []
    for name, tensor in tensors.items():
        if tensor.size_bytes:
            start = tensor.cells().__array_interface__["data"][0]
            places.append((start, start + tensor.size_bytes, name))
    shared: set[str] = set()
    reached = 0
    for start, end, name in sorted(places):
        if start < reached:
            shared.add(name)
        reached = max(reached, end)
    return shared
