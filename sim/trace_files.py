"""Lengths of sequences and sizes of deltas that were really seen: from a file or an event log.

What always holds: values come in the order of their source; a source without a usable value, or
with one that is no number in range, is refused with its place and what would do.
"""

import csv
import math
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any, Final

import msgspec

from scheduler.core.events import FromService
from scheduler.event_log import RecordedTerm, recorded_terms, unpack_event
from sim.replay import term_folder
from sim.trace import place_of
from transport.errors import ConfigError
from transport.messages import Message, TrajectoriesStored, VersionStored

MAX_VALUES: Final = 1_000_000
"""What comes after so many is left out."""
_MAX_FILE_BYTES: Final = 1 << 28
_LARGEST: Final = 2**50


def read_lengths(path: str) -> tuple[int, ...]:
    """Tokens of sequences, each at least 1. A JSONL file has one number a line, a list of them (a
    group), or an object with ``tokens`` or ``lengths``; a CSV file has a column ``tokens``; a
    folder is a run's, or its scheduler's, whose training results are taken.

    Raises:
        ConfigError: it cannot be read, or has no lengths.
    """
    return _read(path, "workload.lengths_file", ("tokens", "lengths"), 1)


def read_deltas(path: str) -> tuple[int, ...]:
    """Bytes of versions' deltas. The same forms, with ``delta_bytes``; of a run's event log it is
    the deltas that its weight store announced.

    Raises:
        ConfigError: it cannot be read, or has no sizes.
    """
    return _read(path, "workload.deltas_file", ("delta_bytes",), 0)


def _read(path: str, key: str, names: tuple[str, ...], least: int) -> tuple[int, ...]:
    source = Path(path)
    if source.is_dir():
        values = list(_recorded(source, names[0]))
    else:
        try:
            if source.stat().st_size > _MAX_FILE_BYTES:
                raise ConfigError(f"{key} {path}: larger than 256 MiB; take a part of it")
            text = source.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{key} {path}: cannot be read ({error}); give a JSONL or CSV file, or a run's "
                "folder"
            ) from error
        rows = _csv_rows(text) if source.suffix == ".csv" else _json_rows(text)
        values = []
        for place, row in rows:
            found = _numbers(row, names, least)
            if not found:
                raise ConfigError(
                    f"{key} {path}: line {place} has no whole number of at least {least}; write "
                    f"a number, a list of them, or {names[0]} = number"
                )
            values += found
            if len(values) >= MAX_VALUES:
                break
    if not values:
        raise ConfigError(f"{key} {path}: has no {names[0]}; give a file with at least one")
    return tuple(values[:MAX_VALUES])


def _json_rows(text: str) -> Iterator[tuple[int, Any]]:
    for place, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield place, msgspec.json.decode(line)
            except msgspec.DecodeError:
                yield place, None


def _csv_rows(text: str) -> Iterator[tuple[int, Any]]:
    for place, row in enumerate(csv.DictReader(StringIO(text)), 2):
        yield place, {name: _number(cell) for name, cell in row.items() if isinstance(name, str)}


def _number(cell: Any) -> float | None:
    try:
        return float(cell)
    except (TypeError, ValueError):
        return None


def _numbers(row: Any, names: tuple[str, ...], least: int) -> list[int]:
    """Those of one line; none when any is wrong."""
    if isinstance(row, dict):
        row = next((row[name] for name in names if name in row), None)
    found = row if isinstance(row, list) else [row]
    numbers: list[int] = []
    for value in found:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not least <= value <= _LARGEST:
            return []
        numbers.append(round(value))
    return numbers


def _recorded(folder: Path, name: str) -> Iterator[int]:
    """What services announced to a scheduler, each job's result and each version once."""
    seen: dict[object, None] = {}
    for message in _announced(folder):
        match message:
            case TrajectoriesStored(summaries=summaries) if name == "tokens":
                for summary in summaries:
                    if place_of(summary.job) is not None and summary.job not in seen:
                        seen[summary.job] = None
                        yield from summary.lengths
            case VersionStored(policy=policy, version=version) if name == "delta_bytes":
                if message.parent is not None and (policy, version) not in seen:
                    seen[policy, version] = None
                    yield message.delta_bytes
            case _:
                pass


def _announced(folder: Path) -> Iterator[Message]:
    newest = term_folder(folder)
    for term in [newest] if newest == folder else recorded_terms(newest.parent):
        for batch in RecordedTerm(term).batches():
            for _, packed in batch.inputs:
                event = unpack_event(packed)
                if isinstance(event, FromService):
                    yield event.message
