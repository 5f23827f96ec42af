"""How key files are read and written.

What always holds: a file is written whole under its final name, or not at all, and never over
another; a secret is not read from a file that others can read; only regular files are read, and
whatever is wrong with one is a ``ConfigError``.
"""

import contextlib
import os
import struct
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from zmq.utils import z85

from transport.errors import ConfigError
from transport.ids import NAME_RULE, is_name
from transport.runtime.files import open_regular
from transport.runtime.toml_text import toml_tables

CURVE_KEY_CHARACTERS = 40
KEY_BYTES = 32

_OTHERS = 0o077
_FILE_BYTES = 16 * 1024
"""Far above any key file; what is larger is something else."""

S = TypeVar("S", bound=msgspec.Struct)


MADE_WITH = "farflow keys create FOLDER"


def load_toml(
    path: Path,
    kind: type[S],
    *,
    secret: bool = False,
    made_with: str = MADE_WITH,
) -> S:
    """A key file, checked. Unknown keys are refused, which also keeps a secret file out of the
    authorized folder.

    Raises:
        ConfigError: naming the file, the key in it and the remedy.
    """
    needed = _what(kind.__struct_fields__)
    try:
        with open_regular(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; make it with `{made_with}`, or name another file"
        ) from error
    found = _found(content)
    if found and needed and found != needed:
        raise ConfigError(f"{path}: is {found}; needed is {needed}")
    if secret and mode & _OTHERS:
        raise ConfigError(
            f"{path}: others can read this secret (mode {mode & 0o777:04o}); "
            f"run `chmod 600 {path}` and, if the machine is shared, replace the key"
        )
    if len(content) > _FILE_BYTES:
        raise ConfigError(f"{path}: larger than {_FILE_BYTES} bytes, this is no key file")
    try:
        return parse_toml(str(path), content.decode(), kind, made_with=made_with)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_toml(where: str, text: str, kind: type[S], *, made_with: str = MADE_WITH) -> S:
    """What ``text`` says, checked; raises ``ConfigError`` beginning with ``where``."""
    try:
        return msgspec.convert(toml_tables(text, where), kind)
    except (ValueError, msgspec.ValidationError) as error:
        # A file that was cut short ends within a value, or lacks its last lines.
        cut = isinstance(error, tomllib.TOMLDecodeError) or "missing required field" in str(error)
        if cut:
            raise ConfigError(
                f"{where}: is not a whole file as `{made_with}` makes it; copy it again, all of it"
                f" ({error})"
            ) from error
        raise ConfigError(f"{where}: {error}") from error


def _what(fields: Collection[str]) -> str:
    """What kind of file has these fields, "" for one that is no key's."""
    secret = "secret_key" in fields
    if "role" in fields:
        if secret:
            return "the secret key of a process, as in keys/NAME.toml"
        return "the public key of a process, as in authorized/NAME.toml or server.public.toml"
    if "signature" in fields:
        return "what the root key has signed, as in certificates/NAME.toml"
    if "verify_key" in fields and "policy" not in fields:
        if secret:
            return "the deployment's root key, as in signing/root.toml"
        return "the public half of the root key, as in root.public.toml"
    if "verify_key" in fields:
        if secret:
            return "a signing key, as in signing/NAME.toml"
        return "the public half of a signing key, as in signers/NAME.toml"
    return ""


def _found(content: bytes) -> str:
    try:
        return _what(toml_tables(content.decode(), ""))
    except (ValueError, ConfigError):
        return ""


def files_with(folder: Path, public_key: str) -> Iterator[Path]:
    """The key files of a folder that hold ``public_key``; a search by text, since a fleet's folder
    has thousands of files. A folder that is not there holds none."""
    wanted = f'"{public_key}"'.encode()
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.endswith(".toml"):
                continue
            try:
                with open_regular(Path(entry.path)) as file:
                    found = wanted in file.read(4096)
            except OSError:
                continue
            if found:
                yield Path(entry.path)


def make_folder(folder: Path, mode: int) -> None:
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; name another folder") from error


def to_toml(key: msgspec.Struct) -> str:
    """Values are names, policy ids, z85 and hexadecimal digits: nothing that TOML escapes."""
    values: dict[str, Any] = msgspec.to_builtins(key)
    return "".join(f'{name} = "{value}"\n' for name, value in values.items() if value is not None)


def write_new(path: Path, text: str, *, mode: int) -> None:
    """The whole file under its final name, or nothing; never over another file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with open(descriptor, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, path)
        finally:
            temporary.unlink()
    except FileExistsError as error:
        raise ConfigError(f"{path} exists; move it away to make a new key") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name another folder") from error


@contextlib.contextmanager
def secret_file(path: Path | None, text: str) -> Iterator[None]:
    """Around making what a secret is for: the new file ``path`` has it before, and is gone where
    that fails. None writes none. Raises ConfigError as ``write_new``."""
    if path is None:
        yield
        return
    write_new(path, text, mode=0o600)
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


# ---- what key files say, checked: each raises ValueError naming the field ------------------------


def check_name(name: str) -> None:
    if not is_name(name):
        raise ValueError(f"name {name!r} is not {NAME_RULE}")


def check_policy(policy: str) -> None:
    parts = policy.split("/")
    if len(parts) != 2 or not all(is_name(part) for part in parts):
        raise ValueError(f"policy {policy!r} is not RUN/NAME")


def check_curve(field: str, key: str) -> None:
    try:
        valid = len(key) == CURVE_KEY_CHARACTERS and len(z85.decode(key)) == KEY_BYTES
    except (ValueError, KeyError, struct.error):
        valid = False
    if not valid:
        raise ValueError(f"{field} is not {CURVE_KEY_CHARACTERS} characters of z85")


def check_hex(field: str, key: str, size_bytes: int = KEY_BYTES) -> None:
    try:
        valid = len(bytes.fromhex(key)) == size_bytes and key == key.lower()
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"{field} is not {2 * size_bytes} lower-case hexadecimal digits")
