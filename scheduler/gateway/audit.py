"""The record of every request that changes something: who, from where, what, how it ended.

What always holds: a line is on the disk before the request is carried out, so that what cannot be
recorded is not done; the record is bounded, and what was in it last stays; what power loss left of
an unfinished line is cut off before the first line of a life, so that no other line is spoilt.

    FOLDER/http-audit.jsonl     and http-audit.jsonl.1 to .3, older

A request has two lines of one ``number``: ``begun``, and ``ended`` with its HTTP status and code.
One that may not be made has the second alone. After a crash the first stands alone: it may have
been carried out. An unfinished line was not on the disk yet, so what it began was not carried out.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec
import structlog

from scheduler.service import Worker
from transport.errors import StoreError
from transport.runtime.clock import Clock
from transport.runtime.files import store_errors

FILE_NAME: Final = "http-audit.jsonl"
MAX_BYTES: Final = 4 * 2**20
KEPT: Final = 3
"""Older files, each of about ``MAX_BYTES``."""
MAX_TAIL_BYTES: Final = 1 << 16
"""Is read at once, and far above any line."""
SHOWN_BYTES: Final = 1000

_log = structlog.get_logger()


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks for what; ``body_sha256`` is empty where no body was read."""

    token: str
    role: str
    address: str
    method: str
    path: str
    body_sha256: str = ""


class AuditLine(Asked, frozen=True, kw_only=True):
    """One line. ``number`` counts the requests of a life of the process, ``life``; ``status`` is
    0 and ``code`` empty while they are not known. ``time_s`` is since 1970."""

    time_s: float
    life: int
    number: int
    what: Literal["begun", "ended"]
    status: int = 0
    code: str = ""


class Audit:
    """Appends to the record; ``life`` is the process's number."""

    def __init__(self, folder: Path, life: int, clock: Clock) -> None:
        self._path = folder / FILE_NAME
        self._life = life
        self._clock = clock
        self._number = 0
        self._mended = False
        self._worker = Worker("http-audit")

    async def begin(self, asked: Asked) -> AuditLine:
        """Record that a request is about to be carried out, durably.

        Raises:
            StoreError: the disk refuses.
        """
        line = self._line("begun", asked)
        await self._worker.run(self._append, line, True)
        return line

    async def refused(self, asked: Asked, status: int, code: str) -> None:
        """Record a request that may not be made; raises as ``begin``."""
        line = self._line("ended", asked)
        line = msgspec.structs.replace(line, status=status, code=code)
        await self._worker.run(self._append, line, False)

    async def end(self, begun: AuditLine, status: int, code: str) -> None:
        """Record how it ended; raises as ``begin``."""
        line = msgspec.structs.replace(
            begun, what="ended", time_s=self._clock.wall_s(), status=status, code=code
        )
        await self._worker.run(self._append, line, False)

    def close(self) -> None:
        """Wait for what is being written."""
        self._worker.close()

    def _line(self, what: Literal["begun", "ended"], asked: Asked) -> AuditLine:
        self._number += 1
        return AuditLine(
            **msgspec.structs.asdict(asked),
            time_s=self._clock.wall_s(),
            life=self._life,
            number=self._number,
            what=what,
        )

    def _append(self, line: AuditLine, durably: bool) -> None:
        data = msgspec.json.encode(line) + b"\n"
        try:
            with store_errors("write", self._path):
                with self._opened() as descriptor:
                    if not self._mended:
                        _cut_unfinished(descriptor, self._path)
                        self._mended = True
                    full = os.fstat(descriptor).st_size > MAX_BYTES
                if full:
                    self._rotate()
                with self._opened() as descriptor:
                    size_bytes = os.fstat(descriptor).st_size
                    if os.write(descriptor, data) < len(data):
                        os.ftruncate(descriptor, size_bytes)  # the next line would be part of it
                        raise StoreError(f"cannot write {self._path}: the disk is full; free space")
                    if durably:
                        os.fsync(descriptor)
        except FileNotFoundError as error:
            raise StoreError(f"no folder {self._path.parent} for the record") from error

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _rotate(self) -> None:
        for number in range(KEPT, 1, -1):
            older = self._path.with_name(f"{FILE_NAME}.{number - 1}")
            if older.exists():
                os.replace(older, self._path.with_name(f"{FILE_NAME}.{number}"))
        os.replace(self._path, self._path.with_name(f"{FILE_NAME}.1"))


def _cut_unfinished(descriptor: int, path: Path) -> None:
    """End a record behind its last whole line. What is cut off goes to the log."""
    size_bytes = whole = os.fstat(descriptor).st_size
    cut = b""
    while whole:
        start = max(0, whole - MAX_TAIL_BYTES)
        tail = os.pread(descriptor, whole - start, start)
        end = tail.rfind(b"\n") + 1
        cut, whole = tail[end:], start + end
        if end:
            break
    if whole == size_bytes:
        return
    text = repr(cut.rstrip(b"\0")[:SHOWN_BYTES])
    _log.warning("http.record_cut", path=str(path), bytes=size_bytes - whole, text=text)
    os.ftruncate(descriptor, whole)
    os.fsync(descriptor)
