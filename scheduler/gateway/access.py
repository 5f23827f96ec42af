"""Tokens of the HTTP interface: who may ask, and how often.

What always holds: a secret is kept only as its SHA-256 (32 random bytes need no slow hash); what
the folder says wrongly is skipped with a warning and never lets anybody in; a token that was taken
out of the folder is refused within ``SCAN_INTERVAL_S`` of the next ``refresh``; when the folder
cannot be read for ``STALE_LOOKS`` of those in a row, everybody is (``service``).

    KEYS/http/NAME.toml        one token (mode 0600): name, role, secret_sha256
    KEYS/http-NAME.toml        the key with which a submitter's jobs are submitted

All functions that touch the folder block.
"""

import contextlib
import hashlib
import math
import os
import secrets
import shutil
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec
import structlog

from scheduler.tokens import revoke_key
from transport.errors import ConfigError, StoreError
from transport.ids import NAME_RULE, is_name
from transport.key_files import (
    check_hex,
    check_name,
    load_toml,
    make_folder,
    secret_file,
    to_toml,
    write_new,
)
from transport.keys import ensure_key
from transport.messages import Role
from transport.runtime.files import atomic_write, fsync_dir, private_dir, store_errors

LOCAL: Final = "local"
"""The operator's token that the first start makes; its secret is in ``FOLDER/gateway/``."""
LOCAL_SECRET: Final = "local-token"  # noqa: S105 - a file name
MAX_TOKENS: Final = 1000
_SUBMITTER: Final = "http-"
_BEGUN: Final = ".http-begun"
_log = structlog.get_logger()


class HttpRole(StrEnum):
    """What a token may do: look; look and give orders; submit jobs and take their results."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    SUBMITTER = "submitter"


class HttpToken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of ``http/NAME.toml``."""

    name: str
    role: HttpRole
    secret_sha256: str

    def __post_init__(self) -> None:
        check_name(self.name)
        check_hex("secret_sha256", self.secret_sha256)


def submitter_key(keys: Path, token: str) -> Path:
    """Where the key of a submitter's token is."""
    return keys / f"{_SUBMITTER}{token}.toml"


def create_token(keys: Path, name: str, role: HttpRole, out: Path | None = None) -> str:
    """Make a token in a deployment's folder of keys; returns its secret, which is kept nowhere but
    in the new file ``out`` if one is named. That is written before the token counts: of a token
    that counts the secret is never lost.

    Raises:
        ConfigError: a bad name, one that there is, or ``out`` cannot be written.
    """
    if not is_name(name) or not is_name(f"{_SUBMITTER}{name}"):
        raise ConfigError(f"token {name!r}: must be {NAME_RULE} (43 at most)")
    folder = keys / "http"
    make_folder(folder, 0o700)
    path = folder / f"{name}.toml"
    if path.exists():
        raise ConfigError(f"token {name}: exists; choose another name, or revoke it first")
    if len(token_names(keys)) >= MAX_TOKENS:
        raise ConfigError(f"{folder}: holds {MAX_TOKENS} tokens; revoke some")
    if role is HttpRole.SUBMITTER:
        ensure_key(keys, f"{_SUBMITTER}{name}", Role.SUBMITTER)
    secret = secrets.token_urlsafe(32)
    token = HttpToken(name=name, role=role, secret_sha256=_digest(secret))
    with secret_file(out, f"{secret}\n"):
        write_new(path, to_toml(token), mode=0o600)
    return secret


def revoke_token(keys: Path, name: str) -> HttpToken:
    """Refuse a token from now on, and the submitter's key that belongs to it.

    Raises:
        ConfigError: there is none of that name.
    """
    path = keys / "http" / f"{name}.toml"
    if not is_name(name) or not path.exists():
        known = ", ".join(token_names(keys)) or "none"
        raise ConfigError(f"token {name}: not in {path.parent}; tokens: {known}")
    token = load_toml(path, HttpToken, secret=True)
    path.unlink()
    fsync_dir(path.parent)
    if token.role is HttpRole.SUBMITTER:
        if (keys / "authorized" / f"{_SUBMITTER}{name}.toml").exists():
            revoke_key(keys, f"{_SUBMITTER}{name}")
        submitter_key(keys, name).unlink(missing_ok=True)
    return token


def token_names(keys: Path) -> list[str]:
    """The names of all tokens, sorted."""
    return sorted(path.stem for path in (keys / "http").glob("*.toml") if _is_token(path.name))


def all_tokens(keys: Path) -> tuple[list[HttpToken], list[str]]:
    """The tokens that count, by name, and what was skipped and why."""
    tokens: list[HttpToken] = []
    warnings: list[str] = []
    for name in token_names(keys)[:MAX_TOKENS]:
        path = keys / "http" / f"{name}.toml"
        try:
            token = load_toml(path, HttpToken, secret=True)
        except ConfigError as error:
            warnings.append(f"{error}; skipped")
            continue
        if token.name == name:
            tokens.append(token)
        else:
            warnings.append(f"{path}: name is {token.name!r}, unlike the file's; skipped")
    return tokens, warnings


