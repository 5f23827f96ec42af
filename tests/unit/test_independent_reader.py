"""What the project writes, a reader that was made from the format page alone reads bit for bit."""

import json

import independent_reader as reader
import msgspec
import numpy as np
import pytest
from independent_coders import Refused
from signing import signing_key
from weight_folder import POLICY, WeightFolder

from scheduler.weight_upkeep import Asked
from transport.weights import digest
from transport.weights.delta_file import CodecSettings, encode_delta
from transport.weights.manifest import sign
from transport.weights.publication import build_delta_version, build_version0
from transport.weights.segments import CODERS
from transport.weights.tensors import ITEM_BYTES, TensorBytes, write_safetensors

KEY = signing_key()
SETTINGS = ("auto", "small", "fast", "portable", "absolute")
PLACE = {"run": "r", "policy": POLICY, "created_wall_s": 0.0}
MIXED = (0.0, 0.02, 0.2, 0.55, 1.0)
"""Shares of changed cells, by what a tensor is."""

TIED = {"embed.weight", "head.weight"}

# Zeros of both signs, subnormals, infinities, quiet and signalling NaNs with payloads.
PATTERNS = {
    "BF16": (0x0000, 0x8000, 0x0001, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFD5, 0x7FFF),
    "F16": (0x0000, 0x8000, 0x0001, 0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFE55, 0xFFFF),
    "F32": (0x00000000, 0x80000000, 0x00000001, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001),
    "F64": (0, 1 << 63, 1, 0x7FF << 52, 0xFFF << 52, (0x7FF << 52) + 1, (0xFFF8 << 48) + 77),
}


def tensor(dtype, shape, cells):
    return TensorBytes(dtype, shape, np.asarray(cells).astype(f"<u{ITEM_BYTES[dtype]}").tobytes())


def weights(dtype, shape, rng):
    """Cells as learned weights have them: finite, few exponents; anything for integers."""
    size = int(np.prod(shape))
    values = rng.normal(0, 0.02, size)
    if dtype in ("F16", "F32", "F64"):
        return TensorBytes(dtype, shape, values.astype(f"<f{ITEM_BYTES[dtype]}").tobytes())
    if dtype == "BF16":
        return tensor(dtype, shape, values.astype("<f4").view("<u4") >> 16)
    if dtype.startswith("F8_"):
        return tensor(dtype, shape, rng.integers(0x18, 0x38, size) | rng.choice([0, 0x80], size))
    return TensorBytes(dtype, shape, rng.bytes(size * ITEM_BYTES[dtype]))


def model(rng, dtypes=tuple(ITEM_BYTES)):
    """Every dtype in several tensors, so that segments have spans of more than one."""
    made = {}
    for dtype in dtypes:
        for part, shape in enumerate([(3, 17), (), (0, 2), (90,), (2, 5, 7)]):
            made[f"{dtype}.{part}"] = weights(dtype, shape, rng)
    made["head.weight"] = made["embed.weight"] = weights("BF16", (60, 10), rng)  # tied
    made["größe.\U0001d54e"], made["größe.\uff5e"] = (weights("BF16", (9,), rng) for _ in range(2))
    return made


def stepped(old, rng, share, far=0.0):
    """``share`` of the cells changed by a step or two, ``far`` of these to any bits instead."""
    new = {}
    for name in sorted(old):
        before = old[name].cells()
        width = before.dtype.itemsize
        cells = before.copy()
        here = share if isinstance(share, float) else rng.choice(share)
        where = np.flatnonzero(rng.random(cells.size) < here)
        moves = rng.choice([1, 1, 1, 2, -1, -1, -3, 40], where.size)
        cells[where] += moves.astype(f"<i{width}").view(cells.dtype)
        anywhere = where[rng.random(where.size) < far]
        cells[anywhere] = np.frombuffer(rng.bytes(anywhere.size * width), cells.dtype)
        patterns = PATTERNS.get(old[name].dtype, ())
        for at, pattern in zip(anywhere, patterns, strict=False):
            cells[at] = pattern
        new[name] = TensorBytes(old[name].dtype, old[name].shape, cells.tobytes())
    if new.keys() >= TIED:
        new["head.weight"] = new["embed.weight"]
    return new


