"""Items of a run, made from its ``TaskSpec``.

What always holds:

1. An item is a pure function of (task, seed, kind, index): asking again, in any order, in another
   process, gives the same item.
2. An item belongs to the held-out part iff ``is_held_out(prompt)``; the kinds ``train`` and
   ``eval`` are therefore disjoint whatever the source does, also for prompts that come twice.
3. Evaluation items have distinct prompts. Their index space ends where the source has no new one
   (``held_out_end``): fewer items than asked for, or none, are given there. The training space
   never ends.
4. What a source gets wrong (data set, setting, file, line, field) is a ``TaskError`` that names it.

Foreign generators draw from small fixed-size blocks with a seed of their own, because some of them
make all their items at once and because a position must be found without making all before it.
"""

import codecs
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import msgspec

from transport.errors import TaskError
from transport.messages import Item
from transport.runs import TaskSpec

Kind = Literal["train", "eval"]

MAX_FILE_BYTES: Final = 1 << 30
MAX_ITEM_BYTES: Final = 64 * 1024
"""Prompt, answer and meta of one item; several items travel in one control frame."""

TRAIN_BLOCK_ITEMS: Final = 64
TRAIN_BLOCK_DRAWS: Final = 96
"""Draws per generator of a training block: 64 items need 80 with one in five held out."""

EVAL_BLOCK_DRAWS: Final = 320
MAX_BLOCK_ROUNDS: Final = 64
"""A training block gives up after so many generators: nearly everything is held out."""

MAX_MISSES: Final = 512
"""Held-out prompts in a row that were all seen before, until no new one is expected: with one
percent of the prompts unseen this ends too early in one case of 170."""

MAX_DRAWS_WITHOUT_HELD_OUT: Final = 64
"""Times ``held_out_one_in``: so many draws, and not one held out (by chance: e^-64)."""

MAX_DRAWS_PER_REQUEST: Final = 10_000
"""Then evaluation items are given as far as they are found, so that a request for training items
waits behind no long search; whoever asked asks again."""

_GENERATOR_ERRORS: Final = (
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
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest(), "big") % one_in == 0


class ItemSource(Protocol):
    """Makes items of one run."""

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


def open_source(task: TaskSpec, seed: int) -> ItemSource:
    """The source that ``task`` describes, checked as far as possible before the first item.

    Raises:
        TaskError: unknown data set or setting, missing or malformed file.
    """
    if task.source == "jsonl":
        return JsonlSource(task, seed)
    return ReasoningGymSource(task, seed)


def check_item(item: Item, where: str) -> Item:
    """Raises TaskError for an empty prompt or an item above ``MAX_ITEM_BYTES``."""
    if not item.prompt.strip():
        raise TaskError(f"{where}: prompt: is empty")
    size_bytes = len(item.prompt.encode()) + len(item.answer.encode()) + len(item.meta.encode())
    if size_bytes > MAX_ITEM_BYTES:
        raise TaskError(
            f"{where}: {size_bytes} bytes of prompt, answer and meta; at most {MAX_ITEM_BYTES}"
        )
    return item


# ---- reasoning-gym ---------------------------------------------------------------------------


