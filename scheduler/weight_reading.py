"""A weight store's folder as its readers see it: what is there, and where each file is.

What always holds: nothing in the folder is changed, locked or removed, so that a store that runs
is not disturbed; a version that disappears while it is read is a version that is no longer kept; a
file is found only under the digest of a complete one.

The layout is that of ``scheduler.weight_versions``. Whether the signatures are right is not asked
here (``farflow weights verify`` does).
"""

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from scheduler.weight_policy import change_entry, walk
from transport.errors import IntegrityError, StoreError
from transport.runtime.units import ranges_text
from transport.weights.blobs import BlobFolder, disk_errors
from transport.weights.folder import write_model_folder
from transport.weights.manifest import FileEntry, SignedManifest, VersionManifest
from transport.weights.manifest_folder import StoredManifest, read_trusted
from transport.weights.plan import Leg, Route, cheapest_route
from transport.weights.state import WeightArena

_DIGEST = re.compile(r"[0-9a-f]{64}")

Stamp = tuple[int, int]
"""Time of the last change in nanoseconds and size in bytes: manifests are replaced, not written."""


@dataclass(slots=True)
class PolicyShelf:
    """The versions of one policy by number; ``snapshots`` and ``composites`` are what the store
    made: full weights of a version, and deltas by (base, version). ``problems`` are files that
    are no manifests; ``damaged`` are digests of files that routes shall not use."""

    policy: str
    folder: Path
    versions: dict[int, StoredManifest] = field(default_factory=dict)
    snapshots: dict[int, StoredManifest] = field(default_factory=dict)
    composites: dict[tuple[int, int], StoredManifest] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    damaged: set[str] = field(default_factory=set)

    @property
    def root(self) -> StoredManifest:
        """The first version, or the first that came whole where that is lost; raises StoreError
        when there is none."""
        whole = (n for n, stored in self.versions.items() if stored.manifest.parent is None)
        return self.version(min(whole, default=min(self.versions, default=0)))

    @property
    def head(self) -> StoredManifest:
        """The version with the highest number; raises StoreError when there is none."""
        return self.version(max(self.versions, default=0))

    def version(self, number: int) -> StoredManifest:
        """Raises StoreError when there is no such version."""
        stored = self.versions.get(number)
        if stored is None:
            known = f"0 to {max(self.versions)}" if self.versions else "none"
            raise StoreError(f"{self.policy} has no version {number}; known: {known}")
        return stored

    @property
    def blobs(self) -> BlobFolder:
        """The files, to be read only."""
        return _ReadOnlyBlobs(self.folder / "blobs")

    def blob(self, digest: str) -> Path:
        """Where a complete file is or will be."""
        return self.folder / "blobs" / digest

    def nameless(self) -> list[str]:
        """Digests of complete files where no manifest can be read that would name any."""
        folder = self.folder / "blobs"
        if self.versions or not folder.is_dir():
            return []
        with disk_errors(f"reading {folder}"):
            return sorted(name for name in os.listdir(folder) if _DIGEST.fullmatch(name))

    def has_catalogue(self, made: StoredManifest) -> bool:
        """Whether a catalogue of the store's is still there: a store that runs removes it before
        the file that it describes, so that none there means retention."""
        version, base = made.manifest.version, made.manifest.parent
        if change_entry(made.manifest) is None:
            return (self.folder / "snapshots" / f"{version:08d}").is_file()
        return (self.folder / "composites" / f"{version:08d}-{base:08d}").is_file()

    def present(self, entries: Collection[FileEntry]) -> bool:
        """Whether there are files and all of them are there and not known to be damaged."""
        digests = [entry.digest for entry in entries]
        return bool(digests) and all(
            digest not in self.damaged and self.blob(digest).is_file() for digest in digests
        )

    def snapshot(self, number: int) -> StoredManifest | None:
        """Full weights of a version: the trainer's (first version) or the store's."""
        stored = self.versions.get(number)
        return stored if stored and stored.manifest.parent is None else self.snapshots.get(number)

    def changes_to(self, number: int) -> dict[int, StoredManifest]:
        """By base: the version's own delta and the composites that lead to it, there or not."""
        found = {b: c for (b, version), c in self.composites.items() if version == number}
        stored = self.versions.get(number)
        if stored is not None and stored.manifest.parent is not None:
            found.setdefault(stored.manifest.parent, stored)
        return found

    def legs_to(self, number: int) -> Iterator[Leg]:
        """Ways to a version whose files are there, for ``cheapest_route``."""
        for base, stored in self.changes_to(number).items():
            entry = change_entry(stored.manifest)
            if entry is not None and self.present((entry,)):
                yield Leg(base, number, entry.size_bytes)
        snapshot = self.snapshot(number)
        if snapshot is not None:
            entries = snapshot.manifest.of_kind("snapshot")
            if self.present(entries):
                yield Leg(None, number, sum(entry.size_bytes for entry in entries))

    def route(self, target: int, *, have: int | None = None) -> Route | None:
        """The way of fewest bytes to a version, None when its files are no longer kept."""
        return cheapest_route(self.legs_to, have=have, target=target)

    def hops(self, route: Route) -> list[VersionManifest]:
        """The manifests whose files a route takes, for ``walk``."""
        found: list[VersionManifest] = []
        for leg in route.legs:
            stored = (
                self.snapshot(leg.version)
                if leg.base is None
                else self.changes_to(leg.version).get(leg.base)
            )
            if stored is None:
                raise StoreError(f"{self.policy}: version {leg.version} is no longer kept")
            found.append(stored.manifest)
        return found

    def arena(self, number: int) -> WeightArena:
        """The weights of a version, verified; memory: the model once.

        Raises:
            StoreError: no such version, no longer kept, or damaged.
        """
        self.version(number)
        route = self.route(number)
        if route is None:
            raise StoreError(
                f"{self.policy}: the files of version {number} are no longer kept; those of "
                f"{ranges_text(n for n in self.versions if self.route(n) is not None)} are"
            )
        try:
            return walk(None, self.blobs, self.hops(route))
        except StoreError as error:
            raise StoreError(
                f"{self.policy}: version {number} cannot be rebuilt: {error}; "
                "`farflow weights verify` tells everything that is damaged"
            ) from error

    def export(self, number: int, folder: Path) -> None:
        """Write a version as a new Hugging Face model folder, in one step.

        Raises:
            StoreError: as ``arena``; the folder exists; the disk refused.
        """
        arena = self.arena(number)
        blobs, entries = self.blobs, self.root.manifest.of_kind("artefact")
        for entry in entries:
            if not blobs.verify(entry):
                raise StoreError(f"{self.policy}: {entry.name} is missing or damaged")
        artefacts = {entry.name: blobs.data(entry.digest) for entry in entries}
        write_model_folder(folder, arena.tensors, artefacts)


