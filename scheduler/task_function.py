"""Items of a user's own function: ``module:function(seed, **settings)`` yields them one by one.

    def items(seed, largest=99):
        rng = random.Random(seed)
        while True:
            a, b = rng.randint(1, largest), rng.randint(1, largest)
            yield {"prompt": f"{a} * {b} =", "answer": str(a * b)}

An item is a mapping or an object with ``prompt``, ``answer``, and perhaps ``meta`` (a text, or what
JSON can write) and ``family``. Equal arguments must give equal items. A function that ends is
called again for the next pass, with another seed; evaluation items come from a call of their own.

What always holds: only modules that the scheduler's owner has listed are imported; whatever the
function raises or yields that is no item is an error with the function, the pass and the position;
going back to an earlier item costs at most the making of all before it.
"""

import importlib
import itertools
import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final

import msgspec

from scheduler.task_items import HeldOutSearch, Kind, check_item, derived_seed, is_held_out
from transport.errors import TaskError
from transport.messages import Item
from transport.runs import SourceFields

KEPT: Final = 2048
"""Training items that are remembered, so that a repeated request starts nothing anew."""

MAX_HELD_OUT_IN_A_ROW: Final = 100_000
"""Yields without one to train on, until there is none."""


_END: Final = object()


class _Yielded(msgspec.Struct, frozen=True):
    prompt: str
    answer: str = ""
    meta: Any = ""
    family: str = ""


class FunctionSource:
    """``modules`` are those that may be imported, ``key`` is that of the table in the run's
    file."""

    def __init__(
        self,
        task: SourceFields,
        seed: int,
        one_in: int,
        modules: Collection[str],
        key: str = "task",
    ) -> None:
        self._where = f"{key}.function: {task.function!r}"
        self._settings = task.settings
        self._seed = seed
        self._one_in = one_in
        self._function = self._load(task.function, modules)
        self._next = 0
        self._items = self._train()
        self._kept: deque[Item] = deque(maxlen=KEPT)
        evaluation = self._pass("eval", 0)
        self._held_out = HeldOutSearch(
            one_in, lambda index: _numbered(next(evaluation, None), index)
        )

    def items(self, kind: Kind, start: int, count: int) -> list[Item]:
        if kind == "eval":
            self._held_out.extend(start + count)
            if self._held_out.end() == 0:
                raise TaskError(
                    f"{self._where}: yields no held-out item; let it yield more different prompts,"
                    " or lower task.held_out_one_in"
                )
            return self._held_out.found[start : start + count]
        if start < self._next - len(self._kept):
            self._next, self._items = 0, self._train()
            self._kept.clear()
        while self._next < start + count:
            self._kept.append(next(self._items))
            self._next += 1
        first = start - (self._next - len(self._kept))
        return list(itertools.islice(self._kept, first, first + count))

    def held_out_end(self) -> int | None:
        return self._held_out.end()

    def _train(self) -> Iterator[Item]:
        """All training items, pass after pass."""
        index = 0
        for pass_ in itertools.count():
            before = index
            since = 0
            for item in self._pass("train", pass_):
                since += 1
                if not is_held_out(item.prompt, self._one_in):
                    yield msgspec.structs.replace(item, index=index)
                    index += 1
                    since = 0
                if since > MAX_HELD_OUT_IN_A_ROW:
                    break
            if index == before:
                raise TaskError(
                    f"{self._where}: pass {pass_} yields no item to train on; let it yield more"
                    " different prompts"
                )

    def _pass(self, kind: Kind, pass_: int) -> Iterator[Item]:
        """What one call yields, checked."""
        seed = derived_seed(self._seed, "function", kind, pass_)
        where = f"{self._where} pass {pass_}"
        try:
            yielded = iter(self._function(seed, **self._settings))
        except Exception as error:
            raise TaskError(f"{where}: {type(error).__name__}: {error}") from error
        for position in itertools.count():
            try:
                value = next(yielded, _END)
            except Exception as error:
                raise TaskError(
                    f"{where}, item {position}: {type(error).__name__}: {error}"
                ) from error
            if value is _END:
                return
            yield check_item(self._item(value, f"{where}, item {position}"), where)

    def _item(self, value: object, where: str) -> Item:
        try:
            made = msgspec.convert(value, _Yielded, from_attributes=True)
            meta = made.meta if isinstance(made.meta, str) else json.dumps(made.meta)
        except msgspec.ValidationError as error:
            reason, _, place = str(error).partition(" - at `$.")
            field = place.rstrip("`")
            raise TaskError(f"{where}: {f'{field}: ' if field else ''}{reason}") from error
        except (TypeError, ValueError) as error:
            raise TaskError(f"{where}: meta: {error}; use a text or what JSON can write") from error
        return Item(index=0, prompt=made.prompt, answer=made.answer, meta=meta, family=made.family)

    def _load(self, function: str, modules: Collection[str]) -> Callable[..., Iterable[object]]:
        module, _, name = function.partition(":")
        if module not in modules:
            raise TaskError(
                f"{self._where}: module {module!r} is not in scheduler.task_modules"
                f" ({', '.join(sorted(modules)) or 'empty'}); add it there, restart the scheduler"
            )
        try:
            loaded = importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise TaskError(
                f"{self._where}: {type(error).__name__}: {error}; install its package into the"
                " scheduler's environment, or add the folder it is in to PYTHONPATH"
            ) from error
        found = getattr(loaded, name, None)
        if not callable(found):
            raise TaskError(f"{self._where}: module {module!r} has no function {name!r}")
        made: Callable[..., Iterable[object]] = found
        return made


def _numbered(item: Item | None, index: int) -> Item | None:
    return None if item is None else msgspec.structs.replace(item, index=index)
