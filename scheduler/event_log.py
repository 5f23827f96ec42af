"""The event log: everything the core was told in one life, to be told again by ``sim replay``.

What always holds: a log is of one term and begins with its build, settings, random seed, clock and
the rows it started from; replaying the inputs in order gives the same effects for the same build,
and each batch carries a digest of its effects, so that the first divergence shows; at most about
``max_bytes`` on disk, older terms go first; nothing depends on it: it is not synced, its end may be
torn, and when the disk refuses it stops recording, not the scheduler.

Within a term that outgrows the bound, the first half of the bound is kept, because a replay must
begin at the beginning, and of the rest the newest part, because people look at the end.

    FOLDER/term-00000007/start          MessagePack ``EventLogStart``
    FOLDER/term-00000007/rows           zstd of frames: [table, key, value]
    FOLDER/term-00000007/events-000000  zstd of frames: ``EventBatch``

A frame is a little-endian u32 size and as many bytes. All functions block; one thread at a time.
"""

import contextlib
import shutil
import struct
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import structlog
import zstandard

from scheduler.core.effects import Effect
from scheduler.core.events import (
    AgentRevoked,
    Event,
    FromAgent,
    FromOperator,
    FromService,
    FromTrainer,
    ItemsProduced,
    TaskSourceFailed,
    Tick,
    Verdict,
    Verdicts,
)
from scheduler.core.settings import CoreSettings
from transport.envelope import KIND_OF
from transport.errors import StoreError
from transport.messages import KINDS, Item, Message
from transport.runs import HELD_OUT

MAX_BYTES: Final = 512 * 2**20
SEGMENT_BYTES: Final = 16 * 2**20
MAX_FRAME_BYTES: Final = 256 * 2**20

_LEVEL: Final = 1
_DIGEST_BYTES: Final = 8
_READ_BYTES: Final = 64 * 1024
_WRITE_BYTES: Final = 256 * 1024
_SIZE: Final = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode
_log = structlog.get_logger()


class EventLogStart(msgspec.Struct, frozen=True, kw_only=True):
    """What a life began with. ``seed`` made the core's ``random.Random``."""

    build: str
    term: int
    now: float
    seed: int
    settings: CoreSettings
    wall_s: float
    rows: int


class EventBatch(msgspec.Struct, frozen=True):
    """Events handled together: (now, packed event) each, and a digest of all their effects."""

    number: int
    inputs: list[tuple[float, list[Any]]]
    effects_digest: bytes


def pack_event(event: Event) -> list[Any]:
    """An event as plain MessagePack values; ``unpack_event`` gives it back."""
    match event:
        case FromAgent(name, message):
            return ["agent", name, *_pack(message)]
        case AgentRevoked(name):
            return ["revoked", name]
        case FromTrainer(name, message):
            return ["trainer", name, *_pack(message)]
        case FromService(name, message, verdicts):
            said = [msgspec.to_builtins(verdicts)] if verdicts else []
            return ["service", name, *_pack(message), *said]
        case FromOperator(name, request, message, fault):
            return ["operator", name, *_pack(message), request, *([fault] if fault else [])]
        case ItemsProduced(run, kind, start, items, evaluation, verdicts):
            said = [msgspec.to_builtins(verdicts)] if verdicts else []
            return ["items", run, kind, start, msgspec.to_builtins(items), evaluation, *said]
        case TaskSourceFailed(run, code, text):
            return ["failed", run, code, text]
        case Tick():
            return ["tick"]


