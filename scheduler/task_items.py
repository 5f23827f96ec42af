"""What all sources of items share: the held-out rule, checks, the search for held-out items.

What always holds: ``is_held_out`` alone decides which kind a prompt belongs to; held-out items have
distinct prompts and indices 0, 1, 2 ...; where their space ends depends on the draws, not on what
was asked for.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Final, Literal, Protocol

import msgspec

from transport.errors import TaskError
from transport.messages import Item

Kind = Literal["train", "eval"]

MAX_ITEM_BYTES: Final = 64 * 1024
"""Prompt, answer and meta of one item; several items travel in one control frame."""

MAX_FAMILY: Final = 80
"""Characters of a task family."""

MAX_MISSES: Final = 512
"""Held-out prompts in a row that were all seen before, until no new one is expected: with one
percent of the prompts unseen this ends too early in one case of 170."""

MAX_DRAWS_WITHOUT_HELD_OUT: Final = 64
"""Times ``held_out_one_in``: so many draws, and not one held out (by chance: e^-64)."""

MAX_DRAWS_PER_REQUEST: Final = 10_000
"""Then evaluation items are given as far as they are found, so that a request for training items
waits behind no long search; whoever asked asks again."""

FOREIGN_ERRORS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What foreign generators raise for settings that do not go together."""


def is_held_out(prompt: str, one_in: int) -> bool:
    """Whether a prompt is never trained on: SHA-256 of its UTF-8 text, modulo ``one_in``."""
    return int.from_bytes(prompt_digest(prompt), "big") % one_in == 0


def prompt_digest(prompt: str) -> bytes:
    return hashlib.sha256(prompt.encode()).digest()


def derived_seed(seed: int, *names: str | int) -> int:
    """A seed of its own for each use of a run's ``seed``; below 2**31, because generators add
    positions to it."""
    text = "/".join(map(str, (seed, *names))).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") >> 1


class ItemSource(Protocol):
    """Makes items of one task."""

    def items(self, kind: Kind, start: int, count: int) -> list[Item]:
        """Items ``start`` to ``start + count - 1``; fewer where the evaluation space ends, and
        while ``held_out_end`` is None because finding them takes more requests.

        Raises:
            TaskError: the source cannot give them.
        """
        ...

    def held_out_end(self) -> int | None:
        """How many evaluation items there are, None while no end was seen."""
        ...


class Named:
    """A source whose errors begin with ``name``, as those do that name a key below it."""

    def __init__(self, name: str, source: ItemSource) -> None:
        self._name = name
        self._source = source

    def items(self, kind: Kind, start: int, count: int) -> list[Item]:
        try:
            return self._source.items(kind, start, count)
        except TaskError as error:
            if str(error).startswith(f"{self._name}."):
                raise
            raise TaskError(f"{self._name}: {error}") from error

    def held_out_end(self) -> int | None:
        return self._source.held_out_end()


class Instructed:
    """A source whose prompts end with the instruction of their family, or with ``instruction``.
    What is held out was decided by the prompts alone, so other words change no item's kind."""

    def __init__(
        self, source: ItemSource, instruction: str, of_families: Mapping[str, str] | None = None
    ) -> None:
        self._source = source
        self._instruction = instruction
        self._of_families = of_families or {}

    def items(self, kind: Kind, start: int, count: int) -> list[Item]:
        return [self._told(item) for item in self._source.items(kind, start, count)]

    def held_out_end(self) -> int | None:
        return self._source.held_out_end()

    def _told(self, item: Item) -> Item:
        instruction = self._of_families.get(item.family, self._instruction)
        if not instruction:
            return item
        told = msgspec.structs.replace(item, prompt=f"{item.prompt}\n\n{instruction}")
        return check_item(told, "instruction")


def check_item(item: Item, where: str) -> Item:
    """Raises TaskError for an empty prompt, a long family or an item above ``MAX_ITEM_BYTES``."""
    if not item.prompt.strip():
        raise TaskError(f"{where}: prompt: is empty")
    if len(item.family) > MAX_FAMILY:
        raise TaskError(f"{where}: family: longer than {MAX_FAMILY} characters")
    try:
        item.family.encode()
        size_bytes = sum(len(text.encode()) for text in (item.prompt, item.answer, item.meta))
    except UnicodeEncodeError as error:
        raise TaskError(
            f"{where}: {error}; decode bytes with errors='replace', a lone surrogate is no text"
        ) from error
    if size_bytes > MAX_ITEM_BYTES:
        raise TaskError(
            f"{where}: {size_bytes} bytes of prompt, answer and meta; at most {MAX_ITEM_BYTES}"
        )
    return item


class HeldOutSearch:
    """The held-out items among the draws of a source. ``draw`` makes the next one, for the index
    that it has if it is held out and new; None when nothing more can be drawn."""

    def __init__(self, one_in: int, draw: Callable[[int], Item | None]) -> None:
        self.found: list[Item] = []
        self.complete = False
        self._one_in = one_in
        self._draw = draw
        self._seen: set[bytes] = set()
        self._misses = 0
        self._since_held_out = 0

    def extend(self, count: int) -> None:
        """Draw on until ``count`` items are there, or for a while."""
        for _ in range(MAX_DRAWS_PER_REQUEST):
            if len(self.found) >= count or self.complete:
                break
            item = self._draw(len(self.found))
            if item is None:
                self.complete = True
            else:
                self._take(item)

    def end(self) -> int | None:
        return len(self.found) if self.complete else None

    def _take(self, item: Item) -> None:
        if not is_held_out(item.prompt, self._one_in):
            self._since_held_out += 1
            if self._since_held_out > MAX_DRAWS_WITHOUT_HELD_OUT * self._one_in:
                self.complete = True
            return
        self._since_held_out = 0
        prompt = prompt_digest(item.prompt)
        if prompt in self._seen:
            self._misses += 1
            self.complete = self._misses >= MAX_MISSES
            return
        self._misses = 0
        self._seen.add(prompt)
        self.found.append(item)
