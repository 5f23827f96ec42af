"""Advantages of the siblings of one group."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

AdvantageMethod = Literal["group_std", "group_mean"]

_EPSILON = 1e-6


def group_advantages(rewards: Sequence[float], method: AdvantageMethod) -> NDArray[np.float64]:
    """One advantage per sibling; exactly zero for all where all rewards are equal.

        group_std    A_i = (r_i - mean(r)) / (std(r) + 1e-6)     GRPO, arXiv:2402.03300, eq. 3
        group_mean   A_i =  r_i - mean(r)                        Dr. GRPO, arXiv:2503.20783

    ``std`` is that of the group itself (divided by its size, not by one less).
    """
    values = np.asarray(rewards, np.float64)
    # Rounding in the mean would otherwise be blown up to something that looks like a signal.
    if values.size == 0 or values.min() == values.max():
        return np.zeros_like(values)
    centred: NDArray[np.float64] = values - values.mean()
    if method == "group_std":
        centred /= values.std() + _EPSILON
    return centred
