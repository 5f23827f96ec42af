"""Texts from code that is not ours, so that they can be sent and logged whatever is in them.

A Python ``str`` may hold lone surrogates (U+D800, say), which UTF-8 has no bytes for: MessagePack,
JSON and text files refuse them. An exception may have any text, or none at all when ``__str__``
itself raises.

What always holds: what ``encodable`` and ``told`` return encodes as UTF-8; neither raises.
"""

from collections.abc import Mapping
from typing import Any, Final

MAX_TOLD: Final = 2000
"""Characters of an error of foreign code: what is read by people, in a message or a log line."""
_MAX_DEPTH: Final = 32
_CUT: Final = "..."


def encodable(text: str) -> str:
    """``text``, with what UTF-8 cannot have written as it would be in a program (``\\ud800``)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


def cut(text: str, most: int = MAX_TOLD) -> str:
    """``text`` in at most ``most`` characters, encodable."""
    if len(text) > most:
        text = text[: most - len(_CUT)] + _CUT
    return encodable(text)[:most]


def told(error: BaseException, most: int = MAX_TOLD) -> str:
    """Type and text of an error in at most ``most`` characters."""
    return cut(f"{type(error).__name__}: {said(error)}".removesuffix(": "), most)


def said(value: object) -> str:
    """``str(value)``, or that there is none; not cut."""
    try:
        return encodable(str(value))
    except Exception:  # noqa: BLE001 - foreign code, whose text is all that is lost
        return f"a {type(value).__name__} without a text"


def shown(value: object) -> str:
    """``repr(value)``, or that there is none; not cut."""
    try:
        return encodable(repr(value))
    except Exception:  # noqa: BLE001 - as in ``said``
        return f"a {type(value).__name__} that cannot be shown"


def all_encodable(value: Any, depth: int = 0) -> Any:
    """The same maps, lists and tuples with every text in them, keys as well, encodable; what is
    nested deeper than ``_MAX_DEPTH`` becomes text."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, (Mapping, list, tuple)) and depth >= _MAX_DEPTH:
        return f"a {type(value).__name__} that is nested too deep"
    if isinstance(value, Mapping):
        return {
            all_encodable(key, depth + 1): all_encodable(one, depth + 1)
            for key, one in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [all_encodable(one, depth + 1) for one in value]
    return value
