"""Items of a file with one JSON object a line.

What always holds: the whole file is checked at the start and what is wrong in it is named with its
line; training goes through the file once per pass, in an order of its own for each.
"""

import codecs
import json
import random
from pathlib import Path
from typing import Final

import msgspec

from scheduler.task_items import Kind, check_item, is_held_out, prompt_digest
from transport.errors import TaskError
from transport.messages import Item
from transport.runs import SourceFields

MAX_FILE_BYTES: Final = 1 << 30


class _Line(msgspec.Struct, frozen=True):
    prompt: str
    answer: str
    id: str | int = ""


class JsonlSource:
    """A file with one object per line: ``prompt``, ``answer`` and perhaps ``id``; other keys are
    ignored. All of it is checked at the start.

    Training index ``pass * lines + position`` is position in a shuffle of its own for every pass
    over the file; evaluation goes through the held-out prompts in the order of the file. ``key`` is
    that of the table in the run's file.
    """

    def __init__(self, task: SourceFields, seed: int, one_in: int, key: str = "task") -> None:
        self._key = key
        if task.reward == "verifier":
            raise TaskError(
                f"{key}.reward: 'verifier' belongs to reasoning-gym; a file's answers are compared"
                " with 'exact' or 'math-verify'"
            )
        self._path = Path(task.path)
        self._seed = seed
        self._train: list[Item] = []
        self._held_out: list[Item] = []
        self._pass = -1
        self._order: list[int] = []
        self._load(one_in)

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
            raise TaskError(f"{self._key}.path: {self._path}: {reason}; check the path") from error
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
        prompt = prompt_digest(line.prompt)
        if prompt not in seen:
            seen.add(prompt)
            self._held_out.append(msgspec.structs.replace(item, index=len(self._held_out)))
