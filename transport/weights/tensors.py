"""Tensors as exact bytes, and safetensors files of them.

What always holds: bits are never interpreted, so every dtype (BF16 and the F8 family too, which
numpy lacks) and every bit pattern survives; a dictionary of tensors is in canonical order (sorted
names); what is written opens with the stock safetensors library; reading hostile bytes allocates
nothing beyond the bytes given and either returns a fully checked result or raises an
``IntegrityError``.

Layout (safetensors): u64 little-endian header length, JSON header, data without holes. The
header is padded to 8 bytes and tensors lie in order of falling item size, so that each is aligned
to its item.
"""

import math
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from transport.errors import IntegrityError, ModelError, SizeLimitExceeded, TruncatedBlob

ITEM_BYTES: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Known safetensors dtypes and their item sizes. Types below a byte (F4, F6) are refused."""

MAX_HEADER_BYTES = 100_000_000  # the limit of the stock library
MAX_DIMENSION = (1 << 63) - 1
"""A dimension fits a signed 64-bit number, as everywhere else; beside a zero it could be any."""

_METADATA = "__metadata__"

Cells = npt.NDArray[np.unsignedinteger[Any]]
Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """One tensor: safetensors dtype name, shape, little-endian C-order bytes.

    ``data`` may be a view of memory that somebody else owns; whoever hands it out does not change
    it any more.

    Raises:
        ModelError: unknown dtype, negative or too large dimension, or a size that does not fit.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Buffer

    def __post_init__(self) -> None:
        item_bytes = ITEM_BYTES.get(self.dtype)
        if item_bytes is None:
            raise ModelError(f"dtype {self.dtype!r} is not supported; known: {_known_dtypes()}")
        if any(size < 0 for size in self.shape):
            raise ModelError(f"shape {self.shape} has a negative dimension")
        if any(size > MAX_DIMENSION for size in self.shape):
            raise ModelError(f"shape {self.shape} has a dimension of 2^63 or more")
        data = self.data
        if isinstance(data, memoryview) and (data.format != "B" or data.ndim != 1):
            # A zero in the shape makes memoryview.cast fail, and there is nothing to view then.
            data = data.cast("B") if data.nbytes else b""
            object.__setattr__(self, "data", data)
        expected = math.prod(self.shape) * item_bytes
        if len(data) != expected:
            raise ModelError(
                f"{self.dtype} tensor of shape {self.shape} needs {expected} bytes, got {len(data)}"
            )

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def cells(self) -> Cells:
        """Flat read-only view of the bit patterns as unsigned integers of the item's size."""
        array: Cells = np.frombuffer(self.data, dtype=f"<u{ITEM_BYTES[self.dtype]}")
        return array


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class TensorRegion(msgspec.Struct, frozen=True):
    """Where a tensor lies in a file's data, as its header claims and as checked."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def _known_dtypes() -> str:
    return ", ".join(ITEM_BYTES)


def header_bytes_needed(prefix: Buffer) -> int:
    """How many of a file's first bytes ``read_header`` needs, as far as ``prefix`` tells."""
    view = memoryview(prefix)
    return 8 if len(view) < 8 else 8 + int.from_bytes(view[:8], "little")


