"""Receiver-driven exchange of hash-addressed chunks, without sockets and clocks.

What always holds: the receiver decides what is sent and when; at most the window's bytes are on
the way (one chunk at least); a chunk counts only if its digest is right; chunks that come twice,
unknown or damaged change nothing but a counter; a chunk is asked for a bounded number of times;
what was on disk before is not asked for.

Both directions use it: an agent fetches a plan's files from the weight store, the weight store
fetches a version's files from the trainer that offers it.

Window (bytes on the way), after BBR (Cardwell et al., ACM Queue 14(5), 2016):

    rate     = largest recent (bytes delivered while a chunk was on its way / that time)
    min RTT  = smallest time from request to arrival within 10 s; when older, the window shrinks
               to two chunks for one round trip to see it again
    window   = gain x rate x min RTT, at least 2 chunks; gain 2 until the rate stops growing by a
               quarter in three round trips, then 1.25: enough to notice a faster path, little
               enough that renewals do not wait behind bulk

Chunks requested while there was nothing more to ask for say little about the path: they may raise
the rate, never lower it, and do not end the start phase.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from transport.messages import ChunkRequest
from transport.weights.manifest import CHUNK_BYTES, FileEntry
from transport.weights.tensors import Buffer

START_CHUNKS = 4
MIN_CHUNKS = 2
MAX_WINDOW_BYTES = 64 << 20
MAX_ATTEMPTS = 8
MAX_INDICES = 64

STARTUP_GAIN = 2.0
CRUISE_GAIN = 1.25
_GROWTH = 1.25
_FLAT_ROUNDS = 3
_RTT_WINDOW_S = 10.0
_RATE_ROUNDS = 10

FIRST_TIMEOUT_S = 30.0
MIN_TIMEOUT_S = 5.0
MAX_TIMEOUT_S = 300.0


class DeliveryWindow:
    """How many bytes may be on the way on one link; keep it from one exchange to the next."""

    def __init__(
        self, *, chunk_bytes: int = CHUNK_BYTES, max_window_bytes: int = MAX_WINDOW_BYTES
    ) -> None:
        self.max_window_bytes = max_window_bytes
        self.chunk_bytes = min(chunk_bytes, max_window_bytes)  # each exchange sets its own
        self.min_rtt_s: float | None = None
        self.smoothed_rtt_s: float | None = None
        self.delivered_bytes = 0
        self.probing = False
        self._min_rtt_at = 0.0
        self._rates: deque[tuple[float, float]] = deque()  # (time, bytes/s), rates falling
        self._gain = STARTUP_GAIN
        self._round_ends_bytes = 0
        self._best_round_rate = 0.0
        self._flat_rounds = 0
        self._limited_until_bytes = 0

    @property
    def rate_bytes_s(self) -> float:
        """Estimated delivery rate; 0 before the first chunk."""
        return self._rates[0][1] if self._rates else 0.0

    def limit_bytes(self) -> int:
        """Bytes that may be on the way now."""
        floor = MIN_CHUNKS * self.chunk_bytes
        if self.probing:
            return min(floor, self.max_window_bytes)
        if self.min_rtt_s is None:
            return min(START_CHUNKS * self.chunk_bytes, self.max_window_bytes)
        window = int(self._gain * self.rate_bytes_s * self.min_rtt_s)
        return min(max(window, floor), self.max_window_bytes)

    def timeout_s(self, outstanding_bytes: int) -> float:
        """How long a chunk requested now may take before it is asked for again."""
        if self.smoothed_rtt_s is None or not self.rate_bytes_s:
            return FIRST_TIMEOUT_S
        expected = self.smoothed_rtt_s + outstanding_bytes / self.rate_bytes_s
        return min(max(4 * expected, MIN_TIMEOUT_S), MAX_TIMEOUT_S)

    def delivered(
        self, size_bytes: int, *, sent_s: float, delivered_at_send: int, lone: bool, now: float
    ) -> None:
        """A chunk arrived that was asked for once. ``lone`` says that it was requested with no
        more than a probe's worth on the way, so that its time has no queue in it."""
        self.delivered_bytes += size_bytes
        rtt = max(now - sent_s, 1e-6)
        self._observe_rtt(rtt, lone, now)
        rate = (self.delivered_bytes - delivered_at_send) / rtt
        limited = delivered_at_send < self._limited_until_bytes
        if not limited or rate > self.rate_bytes_s:
            self._observe_rate(rate, now)
        if not limited and delivered_at_send >= self._round_ends_bytes:
            self._round_ends_bytes = self.delivered_bytes
            self._end_round()

    def delivered_again(self, size_bytes: int) -> None:
        """A chunk arrived that was asked for more than once: its time means nothing."""
        self.delivered_bytes += size_bytes

    def nothing_more_to_ask(self, outstanding_bytes: int) -> None:
        """The exchange, not the path, limits what is on the way now."""
        self._limited_until_bytes = self.delivered_bytes + outstanding_bytes

    def _observe_rtt(self, rtt: float, lone: bool, now: float) -> None:
        before = rtt if self.smoothed_rtt_s is None else self.smoothed_rtt_s
        self.smoothed_rtt_s = before + (rtt - before) / 8
        if self.min_rtt_s is None or rtt <= self.min_rtt_s or (self.probing and lone):
            self.min_rtt_s, self._min_rtt_at, self.probing = rtt, now, False
        elif now - self._min_rtt_at > _RTT_WINDOW_S:
            self.probing = True

    def _observe_rate(self, rate: float, now: float) -> None:
        while self._rates and self._rates[-1][1] <= rate:
            self._rates.pop()
        self._rates.append((now, rate))
        horizon = now - max(1.0, _RATE_ROUNDS * (self.min_rtt_s or 0.0))
        while self._rates[0][0] < horizon:
            self._rates.popleft()

    def _end_round(self) -> None:
        if self._gain == CRUISE_GAIN or self.probing:
            return
        if self.rate_bytes_s >= self._best_round_rate * _GROWTH:
            self._best_round_rate, self._flat_rounds = self.rate_bytes_s, 0
            return
        self._flat_rounds += 1
        if self._flat_rounds >= _FLAT_ROUNDS:
            self._gain = CRUISE_GAIN


