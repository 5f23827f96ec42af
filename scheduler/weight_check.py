"""Checks a weight store's folder: signatures, files, and that every chain gives what was promised.

What always holds: everything that is kept is read and replayed, nothing is changed; a version
whose files were removed by retention is no damage, one that is missing between kept ones is, and so
is a file that the store made and still has a catalogue of: retention removes the catalogue first.

Costs: the model once or twice in memory, and about a pass over it for every version.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from scheduler.weight_policy import change_entry, walk
from scheduler.weight_reading import PolicyShelf
from transport.errors import ChecksumMismatch, FarflowError
from transport.weights.delta_file import decode_delta
from transport.weights.digest import full_digest
from transport.weights.manifest import Signer, VersionManifest, verify
from transport.weights.plan import lineage

if TYPE_CHECKING:
    from transport.weights.state import Undo, WeightArena


MADE: Final = (
    "for files that the store made (composites, snapshots): nothing; while it runs it notices, "
    "and makes them again where they are needed"
)
PUBLISHED: Final = (
    "for files of the trainer: keep the store running; it goes round them over a composite or "
    "snapshot, and writes a snapshot of the newest weights if it has those undamaged in memory; "
    "where nothing leads to what the trainer's next version builds on, it refuses that "
    "(store.parent_lost) and the trainer publishes its weights whole by itself"
)
MANIFESTS: Final = (
    "for manifests: see that signers/ in the folder of keys has the key of every trainer; what a "
    "manifest that is still not believed led to is refused after the store's next start "
    "(store.parent_lost), and the trainer publishes its weights whole by itself; the manifest "
    "comes back only from a backup"
)
ALWAYS: Final = "check the disk; older versions come back only from a backup of {folder}"


class Verdict(msgspec.Struct, kw_only=True):
    """What a check of one policy found. ``replayed`` versions gave their digest, ``not_kept`` have
    no way to them any more; ``damage`` says what is wrong and ``remedies`` what to do, both empty
    for a sound store."""

    policy: str
    versions: int = 0
    replayed: int = 0
    not_kept: int = 0
    snapshots: int = 0
    composites: int = 0
    files: int = 0
    file_bytes: int = 0
    damage: list[str] = []
    remedies: list[str] = []


class StoreCheck:
    """One check of the versions in ``shelf``; ``trusted`` by key id."""

    def __init__(self, shelf: PolicyShelf, trusted: Mapping[str, Signer]) -> None:
        self._shelf = shelf
        self._blobs = shelf.blobs
        self._trusted = trusted
        self._reached: set[int] = set()
        self._verdict = Verdict(policy=shelf.policy, damage=list(shelf.problems))
        self._remedies = {MANIFESTS} if shelf.problems else set[str]()

    def run(self) -> Verdict:
        """Reads everything; may take a while."""
        shelf, verdict = self._shelf, self._verdict
        verdict.versions = len(shelf.versions)
        if shelf.versions:
            self._check_manifests()
            self._check_files()
            self._replay()
            self._check_gaps()
        elif nameless := shelf.nameless():
            self._damaged(
                f"{len(nameless)} files in {shelf.folder / 'blobs'} and no manifest that can be "
                "read names them (harmless only while the very first version is coming in)",
                MANIFESTS,
            )
        if verdict.damage:
            always = ALWAYS.format(folder=shelf.folder)
            known = (MADE, PUBLISHED, MANIFESTS)
            verdict.remedies = [*(text for text in known if text in self._remedies), always]
        return verdict

    def _damaged(self, what: str, remedy: str = "") -> None:
        self._verdict.damage.append(f"{self._shelf.policy}: {what}")
        if remedy:
            self._remedies.add(remedy)

    # ---- one by one ---------------------------------------------------------------------------

    def _check_manifests(self) -> None:
        shelf = self._shelf
        for number, stored in sorted(shelf.versions.items()):
            try:
                manifest = verify(stored.signed, self._trusted)
            except FarflowError as error:
                self._damaged(f"version {number}: {error}", MANIFESTS)
                continue
            if manifest.policy != shelf.policy:
                self._damaged(f"version {number}: is one of {manifest.policy}", MANIFESTS)
        for stored in (*shelf.snapshots.values(), *shelf.composites.values()):
            made = stored.manifest
            of = shelf.versions.get(made.version)
            if of is None or of.manifest.digest != made.digest:
                self._damaged(f"a file made of version {made.version} is of another version", MADE)

    def _check_files(self) -> None:
        shelf = self._shelf
        published = [(entry, s) for s in shelf.versions.values() for entry in s.manifest.files]
        made = [
            (entry, stored)
            for stored in (*shelf.snapshots.values(), *shelf.composites.values())
            for entry in stored.manifest.files
        ]
        seen: set[str] = set()
        for entry, stored in (*published, *made):
            if entry.digest in seen:
                continue
            seen.add(entry.digest)
            ours = not stored.signed.key_id
            remedy = MADE if ours else PUBLISHED
            path = shelf.blob(entry.digest)
            if not self._blobs.has(entry.digest):
                kept = stored is shelf.root and entry.kind == "artefact"
                needed = shelf.has_catalogue(stored) if ours else kept
                if needed:
                    self._damaged(f"{path} ({entry.name}) is missing", remedy)
                continue
            self._verdict.files += 1
            self._verdict.file_bytes += entry.size_bytes
            if not self._blobs.verify(entry):
                shelf.damaged.add(entry.digest)
                self._damaged(f"{path} ({entry.name}) is not what its SHA-256 says", remedy)

    # ---- replay -------------------------------------------------------------------------------

    def _replay(self) -> None:
        shelf = self._shelf
        for number in sorted(shelf.versions):
            snapshot = shelf.snapshot(number)
            if snapshot is not None and shelf.present(snapshot.manifest.of_kind("snapshot")):
                self._verdict.snapshots += 1
                self._start(number, [snapshot.manifest])
        for number in sorted(shelf.versions):
            # What is only reached over composites.
            if number not in self._reached and (route := shelf.route(number)) is not None:
                self._start(number, shelf.hops(route))
        self._verdict.replayed = len(self._reached)

    def _start(self, number: int, hops: Sequence[VersionManifest]) -> None:
        try:
            arena = walk(None, self._blobs, hops)
        except FarflowError as error:
            self._damaged(f"version {number} cannot be rebuilt: {error}", PUBLISHED)
            return
        if number not in self._reached:
            self._reached.add(number)
            self._follow(arena, number, None)

    def _follow(self, arena: "WeightArena", at: int, undo: "list[Undo] | None") -> None:
        """Replay everything that comes after version ``at``, which ``arena`` is. Side branches are
        taken back; the last one is not, unless ``undo`` collects how to."""
        main = set(lineage(self._parents(), max(self._shelf.versions)))
        while True:
            self._check_composites(arena, at)
            following = [
                number
                for number, stored in self._shelf.versions.items()
                if stored.manifest.parent == at
                and number not in self._reached
                and self._shelf.present(stored.manifest.of_kind("delta"))
            ]
            following.sort(key=lambda number: (number in main, number))
            for number in following[:-1]:
                back: list[Undo] = []
                if self._step(arena, number, back):
                    self._follow(arena, number, back)
                for change in reversed(back):
                    arena.undo(change)
            if not following or not self._step(arena, following[-1], undo):
                return
            at = following[-1]

    def _step(self, arena: "WeightArena", number: int, undo: "list[Undo] | None") -> bool:
        manifest = self._shelf.versions[number].manifest
        entry = change_entry(manifest)
        assert entry is not None  # noqa: S101 - asked for before
        try:
            decoded = decode_delta(arena, self._blobs.data(entry.digest), manifest, entry)
            change = arena.apply(decoded.patch, number, decoded.digests)
            if manifest.full_digest is not None and manifest.full_digest != full_digest(
                arena.tensors
            ):
                raise ChecksumMismatch("the full digest is another than the manifest's")
        except FarflowError as error:
            self._shelf.damaged.add(entry.digest)
            self._damaged(
                f"version {number} does not follow from {manifest.parent}: {error}", PUBLISHED
            )
            return False
        if undo is not None:
            undo.append(change)
        self._reached.add(number)
        return True

    def _check_composites(self, arena: "WeightArena", base: int) -> None:
        for (of, number), stored in sorted(self._shelf.composites.items()):
            entry = change_entry(stored.manifest)
            if of != base or entry is None or not self._shelf.present((entry,)):
                continue
            self._verdict.composites += 1
            try:
                decode_delta(arena, self._blobs.data(entry.digest), stored.manifest, entry)
            except FarflowError as error:
                self._shelf.damaged.add(entry.digest)
                self._damaged(f"the composite from {base} to {number}: {error}", MADE)

    def _parents(self) -> dict[int, int | None]:
        return {n: stored.manifest.parent for n, stored in self._shelf.versions.items()}

    # ---- what is missing ----------------------------------------------------------------------

    def _check_gaps(self) -> None:
        """Versions that were not reached: no longer kept, or cut off by what is damaged."""
        shelf = self._shelf
        ends = (min(shelf.versions), max(shelf.versions))
        for number, stored in sorted(shelf.versions.items()):
            if number in self._reached:
                continue
            files, parent = stored.manifest.files, stored.manifest.parent
            missing = [entry.name for entry in files if not self._blobs.has(entry.digest)]
            followed = any(
                later in self._reached or shelf.present(of.manifest.files)
                for later, of in shelf.versions.items()
                if of.manifest.parent == number
            )
            if not missing:
                self._damaged(f"version {number} cannot be rebuilt from what is kept", PUBLISHED)
            elif number in ends or (parent in self._reached and followed):
                self._damaged(f"version {number}: {', '.join(missing)} is missing", PUBLISHED)
            else:
                self._verdict.not_kept += 1
