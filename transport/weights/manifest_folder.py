"""Manifests as numbered files, one per version (composites: one per base and version).

What always holds: a file is written in one step and durable when ``write`` returns; what does not
decode when the folder is opened is left alone and reported, never trusted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from transport.errors import IntegrityError, RemoteProtocolError
from transport.messages import PlanStep
from transport.weights.blobs import disk_errors, write_durably
from transport.weights.manifest import FileEntry, SignedManifest, VersionManifest, decode_manifest


@dataclass(frozen=True, slots=True)
class StoredManifest:
    """A manifest as read and as signed."""

    manifest: VersionManifest
    signed: SignedManifest

    def step(self, files: Iterable[FileEntry]) -> PlanStep:
        """This version as a step of a plan that fetches ``files``."""
        return PlanStep(
            manifest=self.signed.manifest,
            signature=self.signed.signature,
            key_id=self.signed.key_id,
            files=tuple(entry.name for entry in files),
        )


def read_trusted(signed: SignedManifest) -> StoredManifest:
    """A manifest whose signature was checked before it was stored.

    Raises:
        IntegrityError: malformed.
    """
    try:
        return StoredManifest(decode_manifest(signed.manifest), signed)
    except RemoteProtocolError as error:
        raise IntegrityError(f"stored manifest is malformed: {error}") from error


class ManifestFolder:
    """Files of MessagePack ``SignedManifest``, named ``NUMBER`` or ``NUMBER-BASE`` (eight digits
    each)."""

    def __init__(self, folder: Path) -> None:
        """Raises StoreError when the folder cannot be made."""
        self.folder = folder
        with disk_errors(f"opening {folder}"):
            folder.mkdir(parents=True, exist_ok=True)

    def _path(self, version: int, base: int | None) -> Path:
        return self.folder / (f"{version:08d}" + ("" if base is None else f"-{base:08d}"))

    def load(self) -> tuple[list[StoredManifest], list[str]]:
        """Manifests by rising number, and what is wrong with files that are none. Removes what
        a crash left half written.

        Raises:
            StoreError: the folder cannot be read.
        """
        found: list[StoredManifest] = []
        problems: list[str] = []
        with disk_errors(f"reading {self.folder}"):
            for path in sorted(self.folder.iterdir()):
                if not path.name.replace("-", "").isdigit():
                    path.unlink()
                    continue
                try:
                    signed = msgspec.msgpack.decode(path.read_bytes(), type=SignedManifest)
                    found.append(read_trusted(signed))
                except (msgspec.DecodeError, IntegrityError) as error:
                    problems.append(f"{path}: {error}")
        return sorted(found, key=lambda stored: stored.manifest.version), problems

    def write(self, version: int, signed: SignedManifest, *, base: int | None = None) -> None:
        """Raises StoreError when the disk refuses."""
        write_durably(self._path(version, base), (msgspec.msgpack.encode(signed),))

    def remove(self, version: int, *, base: int | None = None) -> None:
        """Raises StoreError when the disk refuses."""
        path = self._path(version, base)
        with disk_errors(f"removing {path}"):
            path.unlink(missing_ok=True)
