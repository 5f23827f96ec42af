"""Delta files: encode, open, decode as they arrive, also in parts."""

import hashlib
import threading
import time

import msgspec
import numpy as np
import pytest
import safetensors
from deltas import after, arena_of, bf16, decoded, model, published, stepped, with_file

from transport.errors import (
    BaseVersionMismatch,
    ChecksumMismatch,
    IntegrityError,
    ModelError,
    TruncatedBlob,
)
from transport.weights.delta_encode import span_cells
from transport.weights.delta_file import (
    CodecSettings,
    CodedSegment,
    DeltaDecoder,
    SegmentWork,
    assemble_delta,
    decode_delta,
    encode_delta,
    encode_segments,
    read_delta_table,
)
from transport.weights.digest import StateDigest, state_digest
from transport.weights.layout import SegmentPlan, Span, plan_segments
from transport.weights.manifest import (
    DELTA_NAME,
    check_manifest,
    composite_name,
    describe_file,
)
from transport.weights.patch import changed_cells
from transport.weights.segments import EncodedSegment, encode_segment
from transport.weights.tensors import TensorBytes, read_header


def test_decoding_gives_the_new_bits_and_leaves_the_old_ones():
    old = model()
    new = stepped(old)
    publication = published(old, new)
    check_manifest(publication.manifest)
    arena = arena_of(old)
    for _ in range(2):
        delta = decode_delta(
            arena, publication.files[DELTA_NAME], publication.manifest, publication.manifest.delta
        )
        assert list(delta.patch) == ["layer.weight", "step"]
        assert after(old, delta) == new
        assert delta.digests == StateDigest.of(new)
        assert delta.digests.hex == publication.manifest.digest
        assert arena.tensors == old
    undo = arena.apply(delta.patch, 1, delta.digests)
    assert arena.tensors == new
    assert arena.digests == arena.rescan() == delta.digests
    arena.apply(delta.patch, 1, delta.digests)
    assert arena.tensors == new
    arena = arena_of(old)
    undo = arena.apply(delta.patch, 1, delta.digests)
    arena.undo(undo)
    assert arena.tensors == old


def test_a_delta_opens_with_the_stock_library_and_lists_what_changed():
    old = model()
    data = published(old, stepped(old)).files[DELTA_NAME]
    opened = safetensors.deserialize(data)
    assert sorted(name for name, _ in opened) == ["segment.000000", "segment.000001"]
    assert {tensor["dtype"] for _, tensor in opened} == {"U8"}
    header = read_delta_table(data)[0]
    assert (header.run, header.policy, header.version, header.parent) == ("r", "r/p", 1, 0)
    assert header.base_digest == state_digest(old)
    table = msgspec.json.decode(read_header(data)[1]["segments"])
    assert [(row[1], row[2]) for row in table] == [
        ("BF16", [["layer.weight", 0, 300]]),
        ("I64", [["step", 0, 1]]),
    ]


def test_signs_of_zero_nan_payloads_and_infinities_are_exact():
    odd = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0001, 0x8001]
    old, new = {"w": bf16(odd)}, {"w": bf16(odd[::-1])}
    delta = encode_delta(old, new, run="r", policy="r/p", version=1, parent=0)
    assert delta.non_finite == "w"
    manifest = msgspec.structs.replace(
        with_file(published(model(), model()).manifest, delta.data),
        digest=delta.header.digest,
        base_digest=delta.header.base_digest,
        fingerprint=delta.header.fingerprint,
    )
    assert after(old, decoded(old, None, delta.data, manifest)) == new
    with pytest.raises(IntegrityError, match="'w' gets infinite"):
        decoded(old, None, delta.data, manifest, finite=True)


def test_a_version_without_changes_is_a_delta_without_segments():
    old = model()
    publication = published(old, dict(old))
    assert safetensors.deserialize(publication.files[DELTA_NAME]) == []
    delta = decoded(old, publication)
    assert delta.patch == {}
    assert delta.digests.hex == state_digest(old)


@pytest.mark.parametrize("coder", ["auto", "small", "fast", "portable", "absolute"])
@pytest.mark.parametrize("segment_cells", [1, 64, 1 << 24])
def test_segments_of_any_size_and_every_setting_give_the_same_bits(coder, segment_cells):
    old = model(size=90)
    new = stepped(old, names=sorted(set(old) - {"none"}))
    settings = CodecSettings(coder=coder)
    made = [
        published(old, new, settings=settings, segment_cells=segment_cells, threads=threads)
        for threads in (1, 3)
    ]
    assert made[0].files == made[1].files
    check_manifest(made[0].manifest)
    for threads in (1, 2):
        delta = decoded(old, made[0], threads=threads)
        assert after(old, delta) == new
        assert delta.digests == StateDigest.of(new)


