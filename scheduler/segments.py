"""Bodies of trajectories on disk: append-only segments, rebuilt by scanning after any death.

What always holds:

1. A body that ``append`` called stored survives a power cut: the segment was synced first. One
   sync covers a whole batch.
2. A segment is synced before the next one is begun, so only the last can have a torn end; that end
   was never called stored and is cut off when the folder is opened. Damage elsewhere costs the
   records that it touches and no others; ``damage`` says where it is, and the file ``DAMAGE`` in
   the folder, for people, until the segment goes.
3. Marks (where records begin, accepted by the scheduler, released) are in a file beside each
   segment and go with it. Released marks are synced before ``release`` returns; the others are
   not: a lost one costs one more announcement, or a record behind damage.
4. A segment goes when all its bodies are released. Segment numbers are not used again while the
   folder lives.
5. At most ``disk_bytes`` of segments: what does not fit is refused, not half-written.
6. A body that comes again lately after its release is a duplicate, which nobody needs. While the
   store is open the last ones are known; over an opening, those whose segment is still there.

What is in the files: ``scheduler.segment_records``.

``append``, ``accept`` and ``release`` block and are called by one thread at a time; ``read`` by
any.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256
from pathlib import Path
from typing import Final

from scheduler.lately_released import LatelyReleased
from scheduler.segment_damage import DamageBook
from scheduler.segment_records import (
    ACCEPTED,
    HEAD_BYTES,
    MARKED,
    RELEASED,
    STARTS,
    Gap,
    Marks,
    Record,
    encode_mark,
    encode_record,
    read_marks,
    scan,
)
from transport.errors import StoreError
from transport.messages import GroupSummary
from transport.runtime.files import fsync_dir, private_dir, store_errors
from transport.summaries import MAX_SUMMARY_BYTES

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NAME: Final = re.compile(r"segment-(\d{8})\.log")


class Outcome(Enum):
    """What became of a body."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    FULL = "full"


@dataclass(slots=True)
class _Body:
    segment: int
    start: int  # of the record
    offset: int
    size_bytes: int
    summary: GroupSummary
    accepted: bool = False


@dataclass(slots=True)
class _Segment:
    number: int
    size_bytes: int = 0
    live: set[str] = field(default_factory=set)


