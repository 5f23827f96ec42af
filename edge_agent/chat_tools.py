"""Tool calls in what a policy wrote.

What always holds: a text is tool calls or it is none; one that parses in part, or that names a tool
which was not offered, is returned as the text that it is.

Two ways of writing them are known: JSON objects with ``name`` and ``arguments`` between
``<tool_call>`` and ``</tool_call>`` (Hermes, Qwen), and one such object as the whole text
(Llama 3, which says ``parameters`` instead).
"""

import re
from collections.abc import Collection
from typing import Any, Final

import msgspec

MAX_CALLS: Final = 64
_MARKED: Final = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def tool_calls(text: str, names: Collection[str]) -> tuple[str, list[tuple[str, str]]]:
    """What is said before the calls, and the calls as (name, arguments as JSON); no calls, and all
    of the text, where it is not made of calls of the tools ``names``."""
    marked = _MARKED.findall(text)
    written, said = (marked, text.partition("<tool_call>")[0]) if marked else ([text], "")
    calls = [_call(one, names) for one in written[: MAX_CALLS + 1]]
    found = [call for call in calls if call is not None]
    if len(found) < len(calls) or len(calls) > MAX_CALLS:
        return text, []
    return said.strip(), found


def _call(written: str, names: Collection[str]) -> tuple[str, str] | None:
    try:
        value: Any = msgspec.json.decode(written.strip())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    return name, msgspec.json.encode(arguments).decode()