def first_token(keys: Path, folder: Path) -> bool:
    """Make the token ``local`` at the first start, with its secret in ``folder``; says if it did.
    The secret is written first, and the token counts at once with the folder of tokens, whose being
    there says that there was a first start: what a crash left unfinished is begun anew.

    Whoever may read the folder of the scheduler may as well give it orders with the keys there.

    Raises:
        ConfigError, StoreError: a folder cannot be used.
    """
    tokens, begun = keys / "http", keys / _BEGUN
    if tokens.exists():
        return False
    secret = secrets.token_urlsafe(32)
    atomic_write(private_dir(folder) / LOCAL_SECRET, f"{secret}\n".encode(), mode=0o600)
    make_folder(begun, 0o700)
    token = HttpToken(name=LOCAL, role=HttpRole.OPERATOR, secret_sha256=_digest(secret))
    atomic_write(begun / f"{LOCAL}.toml", to_toml(token).encode(), mode=0o600)
    try:
        with store_errors("make", tokens):
            os.rename(begun, tokens)
    except StoreError:
        if not tokens.exists():
            raise
        shutil.rmtree(begun)  # somebody made a token of their own meanwhile
        (folder / LOCAL_SECRET).unlink(missing_ok=True)
        return False
    fsync_dir(keys)
    return True


class TokenBook:
    """Who may ask, from a folder that may change at any time."""

    SCAN_INTERVAL_S = 0.4
    STALE_LOOKS = 25
    """So many looks that fail one after the other, about ten seconds, end what was known: whose
    token was revoked meanwhile is then refused, and so is everybody else, until one succeeds."""
    SKIPPED_LOOKS = 5
    """Every so many looks the folder is read though it did not change, while anything in it is
    skipped: what is wrong may be with the machine (too many open files), or with a file's mode."""

    def __init__(self, keys: Path) -> None:
        self._folder = keys / "http"
        self._tokens: dict[str, HttpToken] = {}
        self._seen: list[tuple[str, int, int, int]] | None = None
        self._skipped: set[str] = set()
        self._looks = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def names(self) -> set[str]:
        return {token.name for token in self._tokens.values()}

    def lookup(self, secret: str) -> HttpToken | None:
        """Whose secret it is. That hashes are compared tells nothing about the secret."""
        return self._tokens.get(_digest(secret)) if secret else None

    def named(self, name: str) -> HttpToken | None:
        """The token of a name."""
        return next((token for token in self._tokens.values() if token.name == name), None)

    def valid(self, token: HttpToken) -> bool:
        """Whether a token that was looked up before still counts."""
        return self._tokens.get(token.secret_sha256) == token

    def refresh(self) -> None:
        """Look at the folder, and read it again if it changed. What is skipped is said once.

        Raises:
            StoreError: the folder cannot be read.
        """
        seen = self._fingerprint()
        self._looks += 1
        again = self._skipped and not self._looks % self.SKIPPED_LOOKS
        if seen == self._seen and not again:
            return
        try:
            tokens, warnings = all_tokens(self._folder.parent)
        except OSError as error:
            raise StoreError(f"cannot read {self._folder}: {error.strerror}") from error
        for warning in warnings:
            if warning not in self._skipped:
                _log.warning("http.token_skipped", reason=warning)
        self._skipped = set(warnings)
        self._tokens = {token.secret_sha256: token for token in tokens}
        self._seen = seen  # only now: what was not read is looked at again

    def forget(self) -> None:
        """Let nobody in before the folder was read again."""
        self._tokens, self._seen = {}, None

    def _fingerprint(self) -> list[tuple[str, int, int, int]]:
        try:
            names = [name for name in os.listdir(self._folder) if _is_token(name)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"cannot read {self._folder}: {error.strerror}") from error
        found = []
        for name in names:
            with contextlib.suppress(OSError):  # it went while we looked
                status = (self._folder / name).stat()
                found.append((name, status.st_mtime_ns, status.st_size, status.st_ino))
        return sorted(found)


class Rates:
    """How often each token or address may ask: ``per_s``, with up to two seconds' worth saved up.
    What is remembered is of ``most`` of them; those beyond it share one allowance."""

    def __init__(self, per_s: float, most: int = MAX_TOKENS) -> None:
        self._per_s = per_s
        self._most = most
        self._burst = max(1.0, 2.0 * per_s)
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, name: str, now_s: float) -> float:
        """0.0 when the request may be made, else in how many seconds it may."""
        if name not in self._left and len(self._left) >= self._most:
            self._forget(now_s)
            name = "" if len(self._left) >= self._most else name
        left, at_s = self._left.get(name, (self._burst, now_s))
        left = min(self._burst, left + (now_s - at_s) * self._per_s)
        allowed = left >= 1.0
        self._left[name] = (left - 1.0 if allowed else left, now_s)
        return 0.0 if allowed else math.ceil(10 * (1.0 - left) / self._per_s) / 10

    def keep(self, names: set[str]) -> None:
        """Forget everybody else."""
        self._left = {name: left for name, left in self._left.items() if name in names}

    def _forget(self, now_s: float) -> None:
        """Who has saved up all is as good as new."""
        self._left = {
            name: (left, at_s)
            for name, (left, at_s) in self._left.items()
            if left + (now_s - at_s) * self._per_s < self._burst
        }


def _is_token(name: str) -> bool:
    return name.endswith(".toml") and not name.startswith(".")


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
