"""Versions that the weight store may not have yet, on the trainer's disk.

    FOLDER/outbox/highest            the highest version number that was ever given
    FOLDER/outbox/manifests/NUMBER   signed manifest; written last
    FOLDER/outbox/blobs/SHA256       its files
    FOLDER/outbox/again              ``_Again``, the number under which a checkpoint's weights were
                                     published once more after a rollback

What always holds: a version is listed only after its files and its number are durable, so what is
offered once can be offered again, bit for bit, after a crash; a number that was given is never
given again, whatever became of the version.
"""

from collections.abc import Collection
from pathlib import Path

import msgspec
import structlog

from cloud_trainer.core.settings import PendingVersion
from transport.errors import ChecksumMismatch, StoreError, TruncatedBlob
from transport.messages import VersionOffer
from transport.runtime.files import atomic_write, store_errors
from transport.weights.blobs import BlobFolder
from transport.weights.manifest import FileEntry, SignedManifest, VersionManifest
from transport.weights.manifest_folder import ManifestFolder, StoredManifest
from transport.weights.publication import Publication

_log = structlog.get_logger()


class _Again(msgspec.Struct, frozen=True, kw_only=True):
    """The weights of version ``of``, a checkpoint's at ``step``, are those of ``version`` too."""

    of: int
    step: int
    version: int


class Outbox:
    """The versions in ``folder``. Blocks; ``read_chunk`` may be called beside the others."""

    def __init__(self, folder: Path) -> None:
        """Raises StoreError when the folder cannot be used."""
        self._manifests = ManifestFolder(folder / "manifests")
        self._blobs = BlobFolder(folder / "blobs")
        self._highest_path = folder / "highest"
        self._again_path = folder / "again"
        found, problems = self._manifests.load()
        for problem in problems:
            _log.warning("outbox.damaged", reason=problem)
        self._versions = {stored.manifest.version: stored for stored in found}
        self._entries: dict[str, FileEntry] = {}
        self._index()
        self.highest = max([self._read_highest(), *self._versions])
        self._again = self._read_again()

    def add(
        self, publication: Publication, signed: SignedManifest, *, again: bool = False
    ) -> VersionOffer:
        """Make a version durable here; ``again`` says that it is its parent once more.

        Raises:
            StoreError: the disk refused.
        """
        manifest = publication.manifest
        if manifest.version > self.highest:
            atomic_write(self._highest_path, f"{manifest.version}\n".encode())
            self.highest = manifest.version
        for entry in manifest.files:
            self._blobs.put(entry.digest, (publication.files[entry.name],))
        self._manifests.write(manifest.version, signed)
        self._versions[manifest.version] = StoredManifest(manifest, signed)
        self._index()
        if again and manifest.parent is not None:
            known = self._again
            of = known.of if known and known.version == manifest.parent else manifest.parent
            self._note(_Again(of=of, step=manifest.step, version=manifest.version))
        return _offer(signed)

    def newest_number(self, version: int, step: int) -> int:
        """The last number under which the weights of a checkpoint's version were published.

        Raises:
            StoreError: the disk refused.
        """
        known = self._again
        newest = version
        if known and (known.of, known.step) == (version, step) and not self._broken(known.version):
            newest = known.version
        for number in sorted(self._versions):
            # A crash may have come between a version and its note.
            manifest = self._versions[number].manifest
            same = manifest.step == step and manifest.digest == manifest.base_digest
            if manifest.parent == newest and same and not self._broken(number):
                newest = number
                self._note(_Again(of=version, step=step, version=number))
        return newest

    def clear(self) -> None:
        """Remove every version; no number is given again for that.

        Raises:
            StoreError: the disk refused.
        """
        self.keep_only(())
        self._again = None
        with store_errors("remove", self._again_path):
            self._again_path.unlink(missing_ok=True)

    def offer(self, version: int) -> VersionOffer | None:
        """The offer of a version whose files are all here."""
        stored = self._versions.get(version)
        if stored is None or not all(self._blobs.has(e.digest) for e in stored.manifest.files):
            return None
        return _offer(stored.signed)

    def manifest(self, version: int) -> VersionManifest | None:
        stored = self._versions.get(version)
        return None if stored is None else stored.manifest

    def ancestry(self, version: int) -> list[PendingVersion]:
        """The versions on the way to ``version`` that are here, parents first."""
        found: list[PendingVersion] = []
        at: int | None = version
        while at is not None and at in self._versions:
            manifest = self._versions[at].manifest
            found.append(
                PendingVersion(
                    version=at,
                    parent=manifest.parent,
                    step=manifest.step,
                    whole=manifest.parent is None,
                )
            )
            at = manifest.parent
        return found[::-1]

    def keep_only(self, versions: Collection[int]) -> None:
        """Remove every other version and what is left of interrupted ones.

        Raises:
            StoreError: the disk refused.
        """
        for version in [number for number in self._versions if number not in versions]:
            self._manifests.remove(version)
            del self._versions[version]
        self._index()
        self._blobs.sweep(self._entries)

    def remove(self, version: int) -> None:
        """Forget a version; its number stays given.

        Raises:
            StoreError: the disk refused.
        """
        stored = self._versions.pop(version, None)
        if stored is None:
            return
        self._manifests.remove(version)
        self._index()
        for entry in stored.manifest.files:
            if entry.digest not in self._entries:
                self._blobs.remove(entry.digest)

    def chunk_bytes(self, digest: str) -> int | None:
        """Size of a file's chunks, None when it is not here (any more)."""
        entry = self._entries.get(digest)
        return None if entry is None else entry.chunk_bytes

    def read_chunk(self, digest: str, index: int) -> bytes | None:
        """One verified chunk, None when it is not here (any more)."""
        entry = self._entries.get(digest)
        if entry is None:
            return None
        try:
            return self._blobs.read_chunk(entry, index)
        except (TruncatedBlob, ChecksumMismatch, StoreError) as error:
            _log.warning("outbox.chunk_unreadable", file=entry.name, reason=str(error))
            return None

    def _index(self) -> None:
        # Replaced, not changed: ``read_chunk`` runs in another thread.
        self._entries = {
            entry.digest: entry
            for stored in self._versions.values()
            for entry in stored.manifest.files
        }

    def _broken(self, version: int) -> bool:
        """Whether a version is listed, but cannot be offered any more."""
        return version in self._versions and self.offer(version) is None

    def _note(self, again: _Again) -> None:
        atomic_write(self._again_path, msgspec.json.encode(again))
        self._again = again

    def _read_again(self) -> _Again | None:
        try:
            return msgspec.json.decode(self._again_path.read_bytes(), type=_Again)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            # Then the checkpoint's weights get one more number.
            _log.warning("outbox.damaged", reason=f"{self._again_path}: {error}")
            return None

    def _read_highest(self) -> int:
        try:
            return int(self._highest_path.read_text())
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{self._highest_path}: {error}; write the highest version number ever published "
                "into it (the scheduler's status shows it)"
            ) from error


def _offer(signed: SignedManifest) -> VersionOffer:
    return VersionOffer(manifest=signed.manifest, signature=signed.signature, key_id=signed.key_id)