class BodyStore:
    """Bodies by digest in one folder."""

    def __init__(self, folder: Path, *, segment_bytes: int, disk_bytes: int) -> None:
        """Rebuild the index. The folder, made if need be, belongs to the caller.

        Raises:
            StoreError: the disk refuses.
        """
        self._folder = private_dir(folder)
        self._segment_bytes = segment_bytes
        self._disk_bytes = disk_bytes
        self._bodies: dict[str, _Body] = {}
        self._segments: dict[int, _Segment] = {}
        self._last: _Segment | None = None
        self._file: int | None = None  # of the last segment
        self._sealed: list[_Segment] = []  # within the present batch
        self._highest_number = 0
        self._released = LatelyReleased()
        self.size_bytes = 0
        """Of all segments, released bodies included."""
        self.torn_bytes = 0
        """Cut off the last segment when the folder was opened."""
        self.damage = DamageBook(self._folder)
        """What is not as it was written, found when the folder was opened or a body was read."""
        self._load()

    def __len__(self) -> int:
        return len(self._bodies)

    def settled(self, digest: str) -> bool:
        """Whether nothing is to be stored: the body is there, or was lately released."""
        return digest in self._bodies or digest in self._released

    def fits(self, body_bytes: int) -> bool:
        """Whether there is room for a body of that size, with the largest summary; a guess for
        other threads than the writing one."""
        record_bytes = HEAD_BYTES + MAX_SUMMARY_BYTES + body_bytes
        return self.size_bytes + record_bytes <= self._disk_bytes

    def unaccepted(self) -> list[GroupSummary]:
        """Stored, and not known to be in the scheduler's own store, oldest first. For the start:
        not while another thread changes the store."""
        return [body.summary for body in self._bodies.values() if not body.accepted]

    def append(self, batch: Sequence[tuple[GroupSummary, bytes]]) -> list[Outcome]:
        """Store bodies; STORED and DUPLICATE ones are durable when this returns.

        Raises:
            StoreError: the disk refuses in a way that space would not cure; nothing of the batch
                counts as stored.
        """
        outcomes = []
        staged: dict[str, _Body] = {}
        for summary, body in batch:
            if self.settled(summary.digest) or summary.digest in staged:
                outcomes.append(Outcome.DUPLICATE)
                continue
            written = self._write(summary, body)
            if written is not None:
                staged[summary.digest] = written
            outcomes.append(Outcome.FULL if written is None else Outcome.STORED)
        if staged:
            self._sync_last()
            self._mark_starts(staged.values())
        # Known only now: nobody may hear of a body that a power cut could still take away.
        for digest, written in staged.items():
            self._bodies[digest] = written
            self._segments[written.segment].live.add(digest)
        for segment in self._sealed:
            if not segment.live:
                self._remove(segment)
        self._sealed.clear()
        return outcomes

    def read(self, digest: str) -> bytes | None:
        """The body, checked against its digest; None when it is not there (any more) or damaged."""
        body = self._bodies.get(digest)
        if body is None:
            return None
        try:
            with open(self._path(body.segment), "rb", buffering=0) as file:
                data = os.pread(file.fileno(), body.size_bytes, body.offset)
        except OSError:
            return None
        if sha256(data).hexdigest() == digest:
            return data
        if self._bodies.get(digest) is body:  # not released, and its file removed, meanwhile
            end = body.offset + body.size_bytes
            self.damage.note(body.segment, Gap(body.start, end, "a body with another digest"))
        return None

    def accept(self, digests: Sequence[str]) -> None:
        """The scheduler has these summaries. Unknown digests are ignored."""
        marks: dict[int, list[int]] = {}
        for digest in digests:
            body = self._bodies.get(digest)
            if body is not None and not body.accepted:
                body.accepted = True
                marks.setdefault(body.segment, []).append(body.offset)
        for number, offsets in marks.items():
            self._mark(number, ACCEPTED, offsets, sync=False)

    def release(self, digests: Sequence[str]) -> list[str]:
        """Nobody needs these any more. Returns those that are gone for good, which unknown ones
        are as well; a full disk may leave some to be released again.

        Raises:
            StoreError: the disk refuses in a way that space would not cure.
        """
        by_segment: dict[int, list[str]] = {}
        for digest in dict.fromkeys(digests):
            body = self._bodies.get(digest)
            if body is not None:
                by_segment.setdefault(body.segment, []).append(digest)
        kept: set[str] = set()
        for number, released in by_segment.items():
            segment = self._segments[number]
            dies = segment is not self._last and segment.live <= set(released)
            offsets = [self._bodies[digest].offset for digest in released]
            if not dies and not self._mark(number, RELEASED, offsets, sync=True):
                kept.update(released)
                continue
            segment.live.difference_update(released)
            for digest in released:
                del self._bodies[digest]
            if dies:
                self._remove(segment)
        gone = [digest for digest in digests if digest not in kept]
        self._released.add(gone)
        return gone

    def close(self) -> None:
        """Close the last segment; idempotent."""
        self._close_last()

    # ---- writing ------------------------------------------------------------------------------

    def _write(self, summary: GroupSummary, body: bytes) -> _Body | None:
        """Append one record, unsynced; None when there is no room for it."""
        head = encode_record(summary, body)
        record_bytes = len(head) + len(body)
        if self.size_bytes + record_bytes > self._disk_bytes:
            return None
        try:
            segment, file = self._writable_segment()
            self._write_at(file, segment, head, body)
        except StoreError as error:
            if _is_full(error):
                return None
            raise
        start = segment.size_bytes
        segment.size_bytes += record_bytes
        self.size_bytes += record_bytes
        return _Body(segment.number, start, start + len(head), len(body), summary)

    def _write_at(self, file: int, segment: _Segment, head: bytes, body: bytes) -> None:
        with store_errors("write", self._path(segment.number)):
            try:
                offset = segment.size_bytes
                for part in (head, body):
                    view = memoryview(part)
                    while view:  # a full disk takes a part before it refuses
                        written = os.pwrite(file, view, offset)
                        view, offset = view[written:], offset + written
            except OSError:
                os.ftruncate(file, segment.size_bytes)
                raise

    def _writable_segment(self) -> tuple[_Segment, int]:
        if self._last is not None and self._last.size_bytes >= self._segment_bytes:
            self._seal()
        if self._last is not None and self._file is not None:
            return self._last, self._file
        number = self._highest_number + 1
        path = self._path(number)
        with store_errors("create", path):
            self._marks_path(number).unlink(missing_ok=True)  # of one that died being removed
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fsync_dir(self._folder)
        self._highest_number = number
        self._last = self._segments[number] = _Segment(number)
        self._mark(number, MARKED, [0], sync=True)
        return self._last, self._file

    def _seal(self) -> None:
        """No more records for the last segment."""
        self._sync_last()
        self._close_last()
        if self._last is not None:
            self._sealed.append(self._last)
            self._last = None

    def _sync_last(self) -> None:
        if self._file is not None and self._last is not None:
            with store_errors("sync", self._path(self._last.number)):
                os.fsync(self._file)

    def _close_last(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _mark_starts(self, written: Iterable[_Body]) -> None:
        """Of records that are synced. What fails here is only missed after damage."""
        starts: dict[int, list[int]] = {}
        for body in written:
            starts.setdefault(body.segment, []).append(body.start)
        for number, offsets in starts.items():
            with contextlib.suppress(StoreError):
                self._mark(number, STARTS, offsets, sync=False)

    def _mark(self, number: int, kind: bytes, offsets: Sequence[int], *, sync: bool) -> bool:
        """Append marks to a segment's file; False when the disk is full."""
        data = b"".join(encode_mark(kind, offset) for offset in offsets)
        path = self._marks_path(number)
        try:
            with store_errors("write", path), open(path, "ab", buffering=0) as file:
                before = file.tell()
                if file.write(data) != len(data):
                    file.truncate(before)
                    return False
                if sync:
                    os.fsync(file.fileno())
        except StoreError as error:
            if _is_full(error):
                return False
            raise
        if sync and before == 0:
            fsync_dir(self._folder)
        return True

    def _remove(self, segment: _Segment) -> None:
        with store_errors("remove", self._path(segment.number)):
            self._path(segment.number).unlink(missing_ok=True)
            self._marks_path(segment.number).unlink(missing_ok=True)
        fsync_dir(self._folder)
        del self._segments[segment.number]
        self.size_bytes -= segment.size_bytes
        self.damage.removed(segment.number)

    def _path(self, number: int) -> Path:
        return self._folder / f"segment-{number:08d}.log"

    def _marks_path(self, number: int) -> Path:
        return self._folder / f"segment-{number:08d}.marks"

    # ---- opening ------------------------------------------------------------------------------

    def _load(self) -> None:
        with store_errors("read", self._folder):
            names = sorted(path.name for path in self._folder.iterdir())
        numbers = [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]
        for number in numbers:
            segment = self._segments[number] = _Segment(number)
            with store_errors("read", self._path(number)):
                self._read(segment, is_last=number == numbers[-1])
            self.size_bytes += segment.size_bytes
            self._highest_number = number
        for segment in list(self._segments.values()):
            if not segment.live:
                self._remove(segment)
        self.damage.write()
        self._last = self._segments.get(self._highest_number)
        if self._last is not None:
            with store_errors("open", self._path(self._last.number)):
                self._file = os.open(self._path(self._last.number), os.O_RDWR | os.O_CLOEXEC)

    def _read(self, segment: _Segment, *, is_last: bool) -> None:
        """Index a segment's records, and cut off what was never called stored."""
        marks = read_marks(self._marks_path(segment.number))
        if marks.torn_bytes:
            os.truncate(self._marks_path(segment.number), marks.size_bytes)
        gaps: list[Gap] = []
        with open(self._path(segment.number), "rb+") as file:
            for found in scan(file, marks, all_bodies=is_last):
                if isinstance(found, Record):
                    self._take(segment, marks, found)
                    segment.size_bytes = found.end
                elif gaps and gaps[-1].end == found.start:
                    gaps[-1] = Gap(gaps[-1].start, found.end, gaps[-1].reason)
                else:
                    gaps.append(found)
            if gaps and gaps[-1].end > segment.size_bytes:  # nothing sound comes after it
                segment.size_bytes = gaps[-1].end
                if is_last and not marks.synced_to(gaps[-1].start):
                    torn = gaps.pop()
                    segment.size_bytes = torn.start
                    self.torn_bytes = torn.end - torn.start
                    file.truncate(torn.start)
                    os.fsync(file.fileno())
        for gap in gaps:
            self.damage.note(segment.number, gap)

    def _take(self, segment: _Segment, marks: Marks, record: Record) -> None:
        digest = record.summary.digest
        if record.offset in marks.released:
            self._released.add((digest,))
            return
        self._bodies[digest] = _Body(
            segment.number,
            record.start,
            record.offset,
            record.body_bytes,
            record.summary,
            record.offset in marks.accepted,
        )
        segment.live.add(digest)


def _is_full(error: StoreError) -> bool:
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _FULL
