"""Any weights, any change: exact through files and deltas; anything else is refused."""

import zlib

import msgspec
import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transport.errors import BaseVersionMismatch, IntegrityError
from transport.weights.delta_file import CodecSettings, decode_delta, encode_delta
from transport.weights.digest import StateDigest, first_non_finite, state_digest
from transport.weights.manifest import DELTA_NAME, VersionManifest, describe_file
from transport.weights.patch import patched
from transport.weights.state import WeightArena
from transport.weights.tensors import (
    ITEM_BYTES,
    TensorBytes,
    read_header,
    read_safetensors,
    write_safetensors,
)

WEIGHTS = settings(
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: name != "__metadata__"
)
SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@st.composite
def tensor(draw):
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape = draw(SHAPES)
    size = int(np.prod(shape, dtype=int)) * ITEM_BYTES[dtype]
    return TensorBytes(dtype, shape, draw(st.binary(min_size=size, max_size=size)))


STATES = st.dictionaries(NAMES, tensor(), max_size=5)


@st.composite
def step(draw, old):
    """The same model with some bits changed: a few cells, most, or another tensor altogether."""
    new = {}
    for name, before in old.items():
        cells = before.cells().copy()
        kind = draw(st.sampled_from(["same", "few", "most", "all"]))
        if cells.size and kind != "same":
            rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
            share = {"few": 0.1, "most": 0.7, "all": 1.0}[kind]
            where = rng.random(cells.size) < share
            bits = rng.integers(0, 4 if kind != "all" else 1 << 8, cells.size)
            cells[where] += bits[where].astype(cells.dtype)
        new[name] = TensorBytes(before.dtype, before.shape, cells.tobytes())
    return new


def manifest_of(delta):
    header = delta.header
    return VersionManifest(
        run=header.run,
        policy=header.policy,
        version=header.version,
        parent=header.parent,
        step=1,
        digest=header.digest,
        base_digest=header.base_digest,
        files=(describe_file(DELTA_NAME, "delta", delta.data),),
        full_bytes=0,
        fingerprint=header.fingerprint,
        created_wall_s=0.0,
    )


def delta_between(old, new, **options):
    return encode_delta(old, new, run="r", policy="r/p", version=2, parent=1, **options)


def arena_of(tensors):
    manifest = VersionManifest(
        run="r",
        policy="r/p",
        version=1,
        parent=None,
        step=0,
        digest=state_digest(tensors),
        base_digest=None,
        files=(),
        full_bytes=0,
        fingerprint="",
        created_wall_s=0.0,
    )
    return WeightArena.of(tensors, manifest)


def decoded(arena, data, manifest):
    delta = decode_delta(arena, data, manifest, manifest.delta)
    return {
        name: patched(tensor, delta.patch.get(name, ())) for name, tensor in arena.tensors.items()
    }, delta


@WEIGHTS
@given(STATES, st.dictionaries(NAMES, NAMES, max_size=2))
def test_files_give_back_every_bit_and_the_stock_library_agrees(state, metadata):
    data = write_safetensors(state, metadata)
    assert read_safetensors(data) == state
    assert list(read_safetensors(data)) == sorted(state)
    stock = {name: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for name, t in
             safetensors.deserialize(data)}  # fmt: skip
    assert stock == {name: (t.dtype, t.shape, t.data) for name, t in state.items()}


@WEIGHTS
@given(
    st.data(),
    STATES,
    st.sampled_from([1, 7, 1 << 24]),
    st.sampled_from(["auto", "small", "fast", "portable", "absolute"]),
)
def test_deltas_give_back_every_bit_and_can_be_applied_twice(data, old, segment_cells, coder):
    new = data.draw(step(old))
    made = delta_between(old, new, segment_cells=segment_cells, settings=CodecSettings(coder=coder))
    safetensors.deserialize(made.data)
    arena = arena_of(old)
    for _ in range(2):
        after, delta = decoded(arena, made.data, manifest_of(made))
        assert after == new
        assert delta.patch.keys() == {name for name in old if old[name] != new[name]}
        assert delta.digests == made.digests == StateDigest.of(new)
        assert arena.tensors == old
    undo = arena.apply(delta.patch, 2, delta.digests)
    arena.apply(delta.patch, 2, delta.digests)
    assert arena.tensors == new
    arena = arena_of(old)
    undo = arena.apply(delta.patch, 2, delta.digests)
    assert arena.rescan() == arena.digests
    arena.undo(undo)
    assert arena.tensors == old
    assert arena.rescan() == arena.digests == StateDigest.of(old)


