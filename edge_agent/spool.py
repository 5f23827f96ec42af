"""Finished groups on disk until the trajectory log has them.

What always holds: a body is durable when ``put`` returns; a file under its final name is whole, or
it is thrown away (and reported) when the spool is opened; one that the disk does not give then is
kept for the next start (and reported); entries keep their order over a restart;
the folder never holds more than ``max_bytes`` of bodies; a chunk that is given out is what was put.
Calls block, except those about memory alone (``has``, ``chunk_bytes``, ``offer``), and may come
from several threads.

    SEQUENCE-DIGEST.group    "fsp1" | u32 summary size | summary (MessagePack) | body | SHA-256
                             of all before it; integers little-endian
"""

import hashlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import msgspec

from transport.errors import ChecksumMismatch, IntegrityError, StoreError
from transport.messages import GroupSummary, OfferedBody
from transport.runtime.files import (
    atomic_write,
    fsync_dir,
    read_limited,
    remove_temporaries,
    store_errors,
)
from transport.summaries import MAX_PACKED_BYTES
from transport.trajectory import body_digest
from transport.weights.manifest import chunk_digest

_MAGIC = b"fsp1"
_PREFIX_BYTES = 8
_CHECK_BYTES = 32
_MAX_SUMMARY_BYTES = 1 << 20
_MAX_FILE_BYTES = _PREFIX_BYTES + _MAX_SUMMARY_BYTES + MAX_PACKED_BYTES + _CHECK_BYTES
_SUFFIX = ".group"
_CHUNK_BYTES = 256 << 10
_LARGE_BODY_BYTES = 2 << 20
_LARGE_CHUNK_BYTES = 1 << 20
"""Bodies of more than ``_LARGE_BODY_BYTES`` are cut into chunks of so much."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A body in its file, and its chunks as it was put."""

    path: Path
    offset: int
    size_bytes: int
    chunk_bytes: int
    chunk_digests: tuple[bytes, ...]


