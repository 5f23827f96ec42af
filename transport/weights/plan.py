"""From the version an agent has to the one it wants: the tree of versions and the cheapest way.

What always holds: a plan leads from its start to its target without a gap, each step by the delta
(or composite) against the one before; it starts from what the agent has, proved by digest, or from
a snapshot. ``check_plan`` accepts a plan only if all this is so and the state digest of every
version in it is signed by the policy's trainer; the state is compared with that digest when the
plan is applied.

A plan's steps, in this order (each part may be absent, but not all):

    artefacts   first version's manifest, signed; its artefact files, or these and its snapshot
    snapshot    proof: a later version's manifest, signed; no files
                catalogue: that manifest once more with the snapshot files that the weight store
                made of it instead of the trainer's files
    changes     each either a delta: signed manifest; its delta file
                or a composite: proof as above, then a catalogue with the base of the composite
                for parent and its file

Catalogues are unsigned: what their files must add up to is signed in the proof before them.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from transport.errors import AuthenticationFailed, RemoteProtocolError, SizeLimitExceeded
from transport.messages import PlanStep, VersionRef, WeightsPlan
from transport.weights.manifest import (
    FileEntry,
    SignedManifest,
    Signer,
    VersionManifest,
    composite_name,
    decode_manifest,
    verify,
)
from transport.weights.manifest_folder import StoredManifest

MAX_PLAN_STEPS = 4096
MAX_OVERHEAD_BYTES = 64 << 20  # headers and index of a snapshot or composite
STEP_S: Final = 0.05
"""What a step costs beside its bytes and its decoding: a round trip, and making it durable."""

MAX_DECODE_S: Final = 3600.0
"""Nobody is believed to be slower."""


class LinkSpeed(NamedTuple):
    """What an agent said of itself: bytes a second that its link brings in, cells a second that it
    decodes. 0 where it does not know."""

    rate_bytes_s: float = 0.0
    decode_cells_s: float = 0.0

    def step_bytes(self, cells: int) -> int:
        """What a step over a model of ``cells`` costs beside its files, in bytes that the link
        could have brought in meanwhile; 0 when the link's rate is unknown."""
        if self.rate_bytes_s <= 0:
            return 0
        decode_s = cells / self.decode_cells_s if self.decode_cells_s > 0 else 0.0
        return int(self.rate_bytes_s * (STEP_S + min(decode_s, MAX_DECODE_S)))


UNKNOWN_SPEED: Final = LinkSpeed()


class Leg(NamedTuple):
    """Files that lead from version ``base`` to ``version``: a delta (``base`` is the parent), a
    composite (any other version), or a snapshot (None: from nothing)."""

    base: int | None
    version: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Route:
    """Start at version ``start``, which is held (None: with nothing), and take ``legs`` in order;
    the first of a start with nothing is a snapshot."""

    start: int | None
    legs: tuple[Leg, ...]

    @property
    def size_bytes(self) -> int:
        return sum(leg.size_bytes for leg in self.legs)


def lineage(parents: Mapping[int, int | None], version: int) -> list[int]:
    """Path from the root to ``version``, both included; empty for an unknown version."""
    path: list[int] = []
    cursor: int | None = version
    while cursor is not None and cursor in parents:
        path.append(cursor)
        cursor = parents[cursor]
    return path[::-1]


def cheapest_route(
    legs_to: Callable[[int], Iterable[Leg]],
    *,
    have: int | None,
    target: int,
    step_bytes: int = 0,
) -> Route | None:
    """The way to ``target`` of least cost: bytes of the files and ``step_bytes`` for each leg
    (``LinkSpeed.step_bytes``, so that fewest bytes and least time are one sum). On a tie the one
    with fewest legs, then what the agent has. None when no snapshot and nothing held leads there.

    ``legs_to`` gives the legs that end in a version and can be served; it is asked only as far back
    as may matter. Dijkstra's algorithm from the target backwards, towards two sources: ``have``
    and nothing.
    """
    queue: list[tuple[int, int, bool, int]] = [(0, 0, False, target)]  # last: -1 is nothing
    onward: dict[int, Leg] = {}
    best: dict[int, tuple[int, int]] = {target: (0, 0)}
    done: set[int] = set()
    while queue:
        cost, count, from_nothing, at = heapq.heappop(queue)
        if from_nothing or at == have:
            legs: list[Leg] = []
            while (leg := onward.get(at)) is not None:
                legs.append(leg)
                at = leg.version
            return Route(None if from_nothing else have, tuple(legs))
        if at in done:
            continue
        done.add(at)
        for leg in legs_to(at):
            source = -1 if leg.base is None else leg.base
            reached = (cost + leg.size_bytes + step_bytes, count + 1)
            if source not in done and (source not in best or reached < best[source]):
                best[source], onward[source] = reached, leg
                heapq.heappush(queue, (*reached, leg.base is None, source))
    return None


