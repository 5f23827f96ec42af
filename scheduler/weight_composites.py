"""Making the files that the weight store adds to the trainer's: composites and snapshots.

What always holds: a job reads only complete files and its own arena, so it runs beside everything
else; what it made is durable, and gives the very digest that the version's trainer signed, before
anybody hears of it; a job that fails or is stopped leaves nothing that is listed.

Memory: one model (the arena, from the version's snapshot in place), and for a composite the former
values of the cells that changed on its way: positions and bits, at most another model when every
cell changed. The old weights are never there as a whole: a composite from a snapshot reads them out
of its mapped files, any other makes them tensor by tensor out of the new ones and what is noted.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from scheduler.weight_policy import check_going, walk
from transport.errors import ChecksumMismatch
from transport.weights.blobs import BlobFolder
from transport.weights.delta_encode import (
    SegmentWork,
    assemble_delta,
    encode_segments,
    span_cells,
)
from transport.weights.digest import StateDigest, full_digest
from transport.weights.folder import snapshot_files
from transport.weights.layout import plan_segments
from transport.weights.manifest import INDEX_NAME, VersionManifest, composite_name
from transport.weights.patch import (
    CellList,
    CellRun,
    Patch,
    Positions,
    TensorChange,
    patched,
    values_before,
    write_change,
)
from transport.weights.state import WeightArena
from transport.weights.tensors import Cells, TensorBytes, read_safetensors

DENSE: Final = 8
"""When more than one in so many cells of a tensor changed, the whole tensor is noted."""

_KEPT_TENSORS = 2  # a segment may end in one tensor and begin in the next


@dataclass(frozen=True, slots=True)
class SnapshotJob:
    """Write the full weights of ``version``; ``way`` leads there from a snapshot."""

    blobs: BlobFolder
    version: VersionManifest
    way: tuple[VersionManifest, ...]


@dataclass(frozen=True, slots=True)
class CompositeJob:
    """Write the delta from ``base`` to ``version``, which both descend from a version ``fork``
    (or are it). Ways as in ``walk``: from a snapshot to ``fork``, from there to either. When the
    first is the base's snapshot alone, the last may start from another snapshot."""

    blobs: BlobFolder
    base: VersionManifest
    version: VersionManifest
    to_fork: tuple[VersionManifest, ...]
    to_base: tuple[VersionManifest, ...]
    to_version: tuple[VersionManifest, ...]


Job = SnapshotJob | CompositeJob


class Former:
    """Notes what cells held before a series of patches: the first value of each."""

    def __init__(self) -> None:
        self._noted: dict[str, TensorChange] = {}

    def note(self, tensors: Mapping[str, TensorBytes], patch: Patch) -> None:
        """``patch`` is about to be written over ``tensors``."""
        for name, changes in patch.items():
            cells = tensors[name].cells()
            if changes and not isinstance(self._noted.get(name), CellRun):
                self._noted[name] = self._with(self._noted.get(name), cells, changes)

    def patch(self) -> Patch:
        """What brings all noted cells back."""
        return {name: (change,) for name, change in self._noted.items()}

    @staticmethod
    def _with(
        noted: TensorChange | None, cells: Cells, changes: tuple[TensorChange, ...]
    ) -> TensorChange:
        """``noted`` (a list or nothing) and the cells that ``changes`` will write."""
        lists: list[Positions] = [noted.positions] if isinstance(noted, CellList) else []
        written = sum(change.values.size for change in changes)
        if DENSE * (written + sum(part.size for part in lists)) > cells.size:
            before = cells.copy()
            if noted is not None:
                write_change(before, noted)
            return CellRun(0, before)
        for change in changes:
            if isinstance(change, CellRun):
                lists.append(np.arange(change.start, change.start + change.values.size))
            else:
                lists.append(change.positions)
        unique = np.unique(np.concatenate(lists))
        small = cells.size < 1 << 31
        positions = unique.astype(np.int32) if small else unique.astype(np.int64)
        values = cells[positions]
        if isinstance(noted, CellList):
            values[np.searchsorted(positions, noted.positions)] = noted.values
        return CellList(positions, values)


class Before(Mapping[str, TensorBytes]):
    """``tensors`` with ``patches`` written over them one after the other, each tensor made when it
    is asked for; the last few are remembered."""

    def __init__(self, tensors: Mapping[str, TensorBytes], *patches: Patch) -> None:
        self._tensors = tensors
        self._patches = [patch for patch in patches if patch]
        self._made: OrderedDict[str, TensorBytes] = OrderedDict()

    def __getitem__(self, name: str) -> TensorBytes:
        changes = [change for patch in self._patches for change in patch.get(name, ())]
        if not changes:
            return self._tensors[name]
        if name not in self._made:
            while len(self._made) >= _KEPT_TENSORS:
                self._made.popitem(last=False)
            self._made[name] = patched(self._tensors[name], changes)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def perform(job: Job, stop: threading.Event) -> VersionManifest:
    """Do a job; the catalogue of what was made, for ``WeightVersions.adopt``.

    Raises:
        WalkFailed: a file on the way is damaged or gone.
        IntegrityError: what was made is not what the manifests promise, or does not decode to it;
            nothing was written.
        StoreError: the disk refused, or ``stop`` was set.
    """
    if isinstance(job, CompositeJob):
        return _composite(job, stop)
    arena = walk(None, job.blobs, job.way, go_on=lambda: not stop.is_set())
    return write_snapshot(job.blobs, arena.tensors, job.version)


