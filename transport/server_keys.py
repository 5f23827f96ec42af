"""Which server keys a peer believes while the server's key is changed.

What always holds: only keys from this machine's own folder are tried, the present one first, then
the next one that the root has signed; the files are read again at every failed handshake, so that a
change of the folder needs no restart; once a hub has proved that it holds the next key, that one
becomes the present one, also on the disk where that is possible.

    server.public.toml          the present key
    server.next.public.toml     the next one, during a change (``transport.certificates``)
"""

import asyncio
import threading
from pathlib import Path

import structlog

from transport.certificates import NextServerFile
from transport.errors import ConfigError, StoreError
from transport.key_files import load_toml, to_toml
from transport.keys import PublicKey, load_server_key
from transport.messages import NextServerKey, Role
from transport.runtime.files import atomic_write

PRESENT = "server.public.toml"
FOLLOWING = "server.next.public.toml"

_log = structlog.get_logger()


class PinnedServerKeys:
    """``transport.links.ServerKeys`` of one folder of keys."""

    def __init__(self, folder: Path) -> None:
        """Raises ``ConfigError`` when there is no server key."""
        self._folder = folder
        self._lock = threading.Lock()
        self._keys: tuple[str, ...] = (load_server_key(folder),)
        self.candidates()

    @property
    def present(self) -> str:
        return self._keys[0]

    def candidates(self) -> tuple[str, ...]:
        """What to try, in this order. What does not load (any more) is left as it was."""
        try:
            keys = [load_server_key(self._folder)]
            if (self._folder / FOLLOWING).exists():
                following = load_toml(self._folder / FOLLOWING, NextServerFile).public_key
                if following not in keys:
                    keys.append(following)
        except ConfigError as error:
            _log.warning("server_key.not_read", reason=str(error))
        else:
            self._keys = tuple(keys)
        return self._keys

    def used(self, key: str) -> None:
        """A hub has proved that it holds ``key``; called on the event loop."""
        if key != self._keys[0] and key in self._keys:
            asyncio.get_running_loop().run_in_executor(None, self._promote, key)

    def announce(self, following: NextServerKey) -> bool:
        """Keep the next key, whose signature the caller has checked; false if it is known. Blocks.

        Raises:
            StoreError: the disk refused.
        """
        with self._lock:
            if following.public_key in self.candidates():
                return False
            content = NextServerFile(
                public_key=following.public_key, signature=following.signature.hex()
            )
            atomic_write(self._folder / FOLLOWING, to_toml(content).encode())
            self.candidates()
        _log.info("server_key.next", key=following.public_key)
        return True

    def _promote(self, key: str) -> None:
        with self._lock:
            if key not in self.candidates()[1:]:
                return
            present = PublicKey(name="server", role=Role.SCHEDULER, public_key=key)
            try:
                atomic_write(self._folder / PRESENT, to_toml(present).encode())
                (self._folder / FOLLOWING).unlink(missing_ok=True)
            except (StoreError, OSError) as error:
                # Both stay believed; the next start tries the old one once and then this one.
                _log.warning("server_key.not_kept", reason=str(error))
                return
            self.candidates()
        _log.info("server_key.changed", key=key)
