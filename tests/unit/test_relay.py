"""A relay's cache on disk, and what it does with requests."""

import os
import shutil

import pytest

from transport.chunk_cache import ChunkCache
from transport.chunk_parts import ChunkSource
from transport.delivery_window import DeliveryWindow
from transport.errors import StoreError
from transport.messages import Chunk, ChunkRequest
from transport.relay import MAX_WAITING_EACH, Answer, Relay
from transport.weights.manifest import chunk_digest

KIB = 1 << 10
CHUNK = 128 * KIB
FILE = "f" * 64
A, B = b"route a", b"route b"


def data(fill, size=CHUNK):
    return bytes([fill]) * size


def nothing(digest):
    return False


def relay():
    return Relay([ChunkSource("origin", DeliveryWindow())])


def request(*fills, part_bytes=0, indices=None, size=10 * CHUNK, **changes):
    """The chunks of a file in which chunk ``n`` consists of ``fills[n]``."""
    fields = {
        "digest": FILE,
        "indices": tuple(range(len(fills))) if indices is None else indices,
        "part_bytes": part_bytes,
        "chunk_digests": tuple(chunk_digest(data(fill)) for fill in fills),
        "chunk_bytes": CHUNK,
        "file_bytes": size,
        **changes,
    }
    return ChunkRequest(**fields)


def give(relay, index, contents, part_bytes=0):
    piece = Chunk(digest=FILE, index=index, part_bytes=part_bytes)
    return relay.arrived("origin", piece, contents, 1.0)


def give_whole(relay, number, contents):
    """Both halves of a chunk: a cold link is asked for small parts."""
    half = CHUNK // 2
    give(relay, 2 * number, contents[:half], half)
    return give(relay, 2 * number + 1, contents[half:], half)


def asked(relay, now=0.0):
    return [r for _, r in relay.next_requests(now)]


def test_a_chunk_that_two_ask_for_is_fetched_once_and_both_get_their_pieces():
    core = relay()
    assert core.ask(A, request(1), nothing) == []
    assert core.ask(B, request(1, part_bytes=64 * KIB, indices=(1,)), nothing) == []
    [to_origin] = asked(core)
    assert (to_origin.digest, to_origin.indices, to_origin.part_bytes) == (FILE, (0, 1), 64 * KIB)
    assert to_origin.chunk_digests == ()  # the weight store knows its files
    fetched = give_whole(core, 0, data(1))
    assert (fetched.data, fetched.chunk_digest) == (data(1), chunk_digest(data(1)))
    assert dict(fetched.answers) == {
        A: Answer(FILE, 0, 0, chunk_digest(data(1)), 0, CHUNK),
        B: Answer(FILE, 1, 64 * KIB, chunk_digest(data(1)), 64 * KIB, CHUNK),
    }
    assert core.waiting == 0
    assert (core.counters["miss"], core.counters["joined"]) == (1, 1)


def test_what_is_kept_is_answered_at_once():
    core = relay()
    [(route, answer)] = core.ask(A, request(1), lambda digest: digest == chunk_digest(data(1)))
    assert (route, answer.chunk_digest, answer.stop) == (A, chunk_digest(data(1)), CHUNK)
    assert asked(core) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"chunk_digests": ()},
        {"chunk_digests": (b"short",)},
        {"chunk_bytes": 0},
        {"chunk_bytes": 1 << 30},
        {"file_bytes": 0},
        {"part_bytes": 1000},
        {"indices": (10,)},
        {"part_bytes": 64 * KIB, "indices": (20,)},
    ],
)
def test_a_request_that_says_too_little_or_nonsense_is_answered_with_not_found(changes):
    core = relay()
    asking = request(1, **changes)
    none = Answer(FILE, asking.indices[0], asking.part_bytes)
    assert core.ask(A, asking, lambda digest: True) == [(A, none)]
    assert asked(core) == []


def test_a_liar_gets_nothing_and_spoils_nothing():
    core = relay()
    core.ask(A, request(7), nothing)  # the chunk is in truth made of ones
    for attempt in range(3):
        assert [r.digest for r in asked(core, float(attempt))] == [FILE]
        assert give_whole(core, 0, data(1)) is None
    assert asked(core, 4.0) == []
    assert core.failed() == [(A, Answer(FILE, 0, 0))]
    core.ask(B, request(1), nothing)
    asked(core, 5.0)
    assert dict(give_whole(core, 0, data(1)).answers)[B].chunk_digest == chunk_digest(data(1))


def test_who_contradicts_what_is_being_fetched_is_sent_to_the_origin():
    core = relay()
    core.ask(A, request(1), nothing)
    assert core.ask(B, request(2), nothing) == [(B, Answer(FILE, 0, 0))]
    assert core.waiting == 1


