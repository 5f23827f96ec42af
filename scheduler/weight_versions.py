"""Versions of every policy on the weight store's disk, and the way from any of them to any other.

What always holds: a version is listed only after its files are durable, its signature was checked,
its delta was applied to the store's own copy of the parent and gave the promised digest, and its
weights are finite; its manifest is written last. Numbers are never reused: manifests, a few
kilobytes each, stay for the life of the run even when the files are gone, and are the version
tree. Every retained version can be served to an agent that has nothing. A file that turns out
damaged is no longer offered.

    FOLDER/POLICY/manifests/NUMBER    signed by the trainer
    FOLDER/POLICY/snapshots/NUMBER    full weights of a version that this store made, unsigned:
                                      the version's own manifest proves what they add up to
    FOLDER/POLICY/blobs/SHA256        files of both; SHA256.part is still coming in

Belongs to one thread; only ``read_chunk`` may be called beside it by another. Costs: the head's
weights in memory (the first version's are mapped), and on disk the deltas of the retained versions
beside at most about three snapshots.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from transport.errors import ChecksumMismatch, IntegrityError, StoreError, TruncatedBlob
from transport.messages import PlanStep, WeightsPlan
from transport.weights.blobs import BlobFolder, disk_errors
from transport.weights.digest import first_non_finite
from transport.weights.folder import snapshot_files, write_model_folder
from transport.weights.manifest import (
    FileEntry,
    SignedManifest,
    Signer,
    VersionManifest,
    verify,
)
from transport.weights.manifest_folder import ManifestFolder, StoredManifest
from transport.weights.plan import Route, cheapest_route, check_successor
from transport.weights.state import WeightState, advanced, state_of_snapshot
from transport.weights.tensors import Buffer, TensorBytes

SNAPSHOT_EVERY = 16
KEEP_VERSIONS = 64


@dataclass(slots=True)
class _Policy:
    name: str
    manifests: ManifestFolder
    snapshot_manifests: ManifestFolder
    blobs: BlobFolder
    versions: dict[int, StoredManifest] = field(default_factory=dict)  # rising numbers
    snapshots: dict[int, StoredManifest] = field(default_factory=dict)
    parents: dict[int, int | None] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    head: WeightState | None = None

    @property
    def root(self) -> StoredManifest:
        return self.versions[min(self.versions)]

    def _size_bytes(self, entries: Collection[FileEntry]) -> int | None:
        """Size of files that can all be served, None when one cannot or there are none."""
        intact = all(e.digest not in self.damaged and self.blobs.has(e.digest) for e in entries)
        return sum(entry.size_bytes for entry in entries) if entries and intact else None

    def route(
        self, target: int, *, have: int | None = None, anchors: Collection[int] | None = None
    ) -> Route | None:
        """Cheapest way over files that can be served; ``anchors`` limits the snapshots used."""

        def delta_bytes(version: int) -> int | None:
            return self._size_bytes(self.versions[version].manifest.of_kind("delta"))

        def snapshot_bytes(version: int) -> int | None:
            stored = self.snapshots.get(version)
            if stored is None or (anchors is not None and version not in anchors):
                return None
            return self._size_bytes(stored.manifest.of_kind("snapshot"))

        return cheapest_route(self.parents, delta_bytes, snapshot_bytes, have=have, target=target)


class WeightVersions:
    """All versions of all policies in ``folder``.

    ``trusted`` (by key id) says whose versions of which policy are taken; the caller may change it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        trusted: Mapping[str, Signer],
        snapshot_every: int = SNAPSHOT_EVERY,
        keep_versions: int = KEEP_VERSIONS,
    ) -> None:
        """Load what is on disk. Raises StoreError when the folder cannot be used."""
        self._folder = folder
        self._trusted = trusted
        self._snapshot_every = snapshot_every
        self._keep_versions = keep_versions
        self._policies: dict[str, _Policy] = {}
        self._files: dict[str, tuple[_Policy, FileEntry]] = {}
        self.warnings: list[str] = []
        """What was found damaged, for the caller to log and clear."""
        with disk_errors(f"opening {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            names = sorted(unquote(path.name) for path in folder.iterdir() if path.is_dir())
        for name in names:
            self._open(name)

    # ---- what is there ----------------------------------------------------------------------

    def policies(self) -> list[str]:
        return sorted(name for name, policy in self._policies.items() if policy.versions)

    def versions(self, policy: str) -> list[VersionManifest]:
        """Every version ever stored, by number; the tree is in their ``parent`` fields."""
        known = self._policies.get(policy)
        return [stored.manifest for stored in known.versions.values()] if known else []

    def head(self, policy: str) -> VersionManifest | None:
        """The newest version: the one with the highest number."""
        known = self._policies.get(policy)
        return known.versions[max(known.versions)].manifest if known and known.versions else None

    def blobs(self, policy: str) -> BlobFolder:
        """Where the files of an offered version are to be written, chunk by chunk. Makes the
        policy's folder: ask only for policies that the offering peer may publish."""
        return self._open(policy).blobs

    # ---- taking a version -------------------------------------------------------------------

    def add_version(
        self, signed: SignedManifest, files: Mapping[str, Buffer] | None = None
    ) -> VersionManifest:
        """Take a version durably. Its files are in ``blobs(policy)`` already or in ``files`` (by
        name). Adding the same version again is harmless.

        Raises:
            AuthenticationFailed: not signed by a trusted key.
            RemoteProtocolError: number used, parent unknown, or files of the wrong kinds.
            IntegrityError: files missing or damaged, digest not as promised, weights not finite;
                the files are forgotten, so that another try fetches them again.
            StoreError: the disk refused, or the parent is no longer kept; nothing was added.
        """
        manifest = verify(signed, self._trusted)
        policy = self._open(manifest.policy)
        known = policy.versions.get(manifest.version)
        if known is not None and known.manifest.digest == manifest.digest:
            return known.manifest
        check_successor(manifest, policy.versions)
        parent = None if manifest.parent is None else self._state(policy, manifest.parent)
        try:
            for entry in manifest.files:
                if files and entry.name in files:
                    policy.blobs.put(entry.digest, (files[entry.name],))
                elif not policy.blobs.has(entry.digest):
                    raise TruncatedBlob(f"{entry.name} of version {manifest.version} is missing")
            if parent is None:
                state = state_of_snapshot(policy.blobs, manifest)
                changed: Mapping[str, TensorBytes] = state.tensors
            else:
                state, changed = advanced(parent, policy.blobs, manifest)
            name = first_non_finite(changed)
            if name is not None:
                raise IntegrityError(f"version {manifest.version}: {name!r} is not finite")
        except IntegrityError:
            for entry in manifest.files:
                if entry.digest not in self._files:
                    policy.blobs.remove(entry.digest)
            raise
        policy.manifests.write(manifest.version, signed)
        self._register(policy, StoredManifest(manifest, signed))
        policy.head = state
        return manifest

    # ---- giving versions --------------------------------------------------------------------

    def plan(
        self,
        policy: str,
        have_version: int | None = None,
        have_digest: str = "",
        upto: int | None = None,
    ) -> WeightsPlan | None:
        """The cheapest way from what an agent has to the newest version, or to version ``upto``
        where that exists. None when there is nothing to send.

        Raises:
            StoreError: that version never existed, is no longer kept, or is damaged.
        """
        p = self._policies.get(policy)
        if p is None or not p.versions:
            return None
        head = max(p.versions)
        target = head if upto is None or upto > head else upto
        held = None if have_version is None else p.versions.get(have_version)
        have = have_version if held and held.manifest.digest == have_digest else None
        if have == target:
            return None
        route = p.route(target, have=have)
        if route is None and target == head and p.head is not None and p.head.version == head:
            self._materialise(p, p.head)
            route = p.route(target, have=have)
        if route is None:
            raise StoreError(f"version {target} of {policy} is unknown, not kept or damaged")
        steps: list[PlanStep] = []
        if route.from_snapshot:
            start, artefacts = p.snapshots[route.start], p.root.manifest.of_kind("artefact")
            shards = start.manifest.of_kind("snapshot")
            if start is p.root:
                steps.append(start.step((*artefacts, *shards)))
            else:
                steps.extend([p.root.step(artefacts)] if artefacts else [])
                steps.append(p.versions[route.start].step(()))
                steps.append(start.step(shards))
        chain = (p.versions[number] for number in route.deltas)
        steps.extend(stored.step(stored.manifest.of_kind("delta")) for stored in chain)
        return WeightsPlan(policy=policy, version=target, steps=tuple(steps))

    def read_chunk(self, digest: str, index: int) -> bytes | None:
        """One verified chunk of a file of any policy; None when it cannot be had (never known,
        no longer kept, or damaged: the file is then not offered again)."""
        known = self._files.get(digest)
        if known is None:
            return None
        policy, entry = known
        try:
            return policy.blobs.read_chunk(entry, index)
        except TruncatedBlob:
            return None
        except (ChecksumMismatch, StoreError) as error:
            self._mark_damaged(policy, (entry,), error)
            return None

    def reconstruct(self, policy: str, version: int) -> dict[str, TensorBytes]:
        """Weights of any retained version, verified.

        Raises:
            StoreError: no such version, no longer kept, or damaged.
        """
        return dict(self._state(self._known(policy), version).tensors)

    def export(self, policy: str, version: int, folder: Path) -> None:
        """Write a version as a new Hugging Face model folder, in one step.

        Raises:
            StoreError: as ``reconstruct``; the folder exists; the disk refused.
        """
        p = self._known(policy)
        state = self._state(p, version)
        entries = p.root.manifest.of_kind("artefact")
        artefacts = {entry.name: p.blobs.data(entry.digest) for entry in entries}
        write_model_folder(folder, state.tensors, artefacts)

    # ---- upkeep -----------------------------------------------------------------------------

    def maintain(
        self, policy: str, *, min_acked: int | None = None, uploading: Collection[str] = ()
    ) -> int:
        """Materialise a snapshot where the way to the head has grown long, and remove the files
        that no retained version needs; returns how many were removed.

        Retained: the first version, the last ``keep_versions`` and all from ``min_acked`` (the
        oldest version that a living agent holds) on. ``uploading`` are digests of files that are
        coming in. May write a whole model: call it while nobody waits.

        Raises:
            StoreError: the disk refused; nothing is lost, call again.
        """
        p = self._known(policy)
        numbers = sorted(p.versions)
        route = p.route(numbers[-1])
        if route is None or len(route.deltas) >= self._snapshot_every:
            self._materialise(p, self._state(p, numbers[-1]))
        kept = numbers[-self._keep_versions :]
        if min_acked is not None:
            kept = [number for number in numbers if number >= min(min_acked, kept[0])]
        anchors = self._anchors(p, kept)
        needed: set[int] = set()
        for number in kept:
            route = p.route(number, anchors=anchors) or p.route(number)
            needed.add(number)
            if route is not None:
                anchors.add(route.start)
                needed.update(route.deltas)
        keep = {*uploading, *(entry.digest for entry in p.root.manifest.files)}
        for number in needed:
            keep.update(e.digest for e in p.versions[number].manifest.of_kind("delta"))
        for number in sorted(p.snapshots):
            if number in anchors or number == numbers[0]:
                keep.update(e.digest for e in p.snapshots[number].manifest.of_kind("snapshot"))
            else:
                p.snapshot_manifests.remove(number)
                del p.snapshots[number]
        for digest in [d for d, (owner, _) in self._files.items() if owner is p and d not in keep]:
            del self._files[digest]
        return p.blobs.sweep(keep)

    def _anchors(self, p: _Policy, kept: list[int]) -> set[int]:
        """Snapshots to keep beside the first version's: the newest, the one that the oldest
        retained version starts from, and between them one every ``keep_versions``. More would
        save a joiner a few deltas and cost a whole model on disk each."""
        routes = (p.route(kept[0]), p.route(kept[-1]))
        starts = [route.start for route in routes if route is not None]
        anchors = set(starts)
        last = min(starts, default=0)
        for number in sorted(p.snapshots):
            if number - last >= self._keep_versions:
                anchors.add(number)
                last = number
        return anchors

    # ---- inside -----------------------------------------------------------------------------

    def _known(self, name: str) -> _Policy:
        policy = self._policies.get(name)
        if policy is None or not policy.versions:
            raise StoreError(f"no version of {name} is stored; known: {self.policies()}")
        return policy

    def _open(self, name: str) -> _Policy:
        if name not in self._policies:
            folder = self._folder / quote(name, safe="").replace(".", "%2E")
            policy = self._policies[name] = _Policy(
                name,
                ManifestFolder(folder / "manifests"),
                ManifestFolder(folder / "snapshots"),
                BlobFolder(folder / "blobs"),
            )
            for source in (policy.manifests, policy.snapshot_manifests):
                found, problems = source.load()
                self.warnings.extend(problems)
                for stored in found:
                    self._register(policy, stored, snapshot=source is policy.snapshot_manifests)
        return self._policies[name]

    def _register(self, policy: _Policy, stored: StoredManifest, *, snapshot: bool = False) -> None:
        number = stored.manifest.version
        if not snapshot:
            policy.versions[number] = stored
            policy.parents[number] = stored.manifest.parent
        if snapshot or stored.manifest.parent is None:
            policy.snapshots[number] = stored
        for entry in stored.manifest.files:
            policy.damaged.discard(entry.digest)
            self._files[entry.digest] = (policy, entry)

    def _mark_damaged(
        self, policy: _Policy, entries: Collection[FileEntry], error: Exception
    ) -> None:
        policy.damaged.update(entry.digest for entry in entries)
        self.warnings.append(f"{policy.name}: a file is no longer served: {error}")

    def _state(self, policy: _Policy, version: int) -> WeightState:
        """Weights of a version over whatever files are intact; damaged ones are marked."""
        held = policy.head
        if held is not None and held.version == version:
            return held
        have = None if held is None else held.version
        while (route := policy.route(version, have=have)) is not None:
            at = policy.snapshots.get(route.start, policy.versions[route.start]).manifest
            try:
                state = held
                if state is None or route.from_snapshot:
                    state = state_of_snapshot(policy.blobs, at)
                for at in (policy.versions[number].manifest for number in route.deltas):
                    state, _ = advanced(state, policy.blobs, at)
            except (IntegrityError, StoreError) as error:
                # Each turn marks files that the next route avoids, so this ends.
                self._mark_damaged(policy, at.files, error)
                continue
            if version == max(policy.versions):
                policy.head = state
            return state
        raise StoreError(f"version {version} of {policy.name} is unknown, not kept or damaged")

    def _materialise(self, policy: _Policy, state: WeightState) -> None:
        entries = tuple(
            policy.blobs.store(name, "snapshot", parts)
            for name, parts in snapshot_files(state.tensors).items()
        )
        version = policy.versions[state.version].manifest
        manifest = msgspec.structs.replace(version, files=entries)
        data = msgspec.msgpack.encode(manifest)
        signed = SignedManifest(manifest=data, signature=b"", key_id="")
        policy.snapshot_manifests.write(state.version, signed)
        self._register(policy, StoredManifest(manifest, signed), snapshot=True)
