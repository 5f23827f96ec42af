"""Items of reasoning-gym: procedural data sets that bring their verifiers.

What always holds: training item ``index`` comes from a generator of its block alone, evaluation
items from generators of other seeds; ``meta`` is the entry as JSON, for ``score_answer``.

Generators draw from small fixed-size blocks with a seed of their own, because some of them make all
their items at once and because a position must be found without making all before it.
"""

import json
import random
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from scheduler.task_items import (
    FOREIGN_ERRORS,
    HeldOutSearch,
    Kind,
    check_item,
    derived_seed,
    is_held_out,
)
from transport.errors import TaskError
from transport.messages import Item
from transport.runs import SourceFields

TRAIN_BLOCK_ITEMS: Final = 64
TRAIN_BLOCK_DRAWS: Final = 96
"""Draws per generator of a training block: 64 items need 80 with one in five held out."""

EVAL_BLOCK_DRAWS: Final = 320
MAX_BLOCK_ROUNDS: Final = 64
"""A training block gives up after so many generators: nearly everything is held out."""


_SIMPLE: Final = (bool, int, float, str)
"""Types of settings that are checked here: a generator may take another one and fail later."""


class GymMissing(TaskError):
    """reasoning-gym is not installed here."""


class ReasoningGymSource:
    """Procedural data sets with verifiers. ``meta`` is the entry as JSON, for ``score_answer``;
    ``key`` is that of the table in the run's file."""

    def __init__(self, task: SourceFields, seed: int, one_in: int, key: str = "task") -> None:
        self._key = key
        self._one_in = one_in
        self._dataset = task.dataset
        self._settings = task.settings
        self._seed = seed
        self._where = f"reasoning-gym {task.dataset!r}"
        self._block: tuple[int, list[Item]] = (-1, [])
        self._held_out = HeldOutSearch(one_in, self._next_evaluation_draw)
        self._held_out_draws = 0
        self._check_settings()
        self._evaluation_block = self._generator(0, 1)  # shows whether the settings are right

    def items(self, kind: Kind, start: int, count: int) -> list[Item]:
        if kind == "train":
            return [self._train_item(index) for index in range(start, start + count)]
        self._held_out.extend(start + count)
        if self._held_out.end() == 0:
            raise TaskError(
                f"{self._where}: no held-out prompt found; choose settings with more different "
                "prompts, or lower task.held_out_one_in"
            )
        return self._held_out.found[start : start + count]

    def held_out_end(self) -> int | None:
        return self._held_out.end()

    def _train_item(self, index: int) -> Item:
        block, position = divmod(index, TRAIN_BLOCK_ITEMS)
        if self._block[0] != block:
            self._block = (block, self._train_block(block))
        return self._block[1][position]

    def _train_block(self, block: int) -> list[Item]:
        items: list[Item] = []
        first = block * TRAIN_BLOCK_ITEMS
        for round_ in range(MAX_BLOCK_ROUNDS):
            entries = self._generator(
                derived_seed(self._seed, "train", block, round_), TRAIN_BLOCK_DRAWS
            )
            for position in range(TRAIN_BLOCK_DRAWS):
                item = self._item(entries.draw(position), first + len(items))
                if not is_held_out(item.prompt, self._one_in):
                    items.append(item)
                    if len(items) == TRAIN_BLOCK_ITEMS:
                        return items
        raise TaskError(
            f"{self._where}: {MAX_BLOCK_ROUNDS * TRAIN_BLOCK_DRAWS} entries hold only {len(items)} "
            "to train on; choose settings with more different prompts"
        )

    def _next_evaluation_draw(self, index: int) -> Item:
        block, position = divmod(self._held_out_draws, EVAL_BLOCK_DRAWS)
        if position == 0:
            seed = derived_seed(self._seed, "eval", block, 0)
            self._evaluation_block = self._generator(seed, EVAL_BLOCK_DRAWS)
        self._held_out_draws += 1
        return self._item(self._evaluation_block.draw(position), index)

    def _check_settings(self) -> None:
        try:
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise GymMissing(
                f"{self._where}: reasoning-gym is not installed; pip install 'farflow[tasks]'"
            ) from error
        if self._dataset not in DATASETS:
            raise TaskError(
                f"{self._key}.dataset: reasoning-gym has no data set {self._dataset!r}; it has"
                f" {', '.join(sorted(DATASETS))}"
            )
        config = DATASETS[self._dataset][1]
        known = config.__dataclass_fields__
        types = typing.get_type_hints(config)
        for name, value in self._settings.items():
            where = f"{self._key}.settings.{name}"
            if name in ("seed", "size"):
                raise TaskError(f"{where}: is chosen by the scheduler; remove it")
            if name not in known:
                own = ", ".join(sorted(set(known) - {"seed", "size"}))
                raise TaskError(f"{where}: {self._dataset!r} has no such setting; it has {own}")
            if types[name] in _SIMPLE:
                try:
                    msgspec.convert(value, types[name])
                except msgspec.ValidationError as error:
                    raise TaskError(f"{where}: {error}") from error

    def _generator(self, seed: int, size: int) -> "_Generator":
        import reasoning_gym

        random.seed(seed)
        try:
            dataset: Sequence[Any] = reasoning_gym.create_dataset(
                self._dataset, seed=seed, size=size, **self._settings
            )
        except FOREIGN_ERRORS as error:
            raise TaskError(
                f"{self._key}.settings: {self._dataset!r} refuses them: {error}"
            ) from error
        where = f"{self._key}.settings: {self._dataset!r} with {self._settings}"
        return _Generator(dataset, seed, where)

    def _item(self, entry: Mapping[str, Any], index: int) -> Item:
        try:
            meta = json.dumps(entry, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TaskError(f"{self._where}: its entries are not JSON: {error}") from error
        # Some data sets have no single answer; their verifier works from the metadata alone.
        answer = entry["answer"]
        item = Item(
            index=index,
            prompt=entry["question"],
            answer="" if answer is None else str(answer),
            meta=meta,
        )
        return check_item(item, self._where)


class _Generator:
    """A data set made for one block. A few draw from the global ``random``: seeded before each
    entry, they are pure too. This process makes items and nothing else: nobody misses the old
    state."""

    def __init__(self, dataset: Sequence[Any], seed: int, where: str) -> None:
        self._dataset = dataset
        self._seed = seed
        self._where = where

    def draw(self, position: int) -> Mapping[str, Any]:
        """Raises TaskError when the data set fails with these settings."""
        random.seed(self._seed + position)
        try:
            entry: Mapping[str, Any] = self._dataset[position]
        except FOREIGN_ERRORS as error:
            raise TaskError(
                f"{self._where} cannot make an entry: {type(error).__name__}: {error};"
                " change the settings"
            ) from error
        return entry