def unpack_event(packed: Sequence[Any]) -> Event:
    """Raises StoreError for what ``pack_event`` did not make."""
    try:
        match packed:
            case ["agent", str(name), int(kind), bytes(data)]:
                return FromAgent(name, _unpack(kind, data))
            case ["revoked", str(name)]:
                return AgentRevoked(name)
            case ["trainer", str(name), int(kind), bytes(data)]:
                return FromTrainer(name, _unpack(kind, data))
            case ["service", str(name), int(kind), bytes(data)]:
                return FromService(name, _unpack(kind, data))
            case ["service", str(name), int(kind), bytes(data), verdicts]:
                said = msgspec.convert(verdicts, tuple[Verdicts, ...])
                return FromService(name, _unpack(kind, data), said)
            case ["operator", str(name), int(kind), bytes(data), int(request)]:
                return FromOperator(name, request, _unpack(kind, data))
            case ["operator", str(name), int(kind), bytes(data), int(request), str(fault)]:
                return FromOperator(name, request, _unpack(kind, data), fault)
            case ["items", str(run), ("train" | "eval") as items_kind, int(start), items, *more]:
                made = msgspec.convert(items, tuple[Item, ...])
                # A log of before there were named evaluations, or curators, has fewer parts.
                evaluation = msgspec.convert(more[0], str) if more else HELD_OUT
                curated = msgspec.convert(more[1] if len(more) > 1 else [], tuple[Verdict, ...])
                return ItemsProduced(run, items_kind, start, made, evaluation, curated)
            case ["failed", str(run), str(code), str(text)]:
                return TaskSourceFailed(run, code, text)
            case ["tick"]:
                return Tick()
            case _:
                raise StoreError(f"event log: unknown event {list(packed[:1])}")
    except (KeyError, msgspec.MsgspecError) as error:
        raise StoreError(f"event log: an event of another farflow: {error}") from error


def effects_digest(effects: Sequence[Effect]) -> bytes:
    """Digest of effects in order, as a replay must give it again."""
    parts: list[bytes] = []
    for effect in effects:
        parts += (type(effect).__name__.encode(), _encode(effect))
    return blake2b(b"".join(parts), digest_size=_DIGEST_BYTES).digest()