def read_header(
    data: Buffer, *, size_bytes: int | None = None
) -> tuple[dict[str, TensorRegion], dict[str, str]]:
    """Regions (offsets into ``data``) in canonical order and metadata of a safetensors file.

    ``data`` may be only the beginning of a file of ``size_bytes``, its header at least.

    Raises:
        TruncatedBlob: the file is shorter than it says.
        SizeLimitExceeded: the header is larger than ``MAX_HEADER_BYTES``.
        IntegrityError: anything else that is not a well-formed file.
    """
    view = memoryview(data)
    size_bytes = len(view) if size_bytes is None else size_bytes
    if len(view) < 8:
        raise TruncatedBlob(f"a safetensors file has at least 8 bytes, got {len(view)}")
    header_bytes = int.from_bytes(view[:8], "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise SizeLimitExceeded(f"safetensors header of {header_bytes} bytes is over the limit")
    begin = 8 + header_bytes
    if begin > len(view):
        raise TruncatedBlob(f"safetensors header of {header_bytes} bytes in {len(view)} bytes")
    try:
        fields = msgspec.json.decode(view[8:begin], type=dict[str, msgspec.Raw])
        raw_metadata = fields.pop(_METADATA, None)
        metadata = (
            {} if raw_metadata is None else msgspec.json.decode(raw_metadata, type=dict[str, str])
        )
        entries = {
            name: msgspec.json.decode(raw, type=_Entry) for name, raw in sorted(fields.items())
        }
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise IntegrityError(f"safetensors header is malformed: {error}") from error
    regions = {name: _region(name, entry, begin) for name, entry in entries.items()}
    # Without holes and overlaps nothing is read twice and nothing can hide between tensors; a name
    # that the header repeats leaves a hole here too, as only its last entry counts.
    position = begin
    for name, region in sorted(regions.items(), key=lambda item: (item[1].start, item[1].end)):
        if region.start != position:
            raise IntegrityError(
                f"tensor {name!r} starts at byte {region.start}, expected {position}"
            )
        position = region.end
    if position > size_bytes:
        raise TruncatedBlob(f"safetensors file has {size_bytes} bytes, its header says {position}")
    if position < size_bytes:
        raise IntegrityError(f"{size_bytes - position} bytes behind the last tensor")
    return regions, metadata


def _region(name: str, entry: _Entry, begin: int) -> TensorRegion:
    item_bytes = ITEM_BYTES.get(entry.dtype)
    if item_bytes is None:
        raise IntegrityError(
            f"tensor {name!r}: dtype {entry.dtype!r} is not supported; known: {_known_dtypes()}"
        )
    start, end = entry.data_offsets
    possible = len(entry.shape) <= 64 and all(0 <= size <= MAX_DIMENSION for size in entry.shape)
    if not possible or not 0 <= start <= end:
        raise IntegrityError(f"tensor {name!r} has an impossible shape or offset")
    if math.prod(entry.shape) * item_bytes != end - start:
        raise IntegrityError(
            f"tensor {name!r}: {entry.dtype} of shape {entry.shape} is not {end - start} bytes"
        )
    return TensorRegion(entry.dtype, tuple(entry.shape), begin + start, begin + end)


def file_bytes(path: str | os.PathLike[str], *, mapped: bool = False) -> Buffer:
    """Contents of a file; ``mapped`` returns a view of the page cache instead of a copy.

    Map only files that nobody writes in place (ours are replaced by rename): a mapped file that
    shrinks kills the process.
    """
    with open(path, "rb") as file:
        if mapped and os.fstat(file.fileno()).st_size:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return file.read()


def read_safetensors(
    source: str | os.PathLike[str] | Buffer, *, mapped: bool = False
) -> dict[str, TensorBytes]:
    """Tensors of a safetensors file (path or contents), views of one buffer, canonical order.

    Raises:
        TruncatedBlob, SizeLimitExceeded, IntegrityError: as ``read_header``.
        OSError: the path cannot be read.
    """
    data = source if isinstance(source, Buffer) else file_bytes(source, mapped=mapped)
    regions, _ = read_header(data)
    view = memoryview(data).toreadonly()
    return {
        name: TensorBytes(region.dtype, region.shape, view[region.start : region.end])
        for name, region in regions.items()
    }


def safetensors_parts(
    tensors: Mapping[str, TensorBytes], metadata: Mapping[str, str] | None = None
) -> Iterator[Buffer]:
    """The same file as ``write_safetensors``, piece by piece and without copying any tensor.

    Raises:
        ModelError: a name that the format cannot hold.
    """
    order = sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name].dtype], name))
    header: dict[str, Any] = {}
    if metadata:
        header[_METADATA] = dict(metadata)
    offset = 0
    for name in order:
        tensor = tensors[name]
        if name == _METADATA:
            raise ModelError(f"a tensor cannot be called {_METADATA!r}")
        end = offset + tensor.size_bytes
        header[name] = {
            "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (offset, end),
        }  # fmt: skip
        offset = end
    try:
        encoded = msgspec.json.encode(header)
    except UnicodeEncodeError as error:
        raise ModelError(f"a tensor name is not valid Unicode: {error}") from error
    padded = encoded + b" " * (-len(encoded) % 8)
    yield len(padded).to_bytes(8, "little") + padded
    for name in order:
        yield tensors[name].data


def write_safetensors(
    tensors: Mapping[str, TensorBytes], metadata: Mapping[str, str] | None = None
) -> bytes:
    """A safetensors file; equal tensors and metadata give equal bytes.

    Raises:
        ModelError: a name that the format cannot hold.
    """
    return b"".join(safetensors_parts(tensors, metadata))