class ReasoningGymSource:
    """Procedural data sets with verifiers. ``meta`` is the entry as JSON, for ``score_answer``."""

    def __init__(self, task: TaskSpec, seed: int) -> None:
        self._one_in = task.held_out_one_in
        self._dataset = task.dataset
        self._settings = task.settings
        self._seed = seed
        self._where = f"reasoning-gym {task.dataset!r}"
        self._block: tuple[int, list[Item]] = (-1, [])
        self._held_out: list[Item] = []
        self._held_out_draws = 0
        self._misses = 0
        self._since_held_out = 0
        self._held_out_prompts: set[bytes] = set()
        self._held_out_complete = False
        self._check_settings()
        self._evaluation_block = self._generator(0, 1)  # shows whether the settings are right

    def items(self, kind: Kind, start: int, count: int) -> list[Item]:
        if kind == "train":
            return [self._train_item(index) for index in range(start, start + count)]
        self._extend_held_out(start + count)
        return self._held_out[start : start + count]

    def held_out_end(self) -> int | None:
        return len(self._held_out) if self._held_out_complete else None

    def _train_item(self, index: int) -> Item:
        block, position = divmod(index, TRAIN_BLOCK_ITEMS)
        if self._block[0] != block:
            self._block = (block, self._train_block(block))
        return self._block[1][position]

    def _train_block(self, block: int) -> list[Item]:
        items: list[Item] = []
        first = block * TRAIN_BLOCK_ITEMS
        for round_ in range(MAX_BLOCK_ROUNDS):
            entries = self._generator(self._derived("train", block, round_), TRAIN_BLOCK_DRAWS)
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

    def _extend_held_out(self, count: int) -> None:
        """Draw on; where the space ends depends on the draws alone, not on the requests."""
        for _ in range(MAX_DRAWS_PER_REQUEST):
            if len(self._held_out) >= count or self._held_out_complete:
                break
            self._take_evaluation_draw(self._next_evaluation_draw())
        if self._held_out_complete and not self._held_out:
            raise TaskError(
                f"{self._where}: no held-out prompt found; choose settings with more different "
                "prompts, or lower task.held_out_one_in"
            )

    def _take_evaluation_draw(self, item: Item) -> None:
        if not is_held_out(item.prompt, self._one_in):
            self._since_held_out += 1
            if self._since_held_out > MAX_DRAWS_WITHOUT_HELD_OUT * self._one_in:
                self._held_out_complete = True
            return
        self._since_held_out = 0
        prompt = hashlib.sha256(item.prompt.encode()).digest()
        if prompt in self._held_out_prompts:
            self._misses += 1
            self._held_out_complete = self._misses >= MAX_MISSES
            return
        self._misses = 0
        self._held_out_prompts.add(prompt)
        self._held_out.append(item)

    def _next_evaluation_draw(self) -> Item:
        block, position = divmod(self._held_out_draws, EVAL_BLOCK_DRAWS)
        if position == 0:
            seed = self._derived("eval", block, 0)
            self._evaluation_block = self._generator(seed, EVAL_BLOCK_DRAWS)
        self._held_out_draws += 1
        return self._item(self._evaluation_block.draw(position), len(self._held_out))

    def _derived(self, kind: Kind, block: int, round_: int) -> int:
        """Seed of one generator; below 2**31, because generators add positions to it."""
        text = f"{self._seed}/{kind}/{block}/{round_}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") >> 1

    def _check_settings(self) -> None:
        try:
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise TaskError(
                f"{self._where}: reasoning-gym is not installed; pip install 'farflow[tasks]'"
            ) from error
        if self._dataset not in DATASETS:
            raise TaskError(
                f"task.dataset: reasoning-gym has no data set {self._dataset!r}; it has"
                f" {', '.join(sorted(DATASETS))}"
            )
        known = DATASETS[self._dataset][1].__dataclass_fields__
        for name in self._settings:
            if name in ("seed", "size"):
                raise TaskError(f"task.settings.{name}: is chosen by the scheduler; remove it")
            if name not in known:
                own = ", ".join(sorted(set(known) - {"seed", "size"}))
                raise TaskError(
                    f"task.settings.{name}: {self._dataset!r} has no such setting; it has {own}"
                )

    def _generator(self, seed: int, size: int) -> "_Generator":
        import reasoning_gym

        random.seed(seed)
        try:
            dataset: Sequence[Any] = reasoning_gym.create_dataset(
                self._dataset, seed=seed, size=size, **self._settings
            )
        except _GENERATOR_ERRORS as error:
            raise TaskError(f"task.settings: {self._dataset!r} refuses them: {error}") from error
        return _Generator(dataset, seed, f"task.settings: {self._dataset!r} with {self._settings}")

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
        except _GENERATOR_ERRORS as error:
            raise TaskError(
                f"{self._where} cannot make an entry: {type(error).__name__}: {error};"
                " change the settings"
            ) from error
        return entry


