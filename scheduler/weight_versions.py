"""Versions of every policy on the weight store's disk, and the way from any of them to any other.

What always holds: a version is listed only after its files are durable, its signature was checked,
its delta was applied to the store's own copy of the parent and gave the promised digest, and its
weights are finite; its manifest is written last. Numbers are never reused: manifests, a few
kilobytes each, stay for the life of the run even when the files are gone, and are the version
tree. Every retained version can be served to an agent that has nothing. A file that turns out
damaged is no longer offered.

    FOLDER/POLICY/manifests/NUMBER    signed by the trainer
    FOLDER/POLICY/snapshots/NUMBER    signed by this store: full weights of a version, materialised
    FOLDER/POLICY/blobs/SHA256        files of both; SHA256.part is still coming in

Belongs to one thread. Costs: the head's weights in memory (the first version's are mapped).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from transport.errors import (
    ChecksumMismatch,
    IntegrityError,
    ModelError,
    RemoteProtocolError,
    StoreError,
    TruncatedBlob,
)
from transport.messages import PlanStep, WeightsPlan
from transport.weights.blobs import BlobFolder, disk_errors, write_durably
from transport.weights.delta_file import apply_delta
from transport.weights.digest import StateDigest, first_non_finite
from transport.weights.folder import read_snapshot, snapshot_files, write_model_folder
from transport.weights.manifest import (
    FileEntry,
    SignedManifest,
    SigningKey,
    VersionManifest,
    check_manifest,
    verify,
)
from transport.weights.plan import Route, cheapest_route, lineage
from transport.weights.tensors import Buffer, TensorBytes

SNAPSHOT_EVERY = 16
KEEP_VERSIONS = 64


@dataclass(frozen=True, slots=True)
class State:
    """Weights of one version and their digest."""

    version: int
    tensors: Mapping[str, TensorBytes]
    digests: StateDigest


@dataclass(frozen=True, slots=True)
class Stored:
    """A manifest as read and as signed."""

    manifest: VersionManifest
    signed: SignedManifest


@dataclass(slots=True)
class _Policy:
    name: str
    folder: Path
    blobs: BlobFolder
    versions: dict[int, Stored] = field(default_factory=dict)
    snapshots: dict[int, Stored] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)
    head: State | None = None

    @property
    def parents(self) -> dict[int, int | None]:
        return {number: stored.manifest.parent for number, stored in self.versions.items()}

    def intact(self, entries: Collection[FileEntry]) -> bool:
        return all(e.digest not in self.bad and self.blobs.has(e.digest) for e in entries)

    def route(self, target: int, have: int | None = None) -> Route | None:
        """Cheapest way over files that are there; looks at the lineage of ``target`` only."""
        path = lineage(self.parents, target)
        deltas, snapshots = {}, {}
        for number in path:
            delta = self.versions[number].manifest.delta
            if delta is not None and self.intact((delta,)):
                deltas[number] = delta.size_bytes
            if number in self.snapshots:
                files = self.snapshots[number].manifest.of_kind("snapshot")
                if self.intact(files):
                    snapshots[number] = sum(entry.size_bytes for entry in files)
        return cheapest_route(self.parents, deltas, snapshots, have=have, target=target)


class WeightVersions:
    """All versions of all policies in ``folder``.

    ``signer`` signs the snapshots that the store makes; agents trust its key beside the trainers'.
    ``trusted`` (key id to public key) says whose versions are taken; the caller may change it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        signer: SigningKey,
        trusted: Mapping[str, str],
        snapshot_every: int = SNAPSHOT_EVERY,
        keep_versions: int = KEEP_VERSIONS,
    ) -> None:
        """Load what is on disk. Raises StoreError when the folder cannot be used."""
        self._folder = folder
        self._signer = signer
        self._trusted = trusted
        self._snapshot_every = snapshot_every
        self._keep_versions = keep_versions
        self._policies: dict[str, _Policy] = {}
        self._files: dict[str, tuple[_Policy, FileEntry]] = {}
        self.warnings: list[str] = []
        """What was found damaged, for the caller to log and clear."""
        with disk_errors(f"opening {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(folder.iterdir()):
                if (path / "manifests").is_dir():
                    self._load(self._policy(unquote(path.name)))

    # ---- what is there ----------------------------------------------------------------------

    def policies(self) -> list[str]:
        return sorted(name for name, policy in self._policies.items() if policy.versions)

    def versions(self, policy: str) -> list[VersionManifest]:
        """Every version ever stored, by number; the tree is in their ``parent`` fields."""
        stored = self._policy(policy).versions
        return [stored[number].manifest for number in sorted(stored)]

    def head(self, policy: str) -> VersionManifest | None:
        """The newest version: the one with the highest number."""
        versions = self._policy(policy).versions
        return versions[max(versions)].manifest if versions else None

    def blobs(self, policy: str) -> BlobFolder:
        """Where the files of an offered version are to be written, chunk by chunk."""
        return self._policy(policy).blobs

    # ---- taking a version -------------------------------------------------------------------

    def add_version(
        self, signed: SignedManifest, files: Mapping[str, Buffer] | None = None
    ) -> VersionManifest:
        """Take a version durably. Its files are in ``blobs(policy)`` already or in ``files`` (by
        name). Adding the same version again is harmless.

        Raises:
            AuthenticationFailed: not signed by a trusted key.
            RemoteProtocolError: number used, parent unknown, or files of the wrong kinds.
            IntegrityError: files missing or damaged, digest not as promised, weights not finite.
            StoreError: the disk refused; nothing was added.
        """
        manifest = verify(signed, self._trusted)
        policy = self._policy(manifest.policy)
        known = policy.versions.get(manifest.version)
        if known is not None and known.manifest.digest == manifest.digest:
            return known.manifest
        self._check_place(policy, manifest)
        for entry in manifest.files:
            data = (files or {}).get(entry.name)
            if data is not None:
                policy.blobs.put(entry.digest, (data,))
            elif not policy.blobs.has(entry.digest):
                raise TruncatedBlob(f"{entry.name} of version {manifest.version} is not there")
        if manifest.parent is None:
            state = self._read_snapshot(policy, manifest)
            changed: Mapping[str, TensorBytes] = state.tensors
        else:
            parent = self._state(policy, manifest.parent)
            state, changed = self._apply(policy, parent, manifest)
        name = first_non_finite(changed)
        if name is not None:
            raise IntegrityError(f"version {manifest.version}: tensor {name!r} is not finite")
        self._write(policy.folder / "manifests", manifest.version, signed)
        self._register(policy, Stored(manifest, signed))
        policy.head = state
        return manifest

    def _check_place(self, policy: _Policy, manifest: VersionManifest) -> None:
        where = f"version {manifest.version} of {policy.name}"
        if policy.versions and manifest.version <= max(policy.versions):
            raise RemoteProtocolError(
                f"{where}: the number is used; the next one is {max(policy.versions) + 1}"
            )
        kinds = {entry.kind for entry in manifest.files}
        if manifest.parent is None:
            if policy.versions:
                raise RemoteProtocolError(f"{where} has no parent, but versions exist")
            if "snapshot" not in kinds or "delta" in kinds:
                raise RemoteProtocolError(f"{where} needs a snapshot and no delta")
            return
        parent = policy.versions.get(manifest.parent)
        if parent is None or parent.manifest.digest != manifest.base_digest:
            raise RemoteProtocolError(f"{where}: parent {manifest.parent} is unknown or another")
        before = parent.manifest
        if (before.run, before.fingerprint) != (manifest.run, manifest.fingerprint):
            raise RemoteProtocolError(f"{where} is of another run or model than its parent")
        if kinds != {"delta"}:
            raise RemoteProtocolError(f"{where} needs one delta and nothing else")

    # ---- giving versions --------------------------------------------------------------------

    def plan(
        self,
        policy: str,
        have_version: int | None = None,
        have_digest: str = "",
        upto: int | None = None,
    ) -> WeightsPlan | None:
        """The cheapest way from what an agent has to the newest version, or to version ``upto``
        when that exists. None when there is nothing to send.

        Raises:
            StoreError: that version is no longer kept, or its files are damaged.
        """
        p = self._policy(policy)
        if not p.versions:
            return None
        head = max(p.versions)
        target = upto if upto in p.versions else head
        if upto is not None and upto < head and upto not in p.versions:
            raise StoreError(f"version {upto} of {policy} never existed")
        held = p.versions.get(-1 if have_version is None else have_version)
        have = have_version if held and held.manifest.digest == have_digest else None
        if have == target:
            return None
        route = p.route(target, have)
        if route is None and target == head and p.head is not None:
            self._materialise(p, p.head)
            route = p.route(target, have)
        if route is None:
            raise StoreError(f"version {target} of {policy} is no longer kept or is damaged")
        steps: list[PlanStep] = []
        if route.from_snapshot:
            root = p.versions[lineage(p.parents, target)[0]]
            start = p.snapshots[route.start]
            artefacts = root.manifest.of_kind("artefact")
            shards = start.manifest.of_kind("snapshot")
            if start is root:
                steps.append(_step(root, (*artefacts, *shards)))
            else:
                if artefacts:
                    steps.append(_step(root, artefacts))
                steps.append(_step(start, shards))
        for number in route.deltas:
            stored = p.versions[number]
            steps.append(_step(stored, stored.manifest.of_kind("delta")))
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
            self._mark_bad(policy, (entry,), error)
            return None

    def reconstruct(self, policy: str, version: int) -> dict[str, TensorBytes]:
        """Weights of any retained version, verified.

        Raises:
            StoreError: no such version, no longer kept, or damaged.
        """
        return dict(self._state(self._policy(policy), version).tensors)

    def export(self, policy: str, version: int, folder: Path) -> None:
        """Write a version as a Hugging Face model folder, in one step.

        Raises:
            StoreError: no such version, the folder exists, or the disk refused.
        """
        p = self._policy(policy)
        state = self._state(p, version)
        root = p.versions[lineage(p.parents, version)[0]].manifest
        artefacts = {e.name: p.blobs.data(e.digest) for e in root.of_kind("artefact")}
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
        p = self._policy(policy)
        if not p.versions:
            return 0
        numbers = sorted(p.versions)
        route = p.route(numbers[-1])
        if route is None or len(route.deltas) >= self._snapshot_every:
            self._materialise(p, self._state(p, numbers[-1]))
        kept = numbers[-self._keep_versions :]
        if min_acked is not None:
            kept = [number for number in numbers if number >= min(min_acked, kept[0])]
        keep = set(uploading)
        root = p.versions[numbers[0]].manifest
        keep.update(entry.digest for entry in root.files)
        snapshots = {numbers[0]}
        for number in kept:
            route = p.route(number)
            needed = {number, *(route.deltas if route else ())}
            for version in needed:
                keep.update(e.digest for e in p.versions[version].manifest.of_kind("delta"))
            if route is not None:
                snapshots.add(route.start)
                files = p.snapshots[route.start].manifest.of_kind("snapshot")
                keep.update(entry.digest for entry in files)
        for number in sorted(p.snapshots.keys() - snapshots):
            with disk_errors(f"removing snapshot {number} of {policy}"):
                (p.folder / "snapshots" / f"{number:08d}").unlink(missing_ok=True)
            del p.snapshots[number]
        for digest in [d for d, (owner, _) in self._files.items() if owner is p and d not in keep]:
            del self._files[digest]
        return p.blobs.sweep(keep)

    # ---- inside -----------------------------------------------------------------------------

    def _policy(self, name: str) -> _Policy:
        if name not in self._policies:
            folder = self._folder / quote(name, safe="").replace(".", "%2E")
            with disk_errors(f"opening {folder}"):
                for part in ("manifests", "snapshots"):
                    (folder / part).mkdir(parents=True, exist_ok=True)
            self._policies[name] = _Policy(name, folder, BlobFolder(folder / "blobs"))
        return self._policies[name]

    def _load(self, policy: _Policy) -> None:
        for part in ("manifests", "snapshots"):
            for path in sorted((policy.folder / part).iterdir()):
                if not path.name.isdigit():
                    path.unlink()  # torn write
                    continue
                try:
                    signed = msgspec.msgpack.decode(path.read_bytes(), type=SignedManifest)
                    manifest = msgspec.msgpack.decode(signed.manifest, type=VersionManifest)
                    check_manifest(manifest)
                except (msgspec.DecodeError, IntegrityError, RemoteProtocolError) as error:
                    self.warnings.append(f"{path}: {error}")
                    continue
                self._register(policy, Stored(manifest, signed), snapshot=part == "snapshots")

    def _register(self, policy: _Policy, stored: Stored, *, snapshot: bool = False) -> None:
        number = stored.manifest.version
        if not snapshot:
            policy.versions[number] = stored
        if snapshot or stored.manifest.parent is None:
            policy.snapshots[number] = stored
        for entry in stored.manifest.files:
            policy.bad.discard(entry.digest)
            self._files[entry.digest] = (policy, entry)

    def _write(self, folder: Path, number: int, signed: SignedManifest) -> None:
        write_durably(folder / f"{number:08d}", (msgspec.msgpack.encode(signed),))

    def _mark_bad(self, policy: _Policy, entries: Collection[FileEntry], error: Exception) -> None:
        policy.bad.update(entry.digest for entry in entries)
        self.warnings.append(f"{policy.name}: no longer served: {error}")

    def _state(self, policy: _Policy, version: int) -> State:
        """Weights of a version over whatever files are intact; damaged ones are marked."""
        held = policy.head
        while version in policy.versions:
            if held is not None and held.version == version:
                return held
            route = policy.route(version, None if held is None else held.version)
            if route is None:
                break
            try:
                at = policy.snapshots[route.start].manifest if route.from_snapshot else None
                state = held if at is None else self._read_snapshot(policy, at)
                for number in route.deltas:
                    at = policy.versions[number].manifest
                    assert state is not None  # noqa: S101  (a route starts at one of the two)
                    state, _ = self._apply(policy, state, at)
            except (IntegrityError, ModelError, StoreError) as error:
                # Each turn marks a file that the next route avoids, so this ends.
                assert at is not None  # noqa: S101
                self._mark_bad(policy, at.files, error)
                continue
            assert state is not None  # noqa: S101
            if version == max(policy.versions):
                policy.head = state
            return state
        raise StoreError(f"version {version} of {policy.name} is unknown, not kept or damaged")

    def _read_snapshot(self, policy: _Policy, manifest: VersionManifest) -> State:
        files = {e.name: policy.blobs.data(e.digest) for e in manifest.of_kind("snapshot")}
        tensors, digests = read_snapshot(files, manifest)
        return State(manifest.version, tensors, digests)

    def _apply(
        self, policy: _Policy, parent: State, manifest: VersionManifest
    ) -> tuple[State, dict[str, TensorBytes]]:
        delta = manifest.delta
        if delta is None:
            raise IntegrityError(f"version {manifest.version} of {policy.name} has no delta")
        data = policy.blobs.data(delta.digest)
        changed, digests = apply_delta(parent.tensors, data, manifest, digests=parent.digests)
        return State(manifest.version, {**parent.tensors, **changed}, digests), changed

    def _materialise(self, policy: _Policy, state: State) -> None:
        version = policy.versions[state.version].manifest
        entries = tuple(
            policy.blobs.store(name, "snapshot", parts)
            for name, parts in snapshot_files(state.tensors).items()
        )
        manifest = msgspec.structs.replace(version, files=entries)
        signed = self._signer.sign(manifest)
        self._write(policy.folder / "snapshots", state.version, signed)
        self._register(policy, Stored(manifest, signed), snapshot=True)


def _step(stored: Stored, files: Collection[FileEntry]) -> PlanStep:
    signed = stored.signed
    return PlanStep(
        manifest=signed.manifest,
        signature=signed.signature,
        key_id=signed.key_id,
        files=tuple(entry.name for entry in files),
    )
