"""How a model's cells are cut into segments, and which bits of a cell tell its class.

What always holds: a segment has cells of one dtype only; segments follow the canonical order of
tensors (sorted names) and are disjoint; plans depend on names, dtypes and sizes alone, so both
ends compute the same ones. Boundaries are free: who holds shards passes its own plans, and the
decoded bits do not depend on them.

A *cell* is one element as an unsigned integer of its size. Its *class* is the exponent of the old
value: within one binade the distance of neighbouring values is constant, so whether an update of
a given size crosses it depends on the exponent and on little else.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

SEGMENT_CELLS = 1 << 24
"""Cells of a segment: enough for adaptive models to learn, few enough for small temporaries."""

MAX_SEGMENT_CELLS = (1 << 31) - 1
"""Positions within a segment are 32-bit."""


class Span(NamedTuple):
    """Consecutive cells of one tensor."""

    tensor: str
    start: int
    cells: int


class ClassLayout(NamedTuple):
    """The class of a cell is ``(old >> shift) & mask``; ``mask`` 0 makes one class of all."""

    shift: int
    mask: int

    @property
    def classes(self) -> int:
        return self.mask + 1


_LAYOUTS: dict[str, ClassLayout] = {
    "BF16": ClassLayout(7, 0xFF),
    "F16": ClassLayout(10, 0x1F),
    "F32": ClassLayout(23, 0xFF),
    "F8_E4M3": ClassLayout(3, 0xF),
    "F8_E4M3FNUZ": ClassLayout(3, 0xF),
    "F8_E5M2": ClassLayout(2, 0x1F),
    "F8_E5M2FNUZ": ClassLayout(2, 0x1F),
}
_ONE_CLASS = ClassLayout(0, 0)


def class_layout(dtype: str) -> ClassLayout:
    """Where the exponent of a safetensors dtype lies; one class for integers and 8-byte types."""
    return _LAYOUTS.get(dtype, _ONE_CLASS)


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """Spans of one dtype that are coded together; the segment's cells run over them in order."""

    dtype: str
    spans: tuple[Span, ...]

    @property
    def cells(self) -> int:
        return sum(span.cells for span in self.spans)


def plan_segments(
    kinds: Mapping[str, tuple[str, int]], *, segment_cells: int = SEGMENT_CELLS
) -> list[SegmentPlan]:
    """Segments of a model: per dtype (sorted), all cells in canonical order, cut every
    ``segment_cells`` cells.

    ``kinds`` maps each tensor to its dtype and number of cells. Empty tensors are in no segment.

    Raises:
        ValueError: ``segment_cells`` is not in 1..``MAX_SEGMENT_CELLS``.
    """
    if not 1 <= segment_cells <= MAX_SEGMENT_CELLS:
        raise ValueError(f"segment_cells is {segment_cells}, allowed: 1..{MAX_SEGMENT_CELLS}")
    by_dtype: dict[str, list[str]] = defaultdict(list)
    for tensor in sorted(kinds):
        by_dtype[kinds[tensor][0]].append(tensor)
    plans: list[SegmentPlan] = []
    for dtype in sorted(by_dtype):
        spans: list[Span] = []
        room = segment_cells
        for tensor in by_dtype[dtype]:
            start, cells = 0, kinds[tensor][1]
            while start < cells:
                taken = min(room, cells - start)
                spans.append(Span(tensor, start, taken))
                start += taken
                room -= taken
                if not room:
                    plans.append(SegmentPlan(dtype, tuple(spans)))
                    spans, room = [], segment_cells
        if spans:
            plans.append(SegmentPlan(dtype, tuple(spans)))
    return plans