def read(tensors):
    """A model as the other reader has it."""
    return reader.read_tensors(write_safetensors(tensors))


def encoded(old, new, **options):
    return encode_delta(old, new, run="r", policy=POLICY, version=4, parent=3, **options)


def check_same(theirs, ours):
    """Names, kinds and bits, and what both compute of them."""
    assert {name: (t.dtype, t.shape, t.cells.tobytes()) for name, t in theirs.items()} == {
        name: (t.dtype, t.shape, bytes(t.data)) for name, t in ours.items()
    }
    assert reader.state_digest(theirs) == digest.state_digest(ours)
    assert reader.full_digest(theirs) == digest.full_digest(ours)
    assert reader.fingerprint(theirs) == digest.fingerprint(ours)


@pytest.mark.parametrize("coder", SETTINGS)
@pytest.mark.parametrize(("share", "segment_cells"), [(0.06, 1000), (0.5, 90), (MIXED, 150)])
def test_every_dtype_comes_back_bit_for_bit(coder, share, segment_cells):
    rng = np.random.default_rng(segment_cells)
    old = model(rng)
    new = stepped(old, rng, share, far=0.2)
    made = encoded(old, new, settings=CodecSettings(coder=coder), segment_cells=segment_cells)
    rows = reader.read_rows(made.data)[1]
    assert any(len(row[2]) > 1 for row in rows)  # spans of several tensors
    check_same(reader.read_delta(made.data, read(old)), new)


def test_every_coder_is_read_in_every_width_that_has_it():
    rng = np.random.default_rng(0)
    seen = set()
    for dtype, item_bytes in ITEM_BYTES.items():
        old = {name: weights(dtype, (size,), rng) for name, size in [("a", 300), ("b", 250)]}
        for coder, new in [
            ("small", stepped(old, rng, 0.1)),
            ("fast", stepped(old, rng, 0.1, far=0.2)),
            ("absolute", stepped(old, rng, 0.02, far=0.5)),
            ("auto", stepped(old, rng, 0.9)),
            ("auto", {name: weights(dtype, old[name].shape, rng) for name in old}),
        ]:
            made = encoded(old, new, settings=CodecSettings(coder=coder), segment_cells=420)
            check_same(reader.read_delta(made.data, read(old)), new)
            seen |= {(row[0], item_bytes) for row in reader.read_rows(made.data)[1]}
    absent = {("class.zstd", 8), ("class.range", 8)}
    assert (
        seen
        == {(coder, size) for coder in set(CODERS) - {"same"} for size in (1, 2, 4, 8)} - absent
    )


@pytest.mark.parametrize("coder", ["small", "portable"])
def test_long_gaps_and_far_steps_are_read(coder):
    rng = np.random.default_rng(5)
    cells = 60_000
    old = {"a": tensor("F32", (cells,), np.full(cells, 0x3F800000)), "b": weights("U16", (9,), rng)}
    values = np.full(cells, 0x3F800000, "<u4")
    reach = 2 ** rng.integers(0, 32, 40, np.uint32)  # of every length, up to all bits
    values[np.sort(rng.choice(cells, 40, replace=False))] ^= reach
    values[-1] = 0xBF800000  # the farthest step
    new = {**old, "a": tensor("F32", (cells,), values)}
    made = encoded(old, new, settings=CodecSettings(coder=coder))
    (row,) = reader.read_rows(made.data)[1]
    assert row[0] == {"small": "class.range", "portable": "class.zstd"}[coder]
    check_same(reader.read_delta(made.data, read(old)), new)


