"""Changing the server's key with overlap, in the deployment's folder of keys.

What always holds: the next key is announced before it is used, signed by the root; at every moment
``server.toml`` and ``server.public.toml`` hold a pair, except while ``finish_rotation`` was cut off
in between, which calling it again mends; the old key is kept as ``server.previous.toml`` so that a
change that went wrong can be taken back by hand.

    server.next.toml            secret  the next pair, between begin and finish
    server.next.public.toml     public  its public half with the root's signature
    server.previous.toml        secret  the pair before
"""

import os
from pathlib import Path

from transport.certificates import RootKey, name_next
from transport.errors import ConfigError
from transport.key_files import to_toml, write_new
from transport.keys import KeyPair
from transport.messages import Role
from transport.runtime.files import atomic_write, fsync_dir
from transport.server_keys import FOLLOWING, PRESENT

_SECRET = "server.toml"  # noqa: S105 - a file's name
_NEXT = "server.next.toml"
_PREVIOUS = "server.previous.toml"


def begin_rotation(folder: Path) -> str:
    """Make the next key, or go on with one that is there; returns its public half.

    Raises:
        ConfigError: there is no server key or no root key.
        StoreError: the disk refused.
    """
    KeyPair.load(folder / _SECRET)
    root_path = folder / "signing" / "root.toml"
    if not root_path.exists():
        raise ConfigError(
            f"{root_path}: no such file; agents believe a next server key only from the root: put"
            " the root key there, or make one with `farflow keys create FOLDER`"
        )
    root = RootKey.load(root_path)
    if not (folder / _NEXT).exists():
        write_new(folder / _NEXT, to_toml(KeyPair.generate("server", Role.SCHEDULER)), mode=0o600)
    following = KeyPair.load(folder / _NEXT)
    atomic_write(folder / FOLLOWING, to_toml(name_next(root, following.public_key)).encode())
    return following.public_key


def finish_rotation(folder: Path) -> str:
    """Make the next key the present one; returns its public half. The hubs have it from their next
    start on.

    Raises:
        ConfigError: there is no next key.
        StoreError: the disk refused.
    """
    path = folder / _NEXT
    if not path.exists():
        raise ConfigError(
            f"{path}: no such file; begin with `farflow keys rotate-server` and give agents time"
        )
    following = KeyPair.load(path)
    present = KeyPair.load(folder / _SECRET)
    if present.public_key != following.public_key:
        atomic_write(folder / _PREVIOUS, to_toml(present).encode(), mode=0o600)
        atomic_write(folder / _SECRET, to_toml(following).encode(), mode=0o600)
    atomic_write(folder / PRESENT, to_toml(following.public).encode())
    for name in (FOLLOWING, _NEXT):
        (folder / name).unlink(missing_ok=True)
    fsync_dir(folder)
    return following.public_key


def not_restarted(folder: Path) -> str:
    """What to say in the deployment's folder when the hubs turn out to have another key than the
    present one; "" where no change of it is known."""
    if (folder / _PREVIOUS).exists():
        return (
            "if the scheduler was not restarted since `farflow keys rotate-server --finish`,"
            " restart it with the new key"
        )
    return ""


def abandon_rotation(folder: Path) -> None:
    """Forget the next key. Agents that were told of it go on to believe it as well, which is
    harmless once nobody has it.

    Raises:
        ConfigError: there is no next key.
    """
    if not (folder / _NEXT).exists():
        raise ConfigError(f"{folder / _NEXT}: no such file; no change of the key is under way")
    for name in (FOLLOWING, _NEXT):
        try:
            os.unlink(folder / name)
        except FileNotFoundError:
            continue
    fsync_dir(folder)