def test_own_plans_must_have_every_cell_once():
    old = {"w": bf16(np.arange(100))}
    new = {"w": bf16(np.arange(100)[::-1])}
    spans = (Span("w", 60, 40), Span("w", 0, 60))

    def made(*parts):
        return published(old, new, plans=[SegmentPlan("BF16", part) for part in parts])

    for parts in ((spans,), (spans[:1], spans[1:])):
        assert after(old, decoded(old, made(*parts))) == new
    for parts in ((), (spans[:1],), ((*spans, spans[0]),), (spans, ())):
        with pytest.raises(IntegrityError):
            made(*parts)


def test_what_was_measured_is_true():
    old = {"w": bf16(np.arange(1000))}
    cells = np.arange(1000)
    cells[400:900] += 7
    publication = published(old, {"w": bf16(cells)}, segment_cells=128)
    delta = publication.delta
    assert (delta.changed_cells, delta.total_cells) == (500, 1000)
    assert len(delta.segments) == 5
    assert sum(delta.coded_bytes.values()) == sum(size for _, size in delta.segments)
    assert publication.manifest.delta.segments == delta.segments
    assert publication.manifest.full_bytes == 2000
    offset, size = delta.segments[-1]
    assert offset + size == len(delta.data)
    assert changed_cells(decoded(old, publication).patch) >= 500


def test_a_known_base_digest_changes_nothing():
    old = model()
    new = stepped(old)
    base = StateDigest.of(old)
    first, second = published(old, new), published(old, new, base=base)
    assert first.manifest == second.manifest
    assert second.digests.sums["fp8"] is base.sums["fp8"]


def test_a_composite_names_the_version_it_starts_from():
    old = model()
    new = stepped(stepped(stepped(old), 2), 3)
    made = encode_delta(old, new, run="r", policy="r/p", version=9, parent=2)
    entry = describe_file(composite_name(2), "composite", made.data, segments=made.segments)
    assert entry.name == "delta-from-00000002.safetensors"
    manifest = msgspec.structs.replace(
        published(old, new, version=9, parent=2).manifest, files=(entry,)
    )
    check_manifest(manifest)
    assert manifest.composite == entry
    assert manifest.delta is None
    delta = decode_delta(arena_of(old, version=2), made.data, manifest, entry)
    assert after(old, delta) == new
    with pytest.raises(BaseVersionMismatch, match="composite from 2 to version 9"):
        decode_delta(arena_of(new), made.data, manifest, entry)


# Streaming


def streamed(arena, publication, order, threads=1):
    """Decode with the header first and the segments in ``order``, each from its own bytes."""
    data, manifest = publication.files[DELTA_NAME], publication.manifest
    decoder = DeltaDecoder(arena, manifest, manifest.delta)
    needed = decoder.header_bytes_needed(b"")
    assert needed == 8
    needed = decoder.header_bytes_needed(data[:needed])
    decoder.open(data[:needed])
    assert tuple(decoder.segments) == manifest.delta.segments
    assert decoder.missing == list(range(len(decoder.segments)))
    work = [(i, data[o : o + s]) for i, (o, s) in enumerate(decoder.segments)]
    work = [work[i] for i in order]

    def run(part):
        for index, body in part:
            decoder.decode(index, body)

    workers = [threading.Thread(target=run, args=(work[n::threads],)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    return decoder


def test_segments_are_decoded_in_any_order_by_several_threads_and_twice():
    old = model()
    new = stepped(old, names=("layer.weight", "fp8", "step"))
    publication = published(old, new, segment_cells=50)
    count = len(publication.manifest.delta.segments)
    assert count > 8
    arena = arena_of(old)
    expected = decoded(old, publication)
    order = [*np.random.default_rng(0).permutation(count).tolist(), 0, 3]
    delta = streamed(arena, publication, order, threads=3).finish()
    assert delta.digests == expected.digests
    assert after(old, delta) == new


def test_nothing_comes_out_before_everything_is_there():
    old = model()
    publication = published(old, stepped(old), segment_cells=50)
    manifest = publication.manifest
    decoder = DeltaDecoder(arena_of(old), manifest, manifest.delta)
    with pytest.raises(TruncatedBlob, match="not read yet"):
        decoder.decode(0, b"")
    data = publication.files[DELTA_NAME]
    for prefix in (b"", data[:7], data[: decoder.header_bytes_needed(data) - 1]):
        with pytest.raises(TruncatedBlob):
            decoder.open(prefix)
    count = len(manifest.delta.segments)
    decoder = streamed(arena_of(old), publication, range(count - 1))
    assert decoder.missing == [count - 1]
    with pytest.raises(TruncatedBlob, match="1 segments are missing"):
        decoder.finish()


def test_a_segment_with_other_bytes_is_refused_and_may_come_again():
    old = model()
    new = stepped(old)
    publication = published(old, new)
    decoder = streamed(arena_of(old), publication, [1])
    offset, size = decoder.segments[0]
    body = publication.files[DELTA_NAME][offset : offset + size]
    with pytest.raises(TruncatedBlob):
        decoder.decode(0, body[:-1])
    with pytest.raises(ChecksumMismatch, match="CRC-32"):
        decoder.decode(0, body[:-1] + bytes([body[-1] ^ 1]))
    decoder.decode(0, body)
    assert after(old, decoder.finish()) == new


# Shards


def test_parts_made_by_several_processes_give_the_same_state():
    old = model()
    new = stepped(old, names=("layer.weight", "fp8", "step"))
    base = StateDigest.of(old)
    shards = [
        [
            SegmentPlan("BF16", (Span("layer.weight", 7, 100),)),
            SegmentPlan("F8_E4M3", (Span("fp8", 200, 100), Span("fp8", 3, 5))),
        ],
        [
            SegmentPlan("BF16", (Span("layer.weight", 107, 193), Span("layer.weight", 0, 7))),
            SegmentPlan("F8_E4M3", (Span("fp8", 0, 3), Span("fp8", 8, 192))),
            SegmentPlan("I64", (Span("step", 0, 1),)),
        ],
    ]
    coded = []
    for shard in shards:
        work = [
            SegmentWork(
                plan,
                [old[s.tensor].cells()[s.start : s.start + s.cells].copy() for s in plan.spans],
                [new[s.tensor].cells()[s.start : s.start + s.cells].copy() for s in plan.spans],
            )
            for plan in shard
        ]
        made = list(encode_segments(work, base.kinds, threads=2))
        # What travels between processes is plain data.
        sent = msgspec.msgpack.encode(made)
        coded += msgspec.msgpack.decode(sent, type=list[CodedSegment])
    delta = assemble_delta(coded, base=base, run="r", policy="r/p", version=1, parent=0)
    whole = published(old, new)
    assert delta.header == whole.delta.header
    assert delta.digests == whole.digests
    assert (delta.changed_cells, delta.total_cells) == (
        whole.delta.changed_cells, whole.delta.total_cells,
    )  # fmt: skip
    got = decoded(old, None, delta.data, with_file(whole.manifest, delta.data))
    assert after(old, got) == new
    with pytest.raises(IntegrityError, match="two spans"):
        assemble_delta(
            [*coded, coded[0]], base=base, run="r", policy="r/p", version=1, parent=0
        )  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"extra": bf16([1])},
        {"layer.bias": TensorBytes("I32", (4,), bytes(16))},
        {"layer.bias": TensorBytes("F32", (2, 2), bytes(16))},
    ],
)
def test_old_and_new_must_be_one_model(change):
    old = model()
    with pytest.raises(ModelError, match=min(change)):
        encode_delta(old, {**old, **change}, run="r", policy="p", version=1, parent=0)


