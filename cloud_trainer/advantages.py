"""Advantages: how much better a sequence did than its siblings, or a token than a critic thought.

What always holds: siblings of equal rewards get exactly zero, whatever the rounding; the order of
siblings and of groups does not matter but for rounding.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Baseline = Literal["group_mean", "leave_one_out", "critic"]
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


def generalised_advantages(
    rewards: Values,
    values: Values,
    lengths: Sequence[int] | NDArray[np.int64],
    *,
    gamma: float,
    lam: float,
) -> Values:
    """One advantage per token [tokens], sequence after sequence of ``lengths`` [sequences] tokens.

    ``rewards`` and ``values`` [tokens] are those of the policy's own tokens only. A token's value
    is that of the state it was drawn in: of everything before it, so also of what tools or other
    policies wrote since the own token before. Behind the last one the value is 0.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lam A_{t+1}                       arXiv:1506.02438, eq. 16

    With ``lam`` 1 it is what came of the token (rewards, discounted) less the value.
    """
    last = np.zeros(len(values), np.bool_)
    last[np.cumsum(lengths, dtype=np.int64) - 1] = True
    # A recursion over tokens: lists of plain floats are several times faster than cells of arrays.
    drawn = zip(rewards.tolist()[::-1], values.tolist()[::-1], last.tolist()[::-1], strict=True)
    found: list[float] = []
    advantage = ahead = 0.0
    for reward, value, is_last in drawn:
        if is_last:
            advantage = ahead = 0.0
        advantage = reward + gamma * ahead - value + gamma * lam * advantage
        ahead = value
        found.append(advantage)
    return np.array(found[::-1], np.float64)


def whitened(values: Values) -> Values:
    """``(values - mean) / (std + 1e-6)``."""
    if values.size == 0:
        return values
    whitened_values: Values = (values - values.mean()) / (values.std() + _EPSILON)
    return whitened_values


def overlong_reward(tokens: int, *, max_tokens: int, share: float) -> float:
    """From 0 down to -1 over the last ``share`` of ``max_tokens``, -1 beyond: the soft overlong
    punishment of DAPO, arXiv:2503.14476, where ``share`` is its L_cache / L_max."""
    start = max_tokens * (1.0 - share)
    return -min(1.0, max(0.0, tokens - start) / (max_tokens - start))
