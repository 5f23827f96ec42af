"""Who may connect, from a folder of public keys.

What always holds: what the folder says wrongly is skipped with a warning and never lets anybody
in; a key that two files claim is refused; a change is seen within ``SCAN_INTERVAL_S`` of the next
``refresh``, or, where the folder itself cannot be read, as soon as it can.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from transport.errors import ConfigError
from transport.key_files import load_toml
from transport.keys import Peer, PublicKey

_Stamp = tuple[str, int, int, int]
"""A file's name, when it was changed last, its size and inode."""


class Refresh(NamedTuple):
    """What changed in the authorized folder: public keys, and what was skipped and why. ``gone``
    are those whom the removed keys stood for."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    gone: tuple[Peer, ...] = ()


class AllowList:
    """Who may connect, from a folder of public keys that may change at any time.

    ``lookup`` is a hub's ``authorise``. A key whose owner, role or policy changes counts as removed
    and added, so that its connections are closed and checked anew.
    """

    SCAN_INTERVAL_S = 0.4

    def __init__(self, folder: Path, now: float) -> None:
        """Raises ``ConfigError`` when there is no such folder."""
        if not folder.is_dir():
            raise ConfigError(
                f"{folder}: no such folder; give the deployment's file with --config FILE, or make"
                " keys with `farflow keys create FOLDER`"
            )
        self._folder = folder
        self._peers: dict[str, Peer] = {}
        self._seen: tuple[_Stamp, ...] | None = None
        self._loaded: dict[_Stamp, PublicKey] = {}
        self._next_scan = now
        self.warnings: tuple[str, ...] = ()
        self.refresh(now)

    def __len__(self) -> int:
        return len(self._peers)

    def lookup(self, public_key: str) -> Peer | None:
        return self._peers.get(public_key)

    def refresh(self, now: float) -> Refresh:
        """Look at the folder, at most once per ``SCAN_INTERVAL_S``, and reread it if it changed.

        Disconnect every key in ``removed`` from each hub: being off the list keeps a peer from
        connecting again, it does not end the connection that it has.
        """
        if now < self._next_scan:
            return Refresh()
        self._next_scan = now + self.SCAN_INTERVAL_S
        try:
            seen = self._fingerprint()
            if seen == self._seen:
                return Refresh()
            peers, warnings = self._read(seen)
        except OSError as error:
            return self._unreadable(error)
        self._seen, self.warnings = seen, warnings
        before, self._peers = self._peers, peers
        removed = tuple(sorted(key for key in before if peers.get(key) != before[key]))
        return Refresh(
            added=tuple(sorted(key for key in peers if before.get(key) != peers[key])),
            removed=removed,
            warnings=self.warnings,
            gone=tuple(before[key] for key in removed),
        )

    def _unreadable(self, error: OSError) -> Refresh:
        """Says so once. An error that ended the watching would switch revocation off for good."""
        warning = (
            f"{self._folder}: {error.strerror or error}; who was let in stays, and whom a change"
            " keeps out is let in, until it can be read again"
        )
        known = self._seen is None and self.warnings == (warning,)
        self._seen, self.warnings = None, (warning,)
        return Refresh() if known else Refresh(warnings=self.warnings)

    def _fingerprint(self) -> tuple[_Stamp, ...]:
        found: list[_Stamp] = []
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if not entry.name.endswith(".toml"):
                        continue
                    try:
                        status = entry.stat()
                    except OSError:
                        # Gone meanwhile, or a link to nothing: reading it gives the warning.
                        found.append((entry.name, 0, 0, 0))
                        continue
                    found.append((entry.name, status.st_mtime_ns, status.st_size, status.st_ino))
        except FileNotFoundError:
            return ()
        return tuple(sorted(found))

    def _read(self, seen: Iterable[_Stamp]) -> tuple[dict[str, Peer], tuple[str, ...]]:
        """Of what loaded before only files that changed since: a fleet has thousands, and one more
        must not cost the reading of all."""
        before, self._loaded = self._loaded, {}
        public: list[PublicKey] = []
        warnings: list[str] = []
        for stamp in seen:
            found = before.get(stamp) or _public_key(self._folder / stamp[0])
            if isinstance(found, str):
                warnings.append(found)
                continue
            self._loaded[stamp] = found
            public.append(found)
        entries: dict[str, list[PublicKey]] = {}
        for one in public:
            entries.setdefault(one.public_key, []).append(one)
        peers = {}
        for key, owners in entries.items():
            if len(owners) > 1:
                names = ", ".join(f"{owner.name}.toml" for owner in owners)
                warnings.append(
                    f"{self._folder}: {names} hold the same public key; all refused, keep one"
                )
                continue
            owner = owners[0]
            peers[key] = Peer(name=owner.name, role=owner.role, policy=owner.policy)
        return peers, tuple(warnings)


def read_authorized(
    folder: Path, *, any_file_name: bool = False
) -> tuple[list[PublicKey], list[str]]:
    """The public keys of a folder by file name, and what was skipped and why. In ``revoked/`` one
    name may have had several keys, in files of ``any_file_name``."""
    read = [_public_key(path, any_file_name) for path in sorted(folder.glob("*.toml"))]
    return (
        [one for one in read if not isinstance(one, str)],
        [one for one in read if isinstance(one, str)],
    )


def _public_key(path: Path, any_file_name: bool = False) -> PublicKey | str:
    """A file's key, or why it is skipped."""
    try:
        public = load_toml(path, PublicKey)
    except ConfigError as error:
        return f"{error}; skipped"
    if public.name != path.stem and not any_file_name:
        return f"{path}: name is {public.name!r}, the file must be {public.name}.toml; skipped"
    return public
