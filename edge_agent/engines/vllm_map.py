"""Where the cells of a checkpoint's tensors lie in the memory of a worker of vLLM.

What always holds: a map is made of boxes that were seen being copied while the model's own loader
ran, so fused projections, slices of tensor parallelism, padded vocabularies and tied embeddings
need no rule here; positions and bits are worked out in the agent, a worker only writes and reads
where it is told; published bits that the worker keeps in a wider type come back unchanged.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from transport.errors import IntegrityError, ModelError, WeightApplyFailed
from transport.weights.digest import finite_cells
from transport.weights.patch import CellRun, Patch, TensorChange, check_change
from transport.weights.tensors import ITEM_BYTES, Cells

Positions = npt.NDArray[np.int64]

_WIDER: Final = {("BF16", "F32"), ("F16", "F32")}


class Box(msgspec.Struct, frozen=True, array_like=True):
    """Cells of a tensor that lie in one storage: cell ``source + i . source_strides`` of the tensor
    is cell ``target + i . target_strides`` of the storage, for all 0 <= i < ``shape``. Source
    strides fall, and none is smaller than what the dimensions behind it span."""

    storage: int
    shape: tuple[int, ...]
    source: int
    source_strides: tuple[int, ...]
    target: int
    target_strides: tuple[int, ...]

    @property
    def cells(self) -> int:
        return math.prod(self.shape)

    @property
    def is_run(self) -> bool:
        """Whether it is one run of cells in both."""
        return len(self.shape) == 1 and self.source_strides == self.target_strides == (1,)

    def targets(self, positions: Positions) -> tuple[npt.NDArray[np.bool_], Positions]:
        """Which of the tensor's ``positions`` are in the box, and where those lie in the storage.

        What is in front of the box has a first index below 0, what is behind it one that is too
        large, and what is beside it one of the others.
        """
        rest = positions - self.source
        inside = np.ones(positions.shape, np.bool_)
        target = np.full(positions.shape, self.target, np.int64)
        for size, source, to in zip(
            self.shape, self.source_strides, self.target_strides, strict=True
        ):
            if source == 1:
                index, rest = rest, np.zeros_like(rest)
            else:
                index, rest = np.divmod(rest, source)
            inside &= (index >= 0) & (index < size)
            target += index * to
        inside &= rest == 0
        return inside, target[inside]


def box(
    storage: int,
    shape: Sequence[int],
    source: int,
    source_strides: Sequence[int],
    target: int,
    target_strides: Sequence[int],
) -> Box | None:
    """The box of a copy between two strided views, with as few dimensions as will do; None where
    the view of the tensor overlaps itself, which no map can invert."""
    dimensions = sorted(
        (
            (of, to, size)
            for size, of, to in zip(shape, source_strides, target_strides, strict=True)
            if size != 1
        ),
        reverse=True,
    )
    merged: list[tuple[int, int, int]] = []
    for of, to, size in reversed(dimensions):
        if merged:
            inner_of, inner_to, inner = merged[-1]
            if (of, to) == (inner_of * inner, inner_to * inner):
                merged[-1] = (inner_of, inner_to, inner * size)
                continue
        merged.append((of, to, size))
    merged = merged[::-1] or [(1, 1, 1)]
    span = 0
    for of, _, size in reversed(merged):
        if of <= span:
            return None
        span += of * (size - 1)
    return Box(
        storage,
        tuple(size for _, _, size in merged),
        source,
        tuple(of for of, _, _ in merged),
        target,
        tuple(to for _, to, _ in merged),
    )


class Storage(msgspec.Struct, frozen=True, array_like=True):
    """Memory of a worker: of which parameter, its safetensors type, how many cells; ``wanted`` of
    them are a parameter's that the loader does not fill itself, as it does with padding."""

    name: str
    dtype: str
    cells: int
    wanted: int = 0


class WorkerMap(msgspec.Struct, frozen=True, array_like=True):
    """What one worker recorded: its storages, and each tensor's boxes. ``strange`` are tensors that
    its loader did something with that is no copy, and what that was."""

    storages: tuple[Storage, ...]
    boxes: dict[str, tuple[Box, ...]]
    strange: dict[str, str]


class TensorForm(NamedTuple):
    """A tensor as it is published."""

    dtype: str
    cells: int


Stored = Callable[[str, Cells, TensorForm, str], Cells]
"""Published bit patterns of a named tensor in the type that a worker keeps it in."""


class Write(NamedTuple):
    """New cells of a storage: from ``start`` on, or at ``positions``; or, with ``box``, all cells
    of a tensor, in its order, of which the box's are taken. Values have the storage's type."""

    storage: int
    start: int
    positions: Positions | None
    box: Box | None
    values: Cells


