"""A file of jobs, one JSON object a line, as ``farflow submit`` takes it.

    {"id": "a-1", "prompt": "2 + 2 =", "answer": "4"}
    {"id": "a-2", "items": [{"prompt": "1 + 1 =", "answer": "2"}], "group_size": 8}

What always holds: what is wrong raises ``TaskError`` that names file, line and field; nothing is
submitted of a file that has one such line; ids are unique within a file.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from transport.errors import TaskError
from transport.messages import ExternalJob, Item
from transport.runtime.files import store_errors

MAX_LINE_BYTES: Final = 256 * 1024
_ITEM_FIELDS: Final = ("prompt", "answer", "meta", "family")
_FIELDS: Final = tuple(f for f in ExternalJob.__struct_fields__ if f != "items")


def read_jobs(path: Path, defaults: Mapping[str, Any]) -> list[ExternalJob]:
    """The jobs of a file; ``defaults`` are fields of ``ExternalJob`` that a line may override.

    Raises:
        TaskError: a line is not a job.
        StoreError: the file cannot be read.
    """
    jobs: dict[str, ExternalJob] = {}
    lines: dict[str, int] = {}
    with store_errors("read", path), path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{path}:{number}"
            if len(line) > MAX_LINE_BYTES:
                raise TaskError(f"{where}: longer than {MAX_LINE_BYTES} bytes; split the job")
            if not line.strip():
                continue
            job = _job(where, line, defaults)
            if job.id in jobs:
                raise TaskError(
                    f"{where}: id: {job.id!r} is in line {lines[job.id]} too; ids are unique"
                )
            jobs[job.id], lines[job.id] = job, number
    if not jobs:
        raise TaskError(f"{path}: holds no jobs; write one JSON object a line")
    return list(jobs.values())


def _job(where: str, line: bytes, defaults: Mapping[str, Any]) -> ExternalJob:
    try:
        data = json.loads(line)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise TaskError(f"{where}: is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise TaskError(f"{where}: is no JSON object; write {{...}}")
    if "id" not in data:
        raise TaskError(
            f"{where}: id: missing; give every job one of its own, so that submitting the file "
            "again is harmless"
        )
    own = [field for field in _ITEM_FIELDS if field in data]
    if "items" in data and own:
        raise TaskError(f"{where}: {own[0]}: belongs into the entries of items, or leave out items")
    items = data.pop("items", None)
    if items is None:
        items = [{field: data.pop(field) for field in own}]
    if not isinstance(items, list) or not items:
        raise TaskError(f"{where}: items: must be a list of at least one item")
    for name in data:
        if name not in _FIELDS:
            known = ", ".join((*_ITEM_FIELDS, "items", *_FIELDS))
            raise TaskError(f"{where}: {name}: unknown field; known are {known}")
    found = [_item(where, index, item) for index, item in enumerate(items)]
    try:
        return msgspec.convert({**defaults, **data, "items": found}, ExternalJob)
    except msgspec.ValidationError as error:
        raise TaskError(f"{where}: {_named(error)}") from error


def _item(where: str, index: int, data: object) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise TaskError(f"{where}: items[{index}]: must be an object with prompt and answer")
    for name in data:
        if name not in _ITEM_FIELDS:
            known = ", ".join(_ITEM_FIELDS)
            raise TaskError(f"{where}: items[{index}].{name}: unknown field; known are {known}")
    if not isinstance(data.get("prompt"), str) or not data["prompt"]:
        raise TaskError(f"{where}: prompt: must be a text that is not empty")
    meta = data.get("meta", "")
    text = meta if isinstance(meta, str) else json.dumps(meta)
    item = {"index": index, "answer": "", **data, "meta": text}
    try:
        msgspec.convert(item, Item)
    except msgspec.ValidationError as error:
        raise TaskError(f"{where}: {_named(error)}") from error
    return item


def _named(error: msgspec.ValidationError) -> str:
    """``field: what is wrong`` from "what is wrong - at `$.field`"."""
    text, _, place = str(error).partition(" - at `$")
    field = place.rstrip("`").lstrip(".")
    return f"{field}: {text}" if field else text