class EventLog:
    """Writes the log of this life below ``folder``."""

    def __init__(
        self, folder: Path, *, max_bytes: int = MAX_BYTES, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._term_folder = folder
        self._file: BinaryIO | None = None
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj()
        self._segments: dict[int, int] = {}  # number to size
        self._number = 0
        self._batches = 0
        self._fixed_bytes = 0
        self.recording = False

    def begin(self, start: EventLogStart, rows: Iterable[tuple[str, str, bytes]]) -> None:
        """Start the log of a term."""
        self._term_folder = self._folder / f"term-{start.term:08d}"
        with self._guarded():
            shutil.rmtree(self._term_folder, ignore_errors=True)
            self._term_folder.mkdir(parents=True)
            (self._term_folder / "start").write_bytes(msgspec.msgpack.encode(start))
            rows_path = self._term_folder / "rows"
            with (
                open(rows_path, "wb") as file,
                zstandard.ZstdCompressor(level=_LEVEL).stream_writer(file) as stream,
            ):
                waiting = bytearray()
                for row in rows:
                    waiting += _frame(_encode(row))
                    if len(waiting) >= _WRITE_BYTES:
                        stream.write(waiting)
                        waiting.clear()
                stream.write(waiting)
            self._fixed_bytes = rows_path.stat().st_size
            self._open_segment(0)
            self.recording = True
            self._shrink()

    def append(self, inputs: Sequence[tuple[float, Event]], effects: Sequence[Effect]) -> None:
        """Record a batch; quietly nothing once the disk has refused."""
        if not self.recording or self._file is None:
            return
        batch = EventBatch(
            self._batches,
            [(now, pack_event(event)) for now, event in inputs],
            effects_digest(effects),
        )
        self._batches += 1
        with self._guarded():
            data = self._compressor.compress(_frame(_encode(batch)))
            # So that a reader finds every batch of a process that was killed.
            data += self._compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
            self._file.write(data)
            self._segments[self._number] += len(data)
            if self._segments[self._number] >= self._segment_bytes:
                self._close_segment()
                self._open_segment(self._number + 1)
                self._shrink()

    def close(self) -> None:
        """End the log; idempotent."""
        if self._file is not None:
            with self._guarded():
                self._close_segment()
        self.recording = False

    def _open_segment(self, number: int) -> None:
        self._number = number
        self._segments[number] = 0
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj()
        # Unbuffered: what was written is the system's, and survives a kill.
        self._file = open(self._segment(number), "wb", buffering=0)  # noqa: SIM115

    def _close_segment(self) -> None:
        if self._file is not None:
            with self._file as file:
                self._file = None
                file.write(self._compressor.flush())

    def _segment(self, number: int) -> Path:
        return self._term_folder / f"events-{number:06d}"

    def _shrink(self) -> None:
        """Older terms first; then this term's segments from the middle of the bound on."""
        older = sorted(
            path for path in self._folder.glob("term-*") if path.name < self._term_folder.name
        )
        sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for path in older}
        own = self._fixed_bytes + sum(self._segments.values())
        for path in older:
            if own + sum(sizes.values()) <= self._max_bytes:
                return
            shutil.rmtree(path, ignore_errors=True)
            del sizes[path]
        first_half = max(1, self._max_bytes // 2 // self._segment_bytes)
        for number in sorted(self._segments):
            if own <= self._max_bytes:
                return
            if first_half <= number < self._number:
                self._segment(number).unlink(missing_ok=True)
                own -= self._segments.pop(number)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.recording = False
            _log.warning("event_log.stopped", folder=str(self._folder), reason=str(error))


class RecordedTerm:
    """Reads the log of one term."""

    def __init__(self, folder: Path) -> None:
        """Raises StoreError when ``folder`` holds no log."""
        self.folder = folder
        try:
            data = (folder / "start").read_bytes()
            self.start = msgspec.msgpack.decode(data, type=EventLogStart)
        except (OSError, msgspec.MsgspecError) as error:
            raise StoreError(f"{folder}: no event log of this farflow: {error}") from error
        self.complete = True
        """False once ``batches`` came to a part that is missing or torn."""

    def rows(self) -> Iterator[tuple[str, str, bytes]]:
        """The rows at the start."""
        for data in _frames(self.folder / "rows"):
            yield msgspec.msgpack.decode(data, type=tuple[str, str, bytes])

    def batches(self) -> Iterator[EventBatch]:
        """Batches from the beginning, up to the first that is missing or torn."""
        expected = 0
        for path in sorted(self.folder.glob("events-*")):
            for data in _frames(path):
                batch = msgspec.msgpack.decode(data, type=EventBatch)
                if batch.number != expected:
                    self.complete = False
                    return
                expected += 1
                yield batch


def recorded_terms(folder: Path) -> list[Path]:
    """Folders of the recorded terms, oldest first."""
    return sorted(folder.glob("term-*"))


def _frame(data: bytes) -> bytes:
    return _SIZE.pack(len(data)) + data


def _frames(path: Path) -> Iterator[bytes]:
    """Whole frames; a torn end is left out."""
    # Not a stream reader: that one keeps back the last block of a stream without an end.
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    waiting = bytearray()
    with open(path, "rb") as file:
        while data := file.read(_READ_BYTES):
            try:
                waiting += decompressor.decompress(data)
            except zstandard.ZstdError:
                return
            start = 0
            while len(waiting) - start >= _SIZE.size:
                (size,) = _SIZE.unpack_from(waiting, start)
                end = start + _SIZE.size + size
                if size > MAX_FRAME_BYTES or end > len(waiting):
                    break
                yield bytes(waiting[start + _SIZE.size : end])
                start = end
            del waiting[:start]


def _pack(message: Message) -> tuple[int, bytes]:
    return KIND_OF[type(message)], _encode(message)


def _unpack(kind: int, data: bytes) -> Message:
    return msgspec.msgpack.decode(data, type=KINDS[kind])
