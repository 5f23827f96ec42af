"""Max-min fair rates of transfers that share links (progressive filling).

All rates rise together until a link is full; the transfers through it keep what they have and the
others go on. So no transfer can get more without one that has no more than it getting less, which
is what long TCP flows of equal round trip over shared links come near to (Bertsekas and Gallager,
Data Networks, 6.5.2). A transfer's own bound (a TCP window, say) is a link that it has alone.

What always holds: no link carries more than its rate; every transfer is held by a full link of its
own or by its bound; equal input gives equal output.
"""

import heapq
from collections.abc import Sequence
from typing import Final

UNLIMITED: Final = 1e15
"""Bytes per second: as good as no link at all."""


class Pipe:
    """A link in one direction; ``rate`` in bytes per second, ``scale`` 0 while it is out,
    ``drift`` what the time of day makes of it."""

    __slots__ = ("drift", "name", "rate", "scale")

    def __init__(self, name: str, rate: float) -> None:
        self.name = name
        self.rate = rate
        self.scale = 1.0
        self.drift = 1.0

    @property
    def capacity(self) -> float:
        """Bytes per second at present."""
        return self.rate * self.scale * self.drift


def max_min(paths: Sequence[Sequence[Pipe]], bounds: Sequence[float]) -> list[float]:
    """Rates in bytes per second: transfer ``i`` goes through all of ``paths[i]`` and never faster
    than ``bounds[i]``. O((transfers x links of a path + links) x log)."""
    rates = [0.0] * len(paths)
    left: dict[Pipe, float] = {}
    users: dict[Pipe, list[int]] = {}
    count: dict[Pipe, int] = {}
    for i, path in enumerate(paths):
        for pipe in path:
            left.setdefault(pipe, pipe.capacity)
            users.setdefault(pipe, []).append(i)
            count[pipe] = count.get(pipe, 0) + 1
    order = {pipe: number for number, pipe in enumerate(left)}
    # A link's share never falls while others close, so an old entry is at worst too low.
    shares = [(left[pipe] / count[pipe], number, pipe) for pipe, number in order.items()]
    heapq.heapify(shares)
    by_bound = sorted(range(len(paths)), key=bounds.__getitem__)
    is_open = [True] * len(paths)
    next_bound = 0

    def close(i: int, level: float) -> None:
        is_open[i] = False
        rates[i] = level
        for pipe in paths[i]:
            left[pipe] = max(0.0, left[pipe] - level)
            count[pipe] -= 1

    while next_bound < len(by_bound):
        if not is_open[by_bound[next_bound]]:
            next_bound += 1
            continue
        level = UNLIMITED
        while shares:
            share, number, pipe = shares[0]
            if not count[pipe]:
                heapq.heappop(shares)
                continue
            present = left[pipe] / count[pipe]
            if present > share:
                heapq.heapreplace(shares, (present, number, pipe))
                continue
            level = min(level, present)
            break
        bounded = by_bound[next_bound]
        if bounds[bounded] <= level or not shares:
            close(bounded, min(bounds[bounded], level))
            continue
        heapq.heappop(shares)
        for i in users[pipe]:
            if is_open[i]:
                close(i, level)
    return rates
