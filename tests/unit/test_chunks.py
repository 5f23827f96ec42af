"""Receiver-driven chunk exchange: loss, damage, resume, parts, lanes and relays."""

import pytest

from transport.chunk_exchange import NO_ANSWER, RELAY_TIMEOUT_S, WRONG_CHUNK, ChunkExchange
from transport.chunk_parts import (
    ChunkSource,
    Place,
    WantedChunk,
    ahead_of,
    part_bytes_for,
    place_of,
)
from transport.chunks import ChunkFetcher
from transport.delivery_window import FIRST_TIMEOUT_S, DeliveryWindow
from transport.messages import Ahead
from transport.weights.manifest import chunk_digest, describe_file

CHUNK = 1000
ORIGIN, LANE, RELAY, OTHER = "origin", "lane 1", "relay eu", "relay us"
KIB = 1 << 10
LARGE = 256 * KIB


def file(size_bytes, fill=1, name="delta.safetensors", chunk_bytes=CHUNK):
    data = (bytes([fill, *range(250)]) * (size_bytes // 251 + 1))[:size_bytes]
    return describe_file(name, "delta", data, chunk_bytes=chunk_bytes), data


def source(name, window=None, relay=None):
    relay = name.startswith("relay") if relay is None else relay
    return ChunkSource(name, window or DeliveryWindow(), relay)


def fetch(*entries, present=None, sources=(ORIGIN,), **settings):
    return ChunkFetcher(
        entries,
        present,
        sources=[source(s) if isinstance(s, str) else s for s in sources],
        **settings,
    )


def asked(requests):
    return [(request.digest, index) for _, request in requests for index in request.indices]


def where(requests):
    """Indices by source."""
    found: dict[str, list[int]] = {}
    for name, request in requests:
        found.setdefault(name, []).extend(request.indices)
    return found


def chunk(entry, data, index):
    size = entry.chunk_bytes
    return data[index * size : index * size + entry.chunk_size_bytes(index)]


def give(fetcher, entry, data, index, now=0.1, name=ORIGIN):
    return fetcher.chunk_arrived(name, entry.digest, index, 0, chunk(entry, data, index), now)


def test_everything_is_fetched_in_order_and_each_chunk_is_asked_for_once():
    first, data1 = file(2500)
    second, data2 = file(1000, fill=9)
    fetcher = fetch(first, second, first)
    requests = [r for _, r in fetcher.next_requests(0.0)]
    assert [(r.digest, r.indices) for r in requests] == [
        (first.digest, (0, 1, 2)),
        (second.digest, (0,)),
    ]
    assert all((r.part_bytes, r.chunk_digests, r.file_bytes) == (0, (), 0) for r in requests)
    assert fetcher.next_requests(0.0) == []
    accepted = [give(fetcher, first, data1, i) for i in (2, 0, 1)]
    assert [(a.index, a.file_complete) for a in accepted] == [(2, False), (0, False), (1, True)]
    assert bytes(accepted[0].data) == data1[2000:]
    assert not fetcher.done
    assert give(fetcher, second, data2, 0).file_complete
    assert fetcher.done
    assert fetcher.next_requests(0.2) == []
    assert fetcher.next_deadline() is None
    progress = fetcher.progress()
    assert (progress.have_bytes, progress.total_bytes) == (3500, 3500)
    assert (progress.have_files, progress.total_files) == (2, 2)


def test_nothing_to_fetch_is_done_at_once():
    empty, _ = file(0)
    assert fetch().done
    assert fetch(empty).done
    assert fetch(empty).next_requests(0.0) == []


def test_what_is_on_disk_is_not_asked_for():
    entry, _ = file(4500)
    fetcher = fetch(entry, present={entry.digest: {0, 3}})
    assert fetcher.progress().have_bytes == 2000
    assert fetcher.missing(entry.digest) == {1, 2, 4}
    assert asked(fetcher.next_requests(0.0)) == [(entry.digest, i) for i in (1, 2, 4)]
    assert fetcher.missing("0" * 64) == frozenset()


def test_the_window_never_exceeds_its_bound_and_always_lets_one_piece_through():
    entry, _ = file(50 * CHUNK)
    for bound, pieces in ((2500, 2), (10, 1)):
        window = DeliveryWindow(max_window_bytes=bound)
        fetcher = fetch(entry, sources=[source(ORIGIN, window)])
        assert len(asked(fetcher.next_requests(0.0))) == pieces
        assert fetcher.outstanding_bytes(ORIGIN) == pieces * CHUNK


def test_damaged_chunks_are_asked_for_again_and_in_the_end_given_up():
    entry, data = file(1500)
    fetcher = fetch(entry, max_attempts=3)
    for attempt in range(3):
        assert (entry.digest, 1) in asked(fetcher.next_requests(float(attempt)))
        damaged = b"x" * 500 if attempt else b"short"
        assert fetcher.chunk_arrived(ORIGIN, entry.digest, 1, 0, damaged, attempt + 0.1) is None
    assert fetcher.counters.corrupt == 3
    assert fetcher.next_requests(4.0) == []
    assert fetcher.failed == "chunk.attempts"
    assert not fetcher.dropped
    assert data


def test_duplicate_and_unknown_chunks_change_nothing():
    entry, data = file(1500)
    window = DeliveryWindow()
    fetcher = fetch(entry, sources=[source(ORIGIN, window)])
    fetcher.next_requests(0.0)
    part = chunk(entry, data, 0)
    assert give(fetcher, entry, data, 0) is not None
    before = (fetcher.outstanding_bytes(ORIGIN), window.delivered_bytes)
    for digest, index, part_bytes, name in [
        (entry.digest, 0, 0, ORIGIN),
        ("0" * 64, 0, 0, ORIGIN),
        (entry.digest, 2, 0, ORIGIN),
        (entry.digest, -1, 0, ORIGIN),
        (entry.digest, 1, 500, ORIGIN),
        (entry.digest, 1, 0, "nobody"),
    ]:
        assert fetcher.chunk_arrived(name, digest, index, part_bytes, part, 0.2) is None
    assert fetcher.counters.unknown == 6
    assert (fetcher.outstanding_bytes(ORIGIN), window.delivered_bytes) == before


def test_a_chunk_that_does_not_come_is_asked_for_again_and_may_still_come_late():
    entry, data = file(1500)
    fetcher = fetch(entry, max_attempts=2)
    fetcher.next_requests(0.0)
    give(fetcher, entry, data, 1)
    assert fetcher.next_deadline() == FIRST_TIMEOUT_S
    assert fetcher.next_requests(FIRST_TIMEOUT_S - 0.1) == []
    assert asked(fetcher.next_requests(FIRST_TIMEOUT_S)) == [(entry.digest, 0)]
    assert fetcher.counters.timed_out == 1
    assert fetcher.next_deadline() > FIRST_TIMEOUT_S + 5.0
    assert give(fetcher, entry, data, 0, now=31.0).file_complete
    assert give(fetcher, entry, data, 0, now=32.0) is None
    assert fetcher.done
    assert fetcher.outstanding_bytes(ORIGIN) == 0


def test_a_sender_that_never_answers_is_given_up():
    entry, _ = file(500)
    fetcher = fetch(entry, max_attempts=3)
    now, asked_for = 0.0, 0
    while fetcher.failed is None:
        asked_for += len(asked(fetcher.next_requests(now)))
        now = fetcher.next_deadline() or now
    assert asked_for == 3
    assert now <= 600
    assert fetcher.next_deadline() is None


def test_an_origin_without_the_file_ends_the_fetch():
    entry, _ = file(1500)
    fetcher = fetch(entry)
    fetcher.next_requests(0.0)
    fetcher.chunk_not_found(ORIGIN, "0" * 64, 0, 0)
    assert fetcher.failed is None
    fetcher.chunk_not_found(ORIGIN, entry.digest, 1, 0)
    assert fetcher.failed == "chunk.not_found"
    assert fetcher.next_requests(1.0) == []


def test_after_a_cut_all_that_was_on_the_way_is_asked_for_again_without_blame():
    entry, data = file(3500)
    fetcher = fetch(entry, max_attempts=1)
    assert len(asked(fetcher.next_requests(0.0))) == 4
    for _ in range(5):
        fetcher.source_down(ORIGIN)
        assert fetcher.outstanding_bytes(ORIGIN) == 0
        assert fetcher.next_requests(1.0) == []
        assert fetcher.next_deadline() is None
        fetcher.source_up(ORIGIN)
        assert [index for _, index in asked(fetcher.next_requests(1.0))] == [0, 1, 2, 3]
    assert fetcher.counters.cut == 20
    assert fetcher.failed is None
    assert give(fetcher, entry, data, 2) is not None


def test_a_file_that_turned_out_damaged_is_fetched_once_more_and_not_for_ever():
    entry, data = file(1500)
    fetcher = fetch(entry, max_attempts=2)
    for restart in range(2):
        assert [index for _, index in asked(fetcher.next_requests(0.2))] == [0, 1], restart
        for index in (0, 1):
            give(fetcher, entry, data, index)
        assert fetcher.done
        fetcher.restart_file(entry.digest)
        assert not fetcher.done
    assert fetcher.next_requests(0.3) == []
    assert fetcher.failed == "chunk.attempts"


def test_many_small_chunks_are_asked_for_in_bounded_messages():
    entry, _ = file(400 * CHUNK)
    requests = [request for _, request in fetch(entry).next_requests(1.0)]
    assert sum(len(request.indices) for request in requests) == 400
    assert max(len(request.indices) for request in requests) == 64


# ---- parts -----------------------------------------------------------------------------------


def large(chunks=2, short=0):
    return file(chunks * LARGE + short, chunk_bytes=LARGE)


def part(data, index, part_bytes=64 * KIB):
    return data[index * part_bytes : (index + 1) * part_bytes]


def test_parts_divide_the_chunk_and_are_never_below_64_kib():
    assert part_bytes_for(1 << 20, 1 << 20) == 0
    assert part_bytes_for(1 << 20, 300 * KIB) == 256 * KIB
    assert part_bytes_for(1 << 20, 1) == 64 * KIB
    assert part_bytes_for(96 * KIB, 1) == 0
    assert part_bytes_for(1000, 1) == 0
    assert part_bytes_for(3 * 64 * KIB, 1) == 96 * KIB


def test_a_sender_finds_the_place_of_a_part_and_refuses_sizes_that_are_not_allowed():
    assert place_of(3, 0, LARGE) == Place(3, 0, LARGE)
    assert place_of(6, 64 * KIB, LARGE) == Place(1, 128 * KIB, 192 * KIB)
    for part_bytes in (1, 32 * KIB, 96 * KIB, 2 * LARGE):
        assert place_of(0, part_bytes, LARGE) is None
    assert place_of(0, 64 * KIB, 0) is None


def test_a_cold_link_is_asked_for_small_parts_and_the_whole_chunk_is_verified():
    entry, data = large(short=1000)
    fetcher = fetch(entry)
    parts, whole = [request for _, request in fetcher.next_requests(0.0)]
    assert (parts.part_bytes, parts.indices) == (64 * KIB, tuple(range(8)))
    assert (whole.part_bytes, whole.indices) == (0, (2,))  # the short last chunk
    for index in (1, 0, 2, 7):
        piece = part(data, index)
        assert fetcher.chunk_arrived(ORIGIN, entry.digest, index, 64 * KIB, piece, 0.1) is None
    assert fetcher.chunk_arrived(ORIGIN, entry.digest, 2, 64 * KIB, part(data, 2), 0.1) is None
    assert fetcher.counters.duplicate == 1
    done = fetcher.chunk_arrived(ORIGIN, entry.digest, 3, 64 * KIB, part(data, 3), 0.2)
    assert (done.index, bytes(done.data)) == (0, data[:LARGE])
    assert give(fetcher, entry, data, 2) is not None
    for index in (6, 5, 4):
        done = fetcher.chunk_arrived(ORIGIN, entry.digest, index, 64 * KIB, part(data, index), 0.2)
    assert (done.index, done.file_complete) == (1, True)
    assert fetcher.done


def test_a_damaged_part_costs_its_chunk_and_no_other():
    entry, data = large()
    fetcher = fetch(entry)
    fetcher.next_requests(0.0)
    for index in range(4):
        piece = bytes(64 * KIB) if index == 2 else part(data, index)
        assert fetcher.chunk_arrived(ORIGIN, entry.digest, index, 64 * KIB, piece, 0.1) is None
    assert fetcher.counters.corrupt == 1
    again = fetcher.next_requests(0.2)
    assert {index // 4 for _, index in asked(again)} <= {0}
    assert fetcher.missing(entry.digest) == {0, 1}


def test_parts_that_arrived_before_a_cut_are_not_asked_for_again():
    entry, data = large()
    fetcher = fetch(entry)
    fetcher.next_requests(0.0)
    for index in (0, 2):
        fetcher.chunk_arrived(ORIGIN, entry.digest, index, 64 * KIB, part(data, index), 0.1)
    fetcher.source_down(ORIGIN)
    fetcher.source_up(ORIGIN)
    assert [index for _, index in asked(fetcher.next_requests(0.2))][:4] == [1, 3, 4, 5]


# ---- several sources -------------------------------------------------------------------------


def small_window(pieces):
    return DeliveryWindow(max_window_bytes=pieces * CHUNK)


def test_lanes_to_the_origin_share_the_work_by_their_room():
    entry, _ = file(20 * CHUNK)
    fetcher = fetch(entry, sources=[source(ORIGIN, small_window(6)), source(LANE, small_window(3))])
    shared = where(fetcher.next_requests(0.0))
    assert {name: len(found) for name, found in shared.items()} == {ORIGIN: 6, LANE: 3}
    assert sorted(shared[ORIGIN] + shared[LANE]) == list(range(9))
    fetcher.source_down(LANE)
    assert fetcher.next_requests(0.1) == []
    fetcher.source_up(LANE)
    assert where(fetcher.next_requests(0.2))[LANE] == shared[LANE]


def test_a_lane_that_is_opened_later_takes_part():
    entry, _ = file(20 * CHUNK)
    fetcher = fetch(entry, sources=[source(ORIGIN, small_window(2))])
    assert where(fetcher.next_requests(0.0)) == {ORIGIN: [0, 1]}
    fetcher.add_source(source(LANE, small_window(2)))
    assert where(fetcher.next_requests(0.0)) == {LANE: [2, 3]}


def test_a_chunk_that_was_late_on_one_lane_is_asked_for_on_another():
    entry, _ = file(2 * CHUNK)
    fetcher = fetch(entry, sources=[source(ORIGIN, small_window(2)), source(LANE, small_window(2))])
    before = where(fetcher.next_requests(0.0))
    after = where(fetcher.next_requests(FIRST_TIMEOUT_S))
    assert after[ORIGIN] == before[LANE]
    assert after[LANE] == before[ORIGIN]


def test_a_relay_is_asked_first_and_told_what_the_chunks_hash_to():
    entry, data = file(20 * CHUNK)
    fetcher = fetch(entry, sources=[source(ORIGIN), source(RELAY, small_window(4))])
    [(name, request)] = fetcher.next_requests(0.0)
    assert (name, request.indices) == (RELAY, (0, 1, 2, 3))
    assert request.chunk_digests == entry.chunk_digests[:4]
    assert (request.chunk_bytes, request.file_bytes) == (CHUNK, 20 * CHUNK)
    assert give(fetcher, entry, data, 0, name=RELAY) is not None
    # The origin stays out of it while the relay is there, however little room it has.
    assert set(where(fetcher.next_requests(0.1))) <= {RELAY}
    fetcher.source_down(RELAY)
    assert where(fetcher.next_requests(0.2)) == {ORIGIN: list(range(1, 20))}


def test_what_a_relay_does_not_have_comes_from_the_origin():
    entry, data = file(3 * CHUNK)
    fetcher = fetch(entry, sources=[source(ORIGIN), source(RELAY)])
    fetcher.next_requests(0.0)
    fetcher.chunk_not_found(RELAY, entry.digest, 1, 0)
    assert where(fetcher.next_requests(0.1)) == {ORIGIN: [1]}
    fetcher.chunk_not_found(RELAY, entry.digest, 1, 0)  # once more, of nobody's asking
    assert fetcher.failed is None
    for index, name in ((0, RELAY), (1, ORIGIN), (2, RELAY)):
        give(fetcher, entry, data, index, name=name)
    assert fetcher.done
    assert (fetcher.counters.not_found, not fetcher.dropped) == (1, True)


def test_a_fetch_with_nothing_but_a_relay_that_lacks_a_chunk_has_failed():
    entry, _ = file(CHUNK)
    fetcher = fetch(entry, sources=[source(RELAY)])
    fetcher.next_requests(0.0)
    fetcher.chunk_not_found(RELAY, entry.digest, 0, 0)
    assert fetcher.next_requests(0.1) == []
    assert fetcher.failed == "chunk.not_found"


def test_a_lying_relay_is_dropped_with_a_reason_and_the_origin_gives_the_rest():
    entry, data = file(4 * CHUNK)
    fetcher = fetch(entry, sources=[source(ORIGIN), source(RELAY)], max_attempts=1)
    fetcher.next_requests(0.0)
    assert give(fetcher, entry, data, 0, name=RELAY) is not None
    assert fetcher.chunk_arrived(RELAY, entry.digest, 1, 0, bytes(CHUNK), 0.1) is None
    assert fetcher.dropped == {RELAY: WRONG_CHUNK}
    assert give(fetcher, entry, data, 2, name=RELAY) is None  # nothing of it counts any more
    fetcher.add_source(source(RELAY))
    fetcher.source_up(RELAY)
    assert where(fetcher.next_requests(0.2)) == {ORIGIN: [1, 2, 3]}
    for index in (1, 2, 3):
        assert give(fetcher, entry, data, index) is not None
    assert fetcher.done


def test_a_relay_that_does_not_answer_is_dropped():
    entry, _ = file(2 * CHUNK)
    fetcher = fetch(entry, sources=[source(ORIGIN), source(RELAY)])
    fetcher.next_requests(0.0)
    assert fetcher.next_requests(RELAY_TIMEOUT_S - 1) == []
    assert where(fetcher.next_requests(RELAY_TIMEOUT_S)) == {ORIGIN: [0, 1]}
    assert fetcher.dropped == {RELAY: NO_ANSWER}


def test_parts_of_a_liar_do_not_spoil_a_chunk_that_is_finished_elsewhere():
    entry, _ = large()
    fetcher = fetch(entry, sources=[source(ORIGIN), source(RELAY)])
    fetcher.next_requests(0.0)
    fetcher.chunk_arrived(RELAY, entry.digest, 4, 64 * KIB, bytes(64 * KIB), 0.1)  # a false part
    for index in range(4):
        fetcher.chunk_arrived(RELAY, entry.digest, index, 64 * KIB, bytes(64 * KIB), 0.1)
    assert fetcher.dropped == {RELAY: WRONG_CHUNK}
    assert sorted(where(fetcher.next_requests(0.2))[ORIGIN]) == list(range(8))


def test_a_chunk_may_be_hashed_later_while_others_are_asked_for():
    entry, data = file(3 * CHUNK)
    fetcher = fetch(entry, max_attempts=1)
    fetcher.next_requests(0.0)
    received = [
        fetcher.chunk_received(ORIGIN, entry.digest, index, 0, piece, 0.1)
        for index, piece in enumerate((chunk(entry, data, 0), bytes(CHUNK)))
    ]
    assert [one.matches() for one in received] == [True, False]
    assert fetcher.outstanding_bytes(ORIGIN) == CHUNK
    assert give(fetcher, entry, data, 0) is None  # once more, before the hash
    assert fetcher.counters.duplicate == 1
    assert fetcher.missing(entry.digest) == {0, 1, 2}
    assert fetcher.chunk_verified(received[0], True).index == 0
    assert fetcher.chunk_verified(received[0], True) is None
    assert fetcher.missing(entry.digest) == {1, 2}
    assert fetcher.chunk_verified(received[1], False) is None
    assert fetcher.counters.corrupt == 1
    fetcher.next_requests(0.2)
    assert fetcher.failed == "chunk.attempts"


def test_nobody_is_blamed_for_what_another_source_had_delivered():
    entry, data = file(2 * CHUNK)
    fetcher = fetch(entry, sources=[source(RELAY), source(ORIGIN)], max_attempts=1)
    fetcher.next_requests(0.0)
    late = fetcher.chunk_received(RELAY, entry.digest, 0, 0, bytes(CHUNK), 0.1)
    assert fetcher.chunk_arrived(RELAY, entry.digest, 1, 0, bytes(CHUNK), 0.1) is None
    assert fetcher.dropped == {RELAY: WRONG_CHUNK}
    assert where(fetcher.next_requests(0.2)) == {ORIGIN: [1, 0]}
    again = fetcher.chunk_received(ORIGIN, entry.digest, 0, 0, chunk(entry, data, 0), 0.3)
    assert fetcher.chunk_verified(late, late.matches()) is None
    assert fetcher.chunk_verified(again, again.matches()).index == 0
    assert give(fetcher, entry, data, 1) is not None
    assert fetcher.counters.corrupt == 1


def test_a_wrong_chunk_of_several_sources_is_left_to_the_origin():
    entry, data = file(LARGE, chunk_bytes=LARGE)
    fetcher = fetch(entry, sources=[source(ORIGIN), source(RELAY), source(OTHER)])
    [(first, _)] = fetcher.next_requests(0.0)
    fetcher.chunk_arrived(first, entry.digest, 0, 64 * KIB, bytes(64 * KIB), 0.1)
    fetcher.source_down(first)
    [(second, request)] = fetcher.next_requests(0.2)
    assert {first, second} == {RELAY, OTHER}
    assert request.indices == (1, 2, 3)
    fetcher.source_up(first)
    for index in (1, 2, 3):
        fetcher.chunk_arrived(second, entry.digest, index, 64 * KIB, part(data, index), 0.3)
    assert not fetcher.dropped
    assert where(fetcher.next_requests(0.4)) == {ORIGIN: [0, 1, 2, 3]}


def test_chunks_that_contradict_each_other_are_not_wanted_both():
    exchange = ChunkExchange([source(ORIGIN)])
    wanted = WantedChunk("f", 0, 3000, 1000, chunk_digest(b"a"))
    assert exchange.want(wanted)
    assert exchange.want(wanted)
    assert not exchange.want(wanted._replace(chunk_digest=chunk_digest(b"b")))
    assert not exchange.want(wanted._replace(number=1, chunk_bytes=500))
    exchange.forget(wanted.key)
    exchange.forget(wanted.key)
    assert exchange.want(wanted._replace(number=1, chunk_bytes=500))


@pytest.mark.parametrize("relays", [1, 2])
def test_the_order_of_sources_does_not_matter(relays):
    entry, _ = file(2 * CHUNK)
    names = [RELAY, OTHER][:relays]
    fetcher = fetch(entry, sources=[*names, ORIGIN])
    assert set(where(fetcher.next_requests(0.0))) <= set(names)


def test_what_comes_ahead_is_the_first_bytes_in_pieces_of_the_link():
    large, _ = file(3 * LARGE + 7, chunk_bytes=LARGE)
    small, _ = file(1500, fill=2)

    def ahead(ahead_bytes, piece_bytes):
        found = ahead_of([large, small], ahead_bytes=ahead_bytes, piece_bytes=piece_bytes)
        return [(each.digest, each.indices, each.part_bytes) for each in found]

    assert ahead(0, LARGE) == []
    assert ahead(LARGE - 1, LARGE) == []
    assert ahead(LARGE, LARGE) == [(large.digest, (0,), 0)]
    half = LARGE // 2
    assert ahead(3 * half, half) == [(large.digest, (0, 1, 2), half)]
    everything = ahead(1 << 30, half)
    assert everything == [
        (large.digest, (0, 1, 2, 3, 4, 5), half),
        (large.digest, (3,), 0),  # a short last chunk stays whole
        (small.digest, (0, 1), 0),
    ]
    many, _ = file(100 * 64 * KIB, chunk_bytes=64 * KIB)
    batches = ahead_of([many], ahead_bytes=1 << 30, piece_bytes=0)
    assert [len(each.indices) for each in batches] == [64, 36]


def test_what_comes_unasked_is_not_asked_for_and_says_nothing_about_the_link():
    entry, data = file(3 * LARGE, chunk_bytes=LARGE)
    window = DeliveryWindow()
    fetcher = fetch(entry, sources=[source(ORIGIN, window)])
    (ahead,) = ahead_of([entry], ahead_bytes=5 * 64 * KIB, piece_bytes=64 * KIB)
    fetcher.coming(ORIGIN, ahead, 0.0)
    assert fetcher.outstanding_bytes(ORIGIN) == 5 * 64 * KIB
    rest = [(i, r.part_bytes) for _, r in fetcher.next_requests(0.0) for i in r.indices]
    assert rest == [(i, 64 * KIB) for i in range(5, 12)]
    part = 64 * KIB
    for index in range(12):
        piece = data[index * part : (index + 1) * part]
        fetcher.chunk_arrived(ORIGIN, entry.digest, index, part, piece, 0.5)
        assert (window.min_rtt_s is None) == (index < 5)
    assert fetcher.done
    assert fetcher.counters.unknown == fetcher.counters.duplicate == 0


def test_what_does_not_come_though_it_was_said_to_is_asked_for():
    entry, data = file(2500)
    fetcher = fetch(entry)
    fetcher.coming(ORIGIN, Ahead(digest=entry.digest, indices=(0, 2)), 0.0)
    assert asked(fetcher.next_requests(0.0)) == [(entry.digest, 1)]
    give(fetcher, entry, data, 1)
    assert fetcher.next_requests(1.0) == []
    assert asked(fetcher.next_requests(FIRST_TIMEOUT_S + 1)) == [
        (entry.digest, 0),
        (entry.digest, 2),
    ]
    # Nor after the connection broke.
    fetcher = fetch(entry)
    fetcher.coming(ORIGIN, Ahead(digest=entry.digest, indices=(0, 1, 2)), 0.0)
    fetcher.source_up(ORIGIN)
    assert len(asked(fetcher.next_requests(0.1))) == 3


@pytest.mark.parametrize(
    "ahead",
    [
        Ahead(digest="another", indices=(0,)),
        Ahead(digest="", indices=(3, 1 << 50)),
        Ahead(digest="", indices=(0,), part_bytes=64 * KIB),
        Ahead(digest="", indices=(0,), part_bytes=7),
        Ahead(digest="", indices=()),
    ],
)
def test_what_cannot_come_ahead_changes_nothing(ahead):
    entry, _ = file(2500)
    fetcher = fetch(entry)
    digest = ahead.digest or entry.digest
    named = Ahead(digest=digest, indices=ahead.indices, part_bytes=ahead.part_bytes)
    fetcher.coming(ORIGIN, named, 0.0)
    assert fetcher.outstanding_bytes(ORIGIN) == 0
    assert len(asked(fetcher.next_requests(0.0))) == 3


def test_a_relay_sends_nothing_unasked():
    entry, _ = file(2500)
    fetcher = fetch(entry, sources=[ORIGIN, RELAY])
    fetcher.coming(RELAY, Ahead(digest=entry.digest, indices=(0,)), 0.0)
    assert fetcher.outstanding_bytes(RELAY) == 0
    fetcher.coming(ORIGIN, Ahead(digest=entry.digest, indices=(0,)), 0.0)
    assert where(fetcher.next_requests(0.0)) == {RELAY: [1, 2]}
