"""Advantages: how much better a sequence did than its siblings.

What always holds: siblings of equal rewards get exactly zero, whatever the rounding; the order of
siblings and of groups does not matter but for rounding.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Baseline = Literal["group_mean", "leave_one_out"]
Normalisation = Literal["none", "group_std", "batch_std"]
Values = NDArray[np.float64]

_EPSILON = 1e-6


def group_advantages(
    rewards: Sequence[float] | Values,
    normalisation: Normalisation,
    baseline: Baseline = "group_mean",
) -> Values:
    """One advantage per sibling of one group, in ``rewards``' units for ``batch_std``.

        group_mean      A_i = r_i - mean(r)                         Dr. GRPO, arXiv:2503.20783
        leave_one_out   A_i = r_i - mean(r without r_i)             RLOO, arXiv:2402.14740
        group_std       A_i / (std(r) + 1e-6)                       GRPO, arXiv:2402.03300, eq. 3

    ``std`` is that of the group itself (divided by its size, not by one less).
    """
    values = np.asarray(rewards, np.float64)
    # Rounding in the mean would otherwise be blown up to something that looks like a signal.
    if values.size == 0 or values.min() == values.max():
        return np.zeros_like(values)
    centred: Values = values - values.mean()
    if baseline == "leave_one_out":
        centred *= values.size / (values.size - 1)
    if normalisation == "group_std":
        centred /= values.std() + _EPSILON
    return centred


def batch_advantages(
    groups: Sequence[Sequence[float] | Values],
    normalisation: Normalisation,
    baseline: Baseline = "group_mean",
) -> Values:
    """Advantages of all siblings of all groups, one after the other.

    ``batch_std`` divides them by their own root mean square over the batch, plus 1e-6
    (REINFORCE++, arXiv:2501.03262, with a baseline per group).
    """
    parts = [group_advantages(rewards, normalisation, baseline) for rewards in groups]
    values: Values = np.concatenate([np.zeros(0), *parts])
    if normalisation == "batch_std" and values.size:
        values /= np.sqrt(np.mean(values * values)) + _EPSILON
    return values


def overlong_reward(tokens: int, *, max_tokens: int, share: float) -> float:
    """From 0 down to -1 over the last ``share`` of ``max_tokens``, -1 beyond: the soft overlong
    punishment of DAPO, arXiv:2503.14476, where ``share`` is its L_cache / L_max."""
    start = max_tokens * (1.0 - share)
    return -min(1.0, max(0.0, tokens - start) / (max_tokens - start))
