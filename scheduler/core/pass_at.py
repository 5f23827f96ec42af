"""pass@k: the probability that at least one of k answers to an item is right.

Of n answers to an item c are right; of all ways to choose k of the n, those without a right one are
C(n - c, k) out of C(n, k), so

    pass@k = mean over items of  1 - C(n - c, k) / C(n, k)          1 <= k <= n

is without bias for every k, which 1 - (1 - c / n)^k is not (Chen et al., arXiv:2107.03374, section
2.1). pass@1 is the share of right answers, avg@n.

Example: n = 4 and items with 0, 1 and 4 right: pass@1 = (0 + 1/4 + 1) / 3 = 0.417, pass@2 = (0 +
(1 - 3/6) + 1) / 3 = 0.5, pass@4 = 0.667.

What always holds: the result is a function of how many items have how many right answers, so the
order in which they come makes no difference; it is between 0 and 1, and grows with k.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import comb


def pass_at(counts: Sequence[int], k: int) -> float:
    """``counts[c]`` items have c right ones of ``len(counts) - 1`` answers; 0 without items."""
    items = sum(counts)
    chances = _chances(len(counts) - 1, k)
    found = sum(count * chance for count, chance in zip(counts, chances, strict=True))
    return found / items if items else 0.0


@lru_cache(maxsize=1024)
def _chances(n: int, k: int) -> tuple[float, ...]:
    """That one of k out of n answers is right, by how many of the n are."""
    return tuple(1.0 - comb(n - right, k) / comb(n, k) for right in range(n + 1))
