"""What of a published adapter is in vLLM: the function of its cells, and reading that back."""

import json
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from adapters import floats, write_adapter
from hypothesis import given
from hypothesis import strategies as st
from torch_models import EXAMPLE

from edge_agent.engines.vllm_adapter import AdapterBits, adapter_arguments
from edge_agent.engines.vllm_map import Storage, TensorForm, WorkerMap, box
from transport.errors import IntegrityError, ModelError
from transport.weights.folder import read_model_folder
from transport.weights.patch import CellList, whole

HALF = {"BF16": (8, -126, 127), "F16": (11, -14, 15)}
"""Bits of the significand with the one that is not written, smallest and largest exponent."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_adapter(EXAMPLE, tmp_path_factory.mktemp("adapter") / "a", targets=("q_proj",))


def names(folder):
    """An A and a B."""
    return next(iter(read_model_folder(folder))), list(read_model_folder(folder))[1]


def bits_of(folder, tmp_path, **changes):
    """The adapter with another description."""
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "adapter_config.json").read_bytes())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    return AdapterBits(tmp_path)


def nearest(value, kind):
    """The value of a half type that is nearest to an exact one, of two the even one; None where
    that is beyond the largest."""
    digits, low, high = HALF[kind]
    if not value:
        return value
    exponent = low
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (max(exponent, low) - digits + 1)
    rounded = round(value / unit) * unit  # Python rounds halves to even
    return None if abs(rounded) >= Fraction(2) ** (high + 1) else rounded


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.sampled_from(sorted(HALF)),
)
def test_values_are_rounded_once_to_the_nearest_and_even(folder, values, kind):
    a, _ = names(folder)
    cells = np.array(values, np.float32).view(np.uint32)
    wanted = [nearest(Fraction(float(value)), kind) for value in cells.view(np.float32)]
    bits = AdapterBits(folder)
    if None in wanted:
        with pytest.raises(IntegrityError, match=f"too large for {kind}.*lora_dtype"):
            bits.stored(a, cells, TensorForm("F32", cells.size), kind)
        return
    made = bits.stored(a, cells, TensorForm("F32", cells.size), kind)
    wide = made.astype(np.uint32) << 16
    read = wide.view(np.float32) if kind == "BF16" else made.view(np.float16)
    assert [Fraction(float(value)) for value in read] == wanted


@pytest.mark.parametrize(("alpha", "exact"), [(8.0, True), (4.0, True), (12.0, False)])
def test_only_b_is_scaled_and_by_a_power_of_two_exactly(folder, tmp_path, alpha, exact):
    bits = bits_of(folder, tmp_path, lora_alpha=alpha)
    for name in names(folder):
        values = np.array([0.5, -1.2578125, 3.0e-5], np.float32)
        cells = (values.view(np.uint32) >> 16).astype(np.uint16)
        form = TensorForm("BF16", 3)
        made = bits.stored(name, cells, form, "BF16")
        scale = alpha / 4 if "lora_B" in name else 1.0
        before = (cells.astype(np.uint32) << 16).view(np.float32)
        after = (made.astype(np.uint32) << 16).view(np.float32)
        assert (after == before * np.float32(scale)).all() == (exact or scale == 1.0)
        assert np.allclose(after, before * scale, rtol=2**-8)


def test_what_vllm_has_counts_as_published_only_where_it_is_the_very_bits(folder):
    bits = AdapterBits(folder)
    for name, tensor in read_model_folder(folder).items():
        form = TensorForm(tensor.dtype, tensor.cells().size)
        stored = bits.stored(name, tensor.cells(), form, "BF16")
        assert (bits.published(name, stored, form, "BF16", None) == tensor.cells()).all()
        spoilt = stored.copy()
        spoilt[5] ^= 1
        shown = bits.published(name, spoilt, form, "BF16", None)
        assert np.flatnonzero(shown != tensor.cells()).tolist() == [5]
        at = np.array([4, 5, 6])
        shown = bits.published(name, spoilt[at], form, "BF16", at)
        assert (shown != tensor.cells()[at]).tolist() == [False, True, False]


def test_what_is_written_is_what_is_published_from_then_on(folder):
    bits = AdapterBits(folder)
    _, name = names(folder)
    tensor = read_model_folder(folder)[name]
    form = TensorForm(tensor.dtype, tensor.cells().size)
    new = tensor.cells()[:2] + np.uint32(1 << 20)
    bits.written({name: (CellList(np.array([0, 7]), new),)})
    cells = tensor.cells().copy()
    cells[[0, 7]] = new
    stored = bits.stored(name, cells, form, "BF16")
    assert (bits.published(name, stored, form, "BF16", None) == cells).all()
    bits.written(whole({name: tensor}))
    assert bits.published(name, stored, form, "BF16", None)[0] != cells[0]


def test_in_a_type_that_holds_it_an_adapter_loses_only_what_the_scale_does(folder):
    bits = AdapterBits(folder)
    for name, tensor in read_model_folder(folder).items():
        form = TensorForm("F32", tensor.cells().size)
        stored = bits.stored(name, tensor.cells(), form, "F32").view(np.float32)
        scale = 2.0 if "lora_B" in name else 1.0
        assert (stored.astype(np.float64) == scale * floats(tensor).ravel()).all()


def test_a_layer_that_vllm_has_no_adapter_for_is_refused_by_name(folder):
    bits = AdapterBits(folder)
    (a, b), storage = names(folder), Storage("q.lora_a_stacked.0", "BF16", 64)
    forms = {a: TensorForm("F32", 8), b: TensorForm("F32", 8)}
    all_of = (box(0, (8,), 0, (1,), 0, (1,)),)
    bits.check(forms, [WorkerMap((storage,), {a: all_of, b: all_of}, {})])
    with pytest.raises(ModelError, match=rf"no place for tensor '{b}'.*lora\.targets"):
        bits.check(forms, [WorkerMap((storage,), {a: all_of}, {})])
    with pytest.raises(ModelError, match=r"aten\.cat of it"):
        bits.check(forms, [WorkerMap((storage,), {a: all_of, b: all_of}, {b: "aten.cat of it"})])


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (4, 8), (8, 8), (65, 128), (512, 512)])
def test_vllm_gets_room_for_the_rank(folder, tmp_path, rank, room):
    bits_of(folder, tmp_path, r=rank)
    arguments = adapter_arguments(tmp_path)
    assert (arguments["max_lora_rank"], arguments["max_loras"]) == (room, 1)


def test_a_rank_beyond_vllms_largest_is_refused(folder, tmp_path):
    bits_of(folder, tmp_path, r=513)
    with pytest.raises(ModelError, match=r"rank 513; vLLM has room for 512.*lora\.rank"):
        adapter_arguments(tmp_path)


def test_a_map_survives_the_wire():
    found = WorkerMap((Storage("p", "BF16", 8),), {"w": (box(0, (8,), 0, (1,), 0, (1,)),)}, {})
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(found))
    assert msgspec.convert(plain, WorkerMap) == found