@WEIGHTS
@given(st.data(), STATES.filter(bool))
def test_no_damage_gives_wrong_weights(data, old):
    new = data.draw(step(old))
    made = delta_between(old, new)
    damaged = bytearray(made.data)
    if data.draw(st.booleans()):
        position = data.draw(st.integers(0, len(damaged) - 1))
        damaged[position] ^= data.draw(st.integers(1, 255))
    else:
        del damaged[data.draw(st.integers(0, len(damaged) - 1)) :]
    arena = arena_of(old)
    with pytest.raises(IntegrityError):
        decoded(arena, bytes(damaged), manifest_of(made))
    vouched = msgspec.structs.replace(
        manifest_of(made), files=(describe_file(DELTA_NAME, "delta", bytes(damaged)),)
    )
    try:
        after, _ = decoded(arena, bytes(damaged), vouched)
    except IntegrityError:
        return
    assert after == new


@WEIGHTS
@given(st.data(), STATES, STATES)
def test_another_base_is_always_refused(data, old, other):
    made = delta_between(old, data.draw(step(old)))
    if state_digest(other) != state_digest(old):
        # Another model is refused by what its header says, the same one by its digest.
        with pytest.raises(IntegrityError) as refused:
            decoded(arena_of(other), made.data, manifest_of(made))
        if StateDigest.of(other).kinds == StateDigest.of(old).kinds:
            assert refused.type is BaseVersionMismatch


@WEIGHTS
@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_refused_as_files(data):
    with pytest.raises(IntegrityError):
        read_safetensors(data + b"\xff")


FLOATS = {"F16": np.float16, "F32": np.float32, "F64": np.float64}


@WEIGHTS
@given(st.sampled_from(sorted(FLOATS)), st.binary(min_size=8, max_size=64))
def test_the_finite_check_agrees_with_numpy(dtype, data):
    data = data[: len(data) // 8 * 8]
    values = np.frombuffer(data, FLOATS[dtype])
    state = {"w": TensorBytes(dtype, values.shape, data)}
    assert (first_non_finite(state) is None) == bool(np.isfinite(values).all())


@WEIGHTS
@given(st.binary(min_size=2, max_size=64))
def test_the_finite_check_of_bf16_agrees_with_float32(data):
    data = data[: len(data) // 2 * 2]
    cells = np.frombuffer(data, "<u2")
    values = (cells.astype("<u4") << 16).view("<f4")
    state = {"w": TensorBytes("BF16", cells.shape, data)}
    assert (first_non_finite(state) is None) == bool(np.isfinite(values).all())


ODD = st.one_of(
    st.integers(-3, 400),
    st.sampled_from([-1, 1 << 31, 1 << 32, 1 << 63, 1 << 64, 1 << 200, 0.5, None, True, "", "U8"]),
    st.sampled_from(["same", "raw", "split.zstd", "list.zstd", "class.zstd", "class.range"]),
    st.sampled_from([[], [[]], [["w", 0, 1]], [["w", 0, 3], ["w", 2, 3]], [["v", 0, 1 << 40]]]),
)


@WEIGHTS
@given(st.data(), st.sampled_from(["BF16", "F32", "U8", "F64"]), st.integers(0, 1 << 32))
def test_no_header_or_body_of_a_publisher_gives_wrong_weights(data, dtype, seed):
    """Rows and bodies of any kind, with fitting sizes and check sums: refused, or the very bits."""
    rng = np.random.default_rng(seed)
    old, new = (
        {name: TensorBytes(dtype, (40,), rng.bytes(40 * ITEM_BYTES[dtype])) for name in "vw"}
        for _ in range(2)
    )
    made = delta_between(old, {**old, "w": new["w"]}, segment_cells=30)
    regions, metadata = read_header(made.data)
    bodies = {name: bytes(made.data[r.start : r.end]) for name, r in regions.items()}
    rows = msgspec.json.decode(metadata["segments"])
    for _ in range(data.draw(st.integers(1, 3))):
        number = data.draw(st.integers(0, len(rows) - 1))
        if data.draw(st.booleans()):
            row, field = rows[number], data.draw(st.integers(0, 4))
            if field == 4:
                row[2] = [["w", 0, 30], ["w", 30, 10]]
                row[2][0][data.draw(st.integers(0, 2))] = data.draw(ODD)
            else:
                row[field] = data.draw(ODD)
        else:
            name = f"segment.{number:06d}"
            body = bytearray(bodies[name])
            cut = data.draw(st.integers(0, len(body)))
            body[cut : cut + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
            bodies[name] = bytes(body)
            rows[number][4:] = [len(body), zlib.crc32(body)]
    metadata["segments"] = msgspec.json.encode(rows).decode()
    file = write_safetensors(
        {name: TensorBytes("U8", (len(body),), body) for name, body in bodies.items()}, metadata
    )
    vouched = msgspec.structs.replace(
        manifest_of(made), files=(describe_file(DELTA_NAME, "delta", file),)
    )
    arena = arena_of(old)
    try:
        after, _ = decoded(arena, file, vouched)
    except IntegrityError:
        return
    finally:
        assert arena.tensors == old
    assert after == {**old, "w": new["w"]}
