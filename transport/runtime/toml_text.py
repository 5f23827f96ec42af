"""TOML that somebody else wrote.

What always holds: what comes out is nested so little that every function that descends into it
comes back.
"""

import tomllib
from typing import Any, Final

from transport.errors import ConfigError

MAX_DEPTH: Final = 64
"""Tables and lists within each other; no file of farflow has a tenth of them."""


def toml_tables(text: str, where: str) -> dict[str, Any]:
    """The tables of ``text``.

    Raises:
        ConfigError: nested too deep; begins with ``where``.
        tomllib.TOMLDecodeError: not TOML.
    """
    try:
        data = tomllib.loads(text)
    except RecursionError as error:
        raise _too_deep(where) from error
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        inner = [each for outer in level for each in _inside(outer)]
        level = [each for each in inner if isinstance(each, dict | list)]
        if not level:
            return data
    raise _too_deep(where)


def _inside(outer: dict[str, Any] | list[Any]) -> list[Any]:
    return list(outer.values()) if isinstance(outer, dict) else outer


def _too_deep(where: str) -> ConfigError:
    return ConfigError(
        f"{where}: nested too deep, at most {MAX_DEPTH} tables and lists within each other"
    )