def check_successor(
    manifest: VersionManifest, versions: Mapping[int, StoredManifest], *, lost: bool = False
) -> None:
    """Whether a version may join the tree of stored ones: a new number, and either the root with
    a snapshot or a delta against a stored parent. Where nothing leads to the newest one any more
    (``lost``) another root may come: the trainer goes on from a state that is known as a whole.

    Raises:
        RemoteProtocolError: it may not; says why.
    """
    where = f"version {manifest.version} of {manifest.policy}"
    if versions and manifest.version <= max(versions):
        free = max(versions) + 1
        raise RemoteProtocolError(f"{where}: the number is used; the next one is {free}")
    kinds = {entry.kind for entry in manifest.files}
    if manifest.parent is None:
        if versions and not lost:
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
        """The file that leads from ``base`` here: a delta or a composite."""
        return next((entry for entry in self.files if entry.kind in _CHANGES), None)

    @property
    def base(self) -> VersionRef | None:
        """What ``delta`` is to be applied to; None for a step without one."""
        m = self.manifest
        if self.delta is None or m.parent is None or m.base_digest is None:
            return None
        return VersionRef(version=m.parent, digest=m.base_digest)

    def of_kind(self, kind: str) -> tuple[FileEntry, ...]:
        return tuple(entry for entry in self.files if entry.kind == kind)


def check_plan(
    plan: WeightsPlan, trusted: Mapping[str, Signer], *, max_bytes: int | None = None
) -> tuple[CheckedStep, ...]:
    """The steps of a plan that bring files, verified. Whether the first one's ``base`` is what is
    held, the caller knows.

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
        if checked.delta is not None:
            if len(checked.files) > 1 or (at is not None and not _follows(manifest, at)):
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


_CHANGES = ("delta", "composite")


def _check_step(
    step: PlanStep, proof: CheckedStep | None, trusted: Mapping[str, Signer]
) -> CheckedStep:
    signed = SignedManifest(manifest=step.manifest, signature=step.signature, key_id=step.key_id)
    if step.key_id:
        manifest = verify(signed, trusted)
        if manifest.of_kind("composite"):
            raise RemoteProtocolError(f"plan: version {manifest.version} signs a composite")
    else:
        manifest = decode_manifest(step.manifest)
        if proof is None or _what_is_proved(manifest) != _what_is_proved(proof.manifest):
            raise AuthenticationFailed(f"plan: version {manifest.version} is not signed")
        signed = proof.signed
        _check_catalogue(manifest, proof.manifest)
    by_name = {entry.name: entry for entry in manifest.files}
    if not by_name.keys() >= set(step.files) or len(set(step.files)) != len(step.files):
        raise RemoteProtocolError(f"plan: version {manifest.version} has no such files")
    # In the manifest's order, whatever the order of the names.
    files = tuple(entry for entry in manifest.files if entry.name in step.files)
    return CheckedStep(manifest, signed, files)


def _what_is_proved(manifest: VersionManifest) -> VersionManifest:
    """All that a catalogue must share with its proof: not how one gets there."""
    return msgspec.structs.replace(manifest, files=(), parent=None, base_digest=None)


def _check_catalogue(manifest: VersionManifest, proof: VersionManifest) -> None:
    where = f"plan: catalogue of version {manifest.version}"
    kinds = [entry.kind for entry in manifest.files]
    size = sum(entry.size_bytes for entry in manifest.files)
    if size > manifest.full_bytes + MAX_OVERHEAD_BYTES:
        raise SizeLimitExceeded(f"{where} has {size} bytes for {manifest.full_bytes} of weights")
    if kinds == ["composite"]:
        if manifest.parent is None or manifest.files[0].name != composite_name(manifest.parent):
            raise RemoteProtocolError(f"{where}: the composite's name is not that of its base")
    elif set(kinds) - {"snapshot"}:
        raise RemoteProtocolError(f"{where} may bring a snapshot or one composite only")
    elif (manifest.parent, manifest.base_digest) != (proof.parent, proof.base_digest):
        raise AuthenticationFailed(f"{where}: its parent is not the signed one")


def _follows(manifest: VersionManifest, parent: VersionManifest) -> bool:
    return manifest.parent == parent.version and manifest.base_digest == parent.digest
