"""Delta files that are damaged, of another version or made to harm are refused."""

import tracemalloc
import zlib

import msgspec
import pytest
from deltas import after, arena_of, decoded, model, published, stepped, with_file

from transport.errors import (
    BaseVersionMismatch,
    ChecksumMismatch,
    IntegrityError,
    SizeLimitExceeded,
    TruncatedBlob,
)
from transport.weights.delta_file import (
    DeltaDecoder,
    read_delta_table,
)
from transport.weights.digest import state_digest
from transport.weights.manifest import (
    DELTA_NAME,
)
from transport.weights.tensors import TensorBytes, read_header, write_safetensors


def test_another_base_is_refused_before_anything_is_decoded():
    old = model()
    publication = published(old, stepped(old))
    for other in (model(seed=5), stepped(old)):
        with pytest.raises(BaseVersionMismatch, match="version 0"):
            decoded(other, publication)
    decoder = DeltaDecoder(
        arena_of(model(seed=5)), publication.manifest, publication.manifest.delta
    )
    with pytest.raises(BaseVersionMismatch):
        decoder.open(publication.files[DELTA_NAME])
    with pytest.raises(TruncatedBlob):
        decoder.decode(0, b"")


def test_every_damaged_byte_is_found():
    old = model(size=60)
    publication = published(old, stepped(old))
    data = publication.files[DELTA_NAME]
    for position in range(0, len(data), 5):
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        with pytest.raises(ChecksumMismatch):
            decoded(old, publication, bytes(damaged))
        # Even where the manifest vouches for the damaged file, no wrong weights come out.
        try:
            delta = decoded(
                old, None, bytes(damaged), with_file(publication.manifest, bytes(damaged))
            )
        except IntegrityError:
            continue
        assert delta.digests.hex == publication.manifest.digest
        assert state_digest(after(old, delta)) == publication.manifest.digest


def test_a_short_and_a_long_file_are_refused_by_size():
    old = model()
    publication = published(old, stepped(old))
    data = publication.files[DELTA_NAME]
    with pytest.raises(TruncatedBlob):
        decoded(old, publication, data[:-1])
    with pytest.raises(SizeLimitExceeded):
        decoded(old, publication, data + b"\0")


@pytest.mark.parametrize(
    ("field", "value"),
    [("version", 2), ("parent", 3), ("policy", "r/q"), ("run", "s"), ("fingerprint", "0" * 64)],
)
def test_a_delta_of_another_version_is_refused(field, value):
    old = model()
    publication = published(old, stepped(old))
    manifest = msgspec.structs.replace(publication.manifest, **{field: value})
    with pytest.raises(ChecksumMismatch, match=field):
        decoded(old, publication, manifest=manifest)


def test_segments_must_lie_where_the_manifest_says():
    old = model()
    publication = published(old, stepped(old))
    entry = publication.manifest.delta
    (first, size), *others = entry.segments
    moved = msgspec.structs.replace(entry, segments=((first, size - 1), *others))
    with pytest.raises(ChecksumMismatch, match="segments"):
        decoded(
            old, publication, manifest=msgspec.structs.replace(publication.manifest, files=(moved,))
        )


def rewritten(publication, change):
    """The delta with its table (JSON) changed, and a manifest that vouches for it. Row 0 is of
    ``layer.weight``, row 1 of ``step``."""
    data = publication.files[DELTA_NAME]
    regions, metadata = read_header(data)
    table = msgspec.json.decode(metadata["segments"])
    tensors = {
        name: TensorBytes(region.dtype, region.shape, data[region.start : region.end])
        for name, region in regions.items()
    }
    metadata["segments"] = None
    change(table, tensors, metadata)
    if metadata["segments"] is None:
        metadata["segments"] = msgspec.json.encode(table).decode()
    file = write_safetensors(tensors, metadata)
    return file, with_file(publication.manifest, file)


STEP = "segment.000001"


def other_coder(table, tensors, metadata):
    table[1][0] = "unheard.of"


def unchanged_coder(table, tensors, metadata):
    table[1][0] = "same"


def too_many_cells(table, tensors, metadata):
    table[1][2][0][2] += 1


def no_cells(table, tensors, metadata):
    table[1][2].append(["step", 0, 0])


def negative_start(table, tensors, metadata):
    table[0][2] = [["layer.weight", -1, 300]]


def negative_cells(table, tensors, metadata):
    table[0][2] = [["layer.weight", 0, 301], ["layer.weight", 299, -1]]


def outside(table, tensors, metadata):
    table[0][2] = [["layer.weight", 1, 300]]


def far_outside(table, tensors, metadata):
    table[0][2] = [["layer.weight", 1 << 62, 1 << 62]]


def beyond_integers(table, tensors, metadata):
    table[0][2] = [["layer.weight", 0, 1 << 80]]


