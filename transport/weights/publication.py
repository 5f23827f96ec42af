"""The publisher's side: turn a model folder or a step's weights into a version.

What always holds: a version whose weights are not finite is never built (of a delta the changed
cells are looked at: the base was published, so it is finite); the files are exactly those that the
manifest lists; building reads the old weights and changes nothing, so a failed publication leaves
the base of the next one as it was.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transport.errors import IntegrityError
from transport.weights.delta_encode import EncodedDelta, encode_delta
from transport.weights.digest import (
    StateDigest,
    fingerprint_of_kinds,
    first_non_finite,
    full_digest,
    read_kind,
)
from transport.weights.folder import (
    SHARD_BYTES,
    full_bytes_of,
    read_artefacts,
    read_model_folder,
    snapshot_files,
)
from transport.weights.layout import SEGMENT_CELLS, SegmentPlan
from transport.weights.manifest import DELTA_NAME, FileEntry, VersionManifest, describe_file
from transport.weights.segments import CodecSettings
from transport.weights.tensors import ITEM_BYTES, Buffer, TensorBytes


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
    artefacts: Mapping[str, bytes] | None = None,
    step: int = 0,
    version: int = 0,
    shard_bytes: int = SHARD_BYTES,
    chunk_bytes: int | None = None,
    threads: int = 1,
) -> Publication:
    """The first version: full weights and artefacts, so that agents need no copy beforehand.

    ``tensors`` replaces the folder's weights where the trainer publishes another type than it
    was given (its fp32 masters as BF16, say), or an adapter, with ``artefacts`` of its own.

    Raises:
        ModelError: the folder does not load; names the file.
        IntegrityError: a weight is not finite; names the tensor.
    """
    weights = read_model_folder(folder) if tensors is None else tensors
    _refuse_non_finite(first_non_finite(weights))
    files: dict[str, Buffer] = {}
    entries: list[FileEntry] = []
    for name, data in (read_artefacts(folder) if artefacts is None else artefacts).items():
        files[name] = data
        entries.append(describe_file(name, "artefact", data, chunk_bytes=chunk_bytes))
    for name, parts in snapshot_files(weights, shard_bytes=shard_bytes).items():
        files[name] = b"".join(parts)
        entries.append(describe_file(name, "snapshot", files[name], chunk_bytes=chunk_bytes))
    digests = StateDigest.of(weights, threads=threads)
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
        fingerprint=fingerprint_of_kinds(digests.kinds),
        created_wall_s=created_wall_s,
        full_digest=full_digest(weights, threads=threads),
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
    settings: CodecSettings | None = None,
    threads: int = 1,
    segment_cells: int = SEGMENT_CELLS,
    plans: Sequence[SegmentPlan] | None = None,
    with_full_digest: bool = False,
) -> Publication:
    """The version that ``new`` makes of version ``parent``, whose weights are ``old``.

    ``base`` is the digest of ``old`` (``Publication.digests`` of the parent) where it is known;
    ``with_full_digest`` reads all of ``new`` for the collision-resistant digest.

    Raises:
        ModelError: old and new differ in names, dtypes or shapes; names the tensor.
        IntegrityError: a changed weight is not finite; names the tensor.
    """
    delta = encode_delta(
        old,
        new,
        run=run,
        policy=policy,
        version=version,
        parent=parent,
        base=base,
        settings=settings,
        threads=threads,
        segment_cells=segment_cells,
        plans=plans,
    )
    _refuse_non_finite(delta.non_finite)
    return publish_delta(
        delta,
        step=step,
        created_wall_s=created_wall_s,
        chunk_bytes=chunk_bytes,
        full=full_digest(new, threads=threads) if with_full_digest else None,
    )


def publish_delta(
    delta: EncodedDelta,
    *,
    step: int,
    created_wall_s: float,
    chunk_bytes: int | None = None,
    full: str | None = None,
) -> Publication:
    """The version of a delta that is encoded already, by one process or by several
    (``assemble_delta``); ``full`` is the full digest of the new state where it was computed.

    Raises:
        IntegrityError: a changed weight is not finite; names the tensor.
    """
    _refuse_non_finite(delta.non_finite)
    header = delta.header
    entry = describe_file(
        DELTA_NAME, "delta", delta.data, chunk_bytes=chunk_bytes, segments=delta.segments
    )
    manifest = VersionManifest(
        run=header.run,
        policy=header.policy,
        version=header.version,
        parent=header.parent,
        step=step,
        digest=header.digest,
        base_digest=header.base_digest,
        files=(entry,),
        full_bytes=_bytes_of_kinds(delta.digests.kinds),
        fingerprint=header.fingerprint,
        created_wall_s=created_wall_s,
        full_digest=full,
    )
    return Publication(manifest, {DELTA_NAME: delta.data}, delta.digests, delta)


def _bytes_of_kinds(kinds: Mapping[str, bytes]) -> int:
    read = (read_kind(kind) for kind in kinds.values())
    return sum(math.prod(shape) * ITEM_BYTES[dtype] for dtype, shape in read)


def _refuse_non_finite(name: str | None) -> None:
    if name is not None:
        raise IntegrityError(f"tensor {name!r} has infinite or undefined values; not published")
