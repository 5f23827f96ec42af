"""What a trainer did, as JSON lines for people and plots.

    FOLDER/metrics.jsonl      one object a line: ``kind`` (step, version, checkpoint), ``wall_s``,
    FOLDER/metrics.jsonl.1    and facts; the older file is replaced at each rotation

What always holds: at most two files of ``limit_bytes`` (and a line); lines are whole, also after a
crash in the middle of one; losing them loses nothing that a restart needs.
"""

import os
from pathlib import Path
from typing import Any

import msgspec

from transport.runtime.files import store_errors

LIMIT_BYTES = 32 << 20


class MetricsFile:
    """Appends to ``metrics.jsonl`` in ``folder``. Blocks; one call at a time."""

    def __init__(self, folder: Path, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self.path = folder / "metrics.jsonl"
        self._limit_bytes = limit_bytes
        self._mended = False

    def write(self, kind: str, wall_s: float, facts: dict[str, Any]) -> None:
        """Append one line; floats that are not finite become null.

        Raises:
            StoreError: the disk refused.
        """
        line = msgspec.json.encode({"kind": kind, "wall_s": round(wall_s, 3), **facts}) + b"\n"
        with store_errors("write", self.path):
            self._rotate(len(line))
            with self.path.open("ab") as file:
                if not self._mended and file.tell() and not self._ends_whole():
                    file.write(b"\n")
                self._mended = True
                file.write(line)

    def _rotate(self, more_bytes: int) -> None:
        if self.path.exists() and self.path.stat().st_size + more_bytes > self._limit_bytes:
            os.replace(self.path, self.path.with_name(f"{self.path.name}.1"))

    def _ends_whole(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() == b"\n"