def twice_in_a_segment(table, tensors, metadata):
    table[0][2] = [["layer.weight", 0, 150], ["layer.weight", 149, 150]]


def twice_in_two_segments(table, tensors, metadata):
    table.append(table[1])
    tensors["segment.000002"] = tensors[STEP]


def no_spans(table, tensors, metadata):
    table[1][2] = []


def other_dtype(table, tensors, metadata):
    table[1][1] = "U64"


def unknown_tensor(table, tensors, metadata):
    table[1][2][0][0] = "other"


def no_changes(table, tensors, metadata):
    table[1][3] = 0


def too_many_changes(table, tensors, metadata):
    table[0][3] = 301


def negative_changes(table, tensors, metadata):
    table[0][3] = -1


def other_size(table, tensors, metadata):
    table[1][4] += 1


def wrong_checksum(table, tensors, metadata):
    table[1][5] ^= 1


def empty_body(table, tensors, metadata):
    tensors[STEP] = TensorBytes("U8", (0,), b"")
    table[1][4:] = [0, zlib.crc32(b"")]


def longer_body(table, tensors, metadata):
    body = bytes(tensors[STEP].data) + b"\0"
    tensors[STEP] = TensorBytes("U8", (len(body),), body)
    table[1][4:] = [len(body), zlib.crc32(body)]


def row_without_segment(table, tensors, metadata):
    del tensors[STEP]


def segment_without_row(table, tensors, metadata):
    del table[1]


def other_name(table, tensors, metadata):
    tensors["step"] = tensors.pop(STEP)


def other_type(table, tensors, metadata):
    data = tensors[STEP].data
    tensors[STEP] = TensorBytes("I8", (len(data),), data)


def other_format(table, tensors, metadata):
    metadata["format"] = "farflow.delta.9"


def no_header(table, tensors, metadata):
    metadata["header"] = "{}"


def no_table(table, tensors, metadata):
    del metadata["segments"]
    metadata["segments"] = "null"


def deep_table(table, tensors, metadata):
    metadata["segments"] = "[" * 100_000


def table_of_another_shape(table, tensors, metadata):
    table[0] = table[0][:4]


def fewer_changes(table, tensors, metadata):
    del table[1], tensors[STEP]


LIES = [
    other_coder, unchanged_coder, too_many_cells, no_cells, negative_start, negative_cells,
    outside, far_outside, beyond_integers, twice_in_a_segment, twice_in_two_segments, no_spans,
    other_dtype, unknown_tensor, no_changes, too_many_changes, negative_changes, other_size,
    wrong_checksum, empty_body, longer_body, row_without_segment, segment_without_row, other_name,
    other_type, other_format, no_header, no_table, deep_table, table_of_another_shape,
    fewer_changes,
]  # fmt: skip


@pytest.mark.parametrize("change", LIES)
def test_a_file_that_its_publisher_made_wrongly_is_refused(change):
    old = model()
    data, manifest = rewritten(published(old, stepped(old)), change)
    with pytest.raises(IntegrityError):
        decoded(old, None, data, manifest)


def test_a_header_larger_than_the_model_needs_is_refused_before_it_is_read():
    old = model()
    manifest = published(old, stepped(old)).manifest
    entry = msgspec.structs.replace(manifest.delta, size_bytes=1 << 40)
    decoder = DeltaDecoder(arena_of(old), manifest, entry)
    for size in (2 << 20, 1 << 39, (1 << 64) - 1):
        with pytest.raises(SizeLimitExceeded):
            decoder.header_bytes_needed(size.to_bytes(8, "little"))
        with pytest.raises(SizeLimitExceeded):
            decoder.open(size.to_bytes(8, "little"))
    decoder = DeltaDecoder(arena_of(old), manifest, manifest.delta)
    with pytest.raises(TruncatedBlob):
        decoder.header_bytes_needed((1 << 19).to_bytes(8, "little"))


def test_refusing_millions_of_spans_takes_little_memory():
    old = model()
    made = published(old, stepped(old))
    metadata = dict(read_header(made.files[DELTA_NAME])[1])
    for count, error in ((30_000, IntegrityError), (60_000, SizeLimitExceeded)):
        row = '["raw","BF16",[' + '["layer.weight",0,1],' * count + '["step",0,1]],1,1,0]'
        metadata["segments"] = f"[{row}]"
        data = write_safetensors({"segment.000000": TensorBytes("U8", (1,), b"x")}, metadata)
        manifest = with_file(made.manifest, data)
        arena = arena_of(old)
        tracemalloc.start()
        try:
            with pytest.raises(error):
                DeltaDecoder(arena, manifest, manifest.delta).open(data)
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()


def test_a_plain_safetensors_file_is_no_delta():
    with pytest.raises(IntegrityError, match="not a farflow"):
        read_delta_table(write_safetensors(model()))
