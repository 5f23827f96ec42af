"""Drawing tokens from logits, repeatably and with exact log-probabilities.

What always holds: a token depends on its own row's logits, temperature, ``top_p`` and uniform
number only, so what else is in the batch does not matter; a token of probability zero is never
drawn; ``temperature`` 0 takes the most likely token and reports its log-probability at 1.
"""

import hashlib
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


def uniform_numbers(seed: int, request_id: str, sibling: int, count: int) -> NDArray[np.float32]:
    """[count] numbers in [0, 1) that belong to one sequence: the same for the same arguments, and
    unrelated for others (counter-based generator Philox: Salmon et al., SC 2011)."""
    name = f"{seed}\0{request_id}\0{sibling}".encode()
    key = int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key)).random(count, np.float32)


def choose(
    logits: "torch.Tensor",
    temperature: "torch.Tensor",
    top_p: "torch.Tensor | None",
    uniform: "torch.Tensor",
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """One token per row by inverting the cumulative distribution.

    ``logits`` [rows, vocabulary]; ``temperature``, ``top_p`` and ``uniform`` [rows], ``top_p`` None
    where every row has 1. Returns tokens (int64) and log-probabilities (float32), both [rows]; the
    log-probability is NaN where the logits are not finite.
    """
    import torch

    logits = logits.float()
    greedy = temperature == 0
    scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]
    log_probabilities = torch.log_softmax(scaled, dim=-1)
    if top_p is not None:
        log_probabilities = _nucleus(log_probabilities, torch.where(greedy, 1.0, top_p))
    cumulative = log_probabilities.exp().cumsum(dim=-1)
    total = cumulative[:, -1]
    # Just below the total, so that a token whose probability is not zero lies above the target.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    drawn = drawn.clamp_(max=logits.shape[-1] - 1)  # only reached by NaN
    tokens = torch.where(greedy, logits.argmax(dim=-1), drawn)
    return tokens, log_probabilities.gather(1, tokens[:, None])[:, 0]


def _nucleus(log_probabilities: "torch.Tensor", top_p: "torch.Tensor") -> "torch.Tensor":
    """Keep the fewest most likely tokens that reach ``top_p`` together (arXiv:1904.09751), and
    give them the whole probability."""
    import torch

    ordered, index = log_probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.exp().cumsum(dim=-1) - ordered.exp()
    # The most likely token stays whatever the rounding; top_p 1 keeps the row as it was.
    outside = (before >= top_p[:, None]) & (top_p < 1.0)[:, None]
    outside[:, 0] = False
    dropped = torch.zeros_like(outside).scatter(1, index, outside)
    kept = log_probabilities.masked_fill(dropped, -torch.inf)
    return torch.where((top_p < 1.0)[:, None], kept.log_softmax(dim=-1), log_probabilities)
