"""Which tokens take part when the batch's second moment of log ratios has a budget.

M2PO, arXiv:2510.01161: with ``d_t = log p_now(t) - log p_behaviour(t)``, tokens of the largest
``d_t`` squared are left out until the mean of the others is within the budget. A mean of squares
bounds outliers in both directions, where differences in a KL estimate cancel, and leaves alone
everything that a fixed clip range would cut in a batch that is old as a whole.
"""

import numpy as np
from numpy.typing import NDArray


def within_budget(log_ratios: NDArray[np.float64], budget: float) -> NDArray[np.bool_]:
    """Whether each token takes part: as many as possible, the smallest first, so that the mean of
    ``log_ratios`` squared over them is at most ``budget``. Among equals, earlier ones first."""
    squares = np.square(log_ratios)
    order = np.argsort(squares, kind="stable")
    means = np.cumsum(squares[order]) / np.arange(1, squares.size + 1)
    kept = np.zeros(squares.size, np.bool_)
    # Means of ever larger values never fall: those within the budget come first.
    kept[order[: np.count_nonzero(means <= budget)]] = True
    return kept
