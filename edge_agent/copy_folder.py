"""One policy's copy on the disk: base folder, journal of what lies on top, and the state file.

What always holds: the state file is replaced in one step, after everything that it names is
durable; so whatever happens, it names a complete version, the old one or the new one. What it does
not name is left over and removed.
"""

import itertools
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec

from edge_agent.weight_staging import Edge
from transport.errors import IntegrityError, ModelError, StoreError
from transport.messages import VersionRef
from transport.weights.blobs import BlobFolder, disk_errors, write_durably
from transport.weights.delta_file import decode_delta
from transport.weights.digest import full_digest
from transport.weights.folder import (
    check_artefacts,
    link_model_folder,
    remove_unfinished,
    write_model_folder,
)
from transport.weights.manifest import FileEntry, SignedManifest, VersionManifest
from transport.weights.manifest_folder import StoredManifest, read_trusted
from transport.weights.state import WeightArena
from transport.weights.tensors import TensorBytes

STATE_NAME = "state"


class CopyDrifted(IntegrityError):
    """The copy in memory is not what was verified when it was made."""

    code: ClassVar[str] = "integrity.copy"


class _CopyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The state file: base folder's name and manifest, the journal, artefacts in the base."""

    policy: str
    base: str
    base_manifest: SignedManifest
    edges: tuple[Edge, ...]
    artefacts: tuple[FileEntry, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """What is held: version ``ref``; the base folder of an earlier one, and the edges from there.
    ``arena`` has the weights, or is on the way to the next version while one is staged."""

    arena: WeightArena
    ref: VersionRef
    base: Path
    base_manifest: StoredManifest
    edges: tuple[Edge, ...]
    artefacts: tuple[FileEntry, ...]

    @property
    def head(self) -> VersionManifest:
        """Of the held version."""
        return self.edges[-1].manifest if self.edges else self.base_manifest.manifest

    def rescan(self, policy: str, *, threads: int) -> None:
        """Read all weights and compare them with the held version's digests.

        Raises:
            CopyDrifted: they are not what they were.
        """
        found, expected = self.arena.rescan(threads=threads).hex, self.ref.digest
        full = self.head.full_digest
        if found == expected and full is not None:
            found, expected = full_digest(self.arena.tensors, threads=threads), full
        if found != expected:
            raise CopyDrifted(
                f"the copy of {policy} version {self.ref.version} has digest {found[:12]}, "
                f"it was {expected[:12]}"
            )


class CopyFolder:
    """The folder of one policy. ``threads`` help with digests and decoding."""

    def __init__(self, path: Path, policy: str, *, threads: int) -> None:
        """Raises StoreError when the folder cannot be used."""
        self.path = path
        self.policy = policy
        self.blobs = BlobFolder(path / "blobs")
        self._threads = threads

    def load(self, warnings: list[str]) -> Copy | None:
        """What the disk holds, verified; what is damaged goes to ``warnings``. Then the copy is at
        the last intact version, or None: nothing of it can be used.

        Raises:
            StoreError: the disk refused.
        """
        try:
            data = (self.path / STATE_NAME).read_bytes()
            record = msgspec.msgpack.decode(data, type=_CopyRecord)
            manifest = read_trusted(record.base_manifest)
            base = self.path / Path(record.base).name
            check_artefacts(base, record.artefacts)
            arena = WeightArena.from_folder(base, manifest.manifest, threads=self._threads)
        except (OSError, msgspec.DecodeError, IntegrityError, ModelError) as error:
            warnings.append(f"the copy of {self.policy} was damaged and is discarded: {error}")
            return None
        intact: list[Edge] = []
        for edge in record.edges:
            try:
                self._advance(arena, edge)
                intact.append(edge)
            except (IntegrityError, StoreError) as error:
                self.blobs.remove_damaged((edge.file,))
                warnings.append(f"the copy of {self.policy} goes back to {arena.version}: {error}")
                break
        return Copy(arena, arena.ref, base, manifest, tuple(intact), record.artefacts)

    def write(self, copy: Copy) -> None:
        """From now on ``copy`` is what the disk holds. Raises StoreError when the disk refuses."""
        record = _CopyRecord(
            policy=self.policy,
            base=copy.base.name,
            base_manifest=copy.base_manifest.signed,
            edges=copy.edges,
            artefacts=copy.artefacts,
        )
        write_durably(self.path / STATE_NAME, (msgspec.msgpack.encode(record),))

    def clean(self, copy: Copy) -> None:
        """Remove bases that ``copy`` does not stand on. Raises StoreError."""
        with disk_errors(f"cleaning {self.path}"):
            for path in self.path.glob("base-*"):
                if path != copy.base:
                    shutil.rmtree(path)
        remove_unfinished(self.path)

    def linked_base(self, snapshot: StoredManifest, artefacts: Mapping[str, Path]) -> Path:
        """A new base out of verified files, linked, not copied. Raises StoreError."""
        target = self._free_base(snapshot.manifest.version)
        files = {
            entry.name: self.blobs.path(entry.digest)
            for entry in snapshot.manifest.of_kind("snapshot")
        }
        link_model_folder(target, {**files, **artefacts})
        return target

    def written_base(
        self, version: int, tensors: Mapping[str, TensorBytes], artefacts: Mapping[str, bytes]
    ) -> Path:
        """A new base with these contents. Raises StoreError."""
        target = self._free_base(version)
        write_model_folder(target, tensors, artefacts)
        return target

    def remove(self) -> None:
        """Raises StoreError when the disk refuses."""
        with disk_errors(f"removing {self.path}"):
            if self.path.is_dir():
                shutil.rmtree(self.path)

    def _advance(self, arena: WeightArena, edge: Edge) -> None:
        data = self.blobs.data(edge.file.digest)
        decoded = decode_delta(arena, data, edge.manifest, edge.file, threads=self._threads)
        arena.apply(decoded.patch, edge.manifest.version, decoded.digests)

    def _free_base(self, version: int) -> Path:
        names = (self.path / f"base-{version:08d}-{n}" for n in itertools.count())
        return next(path for path in names if not path.exists())
