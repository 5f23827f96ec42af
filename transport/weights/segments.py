"""Encode and decode one segment: the coder is chosen, the bits come back exactly.

What always holds: ``decode_segment(encode_segment(olds, news), olds)`` gives absolute values that
make ``olds`` the ``news`` bit for bit, whatever the patterns and sizes; a hostile body ends in an
``IntegrityError`` and costs no more memory than the segment and the stated changes imply.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from transport.errors import IntegrityError, ModelError
from transport.weights import coders, kernels
from transport.weights.layout import MAX_SEGMENT_CELLS, class_layout
from transport.weights.patch import CellRun, TensorChange
from transport.weights.static_streams import (
    Packed,
    pack_gaps,
    pack_steps,
    unpack_gaps,
    unpack_steps,
)
from transport.weights.symbols import ClassSymbols, changes_of, symbols_of
from transport.weights.tensors import Cells

CODERS = (
    "same", "raw", "split.zstd", "list.zstd", "class.zstd", "class.range", "dense.zstd",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EncodedSegment:
    coder: str
    changed: int
    body: bytes


class CodecSettings(msgspec.Struct, frozen=True):
    coder: Literal["auto", "small", "fast", "portable", "absolute"] = "auto"
    link_bytes_s: float = 12.5e6


def encode_segment(
    dtype: str, olds: Sequence[Cells], news: Sequence[Cells], settings: CodecSettings,
    *, compiled: bool | None = None
) -> EncodedSegment:
    changed = sum(int(np.count_nonzero(o != n)) for o, n in zip(olds, news, strict=True))
    cells = sum(old.size for old in olds)
    if cells > MAX_SEGMENT_CELLS:
        raise ModelError(f"segment of {cells} cells, at most {MAX_SEGMENT_CELLS}")
    if compiled is None: compiled = kernels.worthwhile(cells)
    if not changed:
        return EncodedSegment("same", 0, b"")
    item_bits = olds[0].dtype.itemsize * 8
    if changed * 2 > cells or item_bits == 64:
        return EncodedSegment("dense.zstd", changed, coders.encode_dense(olds, news))
    layout = class_layout(dtype)
    symbols = symbols_of(olds, news, layout, compiled)
    body = coders.static_body(
        symbols.counts,
        pack_gaps(symbols.gaps, compiled),
        pack_steps(symbols.steps, symbols.counts, item_bits, compiled),
    )
    return EncodedSegment("class.zstd", changed, body)


def decode_segment(
    coder: str, dtype: str, body: memoryview, olds: Sequence[Cells], changed: int,
    *, compiled: bool | None = None
) -> list[TensorChange | None]:
    if coder == "same" and not changed and not len(body):
        return [None] * len(olds)
    if compiled is None: compiled = kernels.worthwhile(sum(o.size for o in olds))
    item_bits = olds[0].dtype.itemsize * 8
    if coder == "dense.zstd":
        return [CellRun(0, new) for new in coders.decode_dense(body, olds)]
    if coder == "class.zstd":
        layout = class_layout(dtype)
        counts, gaps, steps, extra = coders.read_static(body, layout, changed)
        shifts = np.maximum(gaps >> 3, 1).astype(np.int64) - 1
        split = (int(shifts.sum()) + 7) >> 3
        symbols = ClassSymbols(
            counts,
            unpack_gaps(Packed(gaps, extra[:split]), compiled),
            unpack_steps(Packed(steps, extra[split:]), counts, item_bits, compiled),
        )
        return list(changes_of(symbols, olds, layout, compiled))
    raise IntegrityError(f"coder {coder!r} is unknown; known: {', '.join(CODERS)}")
