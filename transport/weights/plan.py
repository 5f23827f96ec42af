"""From the version an agent has to the one it wants: the tree of versions and the cheapest way.

What always holds: a plan leads along the tree from its start to its target without a gap, each
step by the delta against the one before; its first step is either what the agent has, proved by
digest, or a snapshot. ``check_plan`` accepts a plan only if every manifest in it is signed and
all this is so; the digest of the resulting state is checked again when it is applied.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from transport.errors import RemoteProtocolError, SizeLimitExceeded
from transport.messages import WeightsPlan
from transport.weights.manifest import FileEntry, SignedManifest, VersionManifest, verify
from transport.weights.manifest_folder import StoredManifest

MAX_PLAN_STEPS = 4096


@dataclass(frozen=True, slots=True)
class Route:
    """Start at ``start`` (from its snapshot, or held already), then apply ``deltas`` in order."""

    start: int
    from_snapshot: bool
    deltas: tuple[int, ...]
    size_bytes: int


def lineage(parents: Mapping[int, int | None], version: int) -> list[int]:
    """Path from the root to ``version``, both included; empty for an unknown version."""
    path: list[int] = []
    cursor: int | None = version
    while cursor is not None and cursor in parents:
        path.append(cursor)
        cursor = parents[cursor]
    return path[::-1]


def cheapest_route(
    parents: Mapping[int, int | None],
    delta_bytes: Callable[[int], int | None],
    snapshot_bytes: Callable[[int], int | None],
    *,
    have: int | None,
    target: int,
) -> Route | None:
    """The way to ``target`` that moves the fewest bytes; on a tie what the agent has wins.

    ``delta_bytes`` and ``snapshot_bytes`` give a version's file sizes, None where it cannot be
    served; they are asked only as far back as may matter. None when no snapshot and nothing held
    leads there.
    """
    best: Route | None = None
    deltas: list[int] = []
    chain_bytes = 0
    cursor: int | None = target
    while cursor is not None and cursor in parents:
        if cursor == have:
            if best is None or chain_bytes <= best.size_bytes:
                best = Route(cursor, False, tuple(deltas[::-1]), chain_bytes)
            break
        snapshot = snapshot_bytes(cursor)
        if snapshot is not None and (best is None or chain_bytes + snapshot < best.size_bytes):
            best = Route(cursor, True, tuple(deltas[::-1]), chain_bytes + snapshot)
        delta = delta_bytes(cursor)
        if delta is None or (best is not None and chain_bytes + delta > best.size_bytes):
            break
        deltas.append(cursor)
        chain_bytes += delta
        cursor = parents[cursor]
    return best


def check_successor(manifest: VersionManifest, versions: Mapping[int, StoredManifest]) -> None:
    """Whether a version may join the tree of stored ones: a new number, and either the root with
    a snapshot or a delta against a stored parent.

    Raises:
        RemoteProtocolError: it may not; says why.
    """
    where = f"version {manifest.version} of {manifest.policy}"
    if versions and manifest.version <= max(versions):
        free = max(versions) + 1
        raise RemoteProtocolError(f"{where}: the number is used; the next one is {free}")
    kinds = {entry.kind for entry in manifest.files}
    if manifest.parent is None:
        if versions:
            raise RemoteProtocolError(f"{where} has no parent, but versions exist")
        if "snapshot" not in kinds or "delta" in kinds:
            raise RemoteProtocolError(f"{where} needs a snapshot and no delta")
        return
    parent = versions.get(manifest.parent)
    if parent is None or parent.manifest.digest != manifest.base_digest:
        raise RemoteProtocolError(f"{where}: parent {manifest.parent} is unknown or another")
    before = parent.manifest
    if (before.run, before.fingerprint) != (manifest.run, manifest.fingerprint):
        raise RemoteProtocolError(f"{where} is of another run or model than its parent")
    if kinds != {"delta"}:
        raise RemoteProtocolError(f"{where} needs one delta and nothing else")


@dataclass(frozen=True, slots=True)
class CheckedStep:
    """One version of a plan whose manifest is verified, and the files to fetch for it."""

    manifest: VersionManifest
    signed: SignedManifest
    files: tuple[FileEntry, ...]

    @property
    def delta(self) -> FileEntry | None:
        return next((entry for entry in self.files if entry.kind == "delta"), None)

    def of_kind(self, kind: str) -> tuple[FileEntry, ...]:
        return tuple(entry for entry in self.files if entry.kind == kind)


def check_plan(
    plan: WeightsPlan, trusted: Mapping[str, str], *, max_bytes: int | None = None
) -> tuple[CheckedStep, ...]:
    """The steps of a plan, verified.

    A plan is: artefacts of the first version (optional), then a snapshot (optional), then deltas.

    Raises:
        AuthenticationFailed: a manifest is not signed by a trusted key.
        SizeLimitExceeded: more steps or bytes than allowed.
        RemoteProtocolError: the steps do not lead to ``plan.version`` of ``plan.policy``.
    """
    if not 1 <= len(plan.steps) <= MAX_PLAN_STEPS:
        raise SizeLimitExceeded(f"a plan of {len(plan.steps)} steps; 1 to {MAX_PLAN_STEPS} allowed")
    steps: list[CheckedStep] = []
    at: VersionManifest | None = None
    for step in plan.steps:
        signed = SignedManifest(
            manifest=step.manifest, signature=step.signature, key_id=step.key_id
        )
        manifest = verify(signed, trusted)
        if manifest.policy != plan.policy:
            raise RemoteProtocolError(f"plan for {plan.policy} has a step of {manifest.policy}")
        by_name = {entry.name: entry for entry in manifest.files}
        missing = [name for name in step.files if name not in by_name]
        if missing or len(set(step.files)) != len(step.files):
            raise RemoteProtocolError(f"plan: version {manifest.version} has no file {missing[:3]}")
        checked = CheckedStep(manifest, signed, tuple(by_name[name] for name in step.files))
        kinds = {entry.kind for entry in checked.files}
        if "delta" in kinds:
            if len(kinds) > 1 or (at is not None and not _follows(manifest, at)):
                raise RemoteProtocolError(f"plan: version {manifest.version} does not follow")
            at = manifest
        elif "snapshot" in kinds:
            whole = set(checked.of_kind("snapshot")) == set(manifest.of_kind("snapshot"))
            if at is not None or not whole:
                raise RemoteProtocolError(f"plan: snapshot {manifest.version} is out of place")
            at = manifest
        elif at is not None:
            raise RemoteProtocolError(f"plan: step {manifest.version} brings nothing")
        steps.append(checked)
    if at is None or at.version != plan.version:
        raise RemoteProtocolError(f"plan does not lead to version {plan.version} of {plan.policy}")
    total = sum(entry.size_bytes for step in steps for entry in step.files)
    if max_bytes is not None and total > max_bytes:
        raise SizeLimitExceeded(f"plan moves {total} bytes, over the limit of {max_bytes}")
    return tuple(steps)


def _follows(manifest: VersionManifest, parent: VersionManifest) -> bool:
    return manifest.parent == parent.version and manifest.base_digest == parent.digest
