"""What was found damaged in the trajectory log, for people: kept in memory and in a file.

What always holds: the file says what of the segments that are there is known to be damaged, and is
not there when nothing is; at most ``MAX_KEPT`` ranges are kept, the others are counted. It is for
people and decides nothing: a disk that refuses it costs the file, not the log.
"""

import contextlib
import threading
from pathlib import Path
from typing import Final

from scheduler.segment_records import Gap
from transport.errors import SizeLimitExceeded, StoreError
from transport.runtime.files import atomic_write, read_limited, store_errors

DAMAGE_FILE: Final = "DAMAGE"
DAMAGE_REMEDY: Final = (
    "check the disk; trainers hear that such bodies are gone, and other groups take their place"
)
MAX_KEPT: Final = 1000
MAX_FILE_BYTES: Final = 256 * MAX_KEPT
MAX_DAMAGE_LINES: Final = 20
"""In one look; the others are in the file."""


class DamageBook:
    """Damaged ranges by segment and start. Any thread may call."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / DAMAGE_FILE
        self._ranges: dict[tuple[int, int], Gap] = {}
        self._new: list[tuple[int, Gap]] = []
        self._lock = threading.RLock()
        self.left_out = 0
        """Ranges that were not kept."""

    def __len__(self) -> int:
        return len(self._ranges)

    @property
    def size_bytes(self) -> int:
        """Of all ranges that are kept."""
        return sum(gap.end - gap.start for _, gap in self.ranges())

    def ranges(self) -> list[tuple[int, Gap]]:
        """Segment number and range, in order."""
        with self._lock:
            return [(number, gap) for (number, _), gap in sorted(self._ranges.items())]

    def note(self, segment: int, gap: Gap) -> None:
        """Something is damaged; said again it is the same."""
        with self._lock:
            if (segment, gap.start) in self._ranges:
                return
            if len(self._ranges) >= MAX_KEPT:
                self.left_out += 1
                return
            self._ranges[segment, gap.start] = gap
            self._new.append((segment, gap))

    def removed(self, segment: int) -> None:
        """The segment is gone, and nobody needed what was in it."""
        with self._lock:
            gone = [key for key in self._ranges if key[0] == segment]
            for key in gone:
                del self._ranges[key]
        if gone:
            self.write()

    def take_new(self) -> list[tuple[int, Gap]]:
        """What was found since the last call."""
        with self._lock:
            new, self._new = self._new, []
        return new

    def write(self) -> None:
        """Bring the file up to date; blocks."""
        with self._lock, contextlib.suppress(StoreError, FileNotFoundError):
            lines = [told(number, gap) for number, gap in self.ranges()]
            if lines:
                atomic_write(self._path, "".join(f"{line}\n" for line in lines).encode())
            else:
                with store_errors("remove", self._path):
                    self._path.unlink(missing_ok=True)


def told(segment: int, gap: Gap) -> str:
    """One range, as a line for people."""
    size_bytes = gap.end - gap.start
    return (
        f"segment-{segment:08d}.log bytes {gap.start} to {gap.end} ({size_bytes} bytes):"
        f" {gap.reason}"
    )


def damage_lines(folder: Path) -> tuple[str, ...]:
    """What the file says, of a log that runs or not; nothing where it cannot be read. Blocks."""
    try:
        text = read_limited(folder / DAMAGE_FILE, MAX_FILE_BYTES).decode(errors="replace")
    except (FileNotFoundError, StoreError, SizeLimitExceeded):
        return ()
    return tuple(text.splitlines())
