"""Items of several sources in proportion to their weights.

The k-th item of a part of weight w (k from 0) stands at (2 k + 1) / w, and the items of all parts
are taken in that order, equal ones in the order of the parts: the divisor method of Webster, by
which seats of a parliament go to parties. So with P parts, after n items a part whose share of the
weights is s has given n s items, more or less at most by 1/2 + s P / 2; a batch of any size has
nearly the shares of the whole, which independent draws would give only in the long run.

Example: weights 3 and 1 stand at 1/3, 1, 5/3, 7/3 ... and 1, 3, 5 ...: A A B A A A B A ...

What always holds: which part item n comes from, and which item of the part it is, follows from n
and the weights alone, in O(P log P) whatever n is; evaluation items have distinct prompts over all
parts, and where a part has no more of them the others take its turns.
"""

import heapq
from collections.abc import Iterator, Sequence
from fractions import Fraction

import msgspec

from scheduler.task_items import ItemSource, Kind, Named, prompt_digest
from transport.messages import Item

MAX_REPEATED = 512
"""Evaluation items in a row that other parts had before, until a part is taken to have no more."""

_Place = tuple[Fraction, int]


class Turns:
    """Whose turn it is, item by item, after ``done`` items of each part."""

    def __init__(self, weights: Sequence[Fraction], done: Sequence[int]) -> None:
        self.done = list(done)
        self._weights = weights
        self._next = [self._place(part) for part in range(len(weights))]
        heapq.heapify(self._next)

    @property
    def part(self) -> int:
        """The part that gives the next item."""
        return self._next[0][1]

    def advance(self) -> None:
        """It has given it."""
        part = self.part
        self.done[part] += 1
        heapq.heapreplace(self._next, self._place(part))

    def leave(self) -> None:
        """It has no more; the others take its turns."""
        heapq.heappop(self._next)

    def __bool__(self) -> bool:
        return bool(self._next)

    def _place(self, part: int) -> _Place:
        return (2 * self.done[part] + 1) / self._weights[part], part


def counts_before(index: int, weights: Sequence[Fraction]) -> list[int]:
    """How many of the first ``index`` items each part gives."""
    total = sum(weights)
    # At the place 2 t a part has given round(w t) items: all of them together, for t = index /
    # total, the wanted number but for the rounding, which takes at most P / 2 steps to make up.
    done = [int(weight * index / total + Fraction(1, 2)) for weight in weights]
    while sum(done) > index:
        last = [
            ((2 * n - 1) / w, part)
            for part, (n, w) in enumerate(zip(done, weights, strict=True))
            if n
        ]
        done[max(last)[1]] -= 1
    turns = Turns(weights, done)
    for _ in range(index - sum(done)):
        turns.advance()
    return turns.done


class MixtureSource:
    """``parts`` are name, weight and source of each; an item's ``family`` is its part's name."""

    def __init__(self, parts: Sequence[tuple[str, float, ItemSource]]) -> None:
        self._names = [name for name, _, _ in parts]
        self._weights = [Fraction(weight) for _, weight, _ in parts]
        self._sources = [Named(f"part {name}", source) for name, _, source in parts]
        self._held_out: list[Item] = []
        self._prompts: set[bytes] = set()
        self._turns = Turns(self._weights, [0] * len(parts))
        self._taken = [0] * len(parts)
        self._repeated = [0] * len(parts)

    def items(self, kind: Kind, start: int, count: int) -> list[Item]:
        if kind == "train":
            return list(self._train(start, count))
        while len(self._held_out) < start + count and self._turns:
            if not self._extend():
                break
        return self._held_out[start : start + count]

    def held_out_end(self) -> int | None:
        return None if self._turns else len(self._held_out)

    def _train(self, start: int, count: int) -> Iterator[Item]:
        turns = Turns(self._weights, counts_before(start, self._weights))
        firsts = list(turns.done)
        order: list[tuple[int, int]] = []
        for _ in range(count):
            order.append((turns.part, turns.done[turns.part]))
            turns.advance()
        made = [
            source.items("train", first, done - first) if done > first else []
            for source, first, done in zip(self._sources, firsts, turns.done, strict=True)
        ]
        for index, (part, number) in enumerate(order, start=start):
            item = made[part][number - firsts[part]]
            yield msgspec.structs.replace(item, index=index, family=self._names[part])

    def _extend(self) -> bool:
        """Add the next evaluation item; false while its part needs another request to find one."""
        part = self._turns.part
        source = self._sources[part]
        found = source.items("eval", self._taken[part], 1)
        if not found:
            if source.held_out_end() is None:
                return False
            self._turns.leave()
            return True
        self._taken[part] += 1
        prompt = prompt_digest(found[0].prompt)
        if prompt in self._prompts:  # another part has it too
            self._repeated[part] += 1
            if self._repeated[part] >= MAX_REPEATED:
                self._turns.leave()
            return True
        self._repeated[part] = 0
        self._prompts.add(prompt)
        index = len(self._held_out)
        item = msgspec.structs.replace(found[0], index=index, family=self._names[part])
        self._held_out.append(item)
        self._turns.advance()
        return True
