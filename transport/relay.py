"""What a relay does with requests for chunks, without sockets, disks and clocks.

What always holds: every piece asked for is answered once, with bytes of a chunk that hashes to
what the request said, or with "not found", which sends the asker to the origin; a chunk that
several ask for at one time is fetched once; what is waited for is bounded, in all and per asker;
a requester that lies about a chunk gets nothing and spoils nothing: chunks are kept by what they
hash to.

A relay knows no manifests. It believes a request's measures only for that request: if they are
wrong, what the origin sends does not match, and the answer is "not found".
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from transport.chunk_exchange import ChunkExchange
from transport.chunk_parts import (
    MAX_INDICES,
    ChunkKey,
    ChunkSource,
    SourceId,
    WantedChunk,
    place_of,
)
from transport.envelope import BULK_FRAME_BYTES
from transport.messages import Chunk, ChunkRequest
from transport.weights.manifest import CHUNK_DIGEST_BYTES

MAX_WAITING: Final = 65_536
MAX_WAITING_EACH: Final = 8192
"""Pieces that are waited for; more are "not found"."""

MAX_ATTEMPTS: Final = 3


class Answer(NamedTuple):
    """A piece for an asker: bytes ``start`` to ``stop`` of the chunk ``chunk_digest``, or that it
    is not here where that is empty."""

    file_digest: str
    number: int
    part_bytes: int
    chunk_digest: bytes = b""
    start: int = 0
    stop: int = 0


Answers = list[tuple[bytes, Answer]]
"""By the route of who asked."""


class Fetched(NamedTuple):
    """A chunk that came from the origin, and who waits for pieces of it."""

    chunk_digest: bytes
    data: bytes
    answers: Answers


@dataclass(slots=True)
class _Waiting:
    wanted: WantedChunk
    askers: dict[tuple[bytes, Answer], None] = field(default_factory=dict)


class Relay:
    """``sources`` are the lanes to the origin."""

    def __init__(self, sources: Iterable[ChunkSource]) -> None:
        self._exchange = ChunkExchange(sources, max_attempts=MAX_ATTEMPTS)
        self._waiting: dict[ChunkKey, _Waiting] = {}
        self._pieces: Counter[bytes] = Counter()  # waited for, by route
        self.counters: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """Pieces that are waited for."""
        return self._pieces.total()

    @property
    def idle(self) -> bool:
        """Everything that is missing is on its way."""
        return self._exchange.idle

    def ask(self, route: bytes, request: ChunkRequest, has: Callable[[bytes], bool]) -> Answers:
        """Take a request; what can be answered at once. ``has`` tells what is kept."""
        answers: Answers = []
        for position, index in enumerate(request.indices[:MAX_INDICES]):
            none = Answer(request.digest, index, request.part_bytes)
            wanted, answer = _understood(request, position)
            if wanted is None:
                self.counters["not_understood"] += 1
                answers.append((route, none))
            elif has(wanted.chunk_digest):
                self.counters["hit"] += 1
                answers.append((route, answer))
            elif not self._wait(route, wanted, answer):
                self.counters["not_waited_for"] += 1
                answers.append((route, none))
        return answers

    def _wait(self, route: bytes, wanted: WantedChunk, answer: Answer) -> bool:
        if self._pieces[route] >= MAX_WAITING_EACH or self.waiting >= MAX_WAITING:
            return False
        if not self._exchange.want(wanted):
            return False
        waiting = self._waiting.get(wanted.key)
        if waiting is None:
            self.counters["miss"] += 1
            waiting = self._waiting[wanted.key] = _Waiting(wanted)
        else:
            self.counters["joined"] += 1
        if (route, answer) not in waiting.askers:
            waiting.askers[route, answer] = None
            self._pieces[route] += 1
        return True

    # ---- the origin --------------------------------------------------------------------------

    def next_requests(self, now: float) -> list[tuple[SourceId, ChunkRequest]]:
        """As ``ChunkExchange.next_requests``; ask for ``failed`` afterwards."""
        return self._exchange.next_requests(now)

    def next_deadline(self) -> float | None:
        return self._exchange.next_deadline()

    def add_source(self, source: ChunkSource) -> None:
        self._exchange.add_source(source)

    def is_up(self, source: SourceId) -> bool:
        return self._exchange.is_up(source)

    def source_down(self, source: SourceId) -> None:
        self._exchange.source_down(source)

    def arrived(self, source: SourceId, chunk: Chunk, data: bytes, now: float) -> Fetched | None:
        """A message of the origin; a chunk when it is complete and right."""
        if not chunk.found:
            self._exchange.not_found(source, chunk.digest, chunk.index, chunk.part_bytes)
            return None
        done = self._exchange.arrived(
            source, chunk.digest, chunk.index, chunk.part_bytes, data, now
        )
        if done is None:
            return None
        wanted, whole = done
        self.counters["fetched"] += 1
        return Fetched(wanted.chunk_digest, bytes(whole), self._askers(wanted.key))

    def failed(self) -> Answers:
        """What the origin does not have, or not as it was asked for."""
        answers: Answers = []
        while self._exchange.failed:
            key, code = self._exchange.failed.popitem()
            self.counters[f"failed.{code}"] += 1
            answers += _without(self._askers(key))
        return answers

    def give_up(self) -> Answers:
        """The origin cannot be reached: whoever waits asks it directly."""
        answers: Answers = []
        for key in list(self._waiting):
            self._exchange.forget(key)
            answers += _without(self._askers(key))
        return answers

    def _askers(self, key: ChunkKey) -> Answers:
        waiting = self._waiting.pop(key, None)
        if waiting is None:
            return []
        for route, _ in waiting.askers:
            self._pieces[route] -= 1
            if not self._pieces[route]:
                del self._pieces[route]
        return list(waiting.askers)


def _without(answers: Answers) -> Answers:
    return [(route, Answer(a.file_digest, a.number, a.part_bytes)) for route, a in answers]


def _understood(request: ChunkRequest, position: int) -> tuple[WantedChunk | None, Answer]:
    """What one index of a request means; None when it does not say enough, or nonsense."""
    index = request.indices[position]
    answer = Answer(request.digest, index, request.part_bytes)
    digests = request.chunk_digests
    if len(digests) != len(request.indices) or len(digests[position]) != CHUNK_DIGEST_BYTES:
        return None, answer
    place = place_of(index, request.part_bytes, request.chunk_bytes)
    if place is None or not 0 < request.chunk_bytes <= BULK_FRAME_BYTES:
        return None, answer
    wanted = WantedChunk(
        request.digest,
        place.number,
        request.file_bytes,
        request.chunk_bytes,
        digests[position],
    )
    if place.start >= wanted.size_bytes:
        return None, answer
    return wanted, answer._replace(
        chunk_digest=wanted.chunk_digest, start=place.start, stop=place.stop
    )