class Spool:
    """The spool of one agent. Its folder belongs to one process at a time (the caller locks it)."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Open, or make, the spool in ``folder``; ``discarded`` says what was thrown away or could
        not be read.

        Raises:
            StoreError: the folder cannot be used.
        """
        self.discarded: list[str] = []
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._stored: dict[str, _Stored] = {}
        self._entries: list[GroupSummary] = []
        self._sizes: dict[str, int] = {}
        self._next = 0
        with store_errors("open the spool", folder):
            folder.mkdir(parents=True, exist_ok=True)
            remove_temporaries(folder)
            for path in sorted(folder.glob(f"*{_SUFFIX}")):
                self._load(path)

    def entries(self) -> list[GroupSummary]:
        """What was found when the spool was opened, oldest first."""
        return list(self._entries)

    @property
    def size_bytes(self) -> int:
        """Bytes of all bodies."""
        with self._lock:
            return sum(self._sizes.values())

    def has(self, digest: str) -> bool:
        """Whether a body is stored and was not dropped."""
        with self._lock:
            return digest in self._stored

    def put(self, summary: GroupSummary, body: bytes) -> None:
        """Store a body under its digest; storing it again is harmless.

        Raises:
            StoreError: the spool is full, or the disk refused; nothing is stored.
        """
        digest = summary.digest
        with self._lock:
            if digest in self._sizes:
                return
            used_bytes = sum(self._sizes.values())
            if used_bytes + len(body) > self._max_bytes:
                raise StoreError(
                    f"the spool {self._folder} is full: {used_bytes} of {self._max_bytes} bytes "
                    "wait for the trajectory log; check the link, or raise agent.spool_bytes"
                )
            self._sizes[digest] = len(body)  # reserved before the write: others may be writing too
            path = self._folder / f"{self._next:012d}-{digest}{_SUFFIX}"
            self._next += 1
        head = msgspec.msgpack.encode(summary)
        content = b"".join((_MAGIC, len(head).to_bytes(4, "little"), head, body))
        try:
            atomic_write(path, content + hashlib.sha256(content).digest())
        except (StoreError, FileNotFoundError) as error:
            with self._lock:
                del self._sizes[digest]
            raise StoreError(f"the spool did not take a group: {error}") from error
        with self._lock:
            self._stored[digest] = _stored(path, len(content) - len(body), body)

    def read(self, digest: str) -> bytes:
        """A stored body.

        Raises:
            StoreError: there is none, or the disk refused.
            ChecksumMismatch: the file is damaged.
        """
        with self._lock:
            stored = self._stored.get(digest)
        if stored is None:
            raise StoreError(f"the spool has no body {digest[:12]}")
        try:
            return _parse(stored.path)[1]
        except FileNotFoundError as error:
            raise StoreError(f"{stored.path} was removed by somebody else") from error

    def chunk_bytes(self, digest: str) -> int | None:
        """Size of a body's chunks; None when it is not here (any more)."""
        with self._lock:
            stored = self._stored.get(digest)
        return None if stored is None else stored.chunk_bytes

    def offer(self, summary: GroupSummary) -> OfferedBody | None:
        """How the log is told of a body; None when it is not here (any more)."""
        with self._lock:
            stored = self._stored.get(summary.digest)
        if stored is None:
            return None
        return OfferedBody(
            summary=summary, chunk_bytes=stored.chunk_bytes, chunk_digests=stored.chunk_digests
        )

    def read_chunk(self, digest: str, index: int) -> bytes | None:
        """One chunk of a body; None when there is no such chunk (any more).

        Raises:
            StoreError: the disk refused, or the file is gone.
            ChecksumMismatch: the file is damaged.
        """
        with self._lock:
            stored = self._stored.get(digest)
        if stored is None or not 0 <= index < len(stored.chunk_digests):
            return None
        start = index * stored.chunk_bytes
        size_bytes = min(stored.chunk_bytes, stored.size_bytes - start)
        try:
            with store_errors("read", stored.path), open(stored.path, "rb", buffering=0) as file:
                data = os.pread(file.fileno(), size_bytes, stored.offset + start)
        except FileNotFoundError as error:
            if not self.has(digest):  # dropped meanwhile
                return None
            raise StoreError(f"{stored.path} was removed by somebody else") from error
        if chunk_digest(data) != stored.chunk_digests[index]:
            raise ChecksumMismatch(f"{stored.path}: chunk {index} is damaged")
        return data

    def drop(self, digest: str) -> None:
        """Forget a body; one that is not there is none.

        Raises:
            StoreError: the disk refused.
        """
        with self._lock:
            stored = self._stored.pop(digest, None)
            self._sizes.pop(digest, None)
        if stored is not None:
            with store_errors("remove", stored.path):
                stored.path.unlink(missing_ok=True)
            # A name that comes back after a power cut would only be sent again: no sync needed.

    def _load(self, path: Path) -> None:
        number, _, rest = path.name.partition("-")
        if number.isdigit():
            self._next = max(self._next, int(number) + 1)
        try:
            summary, body = _parse(path)
            if rest != summary.digest + _SUFFIX or body_digest(body) != summary.digest:
                raise ChecksumMismatch(f"{path}: is another body than its name says")
        except (StoreError, IntegrityError, FileNotFoundError) as error:
            if isinstance(error.__cause__, OSError):  # its body may be sound: not ours to delete
                self.discarded.append(f"{error}; it stays there for the next start")
                return
            self.discarded.append(str(error))
            path.unlink(missing_ok=True)
            fsync_dir(self._folder)
            return
        self._entries.append(summary)
        self._stored[summary.digest] = _stored(
            path, path.stat().st_size - _CHECK_BYTES - len(body), body
        )
        self._sizes[summary.digest] = len(body)


def _stored(path: Path, offset: int, body: bytes) -> _Stored:
    chunk_bytes = _CHUNK_BYTES if len(body) <= _LARGE_BODY_BYTES else _LARGE_CHUNK_BYTES
    view = memoryview(body)
    digests = (
        chunk_digest(view[start : start + chunk_bytes])
        for start in range(0, len(body), chunk_bytes)
    )
    return _Stored(path, offset, len(body), chunk_bytes, tuple(digests))


def _parse(path: Path) -> tuple[GroupSummary, bytes]:
    content = read_limited(path, _MAX_FILE_BYTES)
    whole, check = content[:-_CHECK_BYTES], content[-_CHECK_BYTES:]
    if whole[:4] != _MAGIC or hashlib.sha256(whole).digest() != check:
        raise ChecksumMismatch(f"{path}: is torn or damaged")
    size = int.from_bytes(whole[4:_PREFIX_BYTES], "little")
    try:
        head = whole[_PREFIX_BYTES : _PREFIX_BYTES + size]
        summary = msgspec.msgpack.decode(head, type=GroupSummary)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ChecksumMismatch(f"{path}: summary: {error}") from error
    return summary, whole[_PREFIX_BYTES + size :]
