"""Deltas of a model whose parameters are spread over processes (FSDP2, DTensor), made where the
shards are: no process ever holds the whole model.

    every rank   before = local_shards(state, dtypes)            its part of the published state
                 sums = shard_sums(before)
                 ... a step ...
                 now = local_shards(state, dtypes)
                 delta = encode_shards(before, now, settings)     segments, moves of the sums
    rank 0       deltas = gather_deltas(delta, group)             (``shard_gathering.py``)
                 encoded = assemble(deltas, base, ...)            the delta file of the version

What always holds: every cell of every published tensor belongs to exactly one rank (``assemble``
checks it), so the decoded bits and the state digest are those of an unsharded publication; what
travels between ranks is the coded segments as byte tensors, never a pickle. Memory: a rank's shard
twice (before and now), its coded bytes twice and the encoder's temporaries; rank 0 has the coded
bytes of all ranks three times for a moment. The first version is that of the model folder, which
nobody needs to gather.

Placements are those of ``torch.distributed.tensor``: ``Shard(d)`` cuts dimension d as
``torch.chunk`` does, mesh dimension by mesh dimension; of replicas the first one publishes.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from transport.errors import ModelError
from transport.weights.cell_sums import add_sums
from transport.weights.delta_encode import CodedSegment, SegmentWork, encode_segments
from transport.weights.digest import (
    span_sum,
    tensor_key,
    tensor_kind,
    zero_sums,
)
from transport.weights.layout import SEGMENT_CELLS, SegmentPlan, Span
from transport.weights.segments import CodecSettings
from transport.weights.tensors import Cells

if TYPE_CHECKING:
    import torch

Kinds = Mapping[str, tuple[str, tuple[int, ...]]]
"""dtype and shape of every published tensor as a whole."""


class Part(NamedTuple):
    """Consecutive cells of one tensor that this rank publishes."""

    tensor: str
    start: int
    cells: Cells


@dataclass(frozen=True, slots=True)
class Shards:
    """One rank's part of the published state, in canonical order; ``kinds`` are those of the whole
    tensors and the same on every rank."""

    kinds: Kinds
    parts: tuple[Part, ...]


# ---- what a rank has ---------------------------------------------------------------------------


def local_shards(
    state: "Mapping[str, torch.Tensor]", dtypes: Mapping[str, str], *, rank: int, ranks: int
) -> Shards:
    """This rank's part of ``state``, rounded to the published ``dtypes`` (copies).

    ``state`` is a state dictionary of DTensors, plain tensors (then the same on every rank, and
    dealt out among them), or both. ``dtypes`` names what is published: of tied parameters one.

    Raises:
        ModelError: a published tensor is missing, or spread in a way that is not supported.
    """
    from transport.runtime.model_folder import published_tensor

    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    parts: list[Part] = []
    for number, name in enumerate(sorted(dtypes)):
        if name not in state:
            raise ModelError(f"the state has no tensor {name!r}, which is published")
        shape = tuple(state[name].shape)
        kinds[name] = (dtypes[name], shape)
        local, box = _local(name, state[name], owner=number % ranks == rank)
        if local is None or not local.numel():
            continue
        cells = published_tensor(local, dtypes[name]).cells()
        starts, run = box_runs(shape, box)
        parts.extend(
            Part(name, start, cells[index * run : (index + 1) * run])
            for index, start in enumerate(starts)
        )
    return Shards(kinds, tuple(parts))


class Box(NamedTuple):
    """A part of a tensor: where it begins and how far it goes in every dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def _local(name: str, value: Any, *, owner: bool) -> "tuple[torch.Tensor | None, Box]":
    """What this rank publishes of a tensor, None for nothing, and where that lies."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    shape = tuple(value.shape)
    if not isinstance(value, DTensor):
        return (value if owner else None), Box((0,) * len(shape), shape)
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        return None, Box((0,) * len(shape), shape)
    cuts: list[tuple[int, int, int]] = []
    first = True
    for placement, size, index in zip(
        value.placements, value.device_mesh.shape, coordinate, strict=True
    ):
        if type(placement) is Shard:
            cuts.append((placement.dim, size, index))
        elif type(placement) is Replicate:
            first = first and index == 0
        else:
            raise ModelError(
                f"tensor {name!r} is spread as {placement}, which cannot be published; use Shard "
                "or Replicate (FSDP2 alone, or tensor parallelism on other dimensions)"
            )
    local, box = value.to_local(), cut_box(shape, cuts)
    if tuple(local.shape) != box.sizes:
        raise ModelError(
            f"tensor {name!r}: this rank holds {tuple(local.shape)}, by its placement {box.sizes}"
        )
    return (local if first else None), box


def cut_box(shape: Sequence[int], cuts: Sequence[tuple[int, int, int]]) -> Box:
    """What is left of a tensor after ``cuts`` (dimension, pieces, which one), each as
    ``torch.chunk`` makes them: pieces of equal size, the last ones smaller or empty."""
    offsets, sizes = [0] * len(shape), list(shape)
    for dimension, pieces, index in cuts:
        piece = -(-sizes[dimension] // pieces)
        begin = min(index * piece, sizes[dimension])
        offsets[dimension] += begin
        sizes[dimension] = min(piece, sizes[dimension] - begin)
    return Box(tuple(offsets), tuple(sizes))


def box_runs(shape: Sequence[int], box: Box) -> tuple[list[int], int]:
    """The flat positions at which a box's runs of consecutive cells start, in the order of its own
    cells, and the length of each. One run for what ``Shard(0)`` makes, one a row for ``Shard(1)``
    of a matrix."""
    if 0 in box.sizes:
        return [], 0
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    outer, run = len(shape), 1
    while outer and box.sizes[outer - 1] == shape[outer - 1]:
        outer -= 1
        run *= box.sizes[outer]
    if outer:
        outer -= 1
        run *= box.sizes[outer]
    starts = np.array([sum(o * s for o, s in zip(box.offsets, strides, strict=True))], np.int64)
    for dimension in range(outer):
        steps = np.arange(box.sizes[dimension], dtype=np.int64) * strides[dimension]
        starts = (starts[:, None] + steps).ravel()
    return starts.tolist(), run


# ---- what a rank makes of it -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShardDelta:
    """What one rank adds to a delta: ``spans`` are all its cells, ``segments`` those that
    changed."""

    kinds: Kinds
    spans: tuple[Span, ...]
    segments: tuple[CodedSegment, ...]


def shard_sums(shards: Shards) -> dict[str, bytes]:
    """By tensor, what this rank's cells add to its sum (``digest.py``); reads all of them."""
    kinds, sums = kinds_bytes(shards.kinds), zero_sums(shards.kinds)
    for part in shards.parts:
        key = tensor_key(part.tensor, kinds[part.tensor])
        sums[part.tensor] = add_sums(sums[part.tensor], span_sum(key, part.start, part.cells))
    return sums