def write_snapshot(
    blobs: BlobFolder,
    tensors: Mapping[str, TensorBytes],
    version: VersionManifest,
    *,
    threads: int = 1,
) -> VersionManifest:
    """Store a version's full weights; the catalogue. They are read once more before: a mapped file
    may have rotted since it was.

    Raises:
        ChecksumMismatch: they are no longer the version's; nothing was written.
        StoreError: the disk refused.
    """
    found = StateDigest.of(tensors, threads=threads).hex
    full = version.full_digest
    if found != version.digest or (
        full is not None and full_digest(tensors, threads=threads) != full
    ):
        raise ChecksumMismatch(
            f"the weights of version {version.version} of {version.policy} in memory are damaged"
        )
    entries = tuple(
        blobs.store(name, "snapshot", parts) for name, parts in snapshot_files(tensors).items()
    )
    return msgspec.structs.replace(version, files=entries)


def _composite(job: CompositeJob, stop: threading.Event) -> VersionManifest:
    def go_on() -> bool:
        return not stop.is_set()

    arena = walk(None, job.blobs, job.to_fork, go_on=go_on)
    before: Mapping[str, TensorBytes]
    if len(job.to_fork) == 1 and not job.to_base:
        base, before = arena.digests, _mapped(job.blobs, job.to_fork[0])
        arena = walk(arena, job.blobs, job.to_version, go_on=go_on)
    else:
        to_base = _patch_to_base(arena, job, go_on)
        base = to_base.digests
        former = Former()
        walk(arena, job.blobs, job.to_version, note=former.note, go_on=go_on)
        before = Before(arena.tensors, former.patch(), to_base.patch)
    encoded = assemble_delta(
        # Nobody applies a composite before agents do, so it is read back here.
        encode_segments(_work(before, arena.tensors, go_on), base.kinds, read_back=True),
        base=base,
        run=job.version.run,
        policy=job.version.policy,
        version=job.version.version,
        parent=job.base.version,
    )
    found = encoded.header.base_digest, encoded.digests.hex
    if found != (job.base.digest, job.version.digest):
        raise ChecksumMismatch(
            f"the composite from {job.base.version} to {job.version.version} of"
            f" {job.version.policy} joins {found[0][:12]} and {found[1][:12]}, not these versions"
        )
    entry = job.blobs.store(composite_name(job.base.version), "composite", (encoded.data,))
    return msgspec.structs.replace(
        job.version,
        parent=job.base.version,
        base_digest=job.base.digest,
        files=(msgspec.structs.replace(entry, segments=encoded.segments),),
    )


def _work(
    before: Mapping[str, TensorBytes], now: Mapping[str, TensorBytes], go_on: Callable[[], bool]
) -> Iterator[SegmentWork]:
    counts = {name: (tensor.dtype, tensor.cells().size) for name, tensor in now.items()}
    for plan in plan_segments(counts):
        check_going(go_on)
        yield SegmentWork(plan, span_cells(plan, before), span_cells(plan, now))


@dataclass(frozen=True, slots=True)
class _ToBase:
    """What makes the fork's weights the base's, and the digest of these."""

    patch: Patch
    digests: StateDigest


def _patch_to_base(arena: WeightArena, job: CompositeJob, go_on: Callable[[], bool]) -> _ToBase:
    """Go to the base and back; ``arena`` is at the fork before and after."""
    fork, digests = arena.version, arena.digests
    if not job.to_base:
        return _ToBase({}, digests)
    former = Former()
    walk(arena, job.blobs, job.to_base, note=former.note, go_on=go_on)
    back = former.patch()
    there = _ToBase(_values_now(arena.tensors, back), arena.digests)
    arena.apply(back, fork, digests)
    return there


def _values_now(tensors: Mapping[str, TensorBytes], patch: Patch) -> Patch:
    """The cells that ``patch`` writes, as they are now."""
    now: dict[str, tuple[TensorChange, ...]] = {}
    for name, changes in patch.items():
        cells = tensors[name].cells()
        now[name] = tuple(
            CellRun(change.start, values_before(cells, change))
            if isinstance(change, CellRun)
            else CellList(change.positions, values_before(cells, change))
            for change in changes
        )
    return now


def _mapped(blobs: BlobFolder, snapshot: VersionManifest) -> dict[str, TensorBytes]:
    """Tensors in the files of a snapshot that was verified a moment ago."""
    tensors: dict[str, TensorBytes] = {}
    for entry in snapshot.of_kind("snapshot"):
        if entry.name != INDEX_NAME:
            tensors.update(read_safetensors(blobs.data(entry.digest)))
    return tensors
