"""Log-probabilities out of logits: the softmax's, its gradient, in little memory."""

import math
import random

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def found_of(logits, targets, **options):
    from cloud_trainer.log_probabilities import token_log_probabilities

    return token_log_probabilities(logits, targets, **options)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_and_entropy_are_those_of_the_softmax_at_the_temperature(temperature):
    import torch

    rng = random.Random(2)
    logits = [[[rng.gauss(0, 3) for _ in range(7)] for _ in range(4)] for _ in range(3)]
    targets = [[rng.randrange(7) for _ in range(4)] for _ in range(3)]
    chosen, entropy = found_of(
        torch.tensor(logits, requires_grad=True), torch.tensor(targets), temperature=temperature
    )
    assert chosen.requires_grad
    assert not entropy.requires_grad
    for row in range(3):
        for column in range(4):
            scaled = [value / temperature for value in logits[row][column]]
            total = math.log(sum(map(math.exp, scaled)))
            logs = [value - total for value in scaled]
            assert chosen[row, column].item() == pytest.approx(logs[targets[row][column]], abs=1e-5)
            expected = -sum(math.exp(value) * value for value in logs)
            assert entropy[row, column].item() == pytest.approx(expected, abs=1e-5)


def layer_of(vocabulary, **options):
    import torch

    torch.manual_seed(1)
    return torch.nn.Linear(8, vocabulary, **options)


def gradients_of(weight, state, vocabulary, targets):
    """Gradients by a layer's weight and its input with logits that came right out of it, and by
    plain autograd."""
    import torch

    gradients = []
    for plain in (False, True):
        made, hidden = weight.clone().requires_grad_(), state.clone().requires_grad_()
        logits = torch.nn.functional.linear(hidden, made)
        if plain:
            logs = logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        else:
            logs, _ = found_of(logits, targets, work_cells=2 * vocabulary)
        (logs * torch.arange(1.0, 1 + logs.numel()).view(logs.shape)).sum().backward()
        gradients.append((made.grad, hidden.grad))
    return gradients


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_gradient_in_the_place_of_the_logits_is_the_same_gradient(kind):
    import torch

    vocabulary, dtype = 31, getattr(torch, kind)
    torch.manual_seed(1)
    weight, state = torch.randn(vocabulary, 8).to(dtype), torch.randn(1, 7, 8).to(dtype)
    targets = torch.randint(vocabulary, (1, 7))
    ours, plain = gradients_of(weight, state, vocabulary, targets)
    # The gradient by the logits is rounded to their type in both; sums may differ by one more.
    tolerance = {"float32": 1e-6, "bfloat16": 2**-7}[kind]
    for one, other in zip(ours, plain, strict=True):
        assert one.dtype == dtype
        assert (one - other).abs().max() <= tolerance * other.abs().max()


def test_only_logits_that_nobody_needs_any_more_are_written_over():
    import torch

    targets = torch.tensor([[1, 2]])
    hidden = torch.randn(1, 2, 8, requires_grad=True)
    raw = layer_of(5, bias=False)(hidden)
    bounded = torch.tanh(layer_of(5, bias=False)(hidden))  # its gradient is made of its result
    leaf = torch.randn(1, 2, 5, requires_grad=True)
    for logits, lost in ((raw, True), (bounded, False), (leaf, False)):
        before = logits.detach().clone()
        found_of(logits, targets)[0].sum().backward()
        assert bool((logits.detach() != before).any()) == lost


def test_nothing_of_the_size_of_the_logits_is_made_but_their_gradient():
    """Every tensor that is made on the way, by its bytes."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        cells = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            for one in made if isinstance(made, tuple) else (made,):
                own = isinstance(one, torch.Tensor) and not function.is_view
                if own and one.untyped_storage().data_ptr() not in known:
                    self.cells = max(self.cells, one.numel())
            return made

    rows, vocabulary = 64, 1000
    weight = torch.randn(vocabulary, 4, requires_grad=True)
    logits = torch.nn.functional.linear(torch.randn(rows, 4), weight)
    known = {logits.untyped_storage().data_ptr()}
    with Largest() as largest:
        chosen, _ = found_of(logits, torch.zeros(rows, dtype=torch.int64), work_cells=4000)
        torch.autograd.grad(chosen.sum(), logits)
    assert largest.cells == 4000


def test_no_tokens_have_no_log_probabilities_and_a_gradient_of_zero():
    import torch

    logits = torch.zeros(1, 0, 5, requires_grad=True)
    chosen, entropy = found_of(logits, torch.zeros(1, 0, dtype=torch.int64))
    chosen.sum().backward()
    assert chosen.shape == entropy.shape == (1, 0)
    assert logits.grad.shape == (1, 0, 5)
