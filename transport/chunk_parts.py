"""Chunks and the equal parts in which they travel.

What always holds: a part size is between ``MIN_PIECE_BYTES`` and the chunk size and divides it, so
that index ``i`` of a request with ``part_bytes`` is that part of the file and lies in one chunk.
"""

import math
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from transport.delivery_window import MIN_PIECE_BYTES, DeliveryWindow
from transport.messages import Ahead, ChunkRequest
from transport.weights.manifest import FileEntry
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
    unasked: bool = False
    """It was sent of the source's own accord: when, nobody here knows."""


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

    def lay_out(self, piece_bytes: int) -> None:
        """Decide in which parts it is asked for, of about ``piece_bytes`` at most."""
        self.laid_out = True
        part_bytes = part_bytes_for(self.wanted.chunk_bytes, piece_bytes)
        if part_bytes < self.wanted.size_bytes:  # a short last chunk stays whole
            self.part_bytes = part_bytes
            self.to_ask = deque(range(self.part_count))

    def take_part(self, start: int, part_bytes: int) -> int | None:
        """The part from byte ``start`` on, which need not be asked for; None where it is not one
        of those that are to be asked for. Lays out in parts of ``part_bytes`` (0: whole)."""
        if not self.laid_out:
            self.lay_out(part_bytes or self.wanted.chunk_bytes)
        part = start // part_bytes if part_bytes else 0
        if self.part_bytes != part_bytes or part not in self.to_ask:
            return None
        self.to_ask.remove(part)
        return part

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


def choose_source(
    chunk: ChunkState, sources: Mapping[SourceId, SourceState]
) -> tuple[SourceId | None, bool]:
    """The source with the most room for the chunk's next part, and whether one that may deliver
    it is full. Relays come first, the one that has the chunk's other parts above all."""
    usable = [
        (name, state) for name, state in sources.items() if state.up and name not in chunk.refused
    ]
    relays = [each for each in usable if each[1].relay]
    if relays:
        owner = [each for each in relays if each[0] == chunk.owner]
        usable = owner or relays
    elif len(usable) > 1:
        usable = [each for each in usable if each[0] != chunk.avoid]
    best: SourceId | None = None
    least = math.inf
    for name, state in usable:
        limit_bytes = state.window.limit_bytes()
        after_bytes = state.outstanding_bytes + chunk.next_size_bytes(state.window)
        fits = after_bytes <= limit_bytes or not state.outstanding_bytes
        if fits and after_bytes / limit_bytes < least:
            best, least = name, after_bytes / limit_bytes
    return best, bool(usable)


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


def ahead_of(
    entries: Iterable[FileEntry], *, ahead_bytes: int, piece_bytes: int
) -> tuple[Ahead, ...]:
    """The first pieces of some files, in order: as many as ``ahead_bytes`` hold, as large as a link
    on which a piece is ``piece_bytes`` wants them."""
    found: list[Ahead] = []
    piece_bytes = max(piece_bytes, MIN_PIECE_BYTES)
    for entry in entries:
        part_bytes = part_bytes_for(entry.chunk_bytes, piece_bytes)
        sizes: dict[tuple[int, int], int] = {}  # by part size (0: whole) and index
        for number in range(len(entry.chunk_digests)):
            size = entry.chunk_size_bytes(number)
            if not part_bytes or part_bytes >= size:
                sizes[0, number] = size
                continue
            first = number * (entry.chunk_bytes // part_bytes)
            for part in range(-(-size // part_bytes)):
                sizes[part_bytes, first + part] = min(part_bytes, size - part * part_bytes)
        fitting: list[tuple[int, int]] = []
        for place, size in sizes.items():
            if size > ahead_bytes:
                ahead_bytes = 0
                break
            ahead_bytes -= size
            fitting.append(place)
        for part, group in groupby(fitting, lambda place: place[0]):
            indices = [index for _, index in group]
            for start in range(0, len(indices), MAX_INDICES):
                batch = tuple(indices[start : start + MAX_INDICES])
                found.append(Ahead(digest=entry.digest, indices=batch, part_bytes=part))
        if not ahead_bytes:
            break
    return tuple(found)


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
