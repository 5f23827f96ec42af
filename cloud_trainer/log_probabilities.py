"""Log-probabilities of given tokens out of logits over a large vocabulary; needs torch.

    log p(t) = z_t / T - log(sum over v of exp(z_v / T))
    d log p(t) / d z_v = (1[v = t] - p(v)) / T

Written down plainly this makes five float32 arrays of the logits' size, three at a time, of which
one of 16384 tokens and 151936 words is 10 GB. Here the float32 numbers exist for a few tokens at a
time only, and are computed a second time where the gradient is.

What always holds: a log-probability has the bits that ``log_softmax`` of all logits in float32
gives; a gradient differs from autograd's by float32 rounding. Beside the logits there is one more
array of their size and type, their gradient, and none where it can take the logits' own place.
"""

from collections.abc import Iterator
from typing import Any

import torch

WORK_CELLS = 2**25
"""Of float32 numbers that an array of the working memory has; up to three are there at a time
(0.4 GB)."""

_SAVES_NO_RESULT = frozenset({"MmBackward0", "AddmmBackward0", "UnsafeViewBackward0"})
"""Nodes of autograd that need for their gradient what they got and not what they made: what a
linear layer without bias, or one of two dimensions, is made of."""


def token_log_probabilities(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    work_cells: int = WORK_CELLS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target at ``temperature``, and entropy in nats (without gradient).

    ``logits`` [..., vocabulary] of any floating type, ``targets`` [...]; results [...], float32.
    Logits that come right out of a linear layer are lost after the backward pass: nothing but
    what computed them may still hold them.
    """
    found: tuple[torch.Tensor, torch.Tensor] = _LogProbabilities.apply(  # type: ignore[no-untyped-call]
        logits, targets, temperature, work_cells, _is_ours(logits)
    )
    return found


def _is_ours(logits: torch.Tensor) -> bool:
    """Whether the gradient may be written over the logits: nobody needs them any more by then."""
    node = logits.grad_fn
    return node is not None and node.name() in _SAVES_NO_RESULT and logits.is_contiguous()


class _LogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        work_cells: int,
        overwrite: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(logits, targets)
        ctx.temperature, ctx.work_cells, ctx.overwrite = temperature, work_cells, overwrite
        rows, wanted = logits.detach().flatten(0, -2), targets.flatten()
        chosen = torch.empty(wanted.shape, dtype=torch.float32, device=logits.device)
        entropy = torch.empty_like(chosen)
        for part in _parts(rows, work_cells):
            logs = _scaled(rows[part], temperature).log_softmax(-1)
            chosen[part] = logs.gather(-1, wanted[part, None])[:, 0]
            entropy[part] = logs.exp().mul_(logs).sum(-1).neg_()
        entropy = entropy.view(targets.shape)
        ctx.mark_non_differentiable(entropy)
        return chosen.view(targets.shape), entropy

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, targets = ctx.saved_tensors
        rows, wanted = logits.detach().flatten(0, -2), targets.flatten()
        slope = slopes[0].flatten() / ctx.temperature
        gradient = rows if ctx.overwrite else torch.empty_like(rows)
        for part in _parts(rows, ctx.work_cells):
            change = _scaled(rows[part], ctx.temperature).softmax(-1)
            change.mul_(-slope[part, None])
            change.scatter_add_(-1, wanted[part, None], slope[part, None])
            gradient[part] = change
        return gradient.view(logits.shape), None, None, None, None


def _parts(rows: torch.Tensor, work_cells: int) -> Iterator[slice]:
    """So many rows at a time as the working memory is for, at least one."""
    step = max(1, work_cells // rows.shape[1])
    for start in range(0, len(rows), step):
        yield slice(start, start + step)


def _scaled(rows: torch.Tensor, temperature: float) -> torch.Tensor:
    return rows.float() if temperature == 1.0 else rows.float() / temperature
