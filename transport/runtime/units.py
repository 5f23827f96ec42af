"""Quantities as people write them in settings: ``"180ms"``, ``"64MiB"``, ``"50Mbit/s"``.

What always holds:

1. A unit is spelled out and case counts (``Mbit`` is not ``MB``); a bare number is accepted only
   where it cannot be misread: seconds for durations, bytes for sizes. A bare rate is refused,
   because bits and bytes differ by eight.
2. Results are finite and not negative, in the unit that the function's name ends with.
3. Every refusal is a ``ConfigError`` that names the setting, shows the value and says what to
   write instead.
"""

import math
import re
from collections.abc import Iterable
from typing import Final

from transport.errors import ConfigError

_QUANTITY: Final = re.compile(
    r"\s*([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([^\s0-9]*)\s*"
)
_MAX_CHARACTERS: Final = 64
"""No honest quantity is longer; it bounds what a settings file can make the pattern look at."""

_SECONDS: Final[dict[str, float]] = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3_600.0,
    "d": 86_400.0,
}
_BYTES: Final[dict[str, float]] = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_BITS_PER_S: Final[dict[str, float]] = {
    "bit/s": 1,
    "kbit/s": 10**3,
    "Mbit/s": 10**6,
    "Gbit/s": 10**9,
} | {f"{unit}/s": 8 * factor for unit, factor in _BYTES.items()}


def parse_duration_s(value: str | float, name: str = "duration") -> float:
    """Seconds of ``"250us"``, ``"180ms"``, ``"1.5s"``, ``"10min"``, ``"2h"``, ``"1d"`` or a number.

    ``name`` is the setting, as the user wrote it; it leads the message of the ``ConfigError``.
    """
    if isinstance(value, str):
        return _parse(value, _SECONDS, name, example="180ms", bare=1.0)
    return _number(value, name, example="180ms")


def parse_bytes(value: str | float, name: str = "size") -> int:
    """Bytes of ``"64MiB"``, ``"1.5GB"`` or a whole number of bytes; refuses fractions of a byte."""
    if isinstance(value, str):
        size = _parse(value, _BYTES, name, example="64MiB", bare=1.0)
    else:
        size = _number(value, name, example="64MiB")
    whole = round(size)
    if abs(size - whole) > 1e-9 * size:  # "2.3kB" is 2300 bytes although 2.3 has no exact float
        raise ConfigError(f"{name} = {value!r} is not a whole number of bytes; write e.g. '64MiB'")
    return whole


def parse_rate_bits_per_s(value: str | float, name: str = "rate") -> float:
    """Bits per second of ``"50Mbit/s"`` or ``"6MB/s"``; ``"unlimited"`` and 0 are 0.0, no limit."""
    if isinstance(value, str):
        if value.strip() == "unlimited":
            return 0.0
        return _parse(value, _BITS_PER_S, name, example="50Mbit/s", bare=None)
    if _number(value, name, example="50Mbit/s") != 0:
        raise ConfigError(
            f"{name} = {value!r} has no unit, and bits and bytes differ by eight; "
            f"write e.g. '50Mbit/s' or '6MB/s'"
        )
    return 0.0


def ranges_text(numbers: Iterable[int], most: int = 8) -> str:
    """Whole numbers for people: ``0, 3-5, 9``; of more than ``most`` ranges the first and the
    last, and how many are between."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in found]
    if len(found) > most:
        cut = found[1 : len(found) - most + 2]
        between = sum(b - a + 1 for a, b in cut)
        texts = [texts[0], f"({between} between)", *texts[len(found) - most + 2 :]]
    return ", ".join(texts) or "none"


def _parse(
    text: str, units: dict[str, float], name: str, *, example: str, bare: float | None
) -> float:
    match = _QUANTITY.fullmatch(text) if len(text) <= _MAX_CHARACTERS else None
    if match is None:
        shown = text[:_MAX_CHARACTERS]
        raise ConfigError(f"{name} = {shown!r} is not a number with a unit; write e.g. '{example}'")
    number, unit = match.groups()
    factor = units.get(unit) if unit else bare
    if factor is None:
        what = f"unknown unit {unit!r}" if unit else "no unit"
        raise ConfigError(
            f"{name} = {text!r} has {what}; use one of {', '.join(units)}, e.g. '{example}'"
        )
    return _number(float(number) * factor, name, example=example)


def _number(value: float, name: str, *, example: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(
            f"{name} is a {type(value).__name__}, not a quantity; write e.g. '{example}'"
        )
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not math.isfinite(number) or number < 0:
        raise ConfigError(f"{name} = {number!r} must be a finite number, zero or more")
    return number
