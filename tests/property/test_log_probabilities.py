"""Log-probabilities a few rows at a time against all of them at once, with autograd's gradient."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
SIZES = st.integers(1, 9)


def all_at_once(logits, targets, temperature):
    import torch

    everything = torch.log_softmax(logits.float() / temperature, dim=-1)
    chosen = everything.gather(-1, targets[..., None])[..., 0]
    with torch.no_grad():
        detached = everything.detach()
        entropy = -(detached.exp() * detached).sum(dim=-1)
    return chosen, entropy


@settings(
    deadline=None,
    derandomize=True,
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    shape=st.lists(SIZES, min_size=1, max_size=3),
    vocabulary=st.sampled_from([1, 2, 7, 100, 5000]),
    kind=st.sampled_from(["float32", "bfloat16", "float16"]),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    spread=st.sampled_from([1e-3, 1.0, 30.0]),
    work_cells=st.sampled_from([1, 7, 1000, 2**25]),
    from_a_layer=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_few_rows_at_a_time_give_what_all_of_them_give(
    shape, vocabulary, kind, temperature, spread, work_cells, from_a_layer, seed
):
    import torch

    from cloud_trainer.log_probabilities import token_log_probabilities

    torch.manual_seed(seed)
    dtype = getattr(torch, kind)
    values = (torch.randn(*shape, vocabulary) * spread).to(dtype)
    targets = torch.randint(vocabulary, shape)
    weights = torch.randn(shape)
    found = []
    for ours in (True, False):
        logits = leaf = values.clone().requires_grad_()
        if from_a_layer:  # whose result ours may write over
            logits = torch.nn.functional.linear(leaf, torch.eye(vocabulary, dtype=dtype))
        if ours:
            chosen, entropy = token_log_probabilities(
                logits, targets, temperature=temperature, work_cells=work_cells
            )
        else:
            chosen, entropy = all_at_once(logits, targets, temperature)
        (chosen * weights).sum().backward()
        found.append((chosen, entropy, leaf.grad))
    (chosen, entropy, gradient), (chosen_, entropy_, gradient_) = found
    assert chosen.dtype == entropy.dtype == torch.float32
    assert gradient.dtype == dtype
    # A part of the rows may be summed up in another order.
    assert torch.allclose(chosen, chosen_, rtol=1e-6, atol=1e-6 * max(1.0, spread))
    assert torch.allclose(entropy, entropy_, rtol=1e-5, atol=1e-5)
    # Rounding before the logits' type gets its turn, which rounds either way from the middle.
    step = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}[kind]
    scale = weights.abs().amax() / temperature
    assert (gradient.float() - gradient_.float()).abs().max() <= 2 * step * scale