@dataclass(frozen=True, slots=True)
class AcceptedChunk:
    """A verified chunk to be written; ``file_complete`` says that it was the file's last."""

    entry: FileEntry
    index: int
    file_complete: bool


@dataclass(slots=True)
class FetchCounters:
    """What happened besides plain delivery."""

    duplicate: int = 0
    unknown: int = 0
    corrupt: int = 0
    timed_out: int = 0
    cut: int = 0


@dataclass(frozen=True, slots=True)
class FetchProgress:
    have_bytes: int
    total_bytes: int
    have_files: int
    total_files: int


@dataclass(slots=True)
class _Request:
    sent_s: float
    deadline_s: float
    size_bytes: int
    delivered_at_send: int
    lone: bool


@dataclass(slots=True)
class _File:
    entry: FileEntry
    missing: set[int]
    attempts: dict[int, int] = field(default_factory=dict)


class ChunkFetcher:
    """Fetches the chunks of some files over one link, in the order of ``entries``.

    ``present`` gives, by file digest, chunks that are on disk and verified. ``window`` is the
    link's; without one the fetch starts from nothing.
    """

    def __init__(
        self,
        entries: Iterable[FileEntry],
        present: Mapping[str, Collection[int]] | None = None,
        *,
        window: DeliveryWindow | None = None,
        max_attempts: int = MAX_ATTEMPTS,
    ) -> None:
        present = present or {}
        self._files: dict[str, _File] = {}
        self._wanted: deque[tuple[str, int]] = deque()
        for entry in entries:
            if entry.digest not in self._files:
                held = present.get(entry.digest, ())
                missing = [i for i in range(len(entry.chunk_digests)) if i not in held]
                self._files[entry.digest] = _File(entry, set(missing))
                self._wanted.extend((entry.digest, index) for index in missing)
        largest = max((f.entry.chunk_bytes for f in self._files.values()), default=CHUNK_BYTES)
        self.window = DeliveryWindow() if window is None else window
        self.window.chunk_bytes = min(largest, self.window.max_window_bytes)
        self._max_attempts = max_attempts
        self._requests: dict[tuple[str, int], _Request] = {}
        self._outstanding_bytes = 0
        self._nothing_expires_before = 0.0
        self.counters = FetchCounters()
        self.failed: str | None = None
        """Stable code once the fetch is hopeless: ``chunk.attempts`` or ``chunk.not_found``."""

    @property
    def done(self) -> bool:
        """Every chunk of every file is there."""
        return not any(file.missing for file in self._files.values())

    @property
    def outstanding_bytes(self) -> int:
        return self._outstanding_bytes

    def progress(self) -> FetchProgress:
        have_bytes = total_bytes = have_files = 0
        for file in self._files.values():
            total_bytes += file.entry.size_bytes
            have_files += not file.missing
            have_bytes += file.entry.size_bytes - sum(
                file.entry.chunk_size_bytes(index) for index in file.missing
            )
        return FetchProgress(have_bytes, total_bytes, have_files, len(self._files))

    def missing(self, digest: str) -> frozenset[int]:
        """Chunks of a file that have not arrived."""
        file = self._files.get(digest)
        return frozenset() if file is None else frozenset(file.missing)

    def next_requests(self, now: float) -> list[ChunkRequest]:
        """What to ask for now, chunks of one file together. Call after every arrival and at
        ``next_deadline``; asking is assumed to happen at ``now``."""
        self._expire(now)
        batches: list[tuple[str, list[int]]] = []
        limit_bytes = self.window.limit_bytes()
        while self._wanted and self.failed is None:
            digest, index = self._wanted[0]
            file = self._files[digest]
            size = file.entry.chunk_size_bytes(index)
            if self._requests and self._outstanding_bytes + size > limit_bytes:
                break
            self._wanted.popleft()
            if index not in file.missing or (digest, index) in self._requests:
                continue
            attempt = file.attempts.get(index, 0) + 1
            if attempt > self._max_attempts:
                self.failed = "chunk.attempts"
                break
            file.attempts[index] = attempt
            lone = self._outstanding_bytes + size <= MIN_CHUNKS * self.window.chunk_bytes
            self._outstanding_bytes += size
            patience = self.window.timeout_s(self._outstanding_bytes) * 2 ** (attempt - 1)
            deadline_s = now + min(patience, MAX_TIMEOUT_S)
            self._nothing_expires_before = min(self._nothing_expires_before, deadline_s)
            self._requests[digest, index] = _Request(
                now, deadline_s, size, self.window.delivered_bytes, lone
            )
            if not batches or batches[-1][0] != digest or len(batches[-1][1]) >= MAX_INDICES:
                batches.append((digest, []))
            batches[-1][1].append(index)
        if not self._wanted:
            self.window.nothing_more_to_ask(self._outstanding_bytes)
        return [ChunkRequest(digest=digest, indices=tuple(chunks)) for digest, chunks in batches]

    def next_deadline(self) -> float | None:
        """When the next chunk on the way is given up, None with nothing on the way."""
        return min((request.deadline_s for request in self._requests.values()), default=None)

    def chunk_arrived(
        self, digest: str, index: int, data: Buffer, now: float
    ) -> AcceptedChunk | None:
        """Take a chunk; None when it is of no use (a counter says why)."""
        file = self._files.get(digest)
        if file is None or not 0 <= index < len(file.entry.chunk_digests):
            self.counters.unknown += 1
            return None
        if index not in file.missing:
            self.counters.duplicate += 1
            return None
        request = self._forget(digest, index)
        if not file.entry.chunk_matches(index, data):
            self.counters.corrupt += 1
            if request is not None:
                self._wanted.appendleft((digest, index))
            return None
        file.missing.discard(index)
        if request is not None and file.attempts[index] == 1:
            self.window.delivered(
                request.size_bytes,
                sent_s=request.sent_s,
                delivered_at_send=request.delivered_at_send,
                lone=request.lone,
                now=now,
            )
        else:
            self.window.delivered_again(len(data))
        return AcceptedChunk(file.entry, index, not file.missing)

    def chunk_not_found(self, digest: str, index: int) -> None:
        """The sender does not have it (any more): the plan is out of date, the fetch fails."""
        file = self._files.get(digest)
        if file is None or index not in file.missing:
            self.counters.unknown += 1
            return
        self._forget(digest, index)
        self.failed = "chunk.not_found"

    def link_cut(self) -> None:
        """Nothing on the way will arrive: all of it is asked for again, without blame."""
        for digest, index in reversed(self._requests):
            self.counters.cut += 1
            self._files[digest].attempts[index] -= 1
            self._wanted.appendleft((digest, index))
        self._requests.clear()
        self._outstanding_bytes = 0

    def restart_file(self, digest: str) -> None:
        """Fetch a file again: it turned out damaged on disk. Counts as one more attempt each."""
        file = self._files[digest]
        file.missing.update(range(len(file.entry.chunk_digests)))
        self._wanted.extend((digest, index) for index in sorted(file.missing))

    def _expire(self, now: float) -> None:
        if now < self._nothing_expires_before:
            return
        late = [key for key, request in self._requests.items() if request.deadline_s <= now]
        for digest, index in reversed(late):
            self._forget(digest, index)
            self.counters.timed_out += 1
            self._wanted.appendleft((digest, index))
        self._nothing_expires_before = self.next_deadline() or 0.0

    def _forget(self, digest: str, index: int) -> _Request | None:
        request = self._requests.pop((digest, index), None)
        if request is not None:
            self._outstanding_bytes -= request.size_bytes
        return request
