"""Max-min fair rates of transfers that share links (progressive filling).

All rates rise together until a link is full; the transfers through it keep what they have and the
others go on. So no transfer can get more without one that has no more than it getting less, which
is what long TCP flows of equal round trip over shared links come near to (Bertsekas and Gallager,
Data Networks, 6.5.2). A transfer's own bound (a TCP window, say) is a link that it has alone.

What always holds: no link carries more than its rate; every transfer is held by a full link of its
own or by its bound; equal input gives equal output.
"""

from collections.abc import Iterable, Sequence
from typing import Final

UNLIMITED: Final = 1e15
"""Bytes per second: as good as no link at all."""


class Pipe:
    """A link in one direction; ``rate`` in bytes per second, ``scale`` 0 while it is out."""

    __slots__ = ("name", "rate", "scale")

    def __init__(self, name: str, rate: float) -> None:
        self.name = name
        self.rate = rate
        self.scale = 1.0

    @property
    def capacity(self) -> float:
        return self.rate * self.scale


def max_min(paths: Sequence[Sequence[Pipe]], bounds: Sequence[float]) -> list[float]:
    """Rates in bytes per second: transfer ``i`` goes through all of ``paths[i]`` and never faster
    than ``bounds[i]``. O(transfers x links of a path x distinct bottlenecks)."""
    rates = [0.0] * len(paths)
    left: dict[Pipe, float] = {}
    users: dict[Pipe, int] = {}
    for path in paths:
        for pipe in path:
            left[pipe] = pipe.capacity
            users[pipe] = users.get(pipe, 0) + 1
    open_ones = list(range(len(paths)))
    while open_ones:
        level = min(_shares(left, users), default=UNLIMITED)
        bounded = [i for i in open_ones if bounds[i] <= level]
        if bounded:
            level = min(bounds[i] for i in bounded)
            closed = [i for i in bounded if bounds[i] <= level]
        else:
            full = {pipe for pipe, count in users.items() if count and left[pipe] / count <= level}
            closed = [i for i in open_ones if any(pipe in full for pipe in paths[i])]
        if not closed:  # through no link at all
            closed = open_ones
        for i in closed:
            rates[i] = level
            for pipe in paths[i]:
                left[pipe] = max(0.0, left[pipe] - level)
                users[pipe] -= 1
        done = frozenset(closed)
        open_ones = [i for i in open_ones if i not in done]
    return rates


def _shares(left: dict[Pipe, float], users: dict[Pipe, int]) -> Iterable[float]:
    return (left[pipe] / count for pipe, count in users.items() if count)
