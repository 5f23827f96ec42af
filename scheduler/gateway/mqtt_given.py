"""Which signed commands were taken, over restarts of the gateway.

What always holds: that a command is about to be carried out is on the disk before it is; what
cannot be written down, or read back, is not carried out; the file is bounded by what has not
expired.

    FOLDER/gateway/mqtt-commands.jsonl      [expires, token, topic, id], a line each

What has expired is forgotten, with one line of no token to say up to which expiry that was done:
nothing that expires by then may be taken, whatever the wall clock says later.

A line that power loss tore was not on the disk yet, so its command was not carried out.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import structlog

from scheduler.service import Worker
from transport.errors import FarflowError, StoreError
from transport.runtime.files import atomic_write, read_limited, store_errors

FILE_NAME: Final = "mqtt-commands.jsonl"
MAX_BYTES: Final = 16 * 2**20
"""Several times what as many commands take as are remembered."""
COMPACT_LINES: Final = 8192

Key = tuple[str, str, str]
"""Token, topic and id."""

_FORGOTTEN: Final[Key] = ("", "", "")
"""In place of a command in the line that says what was forgotten."""

_Line = tuple[float, str, str, str]
_log = structlog.get_logger()


class GivenCommands:
    """The file of one folder; one process at a time."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._worker = Worker("mqtt-commands")
        self._lines = 0
        self._trouble: FarflowError | None = None
        self._forgotten = 0.0

    @property
    def forgotten(self) -> float:
        """Up to which expiry commands may have been forgotten: none of those may be taken. It is
        five minutes ahead of a right clock at most, after one that was wrong for a while."""
        return self._forgotten

    def unexpired(self, found: Mapping[Key, float], wall_s: float) -> dict[Key, float]:
        """What of ``found`` has not expired. The rest may be forgotten, which is remembered."""
        gone = [expires for expires in found.values() if expires <= wall_s]
        self._forgotten = max(self._forgotten, *gone, 0.0)
        return {key: expires for key, expires in found.items() if expires > wall_s}

    def load(self, wall_s: float) -> dict[Key, float]:
        """What earlier lives took and has not expired, with when it does. Blocks. Where it cannot
        be read, nothing is taken before the file was looked after: ``add`` says so."""
        try:
            found = self.unexpired(self._read(), wall_s)
            self._write(found)
        except FarflowError as error:
            self._trouble = error
            _log.error("mqtt.commands_unreadable", reason=str(error))
            return {}
        return found

    async def add(self, key: Key, expires: float, given: Mapping[Key, float]) -> None:
        """Write down that a command is being carried out; ``given`` is all that has not expired,
        which the file is written anew with now and then.

        Raises:
            StoreError: it is not on the disk.
        """
        if self._trouble is not None:
            raise StoreError(f"which commands were taken is not known: {self._trouble}")
        if self._lines >= COMPACT_LINES:
            await self._worker.run(self._write, {**given, key: expires})
        else:
            await self._worker.run(self._append, key, expires)

    def close(self) -> None:
        """Wait for what is being written."""
        self._worker.close()

    def _read(self) -> dict[Key, float]:
        found: dict[Key, float] = {}
        try:
            data = read_limited(self._path, MAX_BYTES)
        except FileNotFoundError:
            return found
        for line in data.split(b"\n"):
            try:
                expires, *key = msgspec.json.decode(line, type=_Line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue  # torn, or the nothing behind the last
            found[(key[0], key[1], key[2])] = expires
        self._forgotten = found.pop(_FORGOTTEN, 0.0)
        return found

    def _write(self, found: Mapping[Key, float]) -> None:
        kept = {_FORGOTTEN: self._forgotten, **found} if self._forgotten else found
        lines = [msgspec.json.encode((expires, *key)) + b"\n" for key, expires in kept.items()]
        try:
            atomic_write(self._path, b"".join(lines), mode=0o600)
        except FileNotFoundError as error:
            raise _no_folder(self._path) from error
        self._lines = len(lines)

    def _append(self, key: Key, expires: float) -> None:
        # The line before may be torn: an empty one costs nothing.
        data = b"\n" + msgspec.json.encode((expires, *key)) + b"\n"
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with store_errors("write", self._path):
                descriptor = os.open(self._path, flags)
                try:
                    if os.write(descriptor, data) < len(data):
                        raise StoreError(f"cannot write {self._path}: the disk is full; free space")
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        except FileNotFoundError as error:
            raise _no_folder(self._path) from error
        self._lines += 1


def _no_folder(path: Path) -> StoreError:
    return StoreError(f"{path}: is gone; start the scheduler again")
