"""Hash-addressed files in one folder, written chunk by chunk and resumable.

What always holds: a file under its digest is complete, was verified against that digest and was
made durable (data synced, renamed, folder synced) before the name existed; a file that is still
coming in has the suffix ``.part`` and each of its chunks is believed only after hashing it again;
other temporary files are removed at the start.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from transport.errors import ChecksumMismatch, StoreError, TruncatedBlob
from transport.weights.manifest import FileEntry, FileKind, describe_file
from transport.weights.tensors import Buffer, file_bytes

_PART, _TEMPORARY = ".part", ".tmp"
_HASH_BYTES = 1 << 22


@contextlib.contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Translate ``OSError`` (disk full, read-only, no permission) into ``StoreError``."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{doing}: {error}") from error


def sync_folder(folder: Path) -> None:
    """Make renames in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, parts: Iterable[Buffer]) -> None:
    """Replace ``path`` in one step: it has the old or the new contents, whatever happens.

    Raises:
        StoreError: the disk refused.
    """
    temporary = path.with_name(path.name + _TEMPORARY)
    with disk_errors(f"writing {path}"):
        with open(temporary, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)


def link_or_copy(source: Path, target: Path) -> None:
    """A second name for a file that nobody writes, or a copy where the disk has no links. Durable
    once the target's folder is synced. Raises OSError."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        with open(target, "rb") as file:
            os.fsync(file.fileno())


class BlobFolder:
    """Files by SHA-256 digest. Callers pass digests from checked manifests only."""

    def __init__(self, folder: Path) -> None:
        """Raises StoreError when the folder cannot be made or listed."""
        self.folder = folder
        with disk_errors(f"opening {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob(f"*{_TEMPORARY}"):
                path.unlink()

    def path(self, digest: str) -> Path:
        """Where the complete file is or will be."""
        return self.folder / digest

    def _part(self, digest: str) -> Path:
        return self.folder / (digest + _PART)

    def has(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def data(self, digest: str) -> Buffer:
        """Contents, mapped: our files are never written in place.

        Raises:
            StoreError: no such file, or the disk refused.
        """
        with disk_errors(f"reading {self.path(digest)}"):
            return file_bytes(self.path(digest), mapped=True)

    def put(self, digest: str, parts: Iterable[Buffer]) -> Path:
        """Store a whole file; ``parts`` must hash to ``digest``.

        Raises:
            ChecksumMismatch: they do not; nothing is stored.
            StoreError: the disk refused.
        """
        pieces = list(parts)
        state = hashlib.sha256()
        for piece in pieces:
            state.update(piece)
        if state.hexdigest() != digest:
            raise ChecksumMismatch(f"contents for {digest[:12]} have digest {state.hexdigest()}")
        if not self.has(digest):
            write_durably(self.path(digest), pieces)
        return self.path(digest)

    def store(
        self, name: str, kind: FileKind, parts: Iterable[Buffer], *, chunk_bytes: int | None = None
    ) -> FileEntry:
        """Store a file whose digest is not known yet, without holding it in memory.

        Raises:
            StoreError: the disk refused.
        """
        temporary = self.folder / f"{name}{_TEMPORARY}"
        write_durably(temporary, parts)
        with disk_errors(f"storing {name} in {self.folder}"):
            data = file_bytes(temporary, mapped=True)
            entry = describe_file(name, kind, data, chunk_bytes=chunk_bytes)
            os.replace(temporary, self.path(entry.digest))
            sync_folder(self.folder)
        return entry

    def present(self, entry: FileEntry) -> frozenset[int]:
        """Chunks on disk that are what the entry says; hashes what an earlier process left."""
        every = range(len(entry.chunk_digests))
        if self.has(entry.digest):
            return frozenset(every)
        try:
            with open(self._part(entry.digest), "rb") as file:
                found = ((index, file.read(entry.chunk_bytes)) for index in every)
                return frozenset(index for index, data in found if entry.chunk_matches(index, data))
        except OSError:
            return frozenset()

    def open_incoming(self, entry: FileEntry) -> BinaryIO:
        """A file to read while it comes in, or when it is there. What is read was verified for
        chunks that are ``present`` or were written by ``write_chunk``; it stays readable while the
        file is completed or removed.

        Raises:
            StoreError: nothing of it is there.
        """
        with disk_errors(f"opening {self.path(entry.digest)}"):
            try:
                return open(self._part(entry.digest), "rb")
            except FileNotFoundError:
                return open(self.path(entry.digest), "rb")

    def write_chunk(self, entry: FileEntry, index: int, data: Buffer) -> None:
        """Write a verified chunk at its place. Not durable until ``complete``.

        Raises:
            StoreError: the disk refused.
        """
        part = self._part(entry.digest)
        with disk_errors(f"writing {part}"):
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                view = memoryview(data)
                offset = index * entry.chunk_bytes
                while view:  # a full disk or a signal can cut a write short
                    written = os.pwrite(descriptor, view, offset)
                    view, offset = view[written:], offset + written
            finally:
                os.close(descriptor)

    def complete(self, entry: FileEntry) -> Path:
        """Verify, make durable and name a file whose chunks are all written.

        Raises:
            TruncatedBlob, ChecksumMismatch: it is not what the entry says; the part is removed.
            StoreError: the disk refused; call again.
        """
        target, part = self.path(entry.digest), self._part(entry.digest)
        if self.has(entry.digest):
            return target
        with disk_errors(f"completing {target}"):
            if entry.size_bytes == 0:
                part.touch()
            with open(part, "rb+") as file:
                size = os.fstat(file.fileno()).st_size
                matches = size == entry.size_bytes and _hash_file(file.fileno()) == entry.digest
                os.fsync(file.fileno())
            if not matches:
                part.unlink()
                if size < entry.size_bytes:
                    raise TruncatedBlob(f"{entry.name}: {size} of {entry.size_bytes} bytes on disk")
                raise ChecksumMismatch(f"{entry.name}: SHA-256 is not the one in the manifest")
            os.replace(part, target)
            sync_folder(self.folder)
        return target

    def verify(self, entry: FileEntry) -> bool:
        """Whether the file on disk still is what the entry says; reads all of it."""
        try:
            with open(self.path(entry.digest), "rb") as file:
                return (
                    os.fstat(file.fileno()).st_size == entry.size_bytes
                    and _hash_file(file.fileno()) == entry.digest
                )
        except OSError:
            return False

    def read_chunk(self, entry: FileEntry, index: int) -> bytes:
        """One chunk of a complete file, checked against its digest.

        Raises:
            TruncatedBlob: no such chunk.
            ChecksumMismatch: the disk gives other bytes than were stored.
            StoreError: no such file, or the disk refused.
        """
        if not 0 <= index < len(entry.chunk_digests):
            raise TruncatedBlob(f"{entry.name} has {len(entry.chunk_digests)} chunks, no {index}")
        path = self.path(entry.digest)
        with disk_errors(f"reading {path}"), open(path, "rb") as file:
            data = os.pread(file.fileno(), entry.chunk_size_bytes(index), index * entry.chunk_bytes)
        if not entry.chunk_matches(index, data):
            raise ChecksumMismatch(f"chunk {index} of {entry.name} is damaged on disk")
        return data

    def remove(self, digest: str) -> None:
        """Forget a file and what came in of it. Open and mapped copies stay readable."""
        with disk_errors(f"removing {self.path(digest)}"):
            self.path(digest).unlink(missing_ok=True)
            self._part(digest).unlink(missing_ok=True)

    def remove_damaged(self, entries: Iterable[FileEntry]) -> None:
        """Forget those files that are no longer what their entries say; reads all of them."""
        for entry in entries:
            if self.has(entry.digest) and not self.verify(entry):
                self.remove(entry.digest)

    def sweep(self, keep: Collection[str]) -> int:
        """Remove every file, complete or not, whose digest is not in ``keep``; returns how many."""
        removed = 0
        with disk_errors(f"sweeping {self.folder}"):
            for path in self.folder.iterdir():
                if path.name.removesuffix(_PART) not in keep:
                    path.unlink(missing_ok=True)
                    removed += 1
        return removed


def _hash_file(descriptor: int) -> str:
    state = hashlib.sha256()
    os.lseek(descriptor, 0, os.SEEK_SET)
    while data := os.read(descriptor, _HASH_BYTES):
        state.update(data)
    return state.hexdigest()
