"""Enrolment tokens: who may let a new key in, how often and until when.

What always holds: a secret is kept only as its SHA-256; a use is on the disk before anybody hears
of it; a token is used at most as often as it says, whatever happens in between; the same key asking
again with the same token gets the same answer and uses nothing up; a key that was revoked does not
come back by its token; no file of ``authorized/`` is ever replaced.

The secret is 32 random bytes, so a slow hash (scrypt) would protect nothing that SHA-256 does not,
and every stranger could make the scheduler compute one.

    KEYS/tokens/ID.json     one token and its uses (mode 0600)
    KEYS/authorized/        gets NAME.toml of each enrolled key
    KEYS/revoked/           public keys that were let in once and are not to come back

All functions block; the folder is locked against other processes while one of them writes.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from transport.errors import ConfigError, StoreError
from transport.ids import is_name
from transport.key_files import files_with, load_toml, make_folder, to_toml, write_new
from transport.keys import GATEWAY, SERVICES, PublicKey
from transport.messages import Role
from transport.runtime.files import FolderLock, atomic_write, fsync_dir, lock_folder, read_limited

MAX_USES: Final = 10_000
SECRET_BYTES: Final = 32
LOCK_S: Final = 5.0
REPEAT_S: Final = 60.0
"""How long a used-up token is answered on: as long as an agent's command tries."""
_ID_BYTES: Final = 8
_MAX_FILE_BYTES: Final = 4 * 2**20
_LOCK_AGAIN_S: Final = 0.02
_RESERVED: Final = frozenset({"server", "root", GATEWAY, *SERVICES})

Code = str


class Use(msgspec.Struct, kw_only=True):
    """One key that the token let in. ``done``: its file in ``authorized/`` was written; that it is
    gone then means that somebody took it out."""

    name: str
    public_key: str
    at_s: float
    done: bool = False


class Token(msgspec.Struct, kw_only=True):
    """Content of ``tokens/ID.json``; times are wall clock."""

    id: str
    role: Role
    secret_sha256: str
    created_s: float
    expires_s: float
    max_uses: Annotated[int, Meta(ge=1, le=MAX_USES)]
    name_prefix: str = ""
    revoked: bool = False
    next_number: int = 1
    uses: list[Use] = []

    def state(self, wall_s: float) -> str:
        """``valid``, ``used up``, ``expired`` or ``revoked``."""
        if self.revoked:
            return "revoked"
        if wall_s >= self.expires_s:
            return "expired"
        return "used up" if len(self.uses) >= self.max_uses else "valid"


class Enrolled(NamedTuple):
    """The key is let in. ``fresh`` is false when it was before."""

    name: str
    role: Role
    fresh: bool


class Refused(NamedTuple):
    """The key stays out; ``code`` is stable, ``message`` says what to do."""

    code: Code
    message: str


