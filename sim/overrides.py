"""Scenarios with some keys changed: ``--set table.key=value``, ``--range table.key=a:b:n``.

What always holds: a key that a scenario does not have is refused with the nearest one that it has;
values are TOML and pass the same checks as a file's.
"""

import difflib
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from sim.scenario import Scenario
from transport.errors import ConfigError
from transport.runtime.config import parse_override

MAX_POINTS: Final = 1000
_OPEN_TABLES: Final = ("sites", "scheduler")
"""Their keys are free, or are checked where they are used."""


def override(scenario: Scenario, settings: Sequence[str]) -> Scenario:
    """``scenario`` with settings such as ``workload.train_s=5`` applied in order; a policy's keys
    are ``policies.NAME.key``.

    Raises:
        ConfigError: names the key and what can be said instead.
    """
    for setting in settings:
        path, value = parse_override(setting)
        scenario = _with(scenario, path, value)
    return scenario


def with_value(scenario: Scenario, key: str, value: Any) -> Scenario:
    """The same for a value at hand."""
    return _with(scenario, tuple(key.split(".")), value)


def parse_values(text: str) -> tuple[str, list[Any]]:
    """``key=v1,v2,v3`` as the key and TOML values; a list's own commas are kept.

    Raises:
        ConfigError: it has another form.
    """
    key, equals, raw = text.partition("=")
    if not equals or not key or not raw.strip():
        raise ConfigError(f"--set {text!r}: write it as key=v1,v2,v3")
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(raw):
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append(raw[start:place])
            start = place + 1
    parts.append(raw[start:])
    return key.strip(), [parse_override(f"{key}={part.strip()}")[1] for part in parts]


def parse_range(text: str) -> tuple[str, list[float | int]]:
    """``key=a:b:n`` as the key and ``n`` values from ``a`` to ``b``, both included; ``a:b:nlog``
    spaces them by a constant factor. All whole numbers stay whole.

    Raises:
        ConfigError: it has another form.
    """
    key, equals, raw = text.partition("=")
    parts = raw.split(":")
    form = f"--range {text!r}: write it as key=from:to:count, or key=from:to:countlog"
    if not equals or not key or len(parts) != 3:
        raise ConfigError(form)
    logarithmic = parts[2].endswith("log")
    try:
        low, high, count = float(parts[0]), float(parts[1]), int(parts[2].removesuffix("log"))
    except ValueError as error:
        raise ConfigError(form) from error
    if not 2 <= count <= MAX_POINTS:
        raise ConfigError(f"--range {text!r}: count is 2 to {MAX_POINTS}")
    if logarithmic and not 0.0 < low < high:
        raise ConfigError(f"--range {text!r}: log needs 0 < from < to")
    shares = [place / (count - 1) for place in range(count)]
    values = [low * (high / low) ** s if logarithmic else low + (high - low) * s for s in shares]
    values = [float(f"{value:.6g}") for value in values]
    if all(value.is_integer() for value in values):
        return key.strip(), [int(value) for value in values]
    return key.strip(), list(values)


def _with(scenario: Scenario, path: tuple[str, ...], value: Any) -> Scenario:
    key = ".".join(path)
    tree = msgspec.to_builtins(scenario)
    table = tree
    for depth, part in enumerate(path):
        is_open = depth == 1 and path[0] in _OPEN_TABLES
        if not isinstance(table, dict) or (part not in table and not is_open):
            raise ConfigError(_unknown(key, tree))
        if depth < len(path) - 1:
            table = table[part]
    table[path[-1]] = value
    try:
        return msgspec.convert(tree, Scenario)
    except msgspec.ValidationError as error:
        text = str(error).replace("`$.", "`").replace(" - at ", ", at ")
        raise ConfigError(f"{key} = {value!r}: {text}") from error


def _unknown(key: str, tree: dict[str, Any]) -> str:
    known = list(_keys(tree))
    near = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
    ends = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    offered = ", ".join(dict.fromkeys(ends + near)) or ", ".join(known)
    return f"{key}: a scenario has no such key; did you mean {offered}?"


def _keys(tree: dict[str, Any], prefix: str = "") -> Sequence[str]:
    found: list[str] = []
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            found += _keys(value, f"{prefix}{name}.")
        else:
            found.append(f"{prefix}{name}")
    return found