class _ReadOnlyBlobs(BlobFolder):
    """Opened without making the folder or clearing away what another process is writing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder


class StoreReader:
    """The policies in ``folder``, a weight store's ``versions``. Blocks; belongs to one thread at a
    time. Manifests that were read stay in memory, some kilobytes each."""

    def __init__(self, folder: Path) -> None:
        """Raises StoreError when there is no such folder."""
        if not folder.is_dir():
            raise StoreError(
                f"{folder}: no weight store is there; name the folder of a scheduler, which holds "
                "weight-store/versions"
            )
        self.folder = folder
        self._seen: dict[Path, tuple[Stamp, StoredManifest]] = {}

    def policies(self) -> list[str]:
        """Names of the policies that have a folder; raises StoreError."""
        with disk_errors(f"reading {self.folder}"):
            return sorted(unquote(path.name) for path in self.folder.iterdir() if path.is_dir())

    def shelf(self, policy: str) -> PolicyShelf:
        """What there is of a policy now.

        Raises:
            StoreError: there is no such policy, or the disk refuses.
        """
        policies = self.policies()
        if policy not in policies:
            raise StoreError(f"no policy {policy!r} in {self.folder}; known: {policies}")
        folder = self.folder / quote(policy, safe="").replace(".", "%2E")
        shelf = PolicyShelf(policy, folder)
        for stored in self._manifests(folder / "manifests", shelf.problems):
            shelf.versions[stored.manifest.version] = stored
        for stored in self._manifests(folder / "snapshots", shelf.problems):
            shelf.snapshots[stored.manifest.version] = stored
        for stored in self._manifests(folder / "composites", shelf.problems):
            if stored.manifest.parent is not None:
                shelf.composites[stored.manifest.parent, stored.manifest.version] = stored
        return shelf

    def shelves(self) -> list[PolicyShelf]:
        """All policies that have versions, or files of such; raises StoreError."""
        found = (self.shelf(policy) for policy in self.policies())
        return [shelf for shelf in found if shelf.versions or shelf.problems or shelf.nameless()]

    def file(self, digest: str) -> Path | None:
        """Path of a complete file of any policy, None where there is none (any more)."""
        if not _DIGEST.fullmatch(digest):
            return None
        with disk_errors(f"reading {self.folder}"):
            folders = [path for path in self.folder.iterdir() if path.is_dir()]
        paths = (folder / "blobs" / digest for folder in folders)
        return next((path for path in paths if path.is_file()), None)

    def _manifests(self, folder: Path, problems: list[str]) -> Iterator[StoredManifest]:
        names = self._names(folder)
        for path in [path for path in self._seen if path.parent == folder]:
            if path.name not in names:
                del self._seen[path]
        for name in names:
            path = folder / name
            try:
                status = path.stat()
                stamp = (status.st_mtime_ns, status.st_size)
                seen = self._seen.get(path)
                if seen is None or seen[0] != stamp:
                    signed = msgspec.msgpack.decode(path.read_bytes(), type=SignedManifest)
                    seen = self._seen[path] = (stamp, read_trusted(signed))
                yield seen[1]
            except FileNotFoundError:
                self._seen.pop(path, None)
            except (msgspec.DecodeError, IntegrityError) as error:
                problems.append(f"{path}: {error}")
            except OSError as error:
                raise StoreError(f"reading {path}: {error}") from error

    def _names(self, folder: Path) -> dict[str, None]:
        """Numbered files in order; anything else is still being written."""
        try:
            with os.scandir(folder) as entries:
                names = sorted(e.name for e in entries if e.name.replace("-", "").isdigit())
                return dict.fromkeys(names)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StoreError(f"reading {folder}: {error}") from error