# ---- JSON lines ------------------------------------------------------------------------------


class _Line(msgspec.Struct, frozen=True):
    prompt: str
    answer: str
    id: str | int = ""


class JsonlSource:
    """A file with one object per line: ``prompt``, ``answer`` and perhaps ``id``; other keys are
    ignored. All of it is checked at the start.

    Training index ``pass * lines + position`` is position in a shuffle of its own for every pass
    over the file; evaluation goes through the held-out prompts in the order of the file.
    """

    def __init__(self, task: TaskSpec, seed: int) -> None:
        if task.reward == "verifier":
            raise TaskError(
                "task.reward: 'verifier' belongs to reasoning-gym; a file's answers are compared"
                " with 'exact' or 'math-verify'"
            )
        self._path = Path(task.path)
        self._seed = seed
        self._train: list[Item] = []
        self._held_out: list[Item] = []
        self._pass = -1
        self._order: list[int] = []
        self._load(task.held_out_one_in)

    def items(self, kind: Kind, start: int, count: int) -> list[Item]:
        part = self._train if kind == "train" else self._held_out
        if not part:
            raise TaskError(
                f"{self._path}: no line is {'for training' if kind == 'train' else 'held out'}; "
                "add lines, or change task.held_out_one_in"
            )
        if kind == "eval":
            return part[start : start + count]
        items = []
        for index in range(start, start + count):
            pass_, position = divmod(index, len(part))
            item = part[self._shuffled(pass_)[position]]
            items.append(msgspec.structs.replace(item, index=index))
        return items

    def held_out_end(self) -> int | None:
        return len(self._held_out)

    def _shuffled(self, pass_: int) -> list[int]:
        if self._pass != pass_:
            self._order = list(range(len(self._train)))
            random.Random(f"{self._seed}/{pass_}").shuffle(self._order)  # noqa: S311 - no secret
            self._pass = pass_
        return self._order

    def _load(self, one_in: int) -> None:
        decoder = msgspec.json.Decoder(_Line)
        seen: set[bytes] = set()
        try:
            if self._path.stat().st_size > MAX_FILE_BYTES:
                raise TaskError(f"{self._path}: larger than {MAX_FILE_BYTES} bytes; split it")
            with open(self._path, "rb") as file:
                for number, raw in enumerate(file, start=1):
                    if number == 1:
                        raw = raw.removeprefix(codecs.BOM_UTF8)
                    if raw.strip():
                        self._take(decoder, raw, number, one_in, seen)
        except OSError as error:
            reason = error.strerror or error
            raise TaskError(f"task.path: {self._path}: {reason}; check the path") from error
        if not self._train and not self._held_out:
            raise TaskError(f"{self._path}: has no lines")

    def _take(
        self,
        decoder: msgspec.json.Decoder[_Line],
        raw: bytes,
        number: int,
        one_in: int,
        seen: set[bytes],
    ) -> None:
        where = f"{self._path}:{number}"
        try:
            line = decoder.decode(raw)
        except msgspec.ValidationError as error:
            reason, _, place = str(error).partition(" - at `$.")
            field = place.rstrip("`")
            raise TaskError(f"{where}: {f'{field}: ' if field else ''}{reason}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TaskError(f"{where}: not a JSON object: {error}") from error
        except RecursionError as error:
            raise TaskError(f"{where}: nested too deeply; remove what is not needed") from error
        meta = json.dumps({"id": line.id}) if line.id != "" else ""
        item = Item(index=0, prompt=line.prompt, answer=line.answer, meta=meta)
        check_item(item, where)
        if not is_held_out(line.prompt, one_in):
            self._train.append(item)
            return
        prompt = hashlib.sha256(line.prompt.encode()).digest()
        if prompt not in seen:
            seen.add(prompt)
            self._held_out.append(msgspec.structs.replace(item, index=len(self._held_out)))
