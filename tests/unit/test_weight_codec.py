"""Segments: every coder gives back the very bits, by numba and by numpy; the choice is right."""

import struct

import numpy as np
import pytest
import zstandard

from transport.errors import IntegrityError, ModelError
from transport.weights import coders, kernels
from transport.weights.layout import SegmentPlan, Span, class_layout, plan_segments
from transport.weights.patch import write_change
from transport.weights.range_coder import decode_symbols, encode_symbols
from transport.weights.segments import CODERS, CodecSettings, decode_segment, encode_segment
from transport.weights.static_streams import (
    Packed,
    pack_gaps,
    pack_steps,
    unpack_gaps,
    unpack_steps,
)
from transport.weights.symbols import add_steps, steps_of
from transport.weights.warming import warm

ITEMS = {"BF16": 2, "F16": 2, "F32": 4, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I32": 4, "F64": 8}
NUMBA = [
    pytest.mark.skipif(not kernels.available(), reason="numba is not installed"),
    pytest.mark.timeout(180),  # the first use compiles the kernels
]
PATHS = [False, pytest.param(True, marks=NUMBA)]
SETTINGS = {
    name: CodecSettings(coder=name) for name in ("auto", "small", "fast", "portable", "absolute")
}


def spans(rng, dtype, sizes, share, wild=False):
    """Old and new cells of spans; weights near zero, so that neighbouring classes occur."""
    kind = np.dtype(f"<u{ITEMS[dtype]}")
    top = np.iinfo(kind).max
    olds, news = [], []
    for size in sizes:
        old = (rng.normal(size=size) * top / 40).astype(np.int64).astype(kind)
        new = old.copy()
        where = rng.random(size) < share
        count = int(where.sum())
        steps = rng.integers(1, 4, count).astype(kind)
        new[where] = (
            rng.integers(0, top, count, kind, endpoint=True) if wild else old[where] + steps
        )
        olds.append(old)
        news.append(new)
    return olds, news


def decoded(coded, dtype, olds, compiled=None):
    changes = decode_segment(
        coded.coder, dtype, memoryview(coded.body), olds, coded.changed, compiled=compiled
    )
    cells = [old.copy() for old in olds]
    for span, change in zip(cells, changes, strict=True):
        if change is not None:
            write_change(span, change)
            write_change(span, change)  # absolute: twice is harmless
    return cells


def same(ones, others):
    return all(np.array_equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("compiled", PATHS)
@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.003, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("dtype", ITEMS)
def test_every_setting_gives_back_the_very_bits(dtype, share, wild, compiled):
    rng = np.random.default_rng(1)
    olds, news = spans(rng, dtype, [0, 1, 403, 0, 3, 117], share, wild)
    for settings in SETTINGS.values():
        coded = encode_segment(dtype, olds, news, settings, compiled=compiled)
        assert coded == encode_segment(dtype, olds, news, settings, compiled=False) or (
            settings.coder == "auto"
        )
        assert same(decoded(coded, dtype, olds, compiled), news)
        assert same(decoded(coded, dtype, olds, False), news)
        assert len(coded.body) <= sum(new.nbytes for new in news)


@pytest.mark.parametrize("compiled", PATHS)
@pytest.mark.parametrize("at", [0, 1, 4095, 65_535, 199_999, 299_998])
def test_single_changes_survive_wherever_they_are(at, compiled):
    olds = [np.full(100_001, 0x3C00, "<u2"), np.full(199_998, 0x3C00, "<u2")]
    news = [old.copy() for old in olds]
    flat = np.concatenate(news)
    flat[at] ^= 0x8000
    news = [flat[:100_001], flat[100_001:]]
    for name in ("small", "fast"):
        coded = encode_segment("BF16", olds, news, SETTINGS[name], compiled=compiled)
        assert coded.changed == 1
        assert len(coded.body) < 60
        assert same(decoded(coded, "BF16", olds, compiled), news)


@pytest.mark.parametrize("compiled", PATHS)
def test_gaps_of_millions_and_unaligned_cells(compiled):
    store = np.zeros(2 * (1 << 21) + 7, np.uint8)
    old = store[1 : 1 + 2 * (1 << 21)].view("<u2")
    new = old.copy()
    new[[0, old.size - 2, old.size - 1]] = (0x8000, 0x7FC1, 0xFF80)
    for name in ("small", "fast"):
        coded = encode_segment("BF16", [old], [new], SETTINGS[name], compiled=compiled)
        assert same(decoded(coded, "BF16", [old], compiled), [new])


@pytest.mark.parametrize("dtype", ["<u1", "<u2", "<u4", "<u8"])
def test_steps_are_small_for_neighbouring_bit_patterns_and_exact_for_all(dtype):
    top = np.iinfo(dtype).max
    old = np.array([5, 5, 0, top, 0, top // 2], dtype)
    new = np.array([6, 4, top, 0, top // 2 + 1, 0], dtype)
    assert steps_of(old, new)[:4].tolist() == [2, 1, 1, 2]
    assert np.array_equal(add_steps(old, steps_of(old, new)), new)


def simulated(cells, share):
    """Weights whose cells change the more likely, the smaller their exponent is."""
    rng = np.random.default_rng(3)
    old = (rng.normal(size=cells).astype("<f4") * 0.02).view("<u4") >> 16
    old = old.astype("<u2")
    exponent = ((old >> 7) & 0xFF).astype(float)
    chance = np.minimum(0.6, share * 2.0 ** (122 - exponent))
    moved = rng.random(cells) < chance
    new = old.copy()
    new[moved] += np.where(rng.random(moved.sum()) < 0.5, 1, 65_535).astype("<u2")
    counts = np.bincount((old >> 7) & 0xFF, minlength=256)
    hits = np.bincount(((old >> 7) & 0xFF)[moved], minlength=256)
    rates = hits[hits > 0] / counts[hits > 0]
    bits = -(rates * np.log2(rates) + (1 - rates) * np.log2(np.maximum(1 - rates, 1e-9)))
    return old, new, (float((counts[hits > 0] * bits).sum()) + int(moved.sum())) / 8


@pytest.mark.timeout(180)
@pytest.mark.skipif(not kernels.available(), reason="numba is not installed")
def test_coders_come_near_the_bound_given_the_old_exponents():
    old, new, bound = simulated(1 << 21, 0.003)
    sizes = {
        name: len(encode_segment("BF16", [old], [new], SETTINGS[name], compiled=True).body)
        for name in ("small", "fast")
    }
    assert sizes["small"] <= 1.10 * bound
    assert sizes["fast"] <= 1.25 * bound


def test_the_choice_follows_density_and_link():
    old, new, _ = simulated(60_000, 0.01)
    for name, expected in [("fast", "class.zstd"), ("absolute", "list.zstd")]:
        assert encode_segment("BF16", [old], [new], SETTINGS[name]).coder == expected
    rng = np.random.default_rng(4)
    everything = spans(rng, "BF16", [50_000], 1.0)
    assert encode_segment("BF16", *everything, SETTINGS["fast"]).coder == "dense.zstd"
    noise = spans(rng, "I32", [5000], 1.0, wild=True)
    assert encode_segment("I32", *noise, SETTINGS["small"]).coder == "raw"
    slow, fast = (CodecSettings(link_bytes_s=rate) for rate in (1e5, 1e10))
    assert encode_segment("BF16", [old], [new], slow).coder == "class.zstd"
    assert encode_segment("BF16", [old], [new], fast).coder == "list.zstd"


def test_new_weights_of_another_base_are_packed_by_their_exponents():
    rng = np.random.default_rng(5)
    old = np.zeros(20_000, "<u2")
    new = (rng.normal(size=20_000).astype("<f4").view("<u4") >> 16).astype("<u2")
    coded = encode_segment("BF16", [old], [new], SETTINGS["absolute"])
    assert coded.coder == "split.zstd"
    assert len(coded.body) < 0.75 * new.nbytes


def test_segments_that_do_not_fit_are_refused():
    cells = np.zeros(3, "<u2")
    with pytest.raises(ModelError, match="differ"):
        encode_segment("BF16", [cells], [cells[:2]], CodecSettings())
    for coder in ("lzma", *CODERS[1:]):
        with pytest.raises(IntegrityError):
            decode_segment(coder, "BF16", memoryview(b""), [cells], 1)
    with pytest.raises(IntegrityError, match="4 changes"):
        decode_segment("raw", "BF16", memoryview(bytes(6)), [cells], 4)


def test_what_a_sample_misses_is_coded_nonetheless():
    """Large segments are sampled (every 64th block) to choose a coder."""
    old = np.zeros(1 << 22, "<u2")
    few, most, sampled = old.copy(), old.copy(), old.copy()
    few[1_000_000] = 5
    most[1 << 14 :] = 5
    sampled[: 1 << 14] = 5
    for new, changed in [(old, 0), (few, 1), (most, old.size - (1 << 14)), (sampled, 1 << 14)]:
        for name in ("fast", "absolute") if new is not most else ("absolute",):
            coded = encode_segment("I16", [old], [new], SETTINGS[name])
            assert coded.changed == changed
            assert len(coded.body) < 0.1 * old.nbytes or new is most
            assert same(decoded(coded, "I16", [old]), [new])


@pytest.mark.parametrize("compiled", PATHS)
@pytest.mark.parametrize("item_bits", [8, 16, 32])
def test_gaps_and_steps_of_any_size_are_packed_exactly(item_bits, compiled):
    rng = np.random.default_rng(6)
    sizes = rng.integers(0, 33, 5000)
    gaps = rng.integers(0, 1 << sizes).astype("<u4")
    gaps[:5] = (0, 15, 16, (1 << 32) - 1, 1 << 31)
    steps = rng.integers(1, 1 << rng.integers(1, item_bits + 1, 5000)).astype("<u4")
    steps[:3] = (1, 2, (1 << item_bits) - 1)
    counts = np.array([0, 1, 2, 1994, 0, 3003])
    packed = pack_gaps(gaps, compiled)
    packed_steps = pack_steps(steps, counts, item_bits, compiled)
    assert same(packed, pack_gaps(gaps))
    assert same(packed_steps, pack_steps(steps, counts, item_bits))
    both = Packed(packed.symbols, np.concatenate((packed.extra, packed_steps.extra)))
    again, taken = unpack_gaps(both, compiled)
    assert np.array_equal(again, gaps)
    assert taken == packed.extra.size
    assert np.array_equal(unpack_steps(packed_steps, counts, item_bits, compiled), steps)
    with pytest.raises(IntegrityError, match="extra bits"):
        unpack_gaps(Packed(packed.symbols, packed.extra[:-1]), compiled)
    with pytest.raises(IntegrityError, match="gap symbol"):
        unpack_gaps(Packed(np.array([240], "u1"), packed.extra), compiled)
    for extra in (packed_steps.extra[:-1], np.append(packed_steps.extra, np.uint8(0))):
        with pytest.raises(IntegrityError, match="extra bits"):
            unpack_steps(Packed(packed_steps.symbols, extra), counts, item_bits, compiled)
    too_large = Packed(np.array([14], "u1"), np.full(item_bits // 8, 255, "u1"))
    with pytest.raises(IntegrityError, match="a step of more"):
        unpack_steps(too_large, np.array([1]), item_bits, compiled)


@pytest.mark.timeout(180)
@pytest.mark.skipif(not kernels.available(), reason="numba is not installed")
def test_after_warming_up_nothing_is_left_to_compile():
    used = (
        kernels.scan_changes, kernels.by_class, kernels.scan_apply, kernels.pack_gaps,
        kernels.unpack_gaps, kernels.pack_steps, kernels.unpack_steps, encode_symbols,
        decode_symbols,
    )  # fmt: skip
    warm()
    before = [len(kernels.compiled(kernel).signatures) for kernel in used]
    assert all(before)
    olds, news = spans(np.random.default_rng(7), "F16", [400, 3], 0.1)
    for name in ("small", "fast"):
        coded = encode_segment("F16", olds, news, SETTINGS[name], compiled=True)
        assert same(decoded(coded, "F16", olds, True), news)
    assert before == [len(kernels.compiled(kernel).signatures) for kernel in used]


def test_a_frame_that_claims_another_size_is_refused_before_it_is_unpacked():
    bomb = zstandard.ZstdCompressor().compress(bytes(50_000_000))
    cells = np.zeros(10, "<u2")
    for coder in ("dense.zstd", "list.zstd"):
        with pytest.raises(IntegrityError, match="claims 50000000 bytes"):
            decode_segment(coder, "BF16", memoryview(bomb), [cells], 3)
    body = struct.pack("<HBI", 1, 0, 3) + struct.pack("<II", len(bomb), 0) + bomb
    with pytest.raises(IntegrityError, match="claims 50000000 bytes"):
        decode_segment("class.zstd", "BF16", memoryview(body), [cells], 3)


@pytest.mark.parametrize("compiled", PATHS)
def test_changes_behind_the_end_are_refused(compiled):
    long, short = np.zeros(100, "<u2"), np.zeros(99, "<u2")
    new = long.copy()
    new[99] = 1
    for name in ("small", "fast", "absolute"):
        coded = encode_segment("BF16", [long], [new], SETTINGS[name], compiled=compiled)
        with pytest.raises(IntegrityError):
            decoded(coded, "BF16", [short], compiled)


def test_class_tables_are_checked():
    layout = class_layout("F16")
    for body in (b"", b"\1\0\0", struct.pack("<HBI", 1, 32, 5), struct.pack("<HBI", 1, 0, 4)):
        with pytest.raises(IntegrityError):
            coders.read_table(memoryview(body), layout, 5)


def test_plans_cover_every_cell_once_in_canonical_order():
    kinds = {"b": ("BF16", 5), "a": ("BF16", 4), "e": ("BF16", 0), "c": ("F32", 3)}
    assert plan_segments(kinds, segment_cells=6) == [
        SegmentPlan("BF16", (Span("a", 0, 4), Span("b", 0, 2))),
        SegmentPlan("BF16", (Span("b", 2, 3),)),
        SegmentPlan("F32", (Span("c", 0, 3),)),
    ]
    with pytest.raises(ValueError, match="segment_cells"):
        plan_segments(kinds, segment_cells=0)
