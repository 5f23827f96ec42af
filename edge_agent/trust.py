"""Whose manifests this agent believes, and which server key comes next.

What always holds: a signer is believed because a file in the keys folder's ``signers/`` says so or
because the root that was pinned at enrolment has certified it, and for no other reason; where no
root is pinned, nothing that the scheduler says adds to the files; certified signers are kept on the
disk, signature and all, and checked again when they are read; how many are kept is bounded.

    KEYS/signers/, KEYS/root.public.toml    what the owner of the box or enrolment has put there
    FOLDER/certified.json                   what the root has certified, as the scheduler passed on
"""

import threading
from pathlib import Path
from typing import Final

import msgspec
import structlog

from transport.certificates import RootPublic, load_root
from transport.errors import ConfigError, SizeLimitExceeded, StoreError
from transport.keys import KEY_ID_CHARACTERS, SignerKey, load_signers
from transport.messages import (
    HostedPolicies,
    Message,
    NextServerKey,
    SignerCertificate,
    Welcome,
)
from transport.runtime.files import atomic_write, read_limited
from transport.server_keys import PinnedServerKeys

MAX_CERTIFIED: Final = 1024
_MAX_BYTES: Final = 2**20

_log = structlog.get_logger()
_Certified = dict[str, SignerCertificate]


class AgentTrust:
    """``signers`` (by key id) is kept up to date in place: others hold on to it. Opening and
    ``refresh`` block; ``take`` may be called on the event loop, and ``keep`` in a thread after it.
    """

    def __init__(self, keys: Path, folder: Path) -> None:
        self._keys = keys
        self._file = folder / "certified.json"
        self._lock = threading.Lock()
        self._root: RootPublic | None = None
        self._local: dict[str, SignerKey] = {}
        self._certified: _Certified = {}
        self._unsaved = False
        self._following: NextServerKey | None = None
        self.signers: dict[str, SignerKey] = {}
        self.refresh()
        self._certified = self._read()
        self._apply()

    def refresh(self) -> None:
        """Read the files of the keys folder again."""
        try:
            root = load_root(self._keys)
            local = load_signers(self._keys / "signers")
        except ConfigError as error:
            _log.warning("signers.not_read", reason=str(error))
            return
        with self._lock:
            self._root, self._local = root, local
        self._apply()

    def take(self, message: Message) -> bool:
        """Learn what a message of the scheduler says about keys; true when ``keep`` has something
        to write down."""
        match message:
            case Welcome(policies=policies, signers=signers) if signers:
                self._believe(policies, signers)
            case HostedPolicies(policies=policies, signers=signers) if signers:
                self._believe(policies, signers)
            case NextServerKey():
                self._next_key(message)
            case _:
                pass
        return self._unsaved or self._following is not None

    def keep(self) -> None:
        """Write down what was learnt. What the disk refuses is learnt again from the next
        welcome."""
        following, self._following = self._following, None
        try:
            if self._unsaved:
                with self._lock:
                    content = msgspec.json.encode(list(self._certified.values()))
                    self._unsaved = False
                atomic_write(self._file, content)
            if following is not None:
                PinnedServerKeys(self._keys).announce(following)
        except (StoreError, ConfigError) as error:
            _log.warning("keys.not_kept", reason=str(error))

    def _believe(
        self, policies: tuple[str, ...], certificates: tuple[SignerCertificate, ...]
    ) -> None:
        """What the scheduler says of a policy replaces what it said before; of other policies
        nothing changes."""
        root = self._root
        if root is None:
            _log.warning(
                "signers.no_root",
                remedy="copy root.public.toml of the deployment to transport.keys",
            )
            return
        told = [one for one in certificates if one.policy in policies][:MAX_CERTIFIED]
        good: list[SignerCertificate] = []
        for one in told:
            if self._certified.get(_key_id(one)) == one or root.certifies(one):
                good.append(one)
            else:
                _log.warning("signers.not_certified", policy=one.policy, key=one.verify_key[:64])
        replaced = {one.policy for one in good}
        with self._lock:
            certified = {k: c for k, c in self._certified.items() if c.policy not in replaced}
            for one in good:
                certified[_key_id(one)] = one
            while len(certified) > MAX_CERTIFIED:
                del certified[next(iter(certified))]
            if certified == self._certified:
                return
            self._certified = certified
            self._unsaved = True
        self._apply()

    def _next_key(self, message: NextServerKey) -> None:
        if self._root is not None and self._root.names_next(message):
            self._following = message
        else:
            _log.warning("server_key.not_signed", key=message.public_key[:64])

    def _apply(self) -> None:
        """Local files come first: where a key id is in both, the file counts."""
        with self._lock:
            wanted = {
                key_id: SignerKey(name="certified", policy=one.policy, verify_key=one.verify_key)
                for key_id, one in self._certified.items()
            }
            wanted.update(self._local)
            # Never empty in between: other threads look signers up meanwhile.
            self.signers.update(wanted)
            for key_id in [key_id for key_id in self.signers if key_id not in wanted]:
                del self.signers[key_id]

    def _read(self) -> _Certified:
        try:
            content = read_limited(self._file, _MAX_BYTES)
            kept = msgspec.json.decode(content, type=list[SignerCertificate])
        except FileNotFoundError:
            return {}
        except (StoreError, SizeLimitExceeded, msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.warning("signers.not_read", reason=str(error))
            return {}
        root = self._root
        if root is None:
            return {}
        return {_key_id(one): one for one in kept[:MAX_CERTIFIED] if root.certifies(one)}


def _key_id(certificate: SignerCertificate) -> str:
    return certificate.verify_key[:KEY_ID_CHARACTERS]
