"""Finished groups on disk until the trajectory log has them.

What always holds: a body is durable when ``put`` returns; a file under its final name is whole, or
it is thrown away (and reported) when the spool is opened; entries keep their order over a restart;
the folder never holds more than ``max_bytes`` of bodies. Calls block and may come from several
threads.

    SEQUENCE-DIGEST.group    "fsp1" | u32 summary size | summary (MessagePack) | body | SHA-256
                             of all before it; integers little-endian
"""

import hashlib
import threading
from pathlib import Path

import msgspec

from transport.errors import ChecksumMismatch, StoreError
from transport.messages import GroupSummary
from transport.runtime.files import (
    atomic_write,
    fsync_dir,
    read_limited,
    remove_temporaries,
    store_errors,
)
from transport.trajectory import MAX_PACKED_BYTES, body_digest

_MAGIC = b"fsp1"
_PREFIX_BYTES = 8
_CHECK_BYTES = 32
_MAX_SUMMARY_BYTES = 1 << 20
_MAX_FILE_BYTES = _PREFIX_BYTES + _MAX_SUMMARY_BYTES + MAX_PACKED_BYTES + _CHECK_BYTES
_SUFFIX = ".group"


class Spool:
    """The spool of one agent. Its folder belongs to one process at a time (the caller locks it)."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Open, or make, the spool in ``folder``; ``discarded`` says what was thrown away.

        Raises:
            StoreError: the folder cannot be used.
        """
        self.discarded: list[str] = []
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._paths: dict[str, Path] = {}
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
            return digest in self._paths

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
            self._paths[digest] = path

    def read(self, digest: str) -> bytes:
        """A stored body.

        Raises:
            StoreError: there is none, or the disk refused.
            ChecksumMismatch: the file is damaged.
        """
        with self._lock:
            path = self._paths.get(digest)
        if path is None:
            raise StoreError(f"the spool has no body {digest[:12]}")
        try:
            return _parse(path)[1]
        except FileNotFoundError as error:
            raise StoreError(f"{path} was removed by somebody else") from error

    def drop(self, digest: str) -> None:
        """Forget a body; one that is not there is none.

        Raises:
            StoreError: the disk refused.
        """
        with self._lock:
            path = self._paths.pop(digest, None)
            self._sizes.pop(digest, None)
        if path is not None:
            with store_errors("remove", path):
                path.unlink(missing_ok=True)
            # A name that comes back after a power cut would only be sent again: no sync needed.

    def _load(self, path: Path) -> None:
        number, _, rest = path.name.partition("-")
        try:
            summary, body = _parse(path)
            if rest != summary.digest + _SUFFIX or body_digest(body) != summary.digest:
                raise ChecksumMismatch(f"{path}: is another body than its name says")
        except (StoreError, ChecksumMismatch, FileNotFoundError) as error:
            self.discarded.append(str(error))
            path.unlink(missing_ok=True)
            fsync_dir(self._folder)
            return
        self._entries.append(summary)
        self._paths[summary.digest] = path
        self._sizes[summary.digest] = len(body)
        if number.isdigit():
            self._next = max(self._next, int(number) + 1)


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
