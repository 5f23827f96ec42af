"""One policy's versions on disk: what there is, which ways lead through it, and walking them.

What always holds: a way is offered only over files that are there and were not found damaged; a
catalogue that this store made (snapshot or composite) is used only if it joins versions whose
manifests it agrees with; walking changes nothing but the arena it is given.

    FOLDER/manifests/NUMBER           signed by the trainer
    FOLDER/snapshots/NUMBER           files with the full weights of a version, made by the store
    FOLDER/composites/NUMBER-BASE     the file that leads from version BASE to NUMBER, likewise
    FOLDER/blobs/SHA256               files of all; SHA256.part is still coming in

Catalogues are unsigned: the version's own manifest proves what their files add up to.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from scheduler.weight_lost import believed, numbered_files
from transport.errors import IntegrityError, StoreError
from transport.messages import PlanStep
from transport.weights.blobs import BlobFolder
from transport.weights.delta_file import decode_delta
from transport.weights.manifest import FileEntry, SignedManifest, Signer, VersionManifest
from transport.weights.manifest_folder import ManifestFolder, StoredManifest
from transport.weights.patch import Patch
from transport.weights.plan import Leg, Route, cheapest_route
from transport.weights.state import WeightArena
from transport.weights.tensors import TensorBytes


class WalkFailed(StoreError):
    """A file on the way is damaged or gone: one of ``manifest``'s."""

    def __init__(self, manifest: VersionManifest, reason: Exception) -> None:
        super().__init__(f"version {manifest.version} of {manifest.policy}: {reason}")
        self.manifest = manifest


def change_entry(manifest: VersionManifest) -> FileEntry | None:
    """The delta or composite among a version's files."""
    return manifest.delta or manifest.composite


def walked_files(manifest: VersionManifest) -> tuple[FileEntry, ...]:
    """Those that lead to the version: its delta or composite, or else its snapshot."""
    entry = change_entry(manifest)
    return manifest.of_kind("snapshot") if entry is None else (entry,)


def check_going(go_on: Callable[[], bool]) -> None:
    """Raises StoreError when ``go_on`` says to stop."""
    if not go_on():
        raise StoreError("the weight store stops")


def walk(
    arena: WeightArena | None,
    blobs: BlobFolder,
    hops: Sequence[VersionManifest],
    *,
    note: Callable[[Mapping[str, TensorBytes], Patch], None] | None = None,
    go_on: Callable[[], bool] = lambda: True,
    threads: int = 1,
) -> WeightArena:
    """Take ``hops`` in order, in place; a snapshot starts a new arena. ``note`` is shown every
    patch before it is written. Costs a pass over the model for each hop.

    Raises:
        WalkFailed: a file is damaged or gone; the arena is at the last version that was reached.
        StoreError: ``go_on`` says to stop; likewise.
    """
    for manifest in hops:
        entry = change_entry(manifest)
        check_going(go_on)
        try:
            if entry is None:
                arena = WeightArena.from_snapshot(blobs, manifest, threads=threads)
                continue
            if arena is None:
                raise StoreError("a delta, and nothing to apply it to")
            data = blobs.data(entry.digest)
            decoded = decode_delta(arena, data, manifest, entry, threads=threads)
            if note is not None:
                note(arena.tensors, decoded.patch)
            arena.apply(decoded.patch, manifest.version, decoded.digests)
        except (IntegrityError, StoreError) as error:
            raise WalkFailed(manifest, error) from error
    if arena is None:
        raise StoreError("a way without a start")
    return arena