def test_equal_changes_give_equal_files():
    old = model()
    new = stepped(old)
    first = published(old, new).files[DELTA_NAME]
    second = published(dict(reversed(old.items())), dict(reversed(new.items()))).files[DELTA_NAME]
    assert hashlib.sha256(first).digest() == hashlib.sha256(second).digest()


def test_a_toy_step_is_far_smaller_than_the_model():
    rng = np.random.default_rng(0)
    old = {"w": bf16(rng.integers(0x3B00, 0x3D00, 100_000))}
    cells = old["w"].cells().copy()
    cells[rng.random(cells.size) < 0.3] += np.uint16(1)
    publication = published(old, {"w": bf16(cells)})
    assert len(publication.files[DELTA_NAME]) < 0.15 * publication.manifest.full_bytes


def test_a_model_of_a_million_parameters_is_coded_in_milliseconds():
    """Several times what it takes (70 ms each): a loop over cells, a second at least, fails."""
    rng = np.random.default_rng(0)
    old, new = {}, {}
    for layer in range(20):
        cells = rng.integers(0x3B00, 0x3D00, 50_000, "<u2")
        old[f"{layer}"] = bf16(cells)
        cells = cells.copy()
        cells[rng.random(50_000) < 0.3] += np.uint16(1)
        new[f"{layer}"] = bf16(cells)
    base = StateDigest.of(old)
    arena = arena_of(old)
    started = time.process_time()
    publication = published(old, new, base=base)
    encoded = time.process_time()
    entry = publication.manifest.delta
    decode_delta(arena, publication.files[DELTA_NAME], publication.manifest, entry)
    assert encoded - started < 0.6
    assert time.process_time() - encoded < 0.6


def test_a_body_that_would_not_decode_is_noticed_before_it_is_offered(monkeypatch):
    old = model()
    new = stepped(old)
    counts = {name: (tensor.dtype, tensor.cells().size) for name, tensor in new.items()}
    plans = plan_segments(counts)
    kinds = StateDigest.of(old).kinds
    work = [SegmentWork(p, span_cells(p, old), span_cells(p, new)) for p in plans]
    sound = list(encode_segments(work, kinds, read_back=True))
    assert sound == list(encode_segments(work, kinds))

    def wrong(*arguments):
        coded = encode_segment(*arguments)
        return EncodedSegment(coded.coder, coded.changed, coded.body[::-1])

    monkeypatch.setattr("transport.weights.delta_encode.encode_segment", wrong)
    with pytest.raises(IntegrityError):
        list(encode_segments(work, kinds, read_back=True))
