"""Whole models through the weight plane's codec, for the delta bench.

What always holds: what is measured is what the product runs (``transport.weights``), and every
body is decoded, written and compared bit for bit before its size counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from transport.weights.delta_encode import EncodedDelta, encode_delta
from transport.weights.digest import StateDigest, fingerprint
from transport.weights.layout import SEGMENT_CELLS, SegmentPlan, plan_segments
from transport.weights.manifest import FileEntry, VersionManifest, describe_file
from transport.weights.patch import TensorChange, write_change
from transport.weights.segments import (
    CodecSettings,
    EncodedSegment,
    decode_segment,
    encode_segment,
)
from transport.weights.state import WeightArena
from transport.weights.tensors import Cells, TensorBytes

Model = Mapping[str, TensorBytes]
Arrays = dict[str, Cells]


def plans_of(model: Model, segment_cells: int = SEGMENT_CELLS) -> list[SegmentPlan]:
    """The segments that both ends cut a model into."""
    kinds = {name: (tensor.dtype, tensor.cells().size) for name, tensor in model.items()}
    return plan_segments(kinds, segment_cells=segment_cells)


def arrays_of(model: Model) -> Arrays:
    """Bit patterns by tensor, without copying."""
    return {name: tensor.cells() for name, tensor in model.items()}


def copied(arrays: Arrays) -> Arrays:
    """Writable copies."""
    return {name: cells.copy() for name, cells in arrays.items()}


def _parts(plan: SegmentPlan, arrays: Arrays) -> list[Cells]:
    return [arrays[span.tensor][span.start : span.start + span.cells] for span in plan.spans]


def encoded(
    plans: Sequence[SegmentPlan], old: Arrays, new: Arrays, settings: CodecSettings
) -> list[EncodedSegment]:
    """Every segment's body."""
    return [
        encode_segment(plan.dtype, _parts(plan, old), _parts(plan, new), settings) for plan in plans
    ]


def decoded_into(
    plans: Sequence[SegmentPlan], segments: Sequence[EncodedSegment], arrays: Arrays
) -> list[tuple[Cells, TensorChange]]:
    """Decode every segment against ``arrays`` and write it there; returns what undoes that."""
    undo = []
    for plan, segment in zip(plans, segments, strict=True):
        parts = _parts(plan, arrays)
        body = memoryview(segment.body)
        changes = decode_segment(segment.coder, plan.dtype, body, parts, segment.changed)
        for cells, change in zip(parts, changes, strict=True):
            if change is not None:
                undo.append((cells, write_change(cells, change)))
    return undo


def undone(undo: Sequence[tuple[Cells, TensorChange]]) -> None:
    """Take back what ``decoded_into`` wrote."""
    for cells, change in reversed(undo):
        write_change(cells, change)


def body_bytes(old: Model, new: Model, settings: CodecSettings) -> tuple[int, str]:
    """Bytes of all bodies, verified, and the coders that were chosen."""
    plans = plans_of(old)
    before, after = arrays_of(old), arrays_of(new)
    segments = encoded(plans, before, after, settings)
    arrays = copied(before)
    decoded_into(plans, segments, arrays)
    for name, cells in arrays.items():
        assert np.array_equal(cells, after[name]), name
    coders = "+".join(sorted({segment.coder for segment in segments}))
    return sum(len(segment.body) for segment in segments), coders


@dataclass(frozen=True)
class Published:
    """A delta file and the manifest that describes it."""

    delta: EncodedDelta
    manifest: VersionManifest
    entry: FileEntry


def _manifest(
    model: Model, digests: StateDigest, version: int, base: str | None, *files: FileEntry
) -> VersionManifest:
    return VersionManifest(
        run="bench",
        policy="solver",
        version=version,
        parent=None if base is None else version - 1,
        step=version,
        digest=digests.hex,
        base_digest=base,
        files=files,
        full_bytes=sum(tensor.size_bytes for tensor in model.values()),
        fingerprint=fingerprint(model),
        created_wall_s=0.0,
    )


def published(
    old: Model,
    new: Model,
    base: StateDigest,
    settings: CodecSettings,
    *,
    threads: int = 1,
    segment_cells: int = SEGMENT_CELLS,
) -> Published:
    """Version 1 over version 0 as a trainer publishes it, down to the manifest."""
    delta = encode_delta(
        old,
        new,
        run="bench",
        policy="solver",
        version=1,
        parent=0,
        base=base,
        settings=settings,
        threads=threads,
        segment_cells=segment_cells,
    )
    return described(new, delta, base)


def described(new: Model, delta: EncodedDelta, base: StateDigest) -> Published:
    """The manifest of an encoded delta."""
    entry = describe_file("delta.safetensors", "delta", delta.data, segments=delta.segments)
    return Published(delta, _manifest(new, delta.digests, 1, base.hex, entry), entry)


def arena_of(old: Model, base: StateDigest, *, threads: int = 1) -> WeightArena:
    """A verified arena that holds version 0: the receiver's copy."""
    return WeightArena.of(old, _manifest(old, base, 0, None), threads=threads)