class PolicyVersions:
    """Belongs to one thread; another may call ``mark_damaged``. ``head`` is the arena of the
    version that was added last, None until one was needed."""

    def __init__(self, name: str, folder: Path, trusted: Mapping[str, Signer]) -> None:
        """Load what is on disk; ``problems`` says what of it is not used. A version whose manifest
        is damaged (``trusted`` by key id) is ``lost``: not there, but its number is taken.

        Raises:
            StoreError: the folder cannot be used.
        """
        self.name = name
        self.blobs = BlobFolder(folder / "blobs")
        self.versions: dict[int, StoredManifest] = {}  # rising numbers
        self.parents: dict[int, int | None] = {}
        self.lost: set[int] = set()
        self.snapshots: dict[int, StoredManifest] = {}
        self.composites: dict[tuple[int, int], StoredManifest] = {}  # (base, version)
        self.files: dict[str, FileEntry] = {}
        self.damaged: set[str] = set()
        self.kept: frozenset[int] | None = None  # as of the last retention
        self.unpaying: set[tuple[int, int]] = set()  # composites not worth their bytes
        self.head: WeightArena | None = None
        self.rescanned = 0  # version at which all of ``head`` was read last
        self.scrubbed = ("", 0)  # file and chunk up to which files were read again
        self.problems: list[str] = []
        self._there: set[str] = set()
        self._bases: dict[int, list[int]] = {}
        self._manifests = ManifestFolder(folder / "manifests")
        self._snapshots = ManifestFolder(folder / "snapshots")
        self._composites = ManifestFolder(folder / "composites")
        self._load(trusted)

    def _load(self, trusted: Mapping[str, Signer]) -> None:
        found, folder = self._loaded(self._manifests), self._manifests.folder
        numbers = numbered_files(folder)
        good, problems = believed(found, self.name, folder, numbers, trusted)
        self.problems.extend(problems)
        for stored in good:
            self._register(stored)
        self.lost = numbers - self.versions.keys()
        for stored in self._loaded(self._snapshots):
            if self._agrees(stored) and stored.manifest.version not in self.snapshots:
                self._register_snapshot(stored)
        for stored in self._loaded(self._composites):
            if self._agrees(stored):
                self._register_composite(stored)

    def _loaded(self, folder: ManifestFolder) -> list[StoredManifest]:
        found, problems = folder.load()
        self.problems.extend(problems)
        return found

    def _agrees(self, stored: StoredManifest) -> bool:
        """Whether a catalogue joins versions of this tree."""
        m = stored.manifest
        version = self.versions.get(m.version)
        fits = version is not None and version.manifest.digest == m.digest
        if change_entry(m) is not None:
            before = None if m.parent is None else self.versions.get(m.parent)
            fits = fits and before is not None and before.manifest.digest == m.base_digest
        if not fits:
            self.problems.append(f"{self.name}: a catalogue of version {m.version} fits no version")
        return fits

    # ---- what there is ------------------------------------------------------------------------

    @property
    def root(self) -> StoredManifest:
        """The first version, or the first that came whole where that is lost."""
        whole = (number for number, parent in self.parents.items() if parent is None)
        return self.versions[min(whole, default=min(self.versions))]

    @property
    def lacks_root(self) -> bool:
        """Whether there are versions, but none that came whole."""
        return bool(self.versions) and None not in self.parents.values()

    @property
    def newest(self) -> int:
        return max(self.versions)

    @property
    def made(self) -> set[tuple[int, int]]:
        """Composites that there are, or that were not worth it."""
        return self.composites.keys() | self.unpaying

    @property
    def usable(self) -> Collection[int]:
        """Versions that a composite may start from."""
        return self.versions if self.kept is None else self.kept

    def intact(self, entries: Collection[FileEntry]) -> bool:
        """Whether there are such files, all of them there and none known to be damaged."""
        for entry in entries:
            if entry.digest in self.damaged:
                return False
            if entry.digest not in self._there:
                if not self.blobs.has(entry.digest):
                    return False
                self._there.add(entry.digest)
        return bool(entries)

    def legs_to(self, version: int, snapshots: Collection[int] | None = None) -> Iterator[Leg]:
        """Ways to come to a version by one set of files, over ``snapshots`` only if given."""
        stored = self.versions[version]
        parent = stored.manifest.parent
        for base, manifest in (
            *(() if parent is None else ((parent, stored.manifest),)),
            *((b, self.composites[b, version].manifest) for b in self._bases.get(version, ())),
        ):
            entry = change_entry(manifest)
            if entry is not None and self.intact((entry,)) and base in self.versions:
                yield Leg(base, version, entry.size_bytes)
        snapshot = self.snapshots.get(version)
        if snapshot is not None and (snapshots is None or version in snapshots):
            shards = snapshot.manifest.of_kind("snapshot")
            if self.intact(shards):
                yield Leg(None, version, sum(entry.size_bytes for entry in shards))

    def route(
        self,
        target: int,
        *,
        have: int | None = None,
        snapshots: Collection[int] | None = None,
        step_bytes: int = 0,
    ) -> Route | None:
        if target not in self.versions:
            return None
        return cheapest_route(
            lambda version: self.legs_to(version, snapshots),
            have=have,
            target=target,
            step_bytes=step_bytes,
        )

    def _stored(self, leg: Leg) -> StoredManifest:
        if leg.base is None:
            return self.snapshots[leg.version]
        composite = self.composites.get((leg.base, leg.version))
        return self.versions[leg.version] if composite is None else composite

    def hops(self, route: Route) -> list[VersionManifest]:
        """The manifests whose files a route takes, for ``walk``."""
        return [self._stored(leg).manifest for leg in route.legs]

    def steps(self, route: Route) -> tuple[PlanStep, ...]:
        """A route as a plan for an agent (form: ``transport.weights.plan``)."""
        steps: list[PlanStep] = []
        artefacts = self.root.manifest.of_kind("artefact")
        for leg in route.legs:
            stored = self._stored(leg)
            files = walked_files(stored.manifest)
            if leg.base is None:
                if stored is self.root:
                    steps.append(stored.step((*artefacts, *files)))
                    continue
                steps.extend([self.root.step(artefacts)] if artefacts else [])
            if not stored.signed.key_id:
                steps.append(self.versions[leg.version].step(()))
            steps.append(stored.step(files))
        return tuple(steps)

    # ---- changes ------------------------------------------------------------------------------

    def add(self, signed: SignedManifest, manifest: VersionManifest) -> None:
        """A version whose files are there. Raises StoreError when the disk refuses."""
        self._manifests.write(manifest.version, signed)
        self._register(StoredManifest(manifest, signed))

    def add_catalogue(self, manifest: VersionManifest) -> None:
        """A snapshot or composite whose files are there. Raises StoreError likewise."""
        signed = SignedManifest(manifest=msgspec.msgpack.encode(manifest), signature=b"", key_id="")
        stored = StoredManifest(manifest, signed)
        if change_entry(manifest) is None:
            self._snapshots.write(manifest.version, signed)
            self._register_snapshot(stored)
        elif manifest.parent is not None:
            self._composites.write(manifest.version, signed, base=manifest.parent)
            self._register_composite(stored)

    def drop_snapshot(self, version: int) -> None:
        """Forget a snapshot of this store's; its files go with the next ``sweep``."""
        self._snapshots.remove(version)
        del self.snapshots[version]

    def drop_composite(self, base: int, version: int) -> None:
        """Likewise."""
        self._composites.remove(version, base=base)
        self._bases[version].remove(base)
        del self.composites[base, version]

    def sweep(self, keep: Collection[str]) -> int:
        """Remove every file that is not in ``keep``; returns how many."""
        self._there.intersection_update(keep)
        for digest in [digest for digest in self.files if digest not in keep]:
            del self.files[digest]
        return self.blobs.sweep(keep)

    def mark_damaged(self, entries: Collection[FileEntry]) -> None:
        """Offer these files no more."""
        self.damaged.update(entry.digest for entry in entries)

    def forget_damaged(self, entries: Collection[FileEntry]) -> None:
        """Remove those files that are known to be damaged, so that they can come in again."""
        for entry in entries:
            if entry.digest in self.damaged:
                self.blobs.remove(entry.digest)
                self._there.discard(entry.digest)

    def restored(self, entries: Collection[FileEntry]) -> None:
        """These files came in again."""
        self.damaged.difference_update(entry.digest for entry in entries)

    def holds(self, version: int) -> bool:
        """Whether a version's weights are those in memory."""
        return self.head is not None and self.head.version == version

    def reaches(self, version: int) -> bool:
        """Whether a version's weights are in memory, or intact files lead to them."""
        return self.holds(version) or self.route(version) is not None

    def is_made_here(self, version: int) -> bool:
        """Whether the snapshot of a version is the store's own."""
        return not self.snapshots[version].signed.key_id

    def _register(self, stored: StoredManifest) -> None:
        number = stored.manifest.version
        self.versions[number] = stored
        if number < self.newest:  # one that was lost came back
            self.versions = dict(sorted(self.versions.items()))
        self.lost.discard(number)
        self.parents[number] = stored.manifest.parent
        if stored.manifest.parent is None:
            self.snapshots[number] = stored
        self._register_files(stored)

    def _register_snapshot(self, stored: StoredManifest) -> None:
        self.snapshots[stored.manifest.version] = stored
        self._register_files(stored)

    def _register_composite(self, stored: StoredManifest) -> None:
        version, base = stored.manifest.version, stored.manifest.parent
        if base is None:
            return
        if (base, version) not in self.composites:
            self._bases.setdefault(version, []).append(base)
        self.composites[base, version] = stored
        self._register_files(stored)

    def _register_files(self, stored: StoredManifest) -> None:
        for entry in stored.manifest.files:
            self.damaged.discard(entry.digest)
            self.files[entry.digest] = entry