class TokenStore:
    """The tokens of one folder of keys."""

    def __init__(self, keys: Path) -> None:
        self._keys = keys
        self._folder = keys / "tokens"
        self._authorized = keys / "authorized"
        self._revoked = keys / "revoked"
        self._seen: list[tuple[str, int]] | None = None
        self._open_until_s = 0.0

    # ---- for operators -------------------------------------------------------------------------

    def create(
        self,
        *,
        role: Role,
        max_uses: int,
        lifetime_s: float,
        wall_s: float,
        name_prefix: str = "",
        told: Callable[[Token, str], contextlib.AbstractContextManager[None]] | None = None,
    ) -> tuple[Token, str]:
        """A new token and its secret, which is kept nowhere. It counts within what ``told`` gives.

        Raises:
            ConfigError: the prefix is no beginning of a name, or a number is out of range.
            StoreError: the disk refused.
        """
        if name_prefix and not is_name(f"{name_prefix}{MAX_USES}"):
            raise ConfigError(
                f"name prefix {name_prefix!r}: {name_prefix}1 would be no name; use a-z, 0-9, '-',"
                " '_' and '.', beginning with a letter or digit, at most 43 characters"
            )
        if not 1 <= max_uses <= MAX_USES:
            raise ConfigError(f"uses {max_uses}: a token has 1 to {MAX_USES}")
        if max_uses > 1 and not name_prefix:
            raise ConfigError("uses above 1 need a name prefix, from which names are made")
        if not lifetime_s > 0:
            raise ConfigError(f"lifetime {lifetime_s:g} s: must be positive")
        secret = secrets.token_hex(SECRET_BYTES)
        token = Token(
            id=secrets.token_hex(_ID_BYTES),
            role=role,
            secret_sha256=_digest(secret),
            created_s=wall_s,
            expires_s=wall_s + lifetime_s,
            max_uses=max_uses,
            name_prefix=name_prefix,
        )
        with told(token, secret) if told else contextlib.nullcontext(), self._locked():
            self._write(token)
        return token, secret

    def all(self) -> list[Token]:
        """By time of creation; what does not load is left out."""
        found = []
        for path in sorted(self._folder.glob("*.json")):
            with contextlib.suppress(StoreError, FileNotFoundError):
                token = self._read(path.stem)
                if token is not None:
                    found.append(token)
        return sorted(found, key=lambda token: (token.created_s, token.id))

    def any_open(self, wall_s: float) -> bool:
        """Whether some token still lets a key in, or did so less than ``REPEAT_S`` ago, so that an
        answer that was lost on its way can be asked for again."""
        seen = self._fingerprint()
        if seen != self._seen:
            self._open_until_s = max((_open_until_s(one) for one in self.all()), default=0.0)
            self._seen = seen
        return wall_s < self._open_until_s

    def revoke(self, token_id: str) -> None:
        """Nobody enrols with it from now on; who has stays in.

        Raises:
            ConfigError: no such token.
            StoreError: the disk refused.
        """
        with self._locked():
            token = self._read(token_id)
            if token is None:
                raise ConfigError(f"token {token_id}: none of that id; see `farflow token ls`")
            token.revoked = True
            self._write(token)

    # ---- for the scheduler ---------------------------------------------------------------------

    def redeem(
        self, token_id: str, secret: str, public_key: str, name: str, wall_s: float
    ) -> Enrolled | Refused:
        """Let ``public_key`` in if the token allows it. ``name`` is a wish, or "".

        Raises:
            StoreError: the disk refused; nothing was promised.
        """
        with self._locked():
            token = self._read(token_id)
            expected = token.secret_sha256 if token is not None else _digest("")
            # The same work and the same answer whether the id or the secret is wrong.
            right = hmac.compare_digest(_digest(secret), expected)
            if token is None or not right:
                return Refused(
                    "enrol.token_invalid",
                    "no such token: copy the token file again, or make one with `farflow token"
                    " create`",
                )
            state = token.state(wall_s)
            if state in ("revoked", "expired"):
                return Refused(
                    f"enrol.token_{state}",
                    f"token {token.id} is {state}: make a new one with `farflow token create`",
                )
            return self._let_in(token, public_key, name, wall_s)

    def _let_in(
        self, token: Token, public_key: str, wish: str, wall_s: float
    ) -> Enrolled | Refused:
        if self._is_revoked(public_key):
            return _REVOKED
        known = next((use for use in token.uses if use.public_key == public_key), None)
        if known is not None:
            return self._again(token, known)
        owner = self._owner(public_key)
        if owner is not None:
            if owner.role is token.role and wish in ("", owner.name):
                return Enrolled(owner.name, owner.role, fresh=False)
            return Refused(
                "enrol.key_known",
                f"this key is that of {owner.role.value} {owner.name!r}: make a new key for"
                " another name",
            )
        if token.state(wall_s) == "used up":
            return Refused(
                "enrol.token_used_up",
                f"token {token.id} was used {len(token.uses)} times: make a new one with `farflow"
                " token create`",
            )
        chosen = self._name(token, wish)
        if isinstance(chosen, Refused):
            return chosen
        use = Use(name=chosen, public_key=public_key, at_s=wall_s)
        token.uses.append(use)
        self._write(token)
        return self._again(token, use, fresh=True)

    def _again(self, token: Token, use: Use, *, fresh: bool = False) -> Enrolled | Refused:
        """What a use that is on the disk leads to: at once, or after a crash, or once more."""
        path = self._authorized / f"{use.name}.toml"
        public = PublicKey(name=use.name, role=token.role, public_key=use.public_key)
        if not use.done:
            if not path.exists():
                try:
                    write_new(path, to_toml(public), mode=0o644)
                except ConfigError as error:
                    raise StoreError(str(error)) from error
                fsync_dir(self._authorized)
            use.done = True
            self._write(token)
        try:
            if load_toml(path, PublicKey) == public:
                return Enrolled(use.name, token.role, fresh)
        except ConfigError:
            pass
        return _REVOKED

    def _name(self, token: Token, wish: str) -> str | Refused:
        if not token.name_prefix:
            if not is_name(wish) or wish in _RESERVED:
                return Refused(
                    "enrol.name_invalid",
                    f"name {wish[:64]!r} cannot be used: name the agent with --name, in a-z, 0-9,"
                    " '-', '_' and '.'",
                )
            if self._taken(wish):
                return Refused(
                    "enrol.name_taken",
                    f"another key is called {wish!r}: choose another name with --name, or revoke"
                    f" that key with `farflow keys revoke {wish}`",
                )
            return wish
        if wish.startswith(token.name_prefix) and is_name(wish) and not self._taken(wish):
            return wish
        while True:
            name = f"{token.name_prefix}{token.next_number}"
            token.next_number += 1
            # Counting on past revoked names keeps the boxes of one image apart in logs.
            revoked = (self._revoked / f"{name}.toml").exists()
            if not (revoked or self._taken(name)) and name not in _RESERVED:
                return name

    def _taken(self, name: str) -> bool:
        """A revoked key's name is free for another key."""
        return (self._authorized / f"{name}.toml").exists()

    def _is_revoked(self, public_key: str) -> bool:
        return _owner_in(self._revoked, public_key) is not None

    def _owner(self, public_key: str) -> PublicKey | None:
        return _owner_in(self._authorized, public_key)

    # ---- files ---------------------------------------------------------------------------------

    def _fingerprint(self) -> list[tuple[str, int]]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            return sorted(
                (entry.name, entry.stat().st_mtime_ns)
                for entry in entries
                if entry.name.endswith(".json")
            )
        return []

    def _read(self, token_id: str) -> Token | None:
        """Raises StoreError for a file that does not load."""
        if len(token_id) != 2 * _ID_BYTES or not set(token_id) <= set("0123456789abcdef"):
            return None
        path = self._folder / f"{token_id}.json"
        try:
            token = msgspec.json.decode(read_limited(path, _MAX_FILE_BYTES), type=Token)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise StoreError(f"{path}: {error}; remove it and make a new token") from error
        return token

    def _write(self, token: Token) -> None:
        atomic_write(
            self._folder / f"{token.id}.json", msgspec.json.encode(token) + b"\n", mode=0o600
        )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Raises StoreError when another process keeps the folder for longer than ``LOCK_S``."""
        make_folder(self._folder, 0o700)
        tries = round(LOCK_S / _LOCK_AGAIN_S)
        while True:
            try:
                lock: FolderLock = lock_folder(self._folder)
                break
            except StoreError:
                tries -= 1
                if tries <= 0:
                    raise
                time.sleep(_LOCK_AGAIN_S)
        with lock:
            yield


def revoke_key(keys: Path, name: str) -> PublicKey:
    """Take a key out of ``authorized/`` and remember it as revoked: its connections close within
    about a second and no token brings it back.

    Raises:
        ConfigError: no such key, or it is one of the scheduler's own services.
    """
    path = keys / "authorized" / f"{name}.toml"
    if name in SERVICES:
        raise ConfigError(f"{name}: is a service of the scheduler, which cannot run without it")
    if not is_name(name) or not path.exists():
        raise ConfigError(f"{name}: no such key in {path.parent}; see `farflow keys ls`")
    public = load_toml(path, PublicKey)
    make_folder(keys / "revoked", 0o755)
    kept = keys / "revoked" / f"{name}.toml"
    number = 1
    while kept.exists():  # the name was given to another key, which is revoked now
        number += 1
        kept = keys / "revoked" / f"{name}.{number}.toml"
    try:
        os.rename(path, kept)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; check who owns the folder") from error
    fsync_dir(kept.parent)
    fsync_dir(path.parent)
    return public


def _owner_in(folder: Path, public_key: str) -> PublicKey | None:
    """Whose key it is."""
    for path in files_with(folder, public_key):
        with contextlib.suppress(ConfigError):
            return load_toml(path, PublicKey)
    return None


def _open_until_s(token: Token) -> float:
    if token.revoked:
        return 0.0
    if len(token.uses) < token.max_uses:
        return token.expires_s
    return min(token.expires_s, max(use.at_s for use in token.uses) + REPEAT_S)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


_REVOKED = Refused(
    "enrol.key_revoked",
    "this key was revoked and stays out: make a new token (`farflow token create`) and a new key in"
    " the same folder with `farflow agent enrol --new-key`; it may have the same name",
)