def encode_shards(
    before: Shards,
    now: Shards,
    settings: CodecSettings,
    *,
    threads: int = 1,
    segment_cells: int = SEGMENT_CELLS,
) -> ShardDelta:
    """Code what changed in this rank's cells, a segment in each of ``threads`` at a time.

    Raises:
        ModelError: the two are not the same parts of the same model.
    """
    spans = _spans(before)
    if before.kinds != now.kinds or spans != _spans(now):
        raise ModelError("this rank's shards are others than those of the last version")
    segments = encode_segments(
        _work(before, now, segment_cells),
        kinds_bytes(before.kinds),
        settings=settings,
        threads=threads,
    )
    return ShardDelta(before.kinds, spans, tuple(segments))


def kinds_bytes(kinds: Kinds) -> dict[str, bytes]:
    """As digests see them."""
    return {name: tensor_kind(dtype, shape) for name, (dtype, shape) in kinds.items()}


def _spans(shards: Shards) -> tuple[Span, ...]:
    return tuple(Span(part.tensor, part.start, part.cells.size) for part in shards.parts)


def _work(before: Shards, now: Shards, segment_cells: int) -> Iterator[SegmentWork]:
    """The parts by dtype, cut into segments of at most so many cells."""
    by_dtype: dict[str, list[tuple[Part, Part]]] = defaultdict(list)
    for old, new in zip(before.parts, now.parts, strict=True):
        by_dtype[before.kinds[old.tensor][0]].append((old, new))
    for dtype in sorted(by_dtype):
        pieces: list[tuple[Span, Cells, Cells]] = []
        room = segment_cells
        for old, new in by_dtype[dtype]:
            at = 0
            while at < old.cells.size:
                end = min(at + room, old.cells.size)
                span = Span(old.tensor, old.start + at, end - at)
                pieces.append((span, old.cells[at:end], new.cells[at:end]))
                at, room = end, room - span.cells
                if not room:
                    yield _segment(dtype, pieces)
                    pieces, room = [], segment_cells
        if pieces:
            yield _segment(dtype, pieces)


def _segment(dtype: str, pieces: Sequence[tuple[Span, Cells, Cells]]) -> SegmentWork:
    spans, olds, news = zip(*pieces, strict=True)
    return SegmentWork(SegmentPlan(dtype, spans), olds, news)
