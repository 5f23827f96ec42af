"""What there is to say about versions in a weight store's folder: one of them, or two compared.

What always holds: only what is on disk is told, nothing is changed; numbers of cells are of the
bit patterns, so that -0.0 and 0.0 differ.
"""

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from scheduler.weight_policy import change_entry
from scheduler.weight_reading import PolicyShelf
from transport.errors import StoreError
from transport.weights.delta_file import read_delta_table
from transport.weights.manifest import FileEntry
from transport.weights.plan import Route, lineage
from transport.weights.tensors import read_header

if TYPE_CHECKING:
    from transport.weights.manifest_folder import StoredManifest


def describe_version(shelf: PolicyShelf, number: int) -> dict[str, Any]:
    """Manifest, files and coding of a version.

    Raises:
        StoreError: there is no such version.
        IntegrityError: its delta is not a delta file.
    """
    stored = shelf.version(number)
    manifest = stored.manifest
    entry = change_entry(manifest)
    coders, changed = _coding(shelf, entry) if entry else ({}, None)
    snapshot = shelf.snapshots.get(number)
    made: list[tuple[int | None, StoredManifest]] = []
    made += [] if snapshot is None else [(None, snapshot)]
    made += [(base, c) for (base, to), c in sorted(shelf.composites.items()) if to == number]
    return {
        "policy": manifest.policy,
        "run": manifest.run,
        "version": number,
        "parent": manifest.parent,
        "step": manifest.step,
        "digest": manifest.digest,
        "base_digest": manifest.base_digest,
        "full_digest": manifest.full_digest,
        "fingerprint": manifest.fingerprint,
        "full_bytes": manifest.full_bytes,
        "created_wall_s": manifest.created_wall_s,
        "key_id": stored.signed.key_id,
        "changed_cells": changed,
        "cells": _cells(shelf),
        "coders": coders,
        "files": [_file(shelf, entry) for entry in manifest.files],
        "made": [
            {"base": base, **_file(shelf, entry)}
            for base, stored in made
            for entry in stored.manifest.files
        ],
    }


def _file(shelf: PolicyShelf, entry: FileEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "kind": entry.kind,
        "size_bytes": entry.size_bytes,
        "digest": entry.digest,
        "chunks": len(entry.chunk_digests),
        "kept": shelf.present((entry,)),
    }


def _coding(shelf: PolicyShelf, entry: FileEntry) -> tuple[dict[str, int], int | None]:
    """Bytes by coder, and how many cells a delta changes; None when it is no longer kept."""
    if not shelf.present((entry,)):
        return {}, None
    _, rows = read_delta_table(shelf.blobs.data(entry.digest))
    coders: dict[str, int] = {}
    for row in rows:
        coders[row.coder] = coders.get(row.coder, 0) + row.size_bytes
    return coders, sum(row.changed for row in rows)


def _cells(shelf: PolicyShelf) -> int | None:
    """How many cells the weights have; None while the first version's files are not there."""
    entries = shelf.root.manifest.of_kind("snapshot")
    shards = [entry for entry in entries if entry.name.endswith(".safetensors")]
    if not shelf.present(shards):
        return None
    headers = (read_header(shelf.blobs.data(entry.digest))[0] for entry in shards)
    return sum(math.prod(region.shape) for regions in headers for region in regions.values())


def compare(shelf: PolicyShelf, old: int, new: int) -> list[dict[str, Any]]:
    """By tensor: how many cells differ between two versions, and how many there are. Memory: the
    model twice.

    Raises:
        StoreError: a version cannot be rebuilt.
    """
    before, after = shelf.arena(old).tensors, shelf.arena(new).tensors
    if before.keys() != after.keys():
        raise StoreError(f"versions {old} and {new} of {shelf.policy} have different tensors")
    return [
        {
            "tensor": name,
            "dtype": tensor.dtype,
            "changed": int(np.count_nonzero(tensor.cells() != after[name].cells())),
            "cells": tensor.cells().size,
        }
        for name, tensor in before.items()
    ]


def ways(shelf: PolicyShelf, old: int, new: int) -> list[dict[str, Any]]:
    """What the store could send an agent at version ``old`` to bring it to ``new``: the way it
    would choose by bytes, every delta between them, the composite, and the way from nothing.

    Raises:
        StoreError: there is no such version.
    """
    shelf.version(old)
    shelf.version(new)
    found: list[dict[str, Any]] = []

    def add(way: str, route: Route | None) -> None:
        if route is not None:
            over = " ".join(
                f"snapshot {leg.version}" if leg.base is None else f"{leg.base}→{leg.version}"
                for leg in route.legs
            )
            found.append({"way": way, "bytes": route.size_bytes, "over": over})

    add("cheapest", shelf.route(new, have=old))
    add("deltas", _deltas(shelf, old, new))
    direct = [leg for leg in shelf.legs_to(new) if leg.base == old]
    if (old, new) in shelf.composites and direct:
        add("composite", Route(old, tuple(direct)))
    add("from nothing", shelf.route(new))
    return found


def _deltas(shelf: PolicyShelf, old: int, new: int) -> Route | None:
    """Every version's own delta from ``old`` to ``new``; None when one is not kept."""
    parents = {number: stored.manifest.parent for number, stored in shelf.versions.items()}
    path = lineage(parents, new)
    if old not in path:
        return None
    legs = [
        leg
        for base, number in itertools.pairwise(path)
        if base >= old
        for leg in shelf.legs_to(number)
        if leg.base == base
    ]
    return Route(old, tuple(legs)) if len(legs) == len(path) - path.index(old) - 1 else None
