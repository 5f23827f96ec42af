"""Which files of a policy stay on disk.

What always holds: after ``retain`` every kept version can be reached by somebody who has nothing,
and by the shortest way from the first version; nothing that a kept version needs was removed; the
number of snapshots is small and composites take no more room than one model.
"""

from collections.abc import Collection, Sequence
from typing import Final

from scheduler.weight_composites import write_snapshot
from scheduler.weight_policy import PolicyVersions
from transport.errors import ChecksumMismatch, IntegrityError, StoreError
from transport.weights.manifest import FileEntry

MAX_COMPOSITES: Final = 128


def drop_damaged(p: PolicyVersions) -> None:
    """Forget the store's own files that are damaged or gone, so that they are made again.

    Raises:
        StoreError: the disk refused.
    """
    for pair in [pair for pair, s in p.composites.items() if not p.intact(s.manifest.files)]:
        p.drop_composite(*pair)
    for version in [v for v, s in p.snapshots.items() if not p.intact(s.manifest.files)]:
        if p.is_made_here(version):
            p.drop_snapshot(version)


def write_head_down(p: PolicyVersions, *, threads: int) -> str:
    """Write the newest weights down when they are in memory and no other way leads to them. What
    is wrong with those in memory, which are then given up, or nothing.

    Raises:
        StoreError: the disk refused.
    """
    if p.head is None or p.head.version != p.newest or p.route(p.newest) is not None:
        return ""
    newest = p.versions[p.newest].manifest
    try:
        p.add_catalogue(write_snapshot(p.blobs, p.head.tensors, newest, threads=threads))
    except ChecksumMismatch as error:
        p.head = None
        return str(error)
    return ""


def read_again(p: PolicyVersions, budget_bytes: int) -> list[tuple[FileEntry, Exception]]:
    """The next ``budget_bytes`` of the files, from where the last call ended: what is damaged."""
    digest, start = p.scrubbed
    names = sorted(name for name, entry in p.files.items() if p.intact((entry,)))
    names = [name for name in names if name >= digest] + [n for n in names if n < digest]
    found: list[tuple[FileEntry, Exception]] = []
    for name in names:
        entry = p.files[name]
        try:
            for index in range(start if name == digest else 0, len(entry.chunk_digests)):
                if budget_bytes <= 0:
                    p.scrubbed = (name, index)
                    return found
                p.blobs.read_chunk(entry, index)
                budget_bytes -= entry.chunk_size_bytes(index)
        except (IntegrityError, StoreError) as error:
            found.append((entry, error))
    p.scrubbed = ("", 0)
    return found


def retain(
    p: PolicyVersions, kept: Sequence[int], *, anchors_apart: int, also: Collection[str]
) -> int:
    """Keep the deltas of the ``kept`` versions (rising), the ways to each of them from nothing and
    from the first version, the newest composites between them, and the files ``also`` (digests);
    remove all others and return how many. Snapshots between the oldest and the newest that are
    needed stay where they are ``anchors_apart`` versions apart.

    Raises:
        StoreError: the disk refused; nothing needed is lost, call again.
    """
    root = p.root.manifest
    snapshots = _anchors(p, kept, anchors_apart)
    deltas, composites = set(kept), set[tuple[int, int]]()
    for number in kept:
        fresh = p.route(number, snapshots=snapshots) or p.route(number)
        for route in (fresh, p.route(number, have=root.version, snapshots=snapshots)):
            for leg in route.legs if route is not None else ():
                if leg.base is None:
                    snapshots.add(leg.version)
                elif (leg.base, leg.version) in p.composites:
                    composites.add((leg.base, leg.version))
                else:
                    deltas.add(leg.version)
    composites |= _newest_composites(p, set(kept), composites)
    for version in [version for version in p.snapshots if version not in snapshots]:
        p.drop_snapshot(version)
    for pair in [pair for pair in p.composites if pair not in composites]:
        p.drop_composite(*pair)
    p.kept = frozenset((*kept, root.version))
    p.unpaying = {pair for pair in p.unpaying if pair[1] in p.kept}
    files = [root.files, *(p.versions[number].manifest.of_kind("delta") for number in deltas)]
    files += [p.snapshots[number].manifest.files for number in snapshots]
    files += [p.composites[pair].manifest.files for pair in composites]
    return p.sweep({*also, *(entry.digest for entries in files for entry in entries)})


def _newest_composites(
    p: PolicyVersions, kept: Collection[int], needed: Collection[tuple[int, int]]
) -> set[tuple[int, int]]:
    """As many of those between kept versions as may take room beside the needed ones."""
    room = p.root.manifest.full_bytes
    chosen: set[tuple[int, int]] = set()
    for base, version in sorted(p.composites, key=lambda pair: (pair[1], pair[0]), reverse=True):
        if (base, version) in needed or base not in kept or version not in kept:
            continue
        room -= sum(e.size_bytes for e in p.composites[base, version].manifest.files)
        if room < 0 or len(chosen) >= MAX_COMPOSITES:
            break
        chosen.add((base, version))
    return chosen


def _anchors(p: PolicyVersions, kept: Sequence[int], apart: int) -> set[int]:
    """Snapshots to keep: the first version's, the newest, the one that the oldest kept version
    starts from, and between them one every ``apart`` versions. More would save a joiner a few
    deltas and cost a whole model on disk each."""
    routes = (p.route(kept[0]), p.route(kept[-1]))
    starts = [route.legs[0].version for route in routes if route is not None]
    anchors = {*({p.root.manifest.version} & p.snapshots.keys()), *starts}
    last = min(starts, default=0)
    for number in sorted(p.snapshots):
        if number - last >= apart:
            anchors.add(number)
            last = number
    return anchors
