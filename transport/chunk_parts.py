"""Chunks and the equal parts in which they travel.

What always holds: a part size is between ``MIN_PIECE_BYTES`` and the chunk size and divides it, so
that index ``i`` of a request with ``part_bytes`` is that part of the file and lies in one chunk.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from transport.delivery_window import MIN_PIECE_BYTES, DeliveryWindow
from transport.messages import ChunkRequest
from transport.weights.tensors import Buffer

MAX_INDICES = 64
"""Pieces of one request."""

SourceId = Hashable
ChunkKey = tuple[str, int]


class ChunkSource(NamedTuple):
    """Where chunks come from. ``window`` belongs to the link and outlives the exchange."""

    id: SourceId
    window: DeliveryWindow
    relay: bool = False


class WantedChunk(NamedTuple):
    """Chunk ``number`` of the file ``file_digest`` and what it must hash to."""

    file_digest: str
    number: int
    file_bytes: int
    chunk_bytes: int
    chunk_digest: bytes

    @property
    def key(self) -> ChunkKey:
        return self.file_digest, self.number

    @property
    def size_bytes(self) -> int:
        return min(self.chunk_bytes, self.file_bytes - self.number * self.chunk_bytes)


@dataclass(slots=True)
class FetchCounters:
    """What happened besides plain delivery, in pieces; ``corrupt`` in chunks."""

    duplicate: int = 0
    unknown: int = 0
    corrupt: int = 0
    timed_out: int = 0
    cut: int = 0
    not_found: int = 0


@dataclass(slots=True)
class PieceRequest:
    """A piece on its way."""

    source: SourceId
    sent_s: float
    deadline_s: float
    size_bytes: int
    delivered_at_send: int
    lone: bool


@dataclass(slots=True)
class SourceState:
    """A source and what is on its way from there."""

    window: DeliveryWindow
    relay: bool
    up: bool = True
    outstanding_bytes: int = 0


@dataclass(slots=True)
class ChunkState:
    """``part_bytes`` 0: whole. ``to_ask`` are parts that nobody is asked for; before the chunk is
    laid out that is one, whatever there will be. ``whole`` is what all parts gave, unverified.
    ``owner`` is the relay that was asked last."""

    wanted: WantedChunk
    laid_out: bool = False
    part_bytes: int = 0
    to_ask: deque[int] = field(default_factory=lambda: deque((0,)))
    parts: dict[int, Buffer] = field(default_factory=dict)
    whole: Buffer | None = None
    contributors: set[SourceId] = field(default_factory=set)
    refused: set[SourceId] = field(default_factory=set)
    owner: SourceId | None = None
    avoid: SourceId | None = None
    failures: int = 0
    queued: bool = False

    @property
    def part_count(self) -> int:
        return -(-self.wanted.size_bytes // self.part_bytes) if self.part_bytes else 1

    def part_size_bytes(self, part: int) -> int:
        size = self.wanted.size_bytes
        return min(self.part_bytes, size - part * self.part_bytes) if self.part_bytes else size

    def next_size_bytes(self, window: DeliveryWindow) -> int:
        """Of the part that would be asked for next on a link."""
        if self.laid_out:
            return self.part_size_bytes(self.to_ask[0])
        size = self.wanted.size_bytes
        return min(part_bytes_for(self.wanted.chunk_bytes, window.piece_bytes()) or size, size)

    def lay_out(self, window: DeliveryWindow) -> None:
        """Decide in which parts it is asked for; its first ones on the link of ``window``."""
        self.laid_out = True
        part_bytes = part_bytes_for(self.wanted.chunk_bytes, window.piece_bytes())
        if part_bytes < self.wanted.size_bytes:  # a short last chunk stays whole
            self.part_bytes = part_bytes
            self.to_ask = deque(range(self.part_count))

    def reset(self) -> None:
        self.laid_out = False
        self.part_bytes = 0
        self.to_ask = deque((0,))
        self.parts.clear()
        self.whole = None
        self.contributors.clear()

    def joined(self) -> Buffer:
        """The whole chunk; every part must be there."""
        if len(self.parts) == 1:
            return self.parts[0]
        return b"".join(self.parts[part] for part in range(self.part_count))


def part_bytes_for(chunk_bytes: int, piece_bytes: int) -> int:
    """Size of the equal parts, at most about ``piece_bytes``, of a chunk; 0 for all of it."""
    part = chunk_bytes
    while part > piece_bytes and part % 2 == 0 and part // 2 >= MIN_PIECE_BYTES:
        part //= 2
    return 0 if part == chunk_bytes else part


class Place(NamedTuple):
    """Where a piece is: chunk ``number`` of its file, bytes ``start`` to ``stop`` of the chunk."""

    number: int
    start: int
    stop: int


def place_of(index: int, part_bytes: int, chunk_bytes: int) -> Place | None:
    """The piece that ``index`` of a request means; None for a part size that is not allowed."""
    if not part_bytes:
        return Place(index, 0, chunk_bytes)
    if not MIN_PIECE_BYTES <= part_bytes <= chunk_bytes or chunk_bytes % part_bytes:
        return None
    number, part = divmod(index, chunk_bytes // part_bytes)
    return Place(number, part * part_bytes, (part + 1) * part_bytes)


def requests_for(
    pieces: Iterable[tuple[ChunkState, int]], *, to_relay: bool
) -> Iterator[ChunkRequest]:
    """Messages that ask for these parts of chunks: those of one file and size together, in order,
    at most ``MAX_INDICES`` in each."""
    for (digest, part_bytes), group in groupby(
        pieces, lambda piece: (piece[0].wanted.file_digest, piece[0].part_bytes)
    ):
        alike = list(group)
        for start in range(0, len(alike), MAX_INDICES):
            batch = alike[start : start + MAX_INDICES]
            wanted = batch[0][0].wanted
            per_chunk = wanted.chunk_bytes // part_bytes if part_bytes else 1
            yield ChunkRequest(
                digest=digest,
                indices=tuple(c.wanted.number * per_chunk + part for c, part in batch),
                part_bytes=part_bytes,
                chunk_digests=tuple(c.wanted.chunk_digest for c, _ in batch) if to_relay else (),
                chunk_bytes=wanted.chunk_bytes if to_relay else 0,
                file_bytes=wanted.file_bytes if to_relay else 0,
            )