def check_maps(forms: Mapping[str, TensorForm], maps: Sequence[WorkerMap]) -> None:
    """Whether each tensor of the folder lies somewhere, in a type that holds its bits, and each
    parameter of vLLM's gets its cells: vLLM computes with whatever was in the memory of one that no
    tensor fills (its own look leaves out linear layers and embeddings).

    Raises:
        ModelError: names the tensor and what vLLM does with it, or the parameter.
    """
    for name, form in forms.items():
        for found in maps:
            if name in found.strange:
                raise ModelError(f"vLLM does more than copy tensor {name!r}: {found.strange[name]}")
        kinds = {found.storages[each.storage].dtype for found, each in _boxes(name, maps)}
        covered = sum(each.cells for _, each in _boxes(name, maps))
        if covered < form.cells:
            raise ModelError(
                f"vLLM loads {covered} of the {form.cells} cells of tensor {name!r}; it has no use "
                "for the others, so they could not be kept up to date: publish a folder without it"
            )
        for kept in kinds:
            if len(kinds) > 1 or (kept != form.dtype and (form.dtype, kept) not in _WIDER):
                raise ModelError(
                    f"tensor {name!r} is {form.dtype} in the folder and {', '.join(sorted(kinds))} "
                    "in vLLM, which loses bits; set [agent.vllm] dtype to the folder's type"
                )
    for found in maps:
        _check_filled(found)


def _check_filled(found: WorkerMap) -> None:
    filled: Counter[int] = Counter()
    for each in itertools.chain.from_iterable(found.boxes.values()):
        filled[each.storage] += each.cells
    for number, storage in enumerate(found.storages):
        missing = storage.wanted - filled[number]
        if missing > 0:
            raise ModelError(
                f"no tensor of the folder fills {missing} of the {storage.wanted} cells of vLLM's"
                f" parameter {storage.name!r}: publish all tensors of the model that config.json"
                " describes, or mend that (tie_word_embeddings, attention_bias)"
            )


def kept_type(name: str, form: TensorForm, maps: Sequence[WorkerMap]) -> str:
    """The type that the workers keep a tensor in; ``check_maps`` has seen that it is one."""
    for found, each in _boxes(name, maps):
        return found.storages[each.storage].dtype
    return form.dtype  # of a tensor without cells nothing is kept


def _boxes(name: str, maps: Sequence[WorkerMap]) -> Iterator[tuple[WorkerMap, Box]]:
    for found in maps:
        for each in found.boxes.get(name, ()):
            yield found, each


def widened(cells: Cells, published: str, kept: str) -> Cells:
    """Published bit patterns in the type that a worker keeps them in; exact."""
    if published == kept:
        return cells
    if published == "BF16":
        return cells.astype(np.uint32) << np.uint32(16)
    wide: Cells = cells.view(np.float16).astype(np.float32).view(np.uint32)
    return wide


def published_cells(cells: Cells, published: str, kept: str) -> Cells:
    """What ``widened`` was made of."""
    if published == kept:
        return cells
    if published == "BF16":
        return (cells >> np.uint32(16)).astype(np.uint16)
    narrow: Cells = cells.view(np.float32).astype(np.float16).view(np.uint16)
    return narrow


def exactly(name: str, cells: Cells, form: TensorForm, kept: str) -> Cells:
    """``Stored`` of a model's weights: the same bits."""
    return widened(cells, form.dtype, kept)


def writes(
    found: WorkerMap,
    forms: Mapping[str, TensorForm],
    patch: Patch,
    where: str,
    stored: Stored = exactly,
) -> Iterator[Write]:
    """What a worker is to write so that its part of the weights becomes what the patch says.

    Raises:
        WeightApplyFailed: a name, position, type or value does not fit; begins with ``where``.
    """
    for name, changes in patch.items():
        form = forms.get(name)
        if form is None:
            raise WeightApplyFailed(f"{where}: the model has no tensor {name!r} to change")
        for change in changes:
            try:
                _check(form, change)
                boxes = found.boxes.get(name, ())
                kept = {found.storages[each.storage].dtype for each in boxes}
                values = {one: stored(name, change.values, form, one) for one in kept}
            except IntegrityError as error:
                raise WeightApplyFailed(f"{where}: tensor {name!r}: {error}") from error
            for each in boxes:
                write = _write(each, form, change, values[found.storages[each.storage].dtype])
                if write is not None:
                    yield write


def _check(form: TensorForm, change: TensorChange) -> None:
    # One cell that looks like all of the tensor's: enough to check against.
    one = np.zeros(1, f"<u{ITEM_BYTES[form.dtype]}")
    check_change(np.broadcast_to(one, form.cells), change)
    if not finite_cells(form.dtype, change.values):
        raise IntegrityError("has values that are not finite")


def _write(each: Box, form: TensorForm, change: TensorChange, values: Cells) -> Write | None:
    """Of ``change``, whose values are ``values`` in the storage's type, what is in the box."""
    if isinstance(change, CellRun):
        size = values.size
        if each.is_run:
            start = max(change.start, each.source)
            end = min(change.start + size, each.source + each.cells)
            if start >= end:
                return None
            to = each.target + start - each.source
            cut = values[start - change.start : end - change.start]
            return Write(each.storage, to, None, None, cut)
        if size == form.cells:
            return Write(each.storage, 0, None, each, values)
        positions = np.arange(change.start, change.start + size, dtype=np.int64)
    elif each.is_run:
        first, end = np.searchsorted(change.positions, (each.source, each.source + each.cells))
        if first == end:
            return None
        targets = change.positions[first:end].astype(np.int64) + (each.target - each.source)
        return Write(each.storage, 0, targets, None, values[first:end])
    else:
        positions = change.positions.astype(np.int64, copy=False)
    inside, targets = each.targets(positions)
    if not targets.size:
        return None
    chosen = values if targets.size == positions.size else values[inside]
    return Write(each.storage, 0, targets, None, chosen)
