"""One version's change as a valid safetensors file.

What always holds: the file opens with the stock library and has one U8 tensor per changed tensor,
under its name: its coded blocks back to back. Metadata says which versions it joins and how each
block is coded. ``apply_delta`` never touches the old tensors, gives absolute values of whole
tensors, and returns only if the digest of the new state is the one in the signed manifest: so a
wrong base, a damaged file, a wrong coder and a wrong apply all end in an error, and applying the
same delta twice to the same base gives the same result.

Checks in order: size and SHA-256 of the file (manifest), its header, versions and digests against
the manifest, base digest against the old tensors, CRC-32 of each block, sizes and ranges in each
coder, digest of the new state.
"""

import hashlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from transport.errors import (
    BaseVersionMismatch,
    ChecksumMismatch,
    IntegrityError,
    ModelError,
    SizeLimitExceeded,
    TruncatedBlob,
)
from transport.weights.codec import BLOCK_CELLS, SAME, Change, decode_block, encode_block
from transport.weights.digest import StateDigest, fingerprint, tensor_digest
from transport.weights.manifest import VersionManifest
from transport.weights.tensors import Buffer, TensorBytes, read_header, write_safetensors

FORMAT = "farflow.delta.1"


class Block(msgspec.Struct, frozen=True, array_like=True):
    """A coded run of cells, in the order of the tensor's cells. Array-like under ``FORMAT``."""

    coder: str
    cells: int
    size_bytes: int
    crc32: int


class DeltaHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Which versions a delta joins; a header without ``format`` of ours is refused."""

    run: str
    policy: str
    version: int
    parent: int
    base_digest: str
    digest: str
    fingerprint: str
    format: str = FORMAT


@dataclass(frozen=True, slots=True)
class EncodedDelta:
    """A delta file and what was measured on the way: cells changed, and bytes by coder."""

    data: bytes
    header: DeltaHeader
    digests: StateDigest
    changed_cells: int
    total_cells: int
    coded_bytes: Mapping[str, int] = field(default_factory=dict)


def encode_delta(
    old: Mapping[str, TensorBytes],
    new: Mapping[str, TensorBytes],
    *,
    run: str,
    policy: str,
    version: int,
    parent: int,
    base: StateDigest | None = None,
    block_cells: int = BLOCK_CELLS,
) -> EncodedDelta:
    """The delta from ``old`` (version ``parent``) to ``new``.

    ``base`` is the digest of ``old`` where the caller has it already; unchanged tensors are then
    not hashed at all.

    Raises:
        ModelError: names, dtypes or shapes differ between old and new; names the tensor.
    """
    base = StateDigest.of(old) if base is None else base
    _check_same_model(old, new)
    bodies: dict[str, TensorBytes] = {}
    table: dict[str, list[Block]] = {}
    digests: dict[str, bytes] = dict(base.tensors)
    coded_bytes: dict[str, int] = {}
    changed_cells = total_cells = 0
    for name in sorted(new):
        blocks, parts = [], []
        for change in _changes(old[name], new[name], block_cells):
            coder, body = encode_block(change)
            blocks.append(Block(coder.name, change.new.size, len(body), zlib.crc32(body)))
            parts.append(body)
            coded_bytes[coder.name] = coded_bytes.get(coder.name, 0) + len(body)
            changed_cells += len(change.indices)
            total_cells += change.new.size
        if any(block.coder != SAME.name for block in blocks):
            table[name] = blocks
            data = b"".join(parts)
            bodies[name] = TensorBytes("U8", (len(data),), data)
            digests[name] = tensor_digest(new[name])
    target = StateDigest.from_digests(digests)
    header = DeltaHeader(
        run=run,
        policy=policy,
        version=version,
        parent=parent,
        base_digest=base.hex,
        digest=target.hex,
        fingerprint=fingerprint(new),
    )
    metadata = {
        "format": FORMAT,
        "header": msgspec.json.encode(header).decode(),
        "blocks": msgspec.json.encode(table).decode(),
    }
    return EncodedDelta(
        write_safetensors(bodies, metadata),
        header,
        target,
        changed_cells,
        total_cells,
        {coder: size for coder, size in sorted(coded_bytes.items()) if size},
    )


def _check_same_model(old: Mapping[str, TensorBytes], new: Mapping[str, TensorBytes]) -> None:
    if old.keys() != new.keys():
        names = sorted(old.keys() ^ new.keys())
        raise ModelError(f"old and new weights have different tensors: {', '.join(names[:5])}")
    for name, tensor in new.items():
        before = old[name]
        if (tensor.dtype, tensor.shape) != (before.dtype, before.shape):
            raise ModelError(
                f"tensor {name!r} was {before.dtype} {before.shape}, "
                f"is {tensor.dtype} {tensor.shape}; a delta needs both alike"
            )


def _changes(old: TensorBytes, new: TensorBytes, block_cells: int) -> Iterator[Change]:
    before, after = old.cells(), new.cells()
    for start in range(0, after.size, block_cells):
        yield Change(before[start : start + block_cells], after[start : start + block_cells])


def check_file(data: Buffer, *, size_bytes: int, digest: str, what: str) -> None:
    """Compare a file with its manifest entry.

    Raises:
        TruncatedBlob, SizeLimitExceeded, ChecksumMismatch: shorter, longer, other contents.
    """
    if len(data) < size_bytes:
        raise TruncatedBlob(f"{what} has {len(data)} of {size_bytes} bytes")
    if len(data) > size_bytes:
        raise SizeLimitExceeded(f"{what} has {len(data)} bytes, its manifest says {size_bytes}")
    if hashlib.sha256(data).hexdigest() != digest:
        raise ChecksumMismatch(f"{what}: SHA-256 is not the one in the manifest")


def read_delta_header(data: Buffer) -> DeltaHeader:
    """Which versions a delta file joins, from its metadata.

    Raises:
        IntegrityError: not a delta file.
    """
    return _parse_metadata(read_header(data)[1])[0]


def _parse_metadata(metadata: Mapping[str, str]) -> tuple[DeltaHeader, dict[str, list[Block]]]:
    if metadata.get("format") != FORMAT:
        raise IntegrityError(f"not a {FORMAT} file: format is {metadata.get('format')!r}")
    try:
        header = msgspec.json.decode(metadata.get("header", ""), type=DeltaHeader)
        blocks = msgspec.json.decode(metadata.get("blocks", ""), type=dict[str, list[Block]])
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise IntegrityError(f"metadata of the delta is malformed: {error}") from error
    return header, blocks


def apply_delta(
    old: Mapping[str, TensorBytes],
    delta: Buffer,
    expected: VersionManifest,
    *,
    digests: StateDigest | None = None,
) -> tuple[dict[str, TensorBytes], StateDigest]:
    """New values of the changed tensors, and the digest of the state they make.

    ``expected`` is the (verified) manifest of the version that the delta leads to; ``digests`` is
    the digest of ``old`` where the caller has it already.

    Raises:
        BaseVersionMismatch: ``old`` is not what the delta was made against.
        ChecksumMismatch, TruncatedBlob, SizeLimitExceeded, IntegrityError: the file is damaged or
            belongs to another version; nothing was changed.
    """
    entry = expected.delta
    if entry is None:
        raise IntegrityError(f"version {expected.version} of {expected.policy} has no delta")
    what = f"delta {expected.version} of {expected.policy}"
    check_file(delta, size_bytes=entry.size_bytes, digest=entry.digest, what=what)
    regions, metadata = read_header(delta)
    header, table = _parse_metadata(metadata)
    _check_header(header, expected, what)
    digests = StateDigest.of(old) if digests is None else digests
    if digests.hex != header.base_digest:
        raise BaseVersionMismatch(
            f"{what} needs version {header.parent} with digest {header.base_digest[:12]}, "
            f"the weights here have digest {digests.hex[:12]}"
        )
    if regions.keys() != table.keys():
        raise IntegrityError(f"{what}: tensors and block table differ")
    view = memoryview(delta)
    changed: dict[str, TensorBytes] = {}
    for name, region in regions.items():
        if name not in old or region.dtype != "U8":
            raise IntegrityError(f"{what}: no tensor {name!r} to change")
        changed[name] = _decode_tensor(
            old[name], view[region.start : region.end], table[name], name
        )
    result = digests.updated(changed)
    if result.hex != expected.digest:
        raise ChecksumMismatch(
            f"{what}: the new state has digest {result.hex[:12]}, "
            f"the manifest says {expected.digest[:12]}"
        )
    return changed, result


def _check_header(header: DeltaHeader, expected: VersionManifest, what: str) -> None:
    for name in ("run", "policy", "version", "parent", "base_digest", "digest", "fingerprint"):
        here, there = getattr(header, name), getattr(expected, name)
        if here != there:
            raise ChecksumMismatch(f"{what}: {name} is {here!r}, its manifest says {there!r}")


def _decode_tensor(
    old: TensorBytes, body: memoryview, blocks: list[Block], name: str
) -> TensorBytes:
    before = old.cells()
    if sum(block.cells for block in blocks) != before.size or any(
        block.cells < 0 or block.size_bytes < 0 for block in blocks
    ):
        raise IntegrityError(f"tensor {name!r}: blocks do not cover its {before.size} cells")
    after = np.empty_like(before)
    cell = position = 0
    for block in blocks:
        part = body[position : position + block.size_bytes]
        if len(part) != block.size_bytes:
            raise TruncatedBlob(f"tensor {name!r}: a block ends behind the data")
        if zlib.crc32(part) != block.crc32:
            raise ChecksumMismatch(f"tensor {name!r}: CRC-32 of a block differs")
        end = cell + block.cells
        after[cell:end] = decode_block(block.coder, part, before[cell:end])
        cell, position = end, position + block.size_bytes
    if position != len(body):
        raise IntegrityError(f"tensor {name!r}: {len(body) - position} bytes behind its blocks")
    return TensorBytes(old.dtype, old.shape, after.view(np.uint8).data.toreadonly())
