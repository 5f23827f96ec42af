"""Chunks on a relay's disk, by what they hash to.

    FOLDER/AB/ABCD...     a chunk; the name is its digest in hexadecimal digits

What always holds: what ``read`` gives hashes to its name, whatever the disk did; the chunks on disk
are at most ``max_bytes``, those used least recently go first; nothing here is missed when it is
lost, so nothing is synced; temporary files of an earlier life are removed.
"""

import contextlib
import os
from collections import OrderedDict
from pathlib import Path

import structlog

from transport.errors import StoreError
from transport.runtime.files import store_errors
from transport.weights.manifest import CHUNK_DIGEST_BYTES, chunk_digest

_TEMPORARY = ".tmp"

_log = structlog.get_logger()


class ChunkCache:
    """Blocks; one thread at a time, except ``has``."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Find what an earlier life left.

        Raises:
            StoreError: the folder cannot be used.
        """
        self._folder = folder
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self.used_bytes = 0
        self.damaged = 0
        found: list[tuple[float, bytes, int]] = []
        with store_errors("open", folder):
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob("??/*"):
                digest = _digest_of(path.name)
                if digest is None or not path.is_file():
                    path.unlink(missing_ok=True)
                    continue
                status = path.stat()
                found.append((status.st_mtime, digest, status.st_size))
        for _, digest, size in sorted(found):
            self._sizes[digest] = size
            self.used_bytes += size
        self._make_room(0)

    def __len__(self) -> int:
        return len(self._sizes)

    def has(self, digest: bytes) -> bool:
        return digest in self._sizes

    def read(self, digest: bytes) -> bytes | None:
        """The chunk, verified; None when it is not here, or damaged and thereby removed."""
        if digest not in self._sizes:
            return None
        path = self._path(digest)
        try:
            data = path.read_bytes()
            os.utime(path)  # the order of use outlives us
        except OSError as error:
            _log.warning("cache.not_read", chunk=digest.hex(), reason=str(error))
            data = b""
        if chunk_digest(data) != digest:
            self.damaged += 1
            self._remove(digest)
            return None
        self._sizes.move_to_end(digest)
        return data

    def write(self, digest: bytes, data: bytes) -> None:
        """Keep a verified chunk, if there can be room for it.

        Raises:
            StoreError: the disk refused.
        """
        if digest in self._sizes or len(data) > self._max_bytes:
            return
        self._make_room(len(data))
        path = self._path(digest)
        temporary = path.with_name(path.name + _TEMPORARY)
        try:
            with store_errors("write", path):
                path.parent.mkdir(parents=True, exist_ok=True)  # perhaps somebody made room
                temporary.write_bytes(data)
                os.replace(temporary, path)
        except (StoreError, FileNotFoundError) as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"cannot write {path}: the folder is gone") from error
        self._sizes[digest] = len(data)
        self.used_bytes += len(data)

    def _make_room(self, size_bytes: int) -> None:
        while self._sizes and self.used_bytes + size_bytes > self._max_bytes:
            self._remove(next(iter(self._sizes)))

    def _remove(self, digest: bytes) -> None:
        self.used_bytes -= self._sizes.pop(digest)
        try:
            with store_errors("remove", self._path(digest)):
                self._path(digest).unlink(missing_ok=True)
        except StoreError as error:  # found again at the next start
            _log.warning("cache.not_removed", chunk=digest.hex(), reason=str(error))

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._folder / name[:2] / name


def _digest_of(name: str) -> bytes | None:
    try:
        digest = bytes.fromhex(name)
    except ValueError:
        return None
    return digest if len(digest) == CHUNK_DIGEST_BYTES and digest.hex() == name else None
