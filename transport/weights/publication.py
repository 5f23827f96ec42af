"""The publisher's side: turn a model folder or a step's weights into a version.

What always holds: a version whose weights are not finite is never built; the files are exactly
those that the manifest lists; building reads the old weights and changes nothing, so a failed
publication leaves the base of the next one as it was.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transport.errors import IntegrityError
from transport.weights.codec import BLOCK_CELLS
from transport.weights.delta_file import EncodedDelta, encode_delta
from transport.weights.digest import StateDigest, fingerprint, first_non_finite
from transport.weights.folder import (
    SHARD_BYTES,
    full_bytes_of,
    read_artefacts,
    read_model_folder,
    snapshot_files,
)
from transport.weights.manifest import DELTA_NAME, FileEntry, VersionManifest, describe_file
from transport.weights.tensors import Buffer, TensorBytes


@dataclass(frozen=True, slots=True)
class Publication:
    """A version ready to be signed and offered: its files by name, and the digest that the next
    delta starts from. ``delta`` has the codec's measurements (None for version 0)."""

    manifest: VersionManifest
    files: Mapping[str, Buffer]
    digests: StateDigest
    delta: EncodedDelta | None = None


def build_version0(
    folder: Path,
    *,
    run: str,
    policy: str,
    created_wall_s: float,
    tensors: Mapping[str, TensorBytes] | None = None,
    step: int = 0,
    version: int = 0,
    shard_bytes: int = SHARD_BYTES,
    chunk_bytes: int | None = None,
) -> Publication:
    """The first version: full weights and artefacts, so that agents need no copy beforehand.

    ``tensors`` replaces the folder's weights where the trainer publishes another type than it
    was given (its fp32 masters as BF16, say).

    Raises:
        ModelError: the folder does not load; names the file.
        IntegrityError: a weight is not finite; names the tensor.
    """
    weights = read_model_folder(folder) if tensors is None else tensors
    _check_finite(weights)
    files: dict[str, Buffer] = {}
    entries: list[FileEntry] = []
    for name, data in read_artefacts(folder).items():
        files[name] = data
        entries.append(describe_file(name, "artefact", data, chunk_bytes=chunk_bytes))
    for name, parts in snapshot_files(weights, shard_bytes=shard_bytes).items():
        files[name] = b"".join(parts)
        entries.append(describe_file(name, "snapshot", files[name], chunk_bytes=chunk_bytes))
    digests = StateDigest.of(weights)
    manifest = VersionManifest(
        run=run,
        policy=policy,
        version=version,
        parent=None,
        step=step,
        digest=digests.hex,
        base_digest=None,
        files=tuple(entries),
        full_bytes=full_bytes_of(weights),
        fingerprint=fingerprint(weights),
        created_wall_s=created_wall_s,
    )
    return Publication(manifest, files, digests)


def build_delta_version(
    old: Mapping[str, TensorBytes],
    new: Mapping[str, TensorBytes],
    *,
    run: str,
    policy: str,
    version: int,
    parent: int,
    step: int,
    created_wall_s: float,
    base: StateDigest | None = None,
    chunk_bytes: int | None = None,
    block_cells: int = BLOCK_CELLS,
) -> Publication:
    """The version that ``new`` makes of version ``parent``, whose weights are ``old``.

    ``base`` is the digest of ``old`` (``Publication.digests`` of the parent) where it is known.

    Raises:
        ModelError: old and new differ in names, dtypes or shapes; names the tensor.
        IntegrityError: a weight is not finite; names the tensor.
    """
    _check_finite(new)
    delta = encode_delta(
        old,
        new,
        run=run,
        policy=policy,
        version=version,
        parent=parent,
        base=base,
        block_cells=block_cells,
    )
    entry = describe_file(DELTA_NAME, "delta", delta.data, chunk_bytes=chunk_bytes)
    manifest = VersionManifest(
        run=run,
        policy=policy,
        version=version,
        parent=parent,
        step=step,
        digest=delta.digests.hex,
        base_digest=delta.header.base_digest,
        files=(entry,),
        full_bytes=full_bytes_of(new),
        fingerprint=delta.header.fingerprint,
        created_wall_s=created_wall_s,
    )
    return Publication(manifest, {DELTA_NAME: delta.data}, delta.digests, delta)


def _check_finite(tensors: Mapping[str, TensorBytes]) -> None:
    name = first_non_finite(tensors)
    if name is not None:
        raise IntegrityError(f"tensor {name!r} has infinite or undefined values; not published")
