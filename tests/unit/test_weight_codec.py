"""Coders of blocks."""

import numpy as np
import pytest
import zstandard

from transport.errors import IntegrityError
from transport.weights.codec import (
    CODERS,
    DENSE,
    RAW,
    SAME,
    SPARSE,
    Change,
    add_steps,
    decode_block,
    encode_block,
    steps_of,
)

TYPES = ["<u1", "<u2", "<u4", "<u8"]


def random_cells(rng, dtype, count):
    return rng.integers(0, np.iinfo(dtype).max, count, dtype=dtype, endpoint=True)


def changed_cells(rng, old, share, largest_step=3):
    new = old.copy()
    where = rng.random(old.size) < share
    new[where] += rng.integers(1, largest_step, where.sum(), endpoint=True).astype(old.dtype)
    return new


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("coder", [RAW, DENSE, SPARSE])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_every_coder_gives_back_the_very_bits(coder, dtype, share):
    rng = np.random.default_rng(1)
    old = random_cells(rng, dtype, 3001)
    new = changed_cells(rng, old, share)
    body = coder.encode(Change(old, new))
    kept = old.copy()
    decoded = decode_block(coder.name, memoryview(body), old)
    assert decoded.dtype == new.dtype
    assert np.array_equal(decoded, new)
    assert np.array_equal(old, kept)


@pytest.mark.parametrize("dtype", TYPES)
def test_steps_are_small_for_neighbouring_bit_patterns_and_exact_for_all(dtype):
    top = np.iinfo(dtype).max
    old = np.array([5, 5, 0, top, 0, top // 2], dtype)
    new = np.array([6, 4, top, 0, top // 2 + 1, 0], dtype)
    assert steps_of(old, new)[:4].tolist() == [2, 1, 1, 2]
    assert np.array_equal(add_steps(old, steps_of(old, new)), new)


@pytest.mark.parametrize("first", [0, 254, 255, 256, 65_534, 65_535, 65_536, 149_999])
def test_gaps_of_every_width_survive(first):
    old = np.zeros(150_000, "<u2")
    new = old.copy()
    new[[first, old.size - 1]] = 7
    body = SPARSE.encode(Change(old, new))
    assert len(body) < 60
    assert np.array_equal(SPARSE.decode(memoryview(body), old), new)


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, SAME), (0.02, SPARSE), (0.3, SPARSE), (0.95, DENSE)]
)
def test_the_smallest_coding_is_chosen(share, expected):
    rng = np.random.default_rng(2)
    old = random_cells(rng, "<u2", 60_000)
    change = Change(old, changed_cells(rng, old, share))
    coder, body = encode_block(change)
    assert coder is expected
    assert len(body) <= min(len(c.encode(change)) for c in (RAW, DENSE, SPARSE))


@pytest.mark.parametrize("count", [9_000, 100_000])
def test_in_the_middle_range_both_are_measured(count):
    rng = np.random.default_rng(3)
    old = random_cells(rng, "<u2", count)
    for share in (0.42, 0.5, 0.55, 0.6):
        change = Change(old, changed_cells(rng, old, share))
        coder, body = encode_block(change)
        best = min(len(c.encode(change)) for c in (DENSE, SPARSE))
        assert coder in (DENSE, SPARSE)
        assert len(body) <= 1.03 * best


def test_what_does_not_compress_is_sent_raw():
    rng = np.random.default_rng(4)
    old, new = random_cells(rng, "<u4", 5000), random_cells(rng, "<u4", 5000)
    coder, body = encode_block(Change(old, new))
    assert coder is RAW
    assert len(body) == new.nbytes


def test_an_unknown_coder_is_refused():
    with pytest.raises(IntegrityError, match="unknown"):
        decode_block("lzma", memoryview(b""), np.zeros(1, "<u2"))


@pytest.mark.parametrize("coder", CODERS.values(), ids=CODERS)
def test_damaged_bodies_are_refused_or_give_as_many_cells(coder):
    rng = np.random.default_rng(5)
    old = random_cells(rng, "<u2", 500)
    new = old if coder is SAME else changed_cells(rng, old, 0.2)
    body = coder.encode(Change(old, new))
    cases = [body[:size] for size in range(0, len(body), 7)] + [body + b"\0"]
    for position in range(len(body)):
        damaged = bytearray(body)
        damaged[position] ^= 0xFF
        cases.append(bytes(damaged))
    for case in cases:
        try:
            cells = decode_block(coder.name, memoryview(case), old)
        except IntegrityError:
            continue
        assert cells.size == old.size


def test_a_frame_that_claims_another_size_is_refused_before_it_is_unpacked():
    bomb = zstandard.ZstdCompressor().compress(bytes(50_000_000))
    with pytest.raises(IntegrityError, match="claims 50000000 bytes"):
        DENSE.decode(memoryview(bomb), np.zeros(10, "<u2"))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(20))
    with pytest.raises(IntegrityError):
        DENSE.decode(memoryview(unsized), np.zeros(10, "<u2"))


def test_changes_behind_the_end_are_refused():
    long, short = np.zeros(100, "<u2"), np.zeros(99, "<u2")
    new = long.copy()
    new[99] = 1
    body = SPARSE.encode(Change(long, new))
    with pytest.raises(IntegrityError, match="cell 99 of 99"):
        SPARSE.decode(memoryview(body), short)
