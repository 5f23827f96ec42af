"""Finished turns of running attempts on disk: one file per attempt, replaced as a whole.

What always holds: a file under its final name is whole and survives a power cut, or it is removed
when the folder is opened; what ``read`` gives has the digest that was asked for. Calls block.

    NAME.turns    "ftns" | u32 summary size | summary (MessagePack) | packed turns
"""

import hashlib
from pathlib import Path
from typing import Final

import msgspec
import structlog

from transport.errors import FarflowError, StoreError
from transport.messages import PartialSummary
from transport.runtime.files import (
    atomic_write,
    private_dir,
    read_limited,
    remove_temporaries,
    store_errors,
)
from transport.summaries import MAX_PARTIAL_BYTES, partial_fault
from transport.trajectory import body_digest

_MAGIC: Final = b"ftns"
_PREFIX_BYTES: Final = 8
_MAX_SUMMARY_BYTES: Final = 1 << 14
_MAX_FILE_BYTES: Final = _PREFIX_BYTES + _MAX_SUMMARY_BYTES + MAX_PARTIAL_BYTES
_SUFFIX: Final = ".turns"

_decoder = msgspec.msgpack.Decoder(PartialSummary)
_log = structlog.get_logger()


class PartialFiles:
    """A folder of them; it belongs to the caller.

    Raises:
        StoreError: the disk refuses.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = private_dir(folder)
        remove_temporaries(self._folder)

    def load(self) -> list[PartialSummary]:
        """What is there, oldest first; what is damaged is removed.

        Raises:
            StoreError: the disk refuses.
        """
        with store_errors("read", self._folder):
            paths = [(path.stat().st_mtime, path) for path in self._folder.glob(f"*{_SUFFIX}")]
        found: list[PartialSummary] = []
        for _, path in sorted(paths):
            try:
                summary = _summary(path)
                if path != self._path(summary.agent, summary.attempt):
                    raise StoreError(f"{path}: holds another attempt's turns")
            except (FarflowError, FileNotFoundError) as error:
                _log.warning("turns.damaged", reason=str(error))
                path.unlink(missing_ok=True)
            else:
                found.append(summary)
        return found

    def write(self, summary: PartialSummary, data: bytes) -> bool:
        """Replace an attempt's turns; false when ``data`` is not what the summary says.

        Raises:
            StoreError: the disk refuses; what was there still is.
        """
        if body_digest(data) != summary.digest:
            return False
        head = msgspec.msgpack.encode(summary)
        sizes = _MAGIC + len(head).to_bytes(4, "little")
        path = self._path(summary.agent, summary.attempt)
        atomic_write(path, b"".join((sizes, head, data)))
        return True

    def read(self, summary: PartialSummary) -> bytes | None:
        """The turns; None when they are not there (any more) or damaged."""
        try:
            data = read_limited(self._path(summary.agent, summary.attempt), _MAX_FILE_BYTES)
        except (FarflowError, FileNotFoundError):
            return None
        turns = data[len(data) - summary.size_bytes :]
        return turns if body_digest(turns) == summary.digest else None

    def remove(self, summary: PartialSummary) -> None:
        """Harmless when others have replaced it.

        Raises:
            StoreError: the disk refuses.
        """
        path = self._path(summary.agent, summary.attempt)
        try:
            if _summary(path).digest == summary.digest:
                with store_errors("remove", path):
                    path.unlink(missing_ok=True)
        except FileNotFoundError:
            return

    def _path(self, agent: str, attempt: str) -> Path:
        name = hashlib.sha256(f"{agent}/{attempt}".encode()).hexdigest()[:40]
        return self._folder / f"{name}{_SUFFIX}"


def _summary(path: Path) -> PartialSummary:
    """Raises StoreError for a file that is none of ours, FileNotFoundError without one."""
    with store_errors("read", path), open(path, "rb") as file:
        prefix = file.read(_PREFIX_BYTES)
        size = int.from_bytes(prefix[4:], "little")
        if prefix[:4] != _MAGIC or size > _MAX_SUMMARY_BYTES:
            raise StoreError(f"{path}: is no file of finished turns")
        try:
            summary = _decoder.decode(file.read(size))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StoreError(f"{path}: {error}") from error
        file_bytes = file.seek(0, 2)
    if partial_fault(summary) or file_bytes != _PREFIX_BYTES + size + summary.size_bytes:
        raise StoreError(f"{path}: is torn or damaged")
    return summary
