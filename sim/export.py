"""What a run, a comparison or a sweep left in its folder, and as tables for other programs.

A folder holds ``result.json`` with ``recording.json`` (a run), ``comparison.json`` or
``sweep.json``, and ``scenario.json``. What always holds: files are replaced whole; reading gives
back what was written, or an error that names the file.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from sim.compare import Comparison, Interval, Measure
from sim.recording import Recording
from sim.run import Result
from sim.scenario import Scenario
from sim.sweep import Sweep
from transport.errors import ConfigError
from transport.runtime.files import atomic_write

T = TypeVar("T")

SCENARIO: Final = "scenario.json"
RESULT: Final = "result.json"
RECORDING: Final = "recording.json"
COMPARISON: Final = "comparison.json"
SWEEP: Final = "sweep.json"
MAX_BYTES: Final = 1 << 30

Rows = tuple[list[str], list[list[Any]]]


def write(folder: Path, name: str, value: Any) -> None:
    """Raises ConfigError when the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / name, msgspec.json.encode(value) + b"\n")
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror}") from error


def read(folder: Path, name: str, kind: type[T]) -> T:
    """Raises ConfigError when the file is missing or of another farflow."""
    path = folder / name
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_BYTES} bytes; is it ours?")
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; was it made with --out?") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: of another version: {error}; run it again") from error


def tables(folder: Path) -> dict[str, Rows]:
    """All tables of a folder by name: heads and rows.

    Raises:
        ConfigError: there is nothing of ours in it.
    """
    found: dict[str, Rows] = {}
    if (folder / RESULT).exists():
        found["result"] = _results([read(folder, RESULT, Result)])
    if (folder / RECORDING).exists():
        found |= _recorded(read(folder, RECORDING, Recording))
    if (folder / COMPARISON).exists():
        comparison = read(folder, COMPARISON, Comparison)
        found["rules"] = _measures(comparison.measures)
        found["results"] = _results(comparison.results)
    if (folder / SWEEP).exists():
        swept = read(folder, SWEEP, Sweep)
        found["points"] = _measures(
            [point.measure for point in swept.points if point.measure is not None]
        )
    if not found:
        raise ConfigError(
            f"{folder}: no result here; make one with `farflow sim run SCENARIO --out {folder}`"
        )
    return found


def document(folder: Path) -> dict[str, Any]:
    """Everything of a folder as one JSON document."""
    named: dict[str, type[Any]] = {
        SCENARIO: Scenario,
        RESULT: Result,
        RECORDING: Recording,
        COMPARISON: Comparison,
        SWEEP: Sweep,
    }
    tables(folder)  # so that an empty folder is the same error
    return {
        name.removesuffix(".json"): msgspec.to_builtins(read(folder, name, kind))
        for name, kind in named.items()
        if (folder / name).exists()
    }


def to_csv(rows: Rows) -> str:
    """One table as RFC 4180 text with a head."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    heads, lines = rows
    writer.writerow(heads)
    writer.writerows(lines)
    return text.getvalue()


def _results(results: Sequence[Result]) -> Rows:
    left_out = ("accounting", "counters", "steps", "problems", "digest")
    names = [name for name in Result.__dataclass_fields__ if name not in left_out]
    return names, [[getattr(result, name) for name in names] for result in results]


def _measures(measures: Sequence[Measure]) -> Rows:
    names = [n for n in Measure.__dataclass_fields__ if n not in ("name", "seeds", "finished")]
    heads = ["name", "seeds", "finished"]
    heads += [f"{name}{end}" for name in names for end in ("", "_low", "_high")]
    rows: list[list[Any]] = []
    for one in measures:
        row: list[Any] = [one.name, len(one.seeds), one.finished]
        for name in names:
            spread: Interval | None = getattr(one, name)
            row += ["", "", ""] if spread is None else [spread.mean, spread.low, spread.high]
        rows.append(row)
    return heads, rows


def _recorded(recording: Recording) -> dict[str, Rows]:
    found: dict[str, Rows] = {
        name: _structs(values)
        for name, values in (
            ("agents", recording.agents),
            ("attempts", recording.attempts),
            ("publications", recording.publications),
            ("fetches", recording.fetches),
        )
    }
    steps = [
        [s.policy, s.step, s.began_s, s.ended_s, sum(s.lags.values()), _mean(s.lags)]
        for s in recording.steps
    ]
    found["steps"] = (["policy", "step", "began_s", "ended_s", "groups", "lag_mean"], steps)
    lags = [
        [policy, lag, count]
        for policy, counts in sorted(recording.lags().items())
        for lag, count in sorted(counts.items())
    ]
    found["policy_lag"] = (["policy", "lag", "groups"], lags)
    heads = ["at_s", "up_bytes", "down_bytes", "trained_tokens", "wasted_tokens", "drawn_tokens"]
    rows = [
        [getattr(sample, head) for head in heads] + list(sample.busy_s)
        for sample in recording.samples
    ]
    found["samples"] = ([*heads, *(f"busy_s {row}" for row in recording.rows)], rows)
    return found


def _structs(values: Sequence[msgspec.Struct]) -> Rows:
    names = list(values[0].__struct_fields__) if values else []
    return names, [[getattr(value, name) for name in names] for value in values]


def _mean(lags: dict[int, int]) -> float:
    return sum(lag * count for lag, count in lags.items()) / max(1, sum(lags.values()))
