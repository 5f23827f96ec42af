"""Receiver-driven exchange of hash-addressed chunks with several sources, without sockets and
clocks.

What always holds: the receiver decides what is sent, by whom and when; on each source at most its
window's bytes are on the way (one piece at least); a chunk counts only if its digest is right;
what comes twice, unknown or damaged changes nothing but a counter; a chunk is asked for a bounded
number of times; what was on the way on a link that went down is asked for elsewhere, without
blame.

Sources are lanes to the origin, which has everything, and relays, which may have it. Relays are
asked first, so that an ocean is crossed once: the origin gets a chunk only when no relay is left
that may have it. A relay without a chunk is not asked for that one again; a relay that delivered a
wrong chunk alone is dropped for this exchange with a reason. Where several sources contributed to
a wrong chunk, it is fetched from the origin.

Pieces: a chunk is asked for whole or in equal parts, as small as the window of its first source
wants them; index ``i`` of a request with ``part_bytes`` is that part of the file. Parts are put
together here, so at most a window's worth of chunks is in memory.
"""

from collections import deque
from collections.abc import Iterable

from transport.chunk_parts import (
    ChunkKey,
    ChunkSource,
    ChunkState,
    FetchCounters,
    PieceRequest,
    SourceId,
    SourceState,
    WantedChunk,
    choose_source,
    place_of,
    requests_for,
)
from transport.delivery_window import MAX_TIMEOUT_S, MIN_PIECES
from transport.messages import Ahead, ChunkRequest
from transport.weights.manifest import chunk_digest
from transport.weights.tensors import Buffer

MAX_ATTEMPTS = 8
WRONG_CHUNK = "relay.wrong_chunk"
NO_ANSWER = "relay.no_answer"
"""Why a relay was dropped."""

RELAY_TIMEOUT_S = 60.0
"""A relay may have to fetch first; one that is gone is noticed by its link."""

_LOOK_AHEAD = 64
"""Chunks that a source may not deliver and that are passed over to find it work."""


