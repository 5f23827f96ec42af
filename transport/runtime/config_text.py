"""Settings as text, from the Structs that check them: what a key takes, and whole commented files.

What always holds: nothing here is written by hand about a table, so that a file and the reference
cannot say other keys, types or defaults than the code. In a commented file a line ``#key = value``
(no space) is a setting at its default, a line ``# text`` is prose: taking the ``#`` away from all
of the first kind changes nothing.
"""

import inspect
import textwrap
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeGuard, get_args, get_origin

import msgspec

_WIDTH: Final = 98
_UNITS: Final = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def described(struct: type[msgspec.Struct]) -> str:
    """The docstring of a table as one line of Markdown."""
    text = " ".join(inspect.cleandoc(struct.__doc__ or "").split())
    return text.replace("``", "`")


def type_text(kind: Any) -> str:
    """What a key takes, in words, with its bounds."""
    if hasattr(kind, "__metadata__"):
        base, *extra = get_args(kind)
        bounds = [
            f"{sign} {value:g}"
            for meta in extra
            for sign, value in (("≥", meta.ge), (">", meta.gt), ("≤", meta.le))
            if value is not None
        ]
        return " ".join([type_text(base), *bounds])
    origin = get_origin(kind)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in get_args(kind))
    if origin is dict and is_table(get_args(kind)[1]):
        return f"tables `{get_args(kind)[1].__name__}` by name"
    element = get_args(kind)[0] if origin is tuple else None
    if is_table(element):
        return f"list of tables `{element.__name__}`"
    if origin is UnionType:
        return " or ".join(type_text(each) for each in get_args(kind) if each is not NoneType)
    if origin is not None:
        return str(kind).replace("typing.", "").replace(" | ", " or ")
    name = getattr(kind, "__name__", str(kind))
    return f"table `{name}`" if is_table(kind) else name


def is_table(kind: Any) -> TypeGuard[type[msgspec.Struct]]:
    """Whether a type is a table of its own."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def default_of(field: msgspec.structs.FieldInfo) -> Any:
    """The default of a field that has one."""
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


def commented_toml(
    kind: type[msgspec.Struct], head: str, values: Mapping[str, Mapping[str, Any]]
) -> str:
    """A file with every table of ``kind``: what ``values`` has by table and key is set, all else
    is there as a comment with its default. ``head`` is prose for the top, a paragraph a line.

    Raises:
        ValueError: ``values`` has a table or key that ``kind`` has not.
    """
    lines = [line for part in head.splitlines() for line in _prose(part)]
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    if unknown := sorted(set(values) - set(fields)):
        raise ValueError(f"no such table: {', '.join(unknown)}")
    for name, field in fields.items():
        lines += _table(name, field.type, values.get(name, {}))
    return "\n".join(lines) + "\n"


def _table(name: str, struct: type[msgspec.Struct], values: Mapping[str, Any]) -> list[str]:
    lines = ["", *_prose(described(struct).replace("`", "")), f"[{name}]"]
    fields = msgspec.structs.fields(struct)
    if unknown := sorted(set(values) - {field.encode_name for field in fields}):
        raise ValueError(f"no such key in [{name}]: {', '.join(unknown)}")
    tables = []
    for field in fields:
        key = field.encode_name
        if is_table(field.type):
            tables.append((f"{name}.{key}", field.type))
        elif key in values:
            lines.append(f"{key} = {toml_value(key, values[key])}")
        elif not field.required and (default := default_of(field)) is not None:
            setting = f"#{key} = {toml_value(key, default)}"
            lines.append(f"{setting:<40}  # {type_text(field.type).replace('`', '')}")
    for path, inner in tables:
        lines += _table(path, inner, {})
    return lines


def toml_value(key: str, value: Any) -> str:
    """``value`` as TOML, sizes of keys in ``_bytes`` in the largest unit that they are whole in.

    Raises:
        TypeError: there is no such value in TOML.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and key.endswith("_bytes") and value:
        unit, size = next(((u, s) for u, s in _UNITS if value % s == 0), ("B", 1))
        return f'"{value // size}{unit}"'
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()  # a JSON string is a basic TOML string
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value("", each) for each in value) + "]"
    if isinstance(value, dict):
        pairs = (f"{toml_value('', str(k))} = {toml_value('', v)}" for k, v in value.items())
        return "{" + ", ".join(pairs) + "}"
    raise TypeError(f"{key}: {type(value).__name__} is nothing that TOML has")


def _prose(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, _WIDTH)] or ["#"]
