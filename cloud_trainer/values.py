"""Arithmetic of a critic: advantages from values, and the loss of values.

No trainer has a critic yet: this is what one will need.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


def gae(
    rewards: NDArray[np.float64],
    values: NDArray[np.float64],
    *,
    discount: float,
    decay: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Generalised advantage estimates and returns of one sequence, both [tokens].

    ``rewards`` and ``values`` [tokens] are those of the policy's own tokens: a token's value is the
    critic's before the token was drawn, and behind the last one it is 0.

        delta_t  = r_t + discount V_{t+1} - V_t
        A_t      = delta_t + discount decay A_{t+1}            arXiv:1506.02438
        return_t = A_t + V_t
    """
    advantages = np.zeros_like(values)
    ahead = following = 0.0
    for t in range(len(values) - 1, -1, -1):
        ahead = rewards[t] + discount * following - values[t] + discount * decay * ahead
        following = values[t]
        advantages[t] = ahead
    return advantages, advantages + values


def clipped_value_losses(
    now: "torch.Tensor", before: "torch.Tensor", returns: "torch.Tensor", *, clip: float
) -> "torch.Tensor":
    """Summed loss of value predictions, all [tokens]: half the larger of two squared errors, that
    of ``now`` and that of ``now`` moved no further than ``clip`` from ``before`` (the form that
    belongs to PPO, arXiv:1707.06347, in the authors' own implementation)."""
    import torch

    near = before + (now - before).clamp(-clip, clip)
    errors = torch.maximum((now - returns).square(), (near - returns).square())
    return errors.sum() / 2
