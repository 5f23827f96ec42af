"""Which keys of a backup come back to a deployment's folder of keys.

What always holds: no file is replaced; a key that was revoked, in the folder or in the backup, does
not come back; and where the folder is a deployment's already, what would let somebody in, or have
somebody believed, stays out unless it is named: that it is missing there means that somebody took
it out. HTTP tokens are revoked by removing their file, agents' and trainers' keys may be.

All functions block.
"""

import contextlib
import tarfile
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from transport.errors import ConfigError
from transport.key_files import files_with
from transport.runtime.files import atomic_write, private_dir
from transport.runtime.toml_text import toml_tables

KEYS: Final = "keys"
"""The folder of keys in a backup."""
MAX_KEY_BYTES: Final = 1 << 20
_REVOKED: Final = "revoked"
_OWN_FOLDERS: Final = frozenset({"signing", _REVOKED})
"""Hold secrets of this deployment's own, and who stays out: nobody is let in by a file there."""
_NEXT_SERVER: Final = "server.next."
"""A change of the server's key that was finished or abandoned since must not go on."""
_SIGNS_OF_LIFE: Final = ("server.toml", "authorized", _REVOKED, "http", "tokens")


class KeysWritten(NamedTuple):
    """How many files were written, and which stayed out though they were missing: paths below the
    folder of keys, ``revoked`` for good, ``kept_out`` unless they are named."""

    written: int = 0
    kept_out: tuple[str, ...] = ()
    revoked: tuple[str, ...] = ()


def key_files(keys: Path) -> Iterator[str]:
    """Regular files below a folder of keys, relative to it; larger ones than keys are left out."""
    for path in sorted(keys.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.stat().st_size <= MAX_KEY_BYTES:
            yield path.relative_to(keys).as_posix()


def write_keys(tar: tarfile.TarFile, keys: Path, readmit: Collection[str]) -> KeysWritten:
    """Write what ``keys`` lacks of the backup ``tar``; ``readmit`` names paths that are written
    although somebody took them out.

    Raises:
        ConfigError: the backup has no file of a name in ``readmit``.
        StoreError: the disk refused.
    """
    members = {path: member for member in tar.getmembers() if (path := _below_keys(member))}
    unknown = sorted(set(readmit) - {str(path) for path in members})
    if unknown:
        raise ConfigError(
            f"--readmit {unknown[0]}: the backup has no such key; name it as the message of"
            " `farflow scheduler restore` does, for example authorized/box1.toml"
        )
    living = any((keys / name).exists() for name in _SIGNS_OF_LIFE)
    private_dir(keys)
    first = sorted(members, key=lambda path: path.parts[0] != _REVOKED)  # they keep others out
    written, kept_out, revoked = 0, [], []
    for path in first:
        member, target = members[path], keys.joinpath(*path.parts)
        content = _content(tar, member)
        public_key = _public_key(content)
        known = bool(public_key) and any(files_with(keys / _REVOKED, public_key))
        if path.parts[0] == _REVOKED:
            if known:
                continue
            target = _free(target)
        elif target.exists():
            continue
        elif known:
            revoked.append(str(path))
            continue
        elif living and _lets_in(path) and str(path) not in readmit:
            kept_out.append(str(path))
            continue
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_write(target, content, mode=member.mode & 0o644)
        written += 1
    return KeysWritten(written, tuple(kept_out), tuple(revoked))


def _free(path: Path) -> Path:
    """``path``, or where there is another key's file of that name, one of the names beside it that
    ``farflow keys revoke`` uses."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}.{number}{path.suffix}")
    return free


def _lets_in(path: PurePosixPath) -> bool:
    """Whether a file's being there may mean that somebody is let in or believed. Folders that are
    not known do."""
    if len(path.parts) == 1:
        return path.name.startswith(_NEXT_SERVER)
    return path.parts[0] not in _OWN_FOLDERS


def _below_keys(member: tarfile.TarInfo) -> PurePosixPath | None:
    """Where a member of a backup belongs in the folder of keys; None for what does not."""
    path = PurePosixPath(member.name)
    inside = path.parts[:1] == (KEYS,) and ".." not in path.parts and len(path.parts) > 1
    if not (inside and member.isreg() and member.size <= MAX_KEY_BYTES):
        return None
    return PurePosixPath(*path.parts[1:])


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    return b"" if file is None else file.read()


def _public_key(content: bytes) -> str:
    """Of a public or secret CURVE key file; "" of every other one."""
    with contextlib.suppress(ValueError, ConfigError):
        found = toml_tables(content.decode(), "").get("public_key", "")
        return found if isinstance(found, str) else ""
    return ""