def test_what_the_origin_lacks_is_not_found():
    core = relay()
    core.ask(A, request(1), nothing)
    core.ask(B, request(1), nothing)
    asked(core)
    none = Chunk(digest=FILE, index=0, part_bytes=64 * KIB, found=False)
    assert core.arrived("origin", none, b"", 1.0) is None
    assert core.failed() == [(A, Answer(FILE, 0, 0)), (B, Answer(FILE, 0, 0))]
    assert core.failed() == []


def test_without_the_origin_whoever_waits_is_sent_there_directly():
    core = relay()
    core.ask(A, request(1, 2), nothing)
    core.source_down("origin")
    assert asked(core) == []
    assert core.give_up() == [(A, Answer(FILE, 0, 0)), (A, Answer(FILE, 1, 0))]
    assert core.give_up() == []
    assert core.waiting == 0


def test_what_is_waited_for_is_bounded_for_each_asker():
    core = relay()
    size = CHUNK * (MAX_WAITING_EACH + 64)
    digest = chunk_digest(data(1))
    refused = []
    for first in range(0, MAX_WAITING_EACH + 64, 64):
        indices = tuple(range(first, first + 64))
        asking = request(indices=indices, size=size, chunk_digests=(digest,) * 64)
        refused += core.ask(A, asking, nothing)
    assert core.waiting == MAX_WAITING_EACH
    assert [answer.number for _, answer in refused] == list(indices)
    assert core.ask(B, request(1, indices=(MAX_WAITING_EACH,), size=size), nothing) == []


# ---- the disk --------------------------------------------------------------------------------


def digest_of(fill, size=1000):
    return chunk_digest(data(fill, size))


def fill_cache(cache, *fills, size=1000):
    for fill in fills:
        cache.write(digest_of(fill, size), data(fill, size))


def test_chunks_are_found_again_after_a_restart_and_what_else_is_there_is_removed(tmp_path):
    fill_cache(ChunkCache(tmp_path, 10_000), 1, 2)
    stray = tmp_path / digest_of(1).hex()[:2] / "stray.tmp"
    stray.write_bytes(b"x")
    cache = ChunkCache(tmp_path, 10_000)
    assert (len(cache), cache.used_bytes, stray.exists()) == (2, 2000, False)
    assert cache.read(digest_of(1)) == data(1, 1000)
    assert cache.read(digest_of(3)) is None


def test_the_least_recently_used_make_room_also_after_a_restart(tmp_path):
    cache = ChunkCache(tmp_path, 3000)
    fill_cache(cache, 1, 2, 3)
    assert cache.read(digest_of(1)) is not None
    fill_cache(cache, 4)
    assert [cache.has(digest_of(n)) for n in (1, 2, 3, 4)] == [True, False, True, True]
    for used_at, fill in enumerate((3, 1, 4)):
        name = digest_of(fill).hex()
        os.utime(tmp_path / name[:2] / name, (used_at, used_at))
    smaller = ChunkCache(tmp_path, 2000)
    assert (len(smaller), smaller.used_bytes) == (2, 2000)
    assert not smaller.has(digest_of(3))


def test_a_chunk_that_is_larger_than_the_cache_is_not_kept(tmp_path):
    cache = ChunkCache(tmp_path, 500)
    fill_cache(cache, 1)
    assert (len(cache), cache.used_bytes) == (0, 0)


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_chunk_is_never_given(tmp_path, damage):
    cache = ChunkCache(tmp_path, 10_000)
    fill_cache(cache, 1)
    name = digest_of(1).hex()
    path = tmp_path / name[:2] / name
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data(2, 1000) if damage == "flip" else data(1, 10))
    assert cache.read(digest_of(1)) is None
    assert (cache.has(digest_of(1)), cache.damaged, path.exists()) == (False, 1, False)
    fill_cache(cache, 1)
    assert cache.read(digest_of(1)) == data(1, 1000)


def test_a_folder_that_vanishes_costs_the_keeping_only(tmp_path):
    cache = ChunkCache(tmp_path / "chunks", 10_000)
    fill_cache(cache, 1)
    shutil.rmtree(tmp_path / "chunks")
    assert cache.read(chunk_digest(data(1, 1000))) is None
    fill_cache(cache, 2)
    assert cache.read(chunk_digest(data(2, 1000))) == data(2, 1000)
    shutil.rmtree(tmp_path / "chunks")
    (tmp_path / "chunks").symlink_to(tmp_path / "unplugged")
    with pytest.raises(StoreError, match="cannot write"):
        fill_cache(cache, 3)