def test_no_change_and_a_changed_scalar_are_files_too():
    rng = np.random.default_rng(1)
    old = model(rng)
    nothing = encoded(old, old).data
    assert reader.read_rows(nothing)[1] == []
    check_same(reader.read_delta(nothing, read(old)), old)
    new = {**old, "BF16.1": tensor("BF16", (), [0xFFC1]), "I64.1": tensor("I64", (), [2**63])}
    check_same(reader.read_delta(encoded(old, new).data, read(old)), new)


def packed(signed):
    return msgspec.msgpack.encode(signed)


def write_files(folder, publication):
    folder.mkdir()
    for name, data in publication.files.items():
        (folder / name).write_bytes(data)
    return folder


def test_a_published_chain_and_a_composite_lead_to_the_signed_digests(tmp_path):
    rng = np.random.default_rng(2)
    states = [model(rng, ("BF16", "F32", "F8_E4M3", "I32"))]
    (tmp_path / "config.json").write_bytes(b"{}")
    made = [build_version0(tmp_path, tensors=states[0], shard_bytes=900, chunk_bytes=256, **PLACE)]
    for version, coder in enumerate(("small", "fast", "absolute"), start=1):
        states.append(stepped(states[-1], rng, 0.1))
        made.append(
            build_delta_version(
                *states[-2:], version=version, parent=version - 1, step=version, chunk_bytes=256,
                settings=CodecSettings(coder=coder), segment_cells=200, with_full_digest=True,
                **PLACE,
            )
        )  # fmt: skip
    manifests, theirs = [], []
    for publication in made:
        signed = packed(sign(publication.manifest, KEY))
        manifest = reader.read_signed(signed, KEY.verify_key, POLICY)
        assert max(len(entry["chunk_digests"]) for entry in manifest["files"]) > 1
        for entry in manifest["files"]:
            reader.check_file(publication.files[entry["name"]], entry)
        manifests.append(manifest)
        if manifest["parent"] is None:
            theirs.append(reader.read_snapshot(write_files(tmp_path / "0", publication)))
        else:
            data = publication.files["delta.safetensors"]
            theirs.append(reader.read_delta(data, theirs[-1], manifest))
            (entry,) = manifest["files"]
            bodies = [data[at : at + size] for at, size in entry["segments"]]
            assert bodies == reader.read_rows(data)[2]
    assert len(manifests[0]["files"]) > 4  # shards, their index and the configuration
    for manifest, model_read, state in zip(manifests, theirs, states, strict=True):
        check_same(model_read, state)
        assert manifest["digest"] == reader.state_digest(model_read)
        assert manifest["full_digest"] == reader.full_digest(model_read)
        assert manifest["fingerprint"] == reader.fingerprint(model_read)
        assert manifest["full_bytes"] == sum(t.cells.nbytes for t in model_read.values())
    composite = encode_delta(
        states[0], states[3], run="r", policy=POLICY, version=3, parent=0, segment_cells=200
    ).data
    check_same(reader.read_delta(composite, theirs[0]), states[3])


