"""From the version an agent has to the one it wants: the tree of versions and the cheapest way.

What always holds: a plan leads along the tree from its start to its target without a gap, each
step by the delta against the one before; it starts from what the agent has, proved by digest, or
from a snapshot. ``check_plan`` accepts a plan only if all this is so and the state digest of every
version in it is signed by the policy's trainer; the state is compared with that digest when the
plan is applied.

A plan's steps, in this order (each part may be absent, but not all):

    artefacts   first version's manifest, signed; its artefact files, or these and its snapshot
    proof       a later version's manifest, signed; no files
    catalogue   that manifest once more with the snapshot files that the weight store made of it
                instead of the trainer's files; unsigned: what they must add up to is signed
    deltas      signed manifests; their delta files
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from transport.errors import AuthenticationFailed, RemoteProtocolError, SizeLimitExceeded
from transport.messages import PlanStep, WeightsPlan
from transport.weights.manifest import (
    FileEntry,
    SignedManifest,
    Signer,
    VersionManifest,
    decode_manifest,
    verify,
)
from transport.weights.manifest_folder import StoredManifest

MAX_PLAN_STEPS = 4096
MAX_OVERHEAD_BYTES = 64 << 20  # headers and index of a snapshot


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
    """One version of a plan and the files to fetch for it. ``signed`` proves the version's digest;
    it is ``manifest`` as signed, or in a catalogue the proof that stood before it."""

    manifest: VersionManifest
    signed: SignedManifest
    files: tuple[FileEntry, ...]

    @property
    def delta(self) -> FileEntry | None:
        return next((entry for entry in self.files if entry.kind == "delta"), None)

    def of_kind(self, kind: str) -> tuple[FileEntry, ...]:
        return tuple(entry for entry in self.files if entry.kind == kind)


def check_plan(
    plan: WeightsPlan, trusted: Mapping[str, Signer], *, max_bytes: int | None = None
) -> tuple[CheckedStep, ...]:
    """The steps of a plan that bring files, verified.

    Raises:
        AuthenticationFailed: a version is not signed by a key trusted for the policy.
        SizeLimitExceeded: more steps or bytes than allowed.
        RemoteProtocolError: the steps do not lead to ``plan.version`` of ``plan.policy``.
    """
    if not 1 <= len(plan.steps) <= MAX_PLAN_STEPS:
        raise SizeLimitExceeded(f"a plan of {len(plan.steps)} steps; 1 to {MAX_PLAN_STEPS} allowed")
    steps: list[CheckedStep] = []
    at: VersionManifest | None = None
    proof: CheckedStep | None = None
    for step in plan.steps:
        checked = _check_step(step, proof, trusted)
        manifest, kinds = checked.manifest, {entry.kind for entry in checked.files}
        where = f"plan for {plan.policy}, version {manifest.version}"
        if manifest.policy != plan.policy:
            raise RemoteProtocolError(f"{where}: is of {manifest.policy}")
        proof = None
        if not kinds:
            proof = checked
            continue
        if "delta" in kinds:
            if len(kinds) > 1 or (at is not None and not _follows(manifest, at)):
                raise RemoteProtocolError(f"{where}: does not follow the step before")
            at = manifest
        elif at is not None:
            raise RemoteProtocolError(f"{where}: only deltas may follow a snapshot or delta")
        elif "snapshot" in kinds:
            if checked.of_kind("snapshot") != manifest.of_kind("snapshot"):
                raise RemoteProtocolError(f"{where}: brings a part of a snapshot")
            at = manifest
        steps.append(checked)
    if at is None or at.version != plan.version:
        raise RemoteProtocolError(f"plan does not lead to version {plan.version} of {plan.policy}")
    total = sum(entry.size_bytes for step in steps for entry in step.files)
    if max_bytes is not None and total > max_bytes:
        raise SizeLimitExceeded(f"plan moves {total} bytes, over the limit of {max_bytes}")
    return tuple(steps)


def _check_step(
    step: PlanStep, proof: CheckedStep | None, trusted: Mapping[str, Signer]
) -> CheckedStep:
    signed = SignedManifest(manifest=step.manifest, signature=step.signature, key_id=step.key_id)
    if step.key_id:
        manifest = verify(signed, trusted)
    else:
        manifest = decode_manifest(step.manifest)
        if proof is None or msgspec.structs.replace(manifest, files=()) != msgspec.structs.replace(
            proof.manifest, files=()
        ):
            raise AuthenticationFailed(f"plan: version {manifest.version} is not signed")
        signed = proof.signed
        size = sum(entry.size_bytes for entry in manifest.files)
        if size > manifest.full_bytes + MAX_OVERHEAD_BYTES:
            raise SizeLimitExceeded(f"plan: a snapshot of {size} bytes for {manifest.full_bytes}")
        if any(entry.kind != "snapshot" for entry in manifest.files):
            raise RemoteProtocolError(f"plan: version {manifest.version} may bring snapshots only")
    by_name = {entry.name: entry for entry in manifest.files}
    if not by_name.keys() >= set(step.files) or len(set(step.files)) != len(step.files):
        raise RemoteProtocolError(f"plan: version {manifest.version} has no such files")
    # In the manifest's order, whatever the order of the names.
    files = tuple(entry for entry in manifest.files if entry.name in step.files)
    return CheckedStep(manifest, signed, files)


def _follows(manifest: VersionManifest, parent: VersionManifest) -> bool:
    return manifest.parent == parent.version and manifest.base_digest == parent.digest