class ChunkExchange:
    """Gets chunks in the order in which they were wanted; ``failed`` collects those that nobody
    delivers, with a stable code: ``chunk.attempts`` or ``chunk.not_found``."""

    def __init__(self, sources: Iterable[ChunkSource], *, max_attempts: int = MAX_ATTEMPTS) -> None:
        self._sources: dict[SourceId, SourceState] = {}
        self._files: dict[str, dict[int, ChunkState]] = {}
        self._queue: deque[ChunkState] = deque()
        self._requests: dict[tuple[ChunkKey, int], PieceRequest] = {}
        self._max_attempts = max_attempts
        self._nothing_expires_before = 0.0
        self.counters = FetchCounters()
        self.dropped: dict[SourceId, str] = {}
        """Sources that are not used any more, and why."""
        self.failed: dict[ChunkKey, str] = {}
        for source in sources:
            self.add_source(source)

    # ---- sources -----------------------------------------------------------------------------

    def add_source(self, source: ChunkSource) -> None:
        """One more source, which is up; one that was dropped stays dropped, one that is known is
        up again."""
        if source.id in self._sources:
            self.source_up(source.id)
        elif source.id not in self.dropped:
            self._sources[source.id] = SourceState(source.window, source.relay)

    def source_up(self, source: SourceId) -> None:
        """What was under way on it before is lost."""
        self.source_down(source)
        if source in self._sources:
            self._sources[source].up = True

    def source_down(self, source: SourceId) -> None:
        """Nothing on the way there will arrive: all of it is asked for again, without blame."""
        state = self._sources.get(source)
        if state is None:
            return
        state.up = False
        lost = [where for where, request in self._requests.items() if request.source == source]
        for key, part in reversed(lost):
            self.counters.cut += 1
            self._ask_again(key, part)

    def is_up(self, source: SourceId) -> bool:
        state = self._sources.get(source)
        return state is not None and state.up

    def outstanding_bytes(self, source: SourceId) -> int:
        """What is on the way on one source."""
        return self._sources[source].outstanding_bytes if source in self._sources else 0

    @property
    def idle(self) -> bool:
        """Nothing is left to ask for that a source could deliver."""
        return not self._queue

    # ---- what is wanted ----------------------------------------------------------------------

    def want(self, wanted: WantedChunk, *, failures: int = 0) -> bool:
        """One more chunk; False for one that contradicts what is wanted of the same file."""
        of_file = self._files.setdefault(wanted.file_digest, {})
        same = of_file.get(wanted.number)
        if same is not None:
            return same.wanted == wanted
        if of_file and next(iter(of_file.values())).wanted.chunk_bytes != wanted.chunk_bytes:
            return False
        chunk = of_file[wanted.number] = ChunkState(wanted, failures=failures, queued=True)
        self._queue.append(chunk)
        return True

    def coming(self, source: SourceId, ahead: Ahead, now: float) -> None:
        """Wanted pieces that an origin sends unasked: they are not asked for, unless they fail to
        come."""
        state = self._sources.get(source)
        of_file = self._files.get(ahead.digest)
        if state is None or not state.up or state.relay or not of_file:
            return
        chunk_bytes = next(iter(of_file.values())).wanted.chunk_bytes
        for index in ahead.indices:
            place = place_of(index, ahead.part_bytes, chunk_bytes)
            chunk = None if place is None else of_file.get(place.number)
            if place is not None and chunk is not None:
                part = chunk.take_part(place.start, ahead.part_bytes)
                if part is not None:
                    self._note_request(chunk, part, source, now, unasked=True)

    def forget(self, key: ChunkKey) -> None:
        """A chunk that is not wanted any more."""
        chunk = self._get(key)
        if chunk is None:
            return
        for part in range(chunk.part_count):
            self._forget_request(key, part)
        chunk.to_ask.clear()
        del self._files[key[0]][key[1]]
        if not self._files[key[0]]:
            del self._files[key[0]]

    # ---- asking ------------------------------------------------------------------------------

    def next_requests(self, now: float) -> list[tuple[SourceId, ChunkRequest]]:
        """What to ask for now and where, pieces of one file together. Call after every arrival
        and at ``next_deadline``; asking is assumed to happen at ``now``."""
        self._expire(now)
        pieces: dict[SourceId, list[tuple[ChunkState, int]]] = {}
        passed_over: list[ChunkState] = []
        while self._queue and len(passed_over) < _LOOK_AHEAD:
            chunk = self._queue[0]
            if not chunk.to_ask:
                self._dequeue()
            elif chunk.failures >= self._max_attempts:
                self._dequeue()
                self._fail(chunk, "chunk.attempts")
            else:
                source, some_usable = choose_source(chunk, self._sources)
                if source is not None:
                    if not chunk.laid_out:
                        chunk.lay_out(self._sources[source].window.piece_bytes())
                    part = chunk.to_ask.popleft()
                    self._note_request(chunk, part, source, now)
                    pieces.setdefault(source, []).append((chunk, part))
                elif not some_usable and not self._may_come(chunk):
                    self._dequeue()
                    self._fail(chunk, "chunk.not_found")
                elif self._some_room():
                    passed_over.append(self._queue.popleft())
                else:
                    break
        self._queue.extendleft(reversed(passed_over))
        if not self._queue:
            for state in self._sources.values():
                state.window.nothing_more_to_ask(state.outstanding_bytes)
        return [
            (source, request)
            for source, asked in pieces.items()
            for request in requests_for(asked, to_relay=self._sources[source].relay)
        ]

    def next_deadline(self) -> float | None:
        """When the next piece on the way is given up, None with nothing on the way."""
        return min((request.deadline_s for request in self._requests.values()), default=None)

    # ---- answers -----------------------------------------------------------------------------

    def arrived(
        self, source: SourceId, digest: str, index: int, part_bytes: int, data: Buffer, now: float
    ) -> tuple[WantedChunk, Buffer] | None:
        """Take a piece; the chunk that it completed, verified, or None (a counter says why where
        the piece was of no use)."""
        found = self.received(source, digest, index, part_bytes, data, now)
        if found and self.verified(*found, chunk_digest(found[1]) == found[0].chunk_digest):
            return found
        return None

    def received(
        self, source: SourceId, digest: str, index: int, part_bytes: int, data: Buffer, now: float
    ) -> tuple[WantedChunk, Buffer] | None:
        """As ``arrived``, without the hash: say what it came to with ``verified``, any time."""
        found = self._find(source, digest, index, part_bytes)
        if found is None:
            return None
        chunk, part = found
        if part in chunk.parts:
            self.counters.duplicate += 1
            return None
        request = self._forget_request(chunk.wanted.key, part)
        chunk.contributors.add(source)
        if len(data) == chunk.part_size_bytes(part):
            chunk.parts[part] = data
            self._measure(source, chunk, request, len(data), now)
            if len(chunk.parts) < chunk.part_count:
                return None
            chunk.whole = chunk.joined()
            return chunk.wanted, chunk.whole
        self._corrupt(chunk)
        return None

    def verified(self, wanted: WantedChunk, whole: Buffer, right: bool) -> bool:
        """Whether a chunk that was received is right and was still wanted."""
        chunk = self._get(wanted.key)
        if chunk is None or chunk.wanted != wanted:
            return False
        if right:
            self.forget(wanted.key)
        elif chunk.whole is whole:  # else it was begun again meanwhile
            self._corrupt(chunk)
        return right

    def not_found(self, source: SourceId, digest: str, index: int, part_bytes: int) -> None:
        """The source does not have it (any more). From a relay that is no error; when the origin
        says so, the chunk has failed."""
        found = self._find(source, digest, index, part_bytes)
        if found is None:
            return
        chunk, part = found
        request = self._requests.get((chunk.wanted.key, part))
        if request is None or request.source != source:
            self.counters.unknown += 1
            return
        self.counters.not_found += 1
        if not self._sources[source].relay:
            self._fail(chunk, "chunk.not_found")
            return
        chunk.refused.add(source)
        self._ask_again(chunk.wanted.key, part)

    # ---- inside ------------------------------------------------------------------------------

    def _find(
        self, source: SourceId, digest: str, index: int, part_bytes: int
    ) -> tuple[ChunkState, int] | None:
        """The chunk and part that an answer is about."""
        of_file = self._files.get(digest)
        if of_file and source in self._sources and index >= 0:
            part = 0
            if part_bytes:
                chunk_bytes = next(iter(of_file.values())).wanted.chunk_bytes
                index, part = divmod(index, max(1, chunk_bytes // part_bytes))
            chunk = of_file.get(index)
            if chunk is not None and chunk.part_bytes == part_bytes and part < chunk.part_count:
                return chunk, part
        self.counters.unknown += 1
        return None

    def _get(self, key: ChunkKey) -> ChunkState | None:
        return self._files.get(key[0], {}).get(key[1])

    def _may_come(self, chunk: ChunkState) -> bool:
        """Whether a source that is down now may deliver it."""
        return not self._sources or any(name not in chunk.refused for name in self._sources)

    def _some_room(self) -> bool:
        return any(
            state.up and state.outstanding_bytes < state.window.limit_bytes()
            for state in self._sources.values()
        )

    def _note_request(
        self, chunk: ChunkState, part: int, source: SourceId, now: float, unasked: bool = False
    ) -> None:
        state = self._sources[source]
        size = chunk.part_size_bytes(part)
        state.outstanding_bytes += size
        lone = state.outstanding_bytes <= MIN_PIECES * state.window.piece_bytes()
        patience_s = state.window.timeout_s(state.outstanding_bytes) * 2**chunk.failures
        patience_s = max(patience_s, RELAY_TIMEOUT_S if state.relay else 0.0)
        deadline_s = now + min(patience_s, MAX_TIMEOUT_S)
        self._nothing_expires_before = min(self._nothing_expires_before, deadline_s)
        self._requests[chunk.wanted.key, part] = PieceRequest(
            source, now, deadline_s, size, state.window.delivered_bytes, lone, unasked
        )
        if state.relay:
            chunk.owner = source

    def _measure(
        self, source: SourceId, chunk: ChunkState, asked: PieceRequest | None, size: int, now: float
    ) -> None:
        window = self._sources[source].window
        if asked is None or asked.source != source or chunk.failures:
            window.delivered_again(size)
        elif asked.unasked:
            window.delivered_unasked(size, now=now)
        else:
            before = asked.delivered_at_send
            window.delivered(
                size, sent_s=asked.sent_s, delivered_at_send=before, lone=asked.lone, now=now
            )

    def _corrupt(self, chunk: ChunkState) -> None:
        self.counters.corrupt += 1
        relays = {name for name in chunk.contributors if self._sources[name].relay}
        if len(relays) == len(chunk.contributors) == 1:
            self._drop(next(iter(relays)), WRONG_CHUNK)
        elif relays:
            chunk.refused |= relays
        else:
            chunk.failures += 1
        self._start_again(chunk)

    def _drop(self, source: SourceId, reason: str) -> None:
        """A source that lies or does not answer; what it delivered in part is not used."""
        self.source_down(source)
        del self._sources[source]
        self.dropped[source] = reason
        for of_file in self._files.values():
            for chunk in of_file.values():
                if source in chunk.contributors:
                    self._start_again(chunk)

    def _start_again(self, chunk: ChunkState) -> None:
        for part in range(chunk.part_count):
            self._forget_request(chunk.wanted.key, part)
        chunk.reset()
        self._enqueue_first(chunk)

    def _ask_again(self, key: ChunkKey, part: int) -> None:
        self._forget_request(key, part)
        chunk = self._get(key)
        if chunk is not None:
            chunk.to_ask.appendleft(part)
            self._enqueue_first(chunk)

    def _enqueue_first(self, chunk: ChunkState) -> None:
        if not chunk.queued:
            self._queue.appendleft(chunk)
        chunk.queued = True

    def _dequeue(self) -> None:
        self._queue.popleft().queued = False

    def _fail(self, chunk: ChunkState, code: str) -> None:
        self.failed[chunk.wanted.key] = code
        self.forget(chunk.wanted.key)

    def _expire(self, now: float) -> None:
        if now < self._nothing_expires_before:
            return
        late = [where for where, request in self._requests.items() if request.deadline_s <= now]
        blamed = set()
        for key, part in reversed(late):
            request = self._requests.get((key, part))
            if request is None:  # its source was dropped
                continue
            self.counters.timed_out += 1
            if self._sources[request.source].relay:
                self._drop(request.source, NO_ANSWER)
                continue
            chunk = self._get(key)
            if chunk is not None:
                chunk.avoid = request.source
                if key not in blamed:
                    blamed.add(key)
                    chunk.failures += 1
            self._ask_again(key, part)
        self._nothing_expires_before = self.next_deadline() or 0.0

    def _forget_request(self, key: ChunkKey, part: int) -> PieceRequest | None:
        request = self._requests.pop((key, part), None)
        if request is not None:
            self._sources[request.source].outstanding_bytes -= request.size_bytes
        return request
