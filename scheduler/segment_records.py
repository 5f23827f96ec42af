"""What a segment of the trajectory log and its file of marks hold, and what can still be read of
them after damage.

Record: magic "fftr", u32 header size, u32 body size, u32 CRC-32 of header and body, u32 CRC-32 of
the sixteen bytes before, header (MessagePack ``GroupSummary``), body. Mark: kind byte, u64 offset,
u32 CRC-32. Integers are little-endian.

    "n"  record starts of this segment are marked        "a"  the scheduler has the body there
    "s"  a record that was synced begins there           "r"  nobody needs the body there

What always holds: a record is only found where the one before it ends or, after damage, where a
mark says that one begins. Bodies come from agents, so what merely looks like a record within one is
not looked for; only in a segment without such marks (an older farflow wrote it, or its marks are
lost) is the next record searched for by its magic, and then it must be sound to its last byte.
"""

import os
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import msgspec

from transport.messages import GroupSummary

MAGIC: Final = b"fftr"
MARKED: Final = b"n"
STARTS: Final = b"s"
ACCEPTED: Final = b"a"
RELEASED: Final = b"r"

_START: Final = struct.Struct("<4sIII")
_CRC: Final = struct.Struct("<I")
_MARK_START: Final = struct.Struct("<cQ")
_MARK: Final = struct.Struct("<cQI")
HEAD_BYTES: Final = _START.size + _CRC.size

SEARCHED_TIMES: Final = 8
"""So many times the bytes that are left are checked in a search by magic, at most: a body can be
full of what looks like heads of large records."""

_decoder = msgspec.msgpack.Decoder(GroupSummary)


class Record(NamedTuple):
    """A record: where it and its body begin, and what its header says."""

    start: int
    offset: int
    body_bytes: int
    summary: GroupSummary

    @property
    def end(self) -> int:
        return self.offset + self.body_bytes


class Gap(NamedTuple):
    """Bytes ``start`` to ``end`` that are not what was written, and why."""

    start: int
    end: int
    reason: str


@dataclass(slots=True)
class Marks:
    """What a file of marks says; ``torn_bytes`` at its end are no whole mark."""

    marked: bool = False
    starts: list[int] = field(default_factory=list)
    accepted: set[int] = field(default_factory=set)
    released: set[int] = field(default_factory=set)
    size_bytes: int = 0
    torn_bytes: int = 0

    def synced_to(self, offset: int) -> bool:
        """Whether something at ``offset`` or after it was synced once."""
        last = max((*self.starts[-1:], *self.accepted, *self.released), default=-1)
        return last >= offset


def encode_record(summary: GroupSummary, body: bytes) -> bytes:
    """A record up to its body."""
    meta = msgspec.msgpack.encode(summary)
    start = _START.pack(MAGIC, len(meta), len(body), zlib.crc32(body, zlib.crc32(meta)))
    return start + _CRC.pack(zlib.crc32(start)) + meta


def encode_mark(kind: bytes, offset: int) -> bytes:
    start = _MARK_START.pack(kind, offset)
    return start + _CRC.pack(zlib.crc32(start))


def read_marks(path: Path) -> Marks:
    """The marks of a segment; damaged ones are left out. Raises OSError."""
    marks = Marks()
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return marks
    marks.torn_bytes = len(data) % _MARK.size
    marks.size_bytes = len(data) - marks.torn_bytes
    starts: set[int] = set()
    for kind, offset, crc in _MARK.iter_unpack(data[: marks.size_bytes]):
        if zlib.crc32(_MARK_START.pack(kind, offset)) != crc:
            continue
        match kind:
            case b"n":
                marks.marked = True
            case b"s":
                starts.add(offset)
            case b"a":
                marks.accepted.add(offset)
            case b"r":
                marks.released.add(offset)
            case _:
                pass  # of a newer farflow
    marks.starts = sorted(starts)
    return marks


def scan(file: BinaryIO, marks: Marks, *, all_bodies: bool) -> Iterator[Record | Gap]:
    """Everything in a segment, in order and without a hole. Bodies are checked that no mark says
    are accepted or released, or all of them. Raises OSError."""
    end = os.fstat(file.fileno()).st_size
    at = 0
    while at < end:
        sizes = _head(file, at, end)
        if sizes is None:
            following = _next_record(file, at, end, marks)
            yield Gap(at, following, "no head of a record")
            at = following
            continue
        meta_bytes, body_bytes, crc = sizes
        meta = file.read(meta_bytes)
        offset = at + HEAD_BYTES + meta_bytes
        checks = all_bodies or not (offset in marks.accepted or offset in marks.released)
        if checks and zlib.crc32(file.read(body_bytes), zlib.crc32(meta)) != crc:
            yield Gap(at, offset + body_bytes, "another checksum")
        else:
            try:
                yield Record(at, offset, body_bytes, _decoder.decode(meta))
            except msgspec.DecodeError:
                yield Gap(at, offset + body_bytes, "a header that does not decode")
        at = offset + body_bytes


def _head(file: BinaryIO, at: int, end: int) -> tuple[int, int, int] | None:
    """Sizes of header and body and the CRC-32 of both, if a record begins here; the file is then
    at its header."""
    file.seek(at)
    head = file.read(HEAD_BYTES)
    if len(head) < HEAD_BYTES or _CRC.pack(zlib.crc32(head[:-4])) != head[-4:]:
        return None
    magic, meta_bytes, body_bytes, crc = _START.unpack(head[:-4])
    if magic != MAGIC or at + HEAD_BYTES + meta_bytes + body_bytes > end:
        return None
    return meta_bytes, body_bytes, crc


def _next_record(file: BinaryIO, after: int, end: int, marks: Marks) -> int:
    """Where the next record after ``after`` begins that can be found; ``end`` without one."""
    if marks.marked:
        following = marks.starts[bisect_right(marks.starts, after) :]
        return next((at for at in following if _head(file, at, end) is not None), end)
    file.seek(after)
    data = file.read(end - after)
    left_bytes = SEARCHED_TIMES * len(data)
    found = data.find(MAGIC, 1)
    while found >= 0 and left_bytes > 0:
        sizes = _head(file, after + found, end)
        if sizes is not None:
            meta_bytes, body_bytes, crc = sizes
            first = found + HEAD_BYTES
            body = first + meta_bytes
            left_bytes -= meta_bytes + 2 * body_bytes
            if zlib.crc32(data[first : body + body_bytes]) == crc and _is_body(
                data[first:body], data[body : body + body_bytes]
            ):
                return after + found
        found = data.find(MAGIC, found + 1)
    return end


def _is_body(meta: bytes, body: bytes) -> bool:
    try:
        return _decoder.decode(meta).digest == sha256(body).hexdigest()
    except msgspec.DecodeError:
        return False
