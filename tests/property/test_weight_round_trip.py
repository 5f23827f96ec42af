"""Any weights, any change: exact through files and deltas; anything else is refused."""

import msgspec
import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transport.errors import BaseVersionMismatch, IntegrityError
from transport.weights.codec import CODERS, Change, decode_block, encode_block
from transport.weights.delta_file import apply_delta, encode_delta
from transport.weights.digest import StateDigest, first_non_finite, state_digest
from transport.weights.manifest import DELTA_NAME, VersionManifest, describe_file
from transport.weights.tensors import ITEM_BYTES, TensorBytes, read_safetensors, write_safetensors

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


def delta_between(old, new, block_cells=1 << 22):
    return encode_delta(
        old, new, run="r", policy="r/p", version=2, parent=1, block_cells=block_cells
    )


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
@given(st.data(), STATES, st.sampled_from([1, 7, 1 << 22]))
def test_deltas_give_back_every_bit_and_can_be_applied_twice(data, old, block_cells):
    new = data.draw(step(old))
    delta = delta_between(old, new, block_cells)
    safetensors.deserialize(delta.data)
    for _ in range(2):
        changed, digests = apply_delta(old, delta.data, manifest_of(delta))
        assert {**old, **changed} == new
        assert changed.keys() == {name for name in old if old[name] != new[name]}
        assert digests.hex == state_digest(new) == StateDigest.of(new).hex


@WEIGHTS
@given(st.data(), STATES.filter(bool))
def test_no_damage_gives_wrong_weights(data, old):
    new = data.draw(step(old))
    delta = delta_between(old, new)
    damaged = bytearray(delta.data)
    if data.draw(st.booleans()):
        position = data.draw(st.integers(0, len(damaged) - 1))
        damaged[position] ^= data.draw(st.integers(1, 255))
    else:
        del damaged[data.draw(st.integers(0, len(damaged) - 1)) :]
    with pytest.raises(IntegrityError):
        apply_delta(old, bytes(damaged), manifest_of(delta))
    vouched = msgspec.structs.replace(
        manifest_of(delta), files=(describe_file(DELTA_NAME, "delta", bytes(damaged)),)
    )
    try:
        changed, _ = apply_delta(old, bytes(damaged), vouched)
    except IntegrityError:
        return
    assert {**old, **changed} == new


@WEIGHTS
@given(st.data(), STATES, STATES)
def test_another_base_is_always_refused(data, old, other):
    delta = delta_between(old, data.draw(step(old)))
    if state_digest(other) != state_digest(old):
        with pytest.raises(BaseVersionMismatch):
            apply_delta(other, delta.data, manifest_of(delta))


@WEIGHTS
@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_refused_as_files(data):
    with pytest.raises(IntegrityError):
        read_safetensors(data + b"\xff")


@WEIGHTS
@given(
    st.sampled_from(sorted(CODERS)),
    st.sampled_from(["<u1", "<u2", "<u4", "<u8"]),
    st.binary(max_size=200),
    st.integers(0, 60),
)
def test_arbitrary_bytes_are_refused_by_coders_or_give_as_many_cells(name, dtype, body, size):
    old = np.zeros(size, dtype)
    try:
        cells = decode_block(name, memoryview(body), old)
    except IntegrityError:
        return
    assert (cells.size, cells.dtype) == (old.size, old.dtype)


@WEIGHTS
@given(st.data(), st.sampled_from(["<u1", "<u2", "<u4", "<u8"]), st.integers(0, 2000))
def test_every_coder_is_exact_and_the_choice_is_never_worse_than_raw(data, dtype, size):
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    top = np.iinfo(dtype).max
    old = rng.integers(0, top, size, dtype=dtype, endpoint=True)
    new = old.copy()
    where = rng.random(size) < data.draw(st.sampled_from([0.0, 0.001, 0.3, 0.6, 1.0]))
    new[where] = rng.integers(0, top, int(where.sum()), dtype=dtype, endpoint=True)
    coder, body = encode_block(Change(old, new))
    assert len(body) <= new.nbytes
    assert np.array_equal(decode_block(coder.name, memoryview(body), old), new)
    for other in CODERS.values():
        if other.name != "same":
            body = other.encode(Change(old, new))
            assert np.array_equal(other.decode(memoryview(body), old), new)


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
