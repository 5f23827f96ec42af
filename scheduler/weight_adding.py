"""How a version that came in becomes one of the store's: checked against its manifest, in place.

What always holds: a version is added only after its weights had the promised digests and were
finite; whatever fails leaves the arena as it was.
"""

import msgspec

from scheduler.weight_policy import PolicyVersions
from transport.errors import ChecksumMismatch, IntegrityError
from transport.weights.delta_file import decode_delta
from transport.weights.digest import first_non_finite, full_digest
from transport.weights.manifest import SignedManifest, VersionManifest
from transport.weights.state import WeightArena


def first(
    p: PolicyVersions, signed: SignedManifest, manifest: VersionManifest, *, threads: int
) -> WeightArena:
    """A version that comes whole; its arena.

    Raises:
        IntegrityError: another state than promised, or not finite.
        StoreError: the disk refused.
    """
    arena = WeightArena.from_snapshot(p.blobs, manifest, threads=threads)
    name = first_non_finite(arena.tensors)
    if name is not None:
        raise IntegrityError(f"version {manifest.version}: {name!r} is not finite")
    p.add(signed, manifest)
    return arena


def advance(
    p: PolicyVersions,
    arena: WeightArena,
    signed: SignedManifest,
    manifest: VersionManifest,
    *,
    threads: int,
) -> None:
    """A version that comes as a delta against what ``arena`` holds. Raises as ``first``."""
    (entry,) = manifest.files
    decoded = decode_delta(
        arena, p.blobs.data(entry.digest), manifest, entry, threads=threads, finite=True
    )
    undo = arena.apply(decoded.patch, manifest.version, decoded.digests)
    try:
        promised = manifest.full_digest
        if promised is not None and promised != full_digest(arena.tensors, threads=threads):
            raise ChecksumMismatch(
                f"version {manifest.version} of {manifest.policy}: the weights have another"
                " full digest than the manifest says"
            )
        p.add(signed, manifest)
    except BaseException:
        arena.undo(undo)
        raise


def restore(
    p: PolicyVersions, known: VersionManifest, manifest: VersionManifest, *, threads: int
) -> None:
    """Full weights of a version that is listed already: like a snapshot that the store made.
    Raises as ``first``."""
    whole = msgspec.structs.replace(known, files=manifest.of_kind("snapshot"))
    arena = WeightArena.from_snapshot(p.blobs, whole, threads=threads)
    if known.parent is None:
        p.restored(manifest.files)
    else:
        p.add_catalogue(whole)
    if p.head is None:
        p.head = arena
