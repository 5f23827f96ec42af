"""Receiver-driven chunk exchange: window, loss, damage, resume."""

import heapq

import pytest

from transport.chunks import (
    CRUISE_GAIN,
    FIRST_TIMEOUT_S,
    START_CHUNKS,
    ChunkFetcher,
    DeliveryWindow,
)
from transport.weights.manifest import describe_file

CHUNK = 1000


def file(size_bytes, fill=1, name="delta.safetensors"):
    data = (bytes([fill, *range(250)]) * (size_bytes // 251 + 1))[:size_bytes]
    return describe_file(name, "delta", data, chunk_bytes=CHUNK), data


def asked(requests):
    return [(request.digest, index) for request in requests for index in request.indices]


def chunk(entry, data, index):
    return data[index * CHUNK : index * CHUNK + entry.chunk_size_bytes(index)]


class Path:
    """A link in virtual time: half a round trip each way, a serialising sender."""

    def __init__(self, fetcher, contents, *, rtt_s, bytes_s):
        self.fetcher, self.contents = fetcher, contents
        self.rtt_s, self.bytes_s = rtt_s, bytes_s
        self.now = 0.0
        self.free_at = 0.0
        self.arrivals = []
        self.largest_window = 0

    def ask(self):
        for digest, index in asked(self.fetcher.next_requests(self.now)):
            entry, data = self.contents[digest]
            part = chunk(entry, data, index)
            self.free_at = max(self.free_at, self.now + self.rtt_s / 2)
            self.free_at += len(part) / self.bytes_s
            heapq.heappush(self.arrivals, (self.free_at + self.rtt_s / 2, digest, index, part))
        self.largest_window = max(self.largest_window, self.fetcher.outstanding_bytes)

    def run(self):
        self.ask()
        while self.arrivals:
            self.now, digest, index, part = heapq.heappop(self.arrivals)
            self.fetcher.chunk_arrived(digest, index, part, self.now)
            self.ask()
        return self.now


def test_everything_is_fetched_in_order_and_each_chunk_is_asked_for_once():
    first, data1 = file(2500)
    second, data2 = file(1000, fill=9)
    fetcher = ChunkFetcher([first, second, first])
    (request,) = [r for r in fetcher.next_requests(0.0) if r.digest == first.digest]
    assert request.indices == (0, 1, 2)
    assert fetcher.next_requests(0.0) == []
    accepted = [
        fetcher.chunk_arrived(first.digest, i, chunk(first, data1, i), 0.1) for i in (2, 0, 1)
    ]
    assert [(a.index, a.file_complete) for a in accepted] == [(2, False), (0, False), (1, True)]
    assert not fetcher.done
    assert fetcher.chunk_arrived(second.digest, 0, data2, 0.2).file_complete
    assert fetcher.done
    assert fetcher.next_requests(0.2) == []
    assert fetcher.next_deadline() is None
    progress = fetcher.progress()
    assert (progress.have_bytes, progress.total_bytes) == (3500, 3500)
    assert (progress.have_files, progress.total_files) == (2, 2)


def test_nothing_to_fetch_is_done_at_once():
    empty, _ = file(0)
    assert ChunkFetcher([]).done
    assert ChunkFetcher([empty]).done
    assert ChunkFetcher([empty]).next_requests(0.0) == []


def test_what_is_on_disk_is_not_asked_for():
    entry, _ = file(4500)
    fetcher = ChunkFetcher([entry], {entry.digest: {0, 3}})
    assert fetcher.progress().have_bytes == 2000
    assert fetcher.missing(entry.digest) == {1, 2, 4}
    assert asked(fetcher.next_requests(0.0)) == [(entry.digest, i) for i in (1, 2, 4)]
    assert fetcher.missing("0" * 64) == frozenset()


def test_a_fetch_starts_with_a_few_chunks():
    entry, _ = file(50 * CHUNK)
    fetcher = ChunkFetcher([entry])
    assert len(asked(fetcher.next_requests(0.0))) == START_CHUNKS
    assert fetcher.outstanding_bytes == START_CHUNKS * CHUNK


def test_the_window_never_exceeds_its_bound_and_always_lets_one_chunk_through():
    entry, _ = file(50 * CHUNK)
    fetcher = ChunkFetcher([entry], window=DeliveryWindow(max_window_bytes=2500))
    assert len(asked(fetcher.next_requests(0.0))) == 2
    fetcher = ChunkFetcher([entry], window=DeliveryWindow(max_window_bytes=10))
    assert len(asked(fetcher.next_requests(0.0))) == 1


@pytest.mark.parametrize("rtt_s", [0.002, 0.15])
def test_the_window_fills_a_long_path_and_does_not_flood_it(rtt_s):
    bytes_s = 2_000_000
    entry, data = file(3_000 * CHUNK)
    fetcher = ChunkFetcher([entry])
    path = Path(fetcher, {entry.digest: (entry, data)}, rtt_s=rtt_s, bytes_s=bytes_s)
    took_s = path.run()
    assert fetcher.done
    ideal_s = rtt_s + entry.size_bytes / bytes_s
    start_s = 8 * rtt_s
    assert took_s < 1.05 * ideal_s + start_s
    # Start doubles: at most twice what the path holds, and the chunk in service.
    assert path.largest_window <= 2.2 * (rtt_s * bytes_s + 2 * CHUNK)
    assert fetcher.window.limit_bytes() <= 1.3 * CRUISE_GAIN * (rtt_s * bytes_s + 2 * CHUNK)
    assert fetcher.window.rate_bytes_s == pytest.approx(bytes_s, rel=0.1)


def test_a_second_fetch_on_the_same_link_starts_with_a_full_window():
    entry, data = file(500 * CHUNK)
    window = DeliveryWindow()
    fetcher = ChunkFetcher([entry], window=window)
    Path(fetcher, {entry.digest: (entry, data)}, rtt_s=0.1, bytes_s=1e6).run()
    other, _ = file(500 * CHUNK, fill=3)
    again = ChunkFetcher([other], window=window)
    assert len(asked(again.next_requests(100.0))) > 80


def test_a_path_that_became_longer_is_seen_again():
    window = DeliveryWindow(chunk_bytes=CHUNK)
    entry, data = file(800 * CHUNK)
    fetcher = ChunkFetcher([entry], window=window)
    Path(fetcher, {entry.digest: (entry, data)}, rtt_s=0.05, bytes_s=1e6).run()
    near = window.min_rtt_s
    other, data = file(25_000 * CHUNK, fill=5)
    fetcher = ChunkFetcher([other], window=window)
    path = Path(fetcher, {other.digest: (other, data)}, rtt_s=0.2, bytes_s=1e6)
    path.now = path.free_at = 20.0
    path.run()
    assert near == pytest.approx(0.05, rel=0.2)
    assert window.min_rtt_s == pytest.approx(0.2, rel=0.2)
    assert path.now < 20.0 + 1.15 * 25.0


def test_damaged_chunks_are_asked_for_again_and_in_the_end_given_up():
    entry, data = file(1500)
    fetcher = ChunkFetcher([entry], max_attempts=3)
    for attempt in range(3):
        assert (entry.digest, 1) in asked(fetcher.next_requests(float(attempt)))
        assert fetcher.chunk_arrived(entry.digest, 1, b"x" * 500, attempt + 0.1) is None
    assert fetcher.counters.corrupt == 3
    assert fetcher.next_requests(4.0) == []
    assert fetcher.failed == "chunk.attempts"
    assert fetcher.chunk_arrived(entry.digest, 1, data[1000:], 5.0) is not None


def test_duplicate_and_unknown_chunks_change_nothing():
    entry, data = file(1500)
    fetcher = ChunkFetcher([entry])
    fetcher.next_requests(0.0)
    part = chunk(entry, data, 0)
    assert fetcher.chunk_arrived(entry.digest, 0, part, 0.1) is not None
    before = (fetcher.outstanding_bytes, fetcher.window.delivered_bytes)
    assert fetcher.chunk_arrived(entry.digest, 0, part, 0.2) is None
    assert fetcher.chunk_arrived("0" * 64, 0, part, 0.2) is None
    assert fetcher.chunk_arrived(entry.digest, 2, part, 0.2) is None
    assert fetcher.chunk_arrived(entry.digest, -1, part, 0.2) is None
    assert (fetcher.counters.duplicate, fetcher.counters.unknown) == (1, 3)
    assert (fetcher.outstanding_bytes, fetcher.window.delivered_bytes) == before


def test_a_chunk_that_does_not_come_is_asked_for_again_and_may_still_come_late():
    entry, data = file(1500)
    fetcher = ChunkFetcher([entry], max_attempts=2)
    fetcher.next_requests(0.0)
    fetcher.chunk_arrived(entry.digest, 1, data[1000:], 0.1)
    assert fetcher.next_deadline() == FIRST_TIMEOUT_S
    assert fetcher.next_requests(FIRST_TIMEOUT_S - 0.1) == []
    assert asked(fetcher.next_requests(FIRST_TIMEOUT_S)) == [(entry.digest, 0)]
    assert fetcher.counters.timed_out == 1
    assert fetcher.next_deadline() > FIRST_TIMEOUT_S + 5.0
    assert fetcher.chunk_arrived(entry.digest, 0, data[:1000], 31.0).file_complete
    assert fetcher.chunk_arrived(entry.digest, 0, data[:1000], 32.0) is None
    assert fetcher.done
    assert fetcher.outstanding_bytes == 0


def test_a_sender_that_never_answers_is_given_up():
    entry, _ = file(500)
    fetcher = ChunkFetcher([entry], max_attempts=3)
    now, asked_for = 0.0, 0
    while fetcher.failed is None:
        asked_for += len(asked(fetcher.next_requests(now)))
        now = fetcher.next_deadline() or now
    assert asked_for == 3
    assert now <= 600
    assert fetcher.next_deadline() is None


def test_a_sender_without_the_file_ends_the_fetch():
    entry, _ = file(1500)
    fetcher = ChunkFetcher([entry])
    fetcher.next_requests(0.0)
    fetcher.chunk_not_found("0" * 64, 0)
    assert fetcher.failed is None
    fetcher.chunk_not_found(entry.digest, 1)
    assert fetcher.failed == "chunk.not_found"
    assert fetcher.next_requests(1.0) == []


def test_after_a_cut_all_that_was_on_the_way_is_asked_for_again_without_blame():
    entry, data = file(3500)
    fetcher = ChunkFetcher([entry], max_attempts=1)
    assert len(asked(fetcher.next_requests(0.0))) == 4
    for _ in range(5):
        fetcher.link_cut()
        assert fetcher.outstanding_bytes == 0
        assert [index for _, index in asked(fetcher.next_requests(1.0))] == [0, 1, 2, 3]
    assert fetcher.counters.cut == 20
    assert fetcher.failed is None
    assert fetcher.chunk_arrived(entry.digest, 2, chunk(entry, data, 2), 1.1) is not None


def test_a_file_that_turned_out_damaged_is_fetched_once_more():
    entry, data = file(1500)
    fetcher = ChunkFetcher([entry])
    fetcher.next_requests(0.0)
    for index in (0, 1):
        fetcher.chunk_arrived(entry.digest, index, chunk(entry, data, index), 0.1)
    assert fetcher.done
    fetcher.restart_file(entry.digest)
    assert not fetcher.done
    assert [index for _, index in asked(fetcher.next_requests(0.2))] == [0, 1]


def test_many_small_chunks_are_asked_for_in_bounded_messages():
    entry, _ = file(400 * CHUNK)
    window = DeliveryWindow()
    fetcher = ChunkFetcher([entry], window=window)
    window.min_rtt_s = window.smoothed_rtt_s = 1.0
    window.delivered(1, sent_s=0.0, delivered_at_send=-400_000, lone=True, now=1.0)
    requests = fetcher.next_requests(1.0)
    assert sum(len(request.indices) for request in requests) == 400
    assert max(len(request.indices) for request in requests) == 64
