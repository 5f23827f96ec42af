"""Settings from TOML files, the environment and the command line, checked before anything starts.

Later sources win: defaults, files in order, ``FARFLOW_TABLE__FIELD`` variables, ``--set
table.field=value``. Each daemon reads its own tables of one file; a table that nobody owns and a
key that its table does not have are refused with their path. ``Resolved.origins`` remembers where
each value came from.
"""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin

import msgspec

from transport.errors import ConfigError
from transport.runtime.files import open_regular
from transport.runtime.toml_text import toml_tables
from transport.runtime.units import parse_bytes, parse_duration_s, parse_rate_bits_per_s

T = TypeVar("T", bound=msgspec.Struct)

TABLES = frozenset(
    {
        "transport",
        "scheduler",
        "http",
        "mqtt",
        "agent",
        "trainer",
        "relay",
        "log",
        "run",
        "policies",
        "task",
        "workflow",
        "evaluation",
        "evaluations",
        "local",
        "links",
        "retention",
    }
)
"""Every table that some farflow program owns; anything else in a file is a typing error."""

_ENVIRONMENT_PREFIX = "FARFLOW_"
_MAX_FILE_BYTES = 1 << 20
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_PART = re.compile(r"\.[^.\[]+|\[[^\]]*\]")


class Resolved(Generic[T]):
    """A checked configuration and, per dotted key, the source that set it."""

    def __init__(self, value: T, origins: dict[str, str]) -> None:
        self.value = value
        self.origins = origins


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of one file.

    Raises:
        ConfigError: missing, no regular file, too large, not TOML, nested too deep, or a table
            that no program owns.
    """
    try:
        with open_regular(path) as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {_MAX_FILE_BYTES} bytes; is it a TOML file?")
        # As a text file is read: TOML forbids a lone carriage return.
        text = content.decode().replace("\r\n", "\n").replace("\r", "\n")
        data = toml_tables(text, str(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    for name, table in data.items():
        if name not in TABLES:
            raise ConfigError(f"{path}: unknown table [{name}]; known are {', '.join(_sorted())}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} must be a table, as in [{name}]")
    return data


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """``table.field=value`` as a path and a TOML value; a bare word is taken as a string.

    Raises:
        ConfigError: no ``=``, an empty key, or a value that is nested too deep.
    """
    key, separator, raw = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not separator or not all(path):
        raise ConfigError(f"--set {text!r}: write it as table.field=value")
    try:
        return path, toml_tables(f"v = {raw}", f"--set {key.strip()}")["v"]
    except tomllib.TOMLDecodeError:
        return path, raw.strip()


def environment_overrides(environ: Mapping[str, str]) -> list[str]:
    """``FARFLOW_TABLE__FIELD=value`` variables in the form of ``--set``, sorted by name."""
    found = []
    for name in sorted(environ):
        if name.startswith(_ENVIRONMENT_PREFIX) and "__" in name:
            path = name[len(_ENVIRONMENT_PREFIX) :].lower().replace("__", ".")
            found.append(f"{path}={environ[name]}")
    return found


def merge(base: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """``extra`` laid over ``base``, tables key by key; neither is changed."""
    merged = dict(base)
    for key, value in extra.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping):
            merged[key] = merge(old, value)
        else:
            merged[key] = value
    return merged


def collect(
    files: Sequence[Path],
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """All sources merged, and the origin of every dotted key.

    Raises:
        ConfigError: as ``read_toml`` and ``parse_override``.
    """
    data: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for path in files:
        tables = read_toml(path)
        data = merge(data, tables)
        origins.update(dict.fromkeys(_leaves(tables), str(path)))
    environment = environment_overrides(os.environ if environ is None else environ)
    for text, origin in [(t, "environment") for t in environment] + [
        (t, "--set") for t in overrides
    ]:
        path_, value = parse_override(text)
        if path_[0] not in TABLES:
            raise ConfigError(f"{origin} {text!r}: unknown table {path_[0]!r}")
        nested: Any = value
        for part in reversed(path_):
            nested = {part: nested}
        data = merge(data, nested)
        origins[".".join(path_)] = origin
    return data, origins


def convert(data: Mapping[str, Any], kind: type[T], where: str = "") -> T:
    """Check ``data`` against the Struct ``kind``; units in ``_s`` and ``_bytes`` fields may be
    texts.

    Raises:
        ConfigError: unknown key, wrong type or range, with the path of the key.
    """
    prepared = _strict(data, kind, where)
    try:
        return msgspec.convert(prepared, kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        path = path.rstrip("`")
        if reason.startswith("Invalid enum value"):
            reason += f"; allowed are {', '.join(_allowed(_type_at(kind, path)))}"
        elif unknown := _UNKNOWN.fullmatch(reason):
            known = getattr(_struct_of(_type_at(kind, path)), "__struct_fields__", ())
            path += f".{unknown[1]}"
            reason = f"unknown key; known are {', '.join(sorted(known)) or 'none'}"
        key = f"{where}{path}".lstrip(".") or where or "the file"
        raise ConfigError(f"{key}: {reason}") from error


def load_config(
    kind: type[T],
    files: Iterable[Path | str],
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Resolved[T]:
    """The settings of one program: its tables out of all sources.

    Raises:
        ConfigError: any source is wrong; names the file or key and the remedy.
    """
    data, origins = collect([Path(f) for f in files], overrides, environ)
    own = {name: data[name] for name in kind.__struct_fields__ if name in data}
    return Resolved(convert(own, kind), origins)


def _strict(value: Any, kind: Any, where: str) -> Any:
    """Refuse unknown keys along the nested Structs of ``kind`` and parse units, with key paths."""
    struct = _struct_of(kind)
    if struct is None or not isinstance(value, Mapping):
        item = _mapping_value(kind)
        if item is not None and isinstance(value, Mapping):
            inner_struct = _struct_of(item)
            if inner_struct is not None:
                for key, inner in value.items():
                    try:
                        convert(inner, inner_struct, f"{where}.{key}".lstrip("."))
                    except ConfigError as error:
                        others = ", ".join(sorted(name for name in value if name != key))
                        if "missing required field" not in str(error) or not others:
                            raise
                        raise ConfigError(
                            f"{error}; or is one of these meant: {others}?"
                        ) from error
            return {k: _strict(v, item, f"{where}.{k}".lstrip(".")) for k, v in value.items()}
        entry = _list_entry(kind)
        if entry is not None and isinstance(value, list):
            return [_strict(each, entry, f"{where}[{n}]") for n, each in enumerate(value)]
        return value
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct)}
    result = {}
    for key, inner in value.items():
        path = f"{where}.{key}".lstrip(".")
        if key not in fields:
            raise ConfigError(
                f"{path}: unknown key; known are {', '.join(sorted(fields)) or 'none'}"
            )
        if isinstance(inner, str) and key.endswith("_bits_per_s"):
            inner = parse_rate_bits_per_s(inner, path)
        elif isinstance(inner, str) and key.endswith("_s"):
            inner = parse_duration_s(inner, path)
        elif isinstance(inner, str) and key.endswith("_bytes"):
            inner = parse_bytes(inner, path)
        result[key] = _strict(inner, fields[key].type, path)
    return result


def _struct_of(kind: Any) -> type[msgspec.Struct] | None:
    for candidate in (kind, *getattr(kind, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, msgspec.Struct):
            return None if getattr(kind, "__origin__", None) in (dict, tuple, list) else candidate
    return None


def _mapping_value(kind: Any) -> Any | None:
    if getattr(kind, "__origin__", None) is dict:
        return kind.__args__[1]
    return None


def _list_entry(kind: Any) -> Any | None:
    """The Struct that a tuple of any length holds, with or without bounds on the length."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return get_args(kind)[0] if get_origin(kind) is tuple and ... in get_args(kind) else None


def _type_at(kind: Any, path: str) -> Any:
    """The type at a path in msgspec's form, as in ``.relays[0].name`` or ``.links[...].rate``."""
    for part in _PART.findall(path):
        if part.startswith("["):
            if get_origin(kind) is Annotated:
                kind = get_args(kind)[0]
            kind = next((a for a in reversed(getattr(kind, "__args__", ())) if a is not ...), None)
            continue
        struct = _struct_of(kind)
        fields = msgspec.structs.fields(struct) if struct is not None else ()
        kind = next((f.type for f in fields if f.encode_name == part[1:]), None)
    return kind


def _allowed(kind: Any) -> list[str]:
    """Values of a ``Literal`` or ``Enum``, or of the one in a union."""
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [str(member.value) for member in kind]
    return [value for part in get_args(kind) for value in _allowed(part)]


def _leaves(data: Mapping[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key, value in data.items():
        path = f"{prefix}{key}"
        found.extend(_leaves(value, f"{path}.") if isinstance(value, Mapping) else [path])
    return found


def _sorted() -> list[str]:
    return [f"[{name}]" for name in sorted(TABLES)]