def test_a_weight_store_is_read_from_its_disk(tmp_path):
    world = WeightFolder(tmp_path, 3, cumulative_every=3)
    assert world.make_all(Asked(1, 3))
    folder = reader.policy_folder(tmp_path, POLICY)

    def fetch(manifest, kind):
        for entry in manifest["files"]:
            if entry["kind"] == kind:
                data = (folder / "blobs" / entry["digest"]).read_bytes()
                reader.check_file(data, entry)
                yield entry["name"], data

    def snapshot(manifest, folder_name):
        target = tmp_path / folder_name
        target.mkdir()
        for name, data in fetch(manifest, "snapshot"):
            (target / name).write_bytes(data)
        return reader.read_snapshot(target)

    signed = [
        reader.read_signed(path.read_bytes(), KEY.verify_key, POLICY)
        for path in sorted((folder / "manifests").iterdir())
    ]
    states = [snapshot(signed[0], "first")]
    for manifest in signed[1:]:
        ((_, data),) = fetch(manifest, "delta")
        states.append(reader.read_delta(data, states[-1], manifest))
    for version, state in enumerate(states):
        check_same(state, world.states[version])
        assert reader.state_digest(state) == signed[version]["digest"]
    pairs, composites = [], []
    for path in sorted((folder / "composites").iterdir()):
        version, base = (int(number) for number in path.name.split("-"))
        catalogue = reader.read_catalogue(path.read_bytes(), signed[version])
        assert (catalogue["parent"], catalogue["base_digest"]) == (base, signed[base]["digest"])
        ((name, data),) = fetch(catalogue, "composite")
        assert name == f"delta-from-{base:08d}.safetensors"
        check_same(reader.read_delta(data, states[base], catalogue), world.states[version])
        pairs.append((base, version))
        composites.append(catalogue["files"][0]["digest"])
    assert (0, 3) in pairs
    # When every way from version 0 is damaged, the store makes a snapshot of the newest version.
    damaged = [world.publications[2].manifest.files[0].digest, *composites]
    for digest_hex in damaged:
        path = world.blob(digest_hex)
        path.write_bytes(bytes(path.stat().st_size))
        assert world.store.read_chunk(digest_hex, 0) is None
    world.store.maintain(POLICY)
    catalogue = reader.read_catalogue((folder / "snapshots" / "00000003").read_bytes(), signed[3])
    check_same(snapshot(catalogue, "later"), world.states[3])


def with_row(data, change):
    """A delta file whose first row says something else."""
    metadata, entries = reader.read_safetensors(data)
    rows = json.loads(metadata["segments"])
    change(rows[0])
    bodies = {name: TensorBytes(*entry) for name, entry in entries.items()}
    return write_safetensors(bodies, {**metadata, "segments": json.dumps(rows)})


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (0, "same", "unknown coder"),
        (1, "F16", "no tensor"),
        (2, [["a", 1, 40]], "outside"),
        (2, [["a", 0, 20], ["a", 19, 20]], "overlap"),
        (3, 4, "table|size"),
        (4, 7, "size"),
        (5, 0, "CRC"),
    ],
)
def test_what_the_page_says_to_refuse_is_refused(place, value, says):
    rng = np.random.default_rng(3)
    old = {"a": weights("BF16", (40,), rng)}
    data = encoded(old, stepped(old, rng, 0.3), settings=CodecSettings(coder="fast")).data
    assert reader.read_delta(data, read(old))
    with pytest.raises(Refused, match=says):
        reader.read_delta(with_row(data, lambda row: row.__setitem__(place, value)), read(old))


def test_wrong_bases_signatures_and_chunks_are_refused():
    rng = np.random.default_rng(4)
    old = {"a": weights("BF16", (40,), rng)}
    new = stepped(old, rng, 0.3)
    made = build_delta_version(old, new, version=1, parent=0, step=1, chunk_bytes=64, **PLACE)
    data, signed = made.files["delta.safetensors"], packed(sign(made.manifest, KEY))
    with pytest.raises(Refused, match="base"):
        reader.read_delta(data, read(new))
    manifest = reader.read_signed(signed, KEY.verify_key, POLICY)
    with pytest.raises(Refused, match="another policy"):
        reader.read_signed(signed, KEY.verify_key, "r/q")
    with pytest.raises(Refused, match="signature"):
        reader.read_signed(
            signed.replace(b"created_wall_s", b"created_wall_t"), KEY.verify_key, POLICY
        )
    entry = {**manifest["files"][0], "chunk_digests": [bytes(16)]}
    with pytest.raises(Refused, match="chunk"):
        reader.check_file(data, entry)
    with pytest.raises(Refused, match="digest"):
        reader.check_file(data[:-1] + b"?", manifest["files"][0])
