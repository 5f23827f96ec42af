"""What the delta bench measures against: the bound, the published formats, simulated weights."""

import math

import numpy as np
import pytest

from bench.entropy import Bound, binary_entropy
from bench.references import REFERENCES
from bench.weight_simulation import from_bf16, one_step, simulate, to_bf16

pytestmark = pytest.mark.slow  # bench support


def bf16(*values):
    return to_bf16(np.array(values, np.float32))


def step_bytes(old, steps):
    return (old.astype(np.int64) + steps).astype(np.uint16)


def test_the_bound_of_an_example_computed_by_hand():
    # Eight cells around 1 of which four move by +1, +1, +1 and -1, eight around 4 that stay.
    old = np.concatenate([bf16(*[1.5] * 8), bf16(*[5.0] * 8)])
    new = step_bytes(old, [1, 1, 1, -1] + [0] * 12)
    bound = Bound()
    bound.add("BF16", old, new)
    steps = 3 * math.log2(4 / 3) + 1 * math.log2(4)
    quarter = -0.25 * math.log2(0.25) - 0.75 * math.log2(0.75)
    assert (bound.cells, bound.changed) == (16, 4)
    assert bound.order_zero_bytes() == pytest.approx((16 * quarter + steps) / 8)
    # Knowing the exponent, one bit a cell where half of them move, and nothing for the others.
    assert bound.exponent_bytes() == pytest.approx((8 * 1 + steps) / 8)


def test_a_bound_is_the_same_whether_tensors_are_counted_together_or_apart():
    old, new = one_step(8192, 0.05, tensors=2)
    apart, together = Bound(), Bound()
    for name in old:
        apart.add("BF16", old[name].cells(), new[name].cells())
    together.add(
        "BF16",
        np.concatenate([old[name].cells() for name in old]),
        np.concatenate([new[name].cells() for name in new]),
    )
    assert apart.exponent_bytes() == pytest.approx(together.exponent_bytes())
    assert apart.order_zero_bytes() == pytest.approx(together.order_zero_bytes())
    assert apart.exponent_bytes() < apart.order_zero_bytes()


def test_without_a_change_nothing_needs_to_be_sent():
    cells = bf16(1.0, 2.0)
    bound = Bound()
    bound.add("BF16", cells, cells)
    assert (bound.changed, bound.order_zero_bytes(), bound.exponent_bytes()) == (0, 0, 0)
    assert binary_entropy(0) == binary_entropy(1) == 0
    assert binary_entropy(0.5) == 1


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: reference.name)
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("share", [0.0, 0.00001, 0.01, 1.0])
def test_every_published_format_gives_back_the_very_bits(reference, dtype, share):
    rng = np.random.default_rng(7)
    old = rng.integers(0, np.iinfo(dtype).max, 700_000, dtype)
    new = old.copy()
    moved = rng.random(old.size) < share
    new[moved] ^= rng.integers(1, np.iinfo(dtype).max, moved.sum(), dtype)
    assert np.array_equal(reference.decode(old, reference.encode(old, new)), new)


def test_the_plain_index_list_takes_six_bytes_for_each_changed_cell():
    old, new = one_step(4096, 0.1, tensors=1)
    (old_cells,) = (tensor.cells() for tensor in old.values())
    (new_cells,) = (tensor.cells() for tensor in new.values())
    changed = np.count_nonzero(old_cells != new_cells)
    assert len(REFERENCES[0].encode(old_cells, new_cells)) == 6 * changed


def test_rounding_to_bf16_is_half_to_even_and_exact_on_the_grid():
    grid = from_bf16(np.arange(0, 0x7F80, 7, dtype=np.uint16))
    assert np.array_equal(to_bf16(grid), np.arange(0, 0x7F80, 7, dtype=np.uint16))
    half = np.array([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)], np.float32)
    assert from_bf16(to_bf16(half)).tolist() == [1.0, 1 + 2**-6, -1.0]


def test_simulated_weights_move_as_published_runs_do_and_repeat_exactly():
    made = simulate(400_000, [1e-6], [0, 19, 20], seed=3)[1e-6]
    again = simulate(400_000, [1e-6], [0, 19, 20], seed=3, threads=1)[1e-6]
    bound = Bound()
    for name, tensor in made[19].items():
        assert tensor.cells().tobytes() == again[19][name].cells().tobytes()
        bound.add(tensor.dtype, tensor.cells(), made[20][name].cells())
    # Published runs at this learning rate change 0.6 to 1.2 % of the weights in a step.
    assert 0.006 < bound.changed / bound.cells < 0.014
    assert 0.6 < bound.exponent_bytes() / bound.changed < 0.85


@pytest.mark.parametrize("share", [0.003, 0.05])
def test_one_step_changes_the_wanted_share(share):
    old, new = one_step(1 << 18, share)
    changed = sum(np.count_nonzero(old[name].cells() != new[name].cells()) for name in old)
    assert changed / (1 << 18) == pytest.approx(share, rel=0.1)
