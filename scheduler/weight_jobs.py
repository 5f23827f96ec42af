"""From what upkeep decides (``scheduler.weight_upkeep``) to a job with all it needs, and back."""

from collections.abc import Collection

from scheduler.weight_composites import CompositeJob, Job, SnapshotJob
from scheduler.weight_policy import PolicyVersions, change_entry
from scheduler.weight_upkeep import (
    CUMULATIVE_LIMIT,
    JOINER_LIMIT,
    Asked,
    aligned,
    next_bridge,
    next_composite,
)
from transport.weights.manifest import VersionManifest
from transport.weights.plan import lineage

_STEP_PART = 100


def step_bytes(p: PolicyVersions) -> int:
    """What a hop more is worth to this store itself: a hundredth of the model, for it costs a pass
    over all of it."""
    return p.root.manifest.full_bytes // _STEP_PART if p.versions else 0


def next_job(
    p: PolicyVersions, asked: Collection[Asked], *, every: int, composites: bool
) -> Job | None:
    """What to make next: a bridge for agents that were left behind, the cumulative of the newest
    ``every``-th version, its snapshot where somebody with nothing would move far more than the
    model, and with ``composites`` shortcuts for who lags. None when nothing is wanted."""
    bridge = next_bridge_job(p, asked)
    if bridge is not None:
        return bridge
    path = lineage(p.parents, p.newest)
    anchor = aligned(path, every)
    root = p.root.manifest
    if anchor is not None and p.parents[anchor] != root.version:
        tried = {version for base, version in p.unpaying if base == root.version}
        if (root.version, anchor) not in p.composites and not tried & set(path):
            job = _composite_job(p, root.version, anchor)
            if job is not None:
                return job
        route = p.route(anchor)
        if route is not None and route.size_bytes > JOINER_LIMIT * root.full_bytes:
            return SnapshotJob(p.blobs, p.versions[anchor].manifest, tuple(p.hops(route)))
    pair = next_composite(path, asked, p.made, p.usable) if composites else None
    return None if pair is None else _pair_job(p, pair)


def next_bridge_job(p: PolicyVersions, asked: Collection[Asked]) -> CompositeJob | None:
    pair = next_bridge(lineage(p.parents, p.newest), asked, p.made, p.usable)
    return None if pair is None else _pair_job(p, pair)


def adopt(p: PolicyVersions, made: VersionManifest) -> bool:
    """Offer what a job made, where it pays: a composite of fewer bytes than any way there is, a
    cumulative of a good part less than the model. Whether it does.

    Raises:
        StoreError: the disk refused.
    """
    entry, base = change_entry(made), made.parent
    if entry is not None and base is not None:
        limit = CUMULATIVE_LIMIT * made.full_bytes
        if base != p.root.manifest.version:
            route = p.route(made.version, have=base)
            limit = float("inf") if route is None else route.size_bytes
        if entry.size_bytes >= limit:
            p.unpaying.add((base, made.version))
            if entry.digest not in p.files:
                p.blobs.remove(entry.digest)
            return False
    p.add_catalogue(made)
    return True


def _pair_job(p: PolicyVersions, pair: tuple[int, int]) -> CompositeJob | None:
    job = _composite_job(p, *pair)
    if job is None:
        p.unpaying.add(pair)  # its way is broken
    return job


def _composite_job(p: PolicyVersions, base: int, version: int) -> CompositeJob | None:
    price = step_bytes(p)
    ancestors = set(lineage(p.parents, base))
    shared = [number for number in lineage(p.parents, version) if number in ancestors]
    if not shared:
        return None
    fork = shared[-1]
    to_fork = p.route(fork, step_bytes=price)
    to_base = p.route(base, have=fork, snapshots=(), step_bytes=price)
    # The old weights are read out of the base's snapshot, or else worked out on the way.
    mapped = to_fork is not None and len(to_fork.legs) == 1 and base == fork
    to_version = p.route(version, have=fork, snapshots=None if mapped else (), step_bytes=price)
    if to_fork is None or to_base is None or to_version is None:
        return None
    return CompositeJob(
        blobs=p.blobs,
        base=p.versions[base].manifest,
        version=p.versions[version].manifest,
        to_fork=tuple(p.hops(to_fork)),
        to_base=tuple(p.hops(to_base)),
        to_version=tuple(p.hops(to_version)),
    )
