"""Delta files: encode, open, apply, refuse."""

import base64
import hashlib
import time

import msgspec
import numpy as np
import pytest
import safetensors

from transport.errors import (
    BaseVersionMismatch,
    ChecksumMismatch,
    IntegrityError,
    ModelError,
    SizeLimitExceeded,
    TruncatedBlob,
)
from transport.weights.delta_file import apply_delta, encode_delta, read_delta_header
from transport.weights.digest import StateDigest, state_digest
from transport.weights.manifest import DELTA_NAME, VersionManifest, describe_file
from transport.weights.publication import build_delta_version
from transport.weights.tensors import TensorBytes, read_header, write_safetensors


def bf16(cells):
    array = np.asarray(cells, "<u2")
    return TensorBytes("BF16", array.shape, array.tobytes())


def model(seed=0, size=300):
    rng = np.random.default_rng(seed)
    return {
        "layer.weight": bf16(rng.integers(0x3B00, 0x3D00, (3, size // 3))),
        "layer.bias": TensorBytes("F32", (4,), rng.normal(size=4).astype("<f4").tobytes()),
        "fp8": TensorBytes("F8_E4M3", (size,), bytes(rng.integers(0, 0x70, size, np.uint8))),
        "step": TensorBytes("I64", (), rng.bytes(8)),
        "none": TensorBytes("F16", (0, 2), b""),
    }


def stepped(tensors, seed=1, names=("layer.weight", "step")):
    rng = np.random.default_rng(seed)
    new = dict(tensors)
    for name in names:
        cells = tensors[name].cells().copy()
        where = rng.random(cells.size) < 0.4
        where[0] = True
        cells[where] += cells.dtype.type(1)
        new[name] = TensorBytes(tensors[name].dtype, tensors[name].shape, cells.tobytes())
    return new


def published(old, new, version=1, parent=0, **options):
    return build_delta_version(
        old,
        new,
        run="r",
        policy="r/p",
        version=version,
        parent=parent,
        step=version,
        created_wall_s=0.0,
        **options,
    )


def with_file(manifest, data):
    """A manifest that vouches for other bytes: what a wrong publisher would sign."""
    return msgspec.structs.replace(manifest, files=(describe_file(DELTA_NAME, "delta", data),))


def test_applying_gives_the_new_bits_and_leaves_the_old_ones():
    old = model()
    new = stepped(old)
    kept = {name: bytes(tensor.data) for name, tensor in old.items()}
    publication = published(old, new)
    for _ in range(2):
        changed, digests = apply_delta(old, publication.files[DELTA_NAME], publication.manifest)
        assert changed == {name: new[name] for name in ("layer.weight", "step")}
        assert digests.hex == publication.manifest.digest == state_digest(new)
    assert {name: bytes(tensor.data) for name, tensor in old.items()} == kept


def test_a_delta_opens_with_the_stock_library_and_lists_what_changed():
    old = model()
    data = published(old, stepped(old)).files[DELTA_NAME]
    opened = safetensors.deserialize(data)
    assert sorted(name for name, _ in opened) == ["layer.weight", "step"]
    assert {tensor["dtype"] for _, tensor in opened} == {"U8"}
    header = read_delta_header(data)
    assert (header.run, header.policy, header.version, header.parent) == ("r", "r/p", 1, 0)
    assert header.base_digest == state_digest(old)


def test_signs_of_zero_nan_payloads_and_infinities_are_exact():
    odd = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0001, 0x8001]
    old, new = {"w": bf16(odd)}, {"w": bf16(odd[::-1])}
    delta = encode_delta(old, new, run="r", policy="p", version=1, parent=0)
    manifest = with_file(published(model(), model()).manifest, delta.data)
    header = delta.header
    manifest = msgspec.structs.replace(
        manifest,
        policy="p",
        digest=header.digest,
        base_digest=header.base_digest,
        fingerprint=header.fingerprint,
    )
    changed, _ = apply_delta(old, delta.data, manifest)
    assert changed == new


def test_a_version_without_changes_is_a_delta_without_tensors():
    old = model()
    publication = published(old, dict(old))
    assert safetensors.deserialize(publication.files[DELTA_NAME]) == []
    changed, digests = apply_delta(old, publication.files[DELTA_NAME], publication.manifest)
    assert changed == {}
    assert digests.hex == state_digest(old)


def test_tensors_larger_than_a_block_are_coded_in_blocks():
    old = {"w": bf16(np.arange(1000))}
    cells = np.arange(1000)
    cells[400:900] += 7
    new = {"w": bf16(cells)}
    publication = published(old, new, block_cells=128)
    changed, _ = apply_delta(old, publication.files[DELTA_NAME], publication.manifest)
    assert changed == new
    assert publication.delta.changed_cells == 500
    assert publication.delta.total_cells == 1000


def test_a_known_base_digest_spares_hashing_and_changes_nothing():
    old = model()
    new = stepped(old)
    base = StateDigest.of(old)
    first, second = published(old, new), published(old, new, base=base)
    assert first.manifest == second.manifest
    changed, digests = apply_delta(old, first.files[DELTA_NAME], first.manifest, digests=base)
    assert digests == StateDigest.of(new)
    assert digests.tensors["fp8"] is base.tensors["fp8"]
    assert changed.keys() == {"layer.weight", "step"}


def test_another_base_is_refused():
    old = model()
    publication = published(old, stepped(old))
    with pytest.raises(BaseVersionMismatch, match="version 0"):
        apply_delta(model(seed=5), publication.files[DELTA_NAME], publication.manifest)


def test_applying_to_the_result_is_refused():
    old = model()
    new = stepped(old)
    publication = published(old, new)
    with pytest.raises(BaseVersionMismatch):
        apply_delta(new, publication.files[DELTA_NAME], publication.manifest)


def test_every_damaged_byte_is_found():
    old = model(size=60)
    publication = published(old, stepped(old))
    data = publication.files[DELTA_NAME]
    for position in range(0, len(data), 5):
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        with pytest.raises(ChecksumMismatch):
            apply_delta(old, bytes(damaged), publication.manifest)
        # Even where the manifest vouches for the damaged file, no wrong weights come out.
        try:
            changed, digests = apply_delta(
                old, bytes(damaged), with_file(publication.manifest, bytes(damaged))
            )
        except IntegrityError:
            continue
        assert digests.hex == publication.manifest.digest
        assert state_digest({**old, **changed}) == publication.manifest.digest


def test_a_short_and_a_long_file_are_refused_by_size():
    old = model()
    publication = published(old, stepped(old))
    data = publication.files[DELTA_NAME]
    with pytest.raises(TruncatedBlob):
        apply_delta(old, data[:-1], publication.manifest)
    with pytest.raises(SizeLimitExceeded):
        apply_delta(old, data + b"\0", publication.manifest)


@pytest.mark.parametrize(
    ("field", "value"),
    [("version", 2), ("parent", 3), ("policy", "r/q"), ("run", "s"), ("fingerprint", "0" * 64)],
)
def test_a_delta_of_another_version_is_refused(field, value):
    old = model()
    publication = published(old, stepped(old))
    manifest = msgspec.structs.replace(publication.manifest, **{field: value})
    with pytest.raises(ChecksumMismatch, match=field):
        apply_delta(old, publication.files[DELTA_NAME], manifest)


def rewritten(publication, change):
    """The delta with its block table (JSON) changed, and a manifest that vouches for it."""
    data = publication.files[DELTA_NAME]
    regions, metadata = read_header(data)
    table = msgspec.json.decode(metadata["blocks"])
    tensors = {
        name: TensorBytes(region.dtype, region.shape, data[region.start : region.end])
        for name, region in regions.items()
    }
    change(table, tensors, metadata)
    metadata["blocks"] = msgspec.json.encode(table).decode()
    file = write_safetensors(tensors, metadata)
    return file, with_file(publication.manifest, file)


def other_coder(table, tensors, metadata):
    table["step"][0][0] = "unheard.of"


def too_many_cells(table, tensors, metadata):
    table["step"][0][1] += 1


def negative_cells(table, tensors, metadata):
    table["step"] = [["same", -1, 0, 0], ["same", 2, 0, 0]]


def block_behind_the_end(table, tensors, metadata):
    table["step"][0][2] += 1


def bytes_left_over(table, tensors, metadata):
    table["step"] = [["same", 1, 0, 0]]


def unknown_tensor(table, tensors, metadata):
    table["other"], tensors["other"] = table.pop("step"), tensors.pop("step")


def tensor_without_blocks(table, tensors, metadata):
    del table["step"]


def wrong_checksum(table, tensors, metadata):
    table["step"][0][3] ^= 1


def other_type(table, tensors, metadata):
    data = tensors["step"].data
    tensors["step"] = TensorBytes("I8", (len(data),), data)


def other_format(table, tensors, metadata):
    metadata["format"] = "farflow.delta.9"


def no_header(table, tensors, metadata):
    metadata["header"] = "{}"


def fewer_changes(table, tensors, metadata):
    del table["step"], tensors["step"]


@pytest.mark.parametrize(
    "change",
    [
        other_coder, too_many_cells, negative_cells, block_behind_the_end, bytes_left_over,
        unknown_tensor, tensor_without_blocks, wrong_checksum, other_type, other_format,
        no_header, fewer_changes,
    ],
)  # fmt: skip
def test_a_file_that_its_publisher_made_wrongly_is_refused(change):
    old = model()
    data, manifest = rewritten(published(old, stepped(old)), change)
    with pytest.raises(IntegrityError):
        apply_delta(old, data, manifest)


def test_a_manifest_without_a_delta_is_refused():
    old = model()
    manifest = msgspec.structs.replace(published(old, stepped(old)).manifest, files=())
    with pytest.raises(IntegrityError, match="no delta"):
        apply_delta(old, b"", manifest)


def test_a_plain_safetensors_file_is_no_delta():
    with pytest.raises(IntegrityError, match="not a farflow"):
        read_delta_header(write_safetensors(model()))


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


GOLDEN = base64.b64decode(
    b"2AIAAAAAAAB7Il9fbWV0YWRhdGFfXyI6eyJmb3JtYXQiOiJmYXJmbG93LmRlbHRhLjEiLCJoZWFkZXIiOiJ7XCJy"
    b"dW5cIjpcInJcIixcInBvbGljeVwiOlwici9wXCIsXCJ2ZXJzaW9uXCI6MixcInBhcmVudFwiOjEsXCJiYXNlX2Rp"
    b"Z2VzdFwiOlwiODVjNmMyMTBiNTU3NTY0ZWM1MjBlMWMyYzYzZGMzM2Y5NjI2NTg3OWY2MmNlNzBhMWQ2MTE3ZGIw"
    b"NTBmOWMzNlwiLFwiZGlnZXN0XCI6XCJhOTUzNjA0NzEzNjk3NjNjMzcwNjI3NzM3OTg1MWUyOGZmN2IzMTg0Yzg0"
    b"NTBmNGMyZTVjMWNhNmVhYTk4YWE1XCIsXCJmaW5nZXJwcmludFwiOlwiNzMwMTlkZmRhNDE1ZDJiNGY4MjZlM2I5"
    b"OGQ1ZmExYmE0YzUwYzMzMDliNmJlMWI3Y2YwNDFhYWU3MjJjM2U4N1wiLFwiZm9ybWF0XCI6XCJmYXJmbG93LmRl"
    b"bHRhLjFcIn0iLCJibG9ja3MiOiJ7XCJkZW5zZVwiOltbXCJkZW5zZS5zdGVwLnpzdGRcIiw2NCwyMCwyNjg3Nzgz"
    b"NzE0XV0sXCJyYXdcIjpbW1wicmF3XCIsMywzLDM5NTE5OTk1OTFdXSxcInNwYXJzZVwiOltbXCJzcGFyc2Uuc3Rl"
    b"cC56c3RkXCIsNDAsMjQsMTg0NDMzMzUxXV19In0sImRlbnNlIjp7ImR0eXBlIjoiVTgiLCJzaGFwZSI6WzIwXSwi"
    b"ZGF0YV9vZmZzZXRzIjpbMCwyMF19LCJyYXciOnsiZHR5cGUiOiJVOCIsInNoYXBlIjpbM10sImRhdGFfb2Zmc2V0"
    b"cyI6WzIwLDIzXX0sInNwYXJzZSI6eyJkdHlwZSI6IlU4Iiwic2hhcGUiOlsyNF0sImRhdGFfb2Zmc2V0cyI6WzIz"
    b"LDQ3XX19ICAgICi1L/0ggF0AABgCAgACAASSmASweHl6AgAAAAEotS/9IApRAAADIwMDAAAAAAAA"
)


def test_a_delta_of_the_first_release_is_still_understood():
    """Never edit the bytes: files like this one lie in stores and spools."""
    old = {
        "dense": bf16(np.arange(0x3C00, 0x3C40)),
        "sparse": TensorBytes(
            "F32", (40,), np.arange(0x3F800000, 0x3F800028, dtype="<u4").tobytes()
        ),
        "raw": TensorBytes("I8", (3,), b"abc"),
        "kept": TensorBytes("BOOL", (), b"\x01"),
    }
    sparse = old["sparse"].cells().copy()
    sparse[[3, 39]] -= np.uint32(2)
    header = read_delta_header(GOLDEN)
    manifest = VersionManifest(
        run="r",
        policy="r/p",
        version=2,
        parent=1,
        step=2,
        digest="a95360471369763c3706277379851e28ff7b3184c8450f4c2e5c1ca6eaa98aa5",
        base_digest="85c6c210b557564ec520e1c2c63dc33f96265879f62ce70a1d6117db050f9c36",
        files=(describe_file(DELTA_NAME, "delta", GOLDEN),),
        full_bytes=0,
        fingerprint=header.fingerprint,
        created_wall_s=0.0,
    )
    changed, _ = apply_delta(old, GOLDEN, manifest)
    assert changed == {
        "dense": bf16(np.arange(0x3C01, 0x3C41)),
        "sparse": TensorBytes("F32", (40,), sparse.tobytes()),
        "raw": TensorBytes("I8", (3,), b"xyz"),
    }
    coders = msgspec.json.decode(read_header(GOLDEN)[1]["blocks"])
    assert {name: blocks[0][0] for name, blocks in coders.items()} == {
        "dense": "dense.step.zstd",
        "sparse": "sparse.step.zstd",
        "raw": "raw",
    }


def test_a_model_of_a_million_parameters_is_coded_in_milliseconds():
    """Ten times the time that it takes (20 ms and 10 ms): a loop over cells does not pass."""
    rng = np.random.default_rng(0)
    old, new = {}, {}
    for layer in range(20):
        cells = rng.integers(0x3B00, 0x3D00, 50_000, "<u2")
        old[f"{layer}"] = bf16(cells)
        cells = cells.copy()
        cells[rng.random(50_000) < 0.3] += np.uint16(1)
        new[f"{layer}"] = bf16(cells)
    base = StateDigest.of(old)
    started = time.process_time()
    publication = published(old, new, base=base)
    encoded = time.process_time()
    apply_delta(old, publication.files[DELTA_NAME], publication.manifest, digests=base)
    assert encoded - started < 0.2
    assert time.process_time() - encoded < 0.1
