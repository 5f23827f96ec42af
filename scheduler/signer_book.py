"""What the scheduler tells agents about keys: certified signers, and the server key to come.

What always holds: only what the root has signed is passed on; a change of the folder of keys is
seen at the next ``refresh``; what does not load is left out with a warning and changes nothing
else.
"""

from pathlib import Path
from typing import NamedTuple

import structlog

from transport.certificates import (
    NextServerFile,
    RootPublic,
    load_certificates,
    load_root,
    of_policies,
)
from transport.errors import ConfigError
from transport.key_files import load_toml
from transport.messages import NextServerKey, SignerCertificate
from transport.server_keys import FOLLOWING

_log = structlog.get_logger()


class _Read(NamedTuple):
    certificates: tuple[SignerCertificate, ...]
    following: NextServerKey | None


class SignerBook:
    """One folder of keys; ``refresh`` blocks, the rest does not."""

    def __init__(self, keys: Path) -> None:
        self._keys = keys
        self._seen: object = None
        self._read = _Read((), None)
        self.refresh()

    @property
    def certificates(self) -> tuple[SignerCertificate, ...]:
        return self._read.certificates

    @property
    def following(self) -> NextServerKey | None:
        """The server key to come, during a change of it."""
        return self._read.following

    def of(self, policies: tuple[str, ...]) -> tuple[SignerCertificate, ...]:
        """The certificates of these policies."""
        return of_policies(self._read.certificates, policies)

    def refresh(self) -> bool:
        """Look at the folder; whether what is to be told has changed."""
        seen = self._fingerprint()
        if seen == self._seen:
            return False
        self._seen = seen
        before = self._read
        try:
            root = load_root(self._keys)
        except ConfigError as error:
            _log.warning("root.not_read", reason=str(error))
            root = None
        certificates, warnings = load_certificates(self._keys / "certificates", root)
        for warning in warnings:
            _log.warning("certificates.skipped", reason=warning)
        self._read = _Read(tuple(certificates), self._following(root))
        return self._read != before

    def _following(self, root: RootPublic | None) -> NextServerKey | None:
        path = self._keys / FOLLOWING
        if not path.exists():
            return None
        try:
            message = load_toml(path, NextServerFile).message
        except ConfigError as error:
            _log.warning("server_key.not_read", reason=str(error))
            return None
        if root is None or not root.names_next(message):
            _log.warning(
                "server_key.not_signed", file=str(path), remedy="farflow keys rotate-server"
            )
            return None
        return message

    def _fingerprint(self) -> object:
        files = [self._keys / "root.public.toml", self._keys / FOLLOWING]
        files += sorted((self._keys / "certificates").glob("*.toml"))
        found = []
        for file in files:
            try:
                status = file.stat()
            except OSError:
                continue
            found.append((file.name, status.st_mtime_ns, status.st_size, status.st_ino))
        return found
