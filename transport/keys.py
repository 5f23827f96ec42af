"""Keys: who a process is, who may connect, and who signed a manifest.

What always holds: a secret is written once, with mode 0600, whole or not at all, and is not read
from a file that others can read; a public key stands for exactly one name, role and policy; what
an authorized folder says wrongly is skipped with a warning and never lets anybody in.

One folder holds a deployment's keys (``create_keys``); a machine gets only its own files.

    server.toml                 secret  the key of every hub; role scheduler
    server.public.toml          public  what everybody who connects must know
    NAME.toml                   secret  one per agent, trainer, service, relay and operator
    signing/NAME.toml           secret  Ed25519, signs the weight manifests of one policy
    authorized/NAME.toml        public  who may connect
    signers/NAME.toml           public  whose manifests are believed
    signing/root.toml           secret  Ed25519, certifies signers and the next server key
    root.public.toml            public  its other half, pinned by agents
    certificates/NAME.toml      public  what the root says of a signer (``transport.certificates``)
    relays/NAME.toml            public  what an agent must know to ask a relay

CURVE keys are 40 characters of z85 (RFC 32), Ed25519 keys 64 hexadecimal digits.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from transport.certificates import RootKey, certify, load_certificate
from transport.errors import ConfigError
from transport.key_files import (
    MADE_WITH,
    check_curve,
    check_hex,
    check_name,
    check_policy,
    files_with,
    load_toml,
    make_folder,
    to_toml,
    write_new,
)
from transport.messages import Role

KEY_ID_CHARACTERS = 16

SERVICES = ("trajectory-log", "weight-store")
"""Names of the scheduler's own processes beside it."""

GATEWAY = "gateway"
"""The operator's key with which the scheduler's HTTP interface asks it."""


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a public key stands for. ``policy`` is set for trainers only."""

    name: str
    role: Role
    policy: str | None = None


class PublicKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of ``authorized/NAME.toml`` and ``server.public.toml``."""

    name: str
    role: Role
    public_key: str
    policy: str | None = None

    def __post_init__(self) -> None:
        _check_owner(self.name, self.role, self.policy)
        check_curve("public_key", self.public_key)


class KeyPair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A CURVE key pair and whose it is; content of ``NAME.toml``."""

    name: str
    role: Role
    public_key: str
    secret_key: str
    policy: str | None = None

    def __post_init__(self) -> None:
        _check_owner(self.name, self.role, self.policy)
        check_curve("secret_key", self.secret_key)
        if zmq.curve_public(self.secret_key.encode("ascii")).decode() != self.public_key:
            raise ValueError("public_key does not belong to secret_key")

    def __repr__(self) -> str:
        return f"KeyPair(name={self.name!r}, role={self.role.value!r}, {self.public_key!r})"

    @classmethod
    def generate(cls, name: str, role: Role, policy: str | None = None) -> "KeyPair":
        """A new pair from libsodium's random bytes."""
        public_key, secret_key = zmq.curve_keypair()
        return cls(
            name=name,
            role=role,
            public_key=public_key.decode(),
            secret_key=secret_key.decode(),
            policy=policy,
        )

    @classmethod
    def load(cls, path: Path, made_with: str = MADE_WITH) -> "KeyPair":
        """Raises ``ConfigError`` naming the file and the remedy, the command ``made_with``."""
        return load_toml(path, cls, secret=True, made_with=made_with)

    def save(self, path: Path) -> None:
        """Write a new file with mode 0600; never replaces one."""
        write_new(path, to_toml(self), mode=0o600)

    @property
    def public(self) -> PublicKey:
        return PublicKey(
            name=self.name, role=self.role, public_key=self.public_key, policy=self.policy
        )


class SignerKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The public half of a signing key; content of ``signers/NAME.toml``."""

    name: str
    policy: str
    verify_key: str

    def __post_init__(self) -> None:
        check_name(self.name)
        check_policy(self.policy)
        check_hex("verify_key", self.verify_key)

    @property
    def key_id(self) -> str:
        return self.verify_key[:KEY_ID_CHARACTERS]

    def verify(self, data: bytes, signature: bytes) -> bool:
        """Whether the holder of the signing key signed exactly ``data``."""
        try:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.verify_key))
            key.verify(signature, data)
        except (InvalidSignature, ValueError):
            return False
        return True


class SigningKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An Ed25519 key that signs the manifests of ``policy``; content of ``signing/NAME.toml``."""

    name: str
    policy: str
    verify_key: str
    secret_key: str

    def __post_init__(self) -> None:
        check_name(self.name)
        check_policy(self.policy)
        check_hex("secret_key", self.secret_key)
        if _verify_key(self._private()) != self.verify_key:
            raise ValueError("verify_key does not belong to secret_key")

    def __repr__(self) -> str:
        return f"SigningKey(name={self.name!r}, policy={self.policy!r}, {self.verify_key!r})"

    @classmethod
    def generate(cls, name: str, policy: str) -> "SigningKey":
        private = Ed25519PrivateKey.generate()
        return cls(
            name=name,
            policy=policy,
            verify_key=_verify_key(private),
            secret_key=private.private_bytes_raw().hex(),
        )

    @classmethod
    def load(cls, path: Path, made_with: str = MADE_WITH) -> "SigningKey":
        """As ``KeyPair.load``."""
        return load_toml(path, cls, secret=True, made_with=made_with)

    def save(self, path: Path) -> None:
        write_new(path, to_toml(self), mode=0o600)

    def sign(self, data: bytes) -> bytes:
        """64 bytes, the same for the same data (RFC 8032)."""
        return self._private().sign(data)

    @property
    def key_id(self) -> str:
        return self.public.key_id

    @property
    def public(self) -> SignerKey:
        return SignerKey(name=self.name, policy=self.policy, verify_key=self.verify_key)

    def _private(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(self.secret_key))


class DeploymentKeys(NamedTuple):
    """Every key of a deployment, by name; ``trainers`` and ``signers`` by policy id."""

    server: KeyPair
    services: dict[str, KeyPair]
    operators: dict[str, KeyPair]
    viewers: dict[str, KeyPair]
    agents: dict[str, KeyPair]
    trainers: dict[str, KeyPair]
    signers: dict[str, SigningKey]
    relays: dict[str, KeyPair]
    submitters: dict[str, KeyPair]
    root: RootKey | None


def create_keys(
    folder: Path,
    *,
    agents: Iterable[str] = (),
    trainers: Iterable[str] = (),
    operators: Iterable[str] = ("operator",),
    viewers: Iterable[str] = (),
    relays: Iterable[str] = (),
    submitters: Iterable[str] = (),
) -> DeploymentKeys:
    """Make what is missing of a deployment's keys in ``folder`` and return the named ones.

    Keys that are there are kept, so calling again adds agents or trainers. ``trainers`` are policy
    ids; each gets a key ``trainer-RUN-POLICY``, a signing key of the same name and a certificate
    for it.

    Raises:
        ConfigError: a bad name, a file that does not load, or one of another role or policy.
    """
    make_folder(folder, 0o700)
    for public_folder in ("authorized", "signers", "relays", "certificates"):
        make_folder(folder / public_folder, 0o755)
    make_folder(folder / "signing", 0o700)
    server = ensure_key(folder, "server", Role.SCHEDULER, public_path=folder / "server.public.toml")
    root = _ensure_root(folder)
    trainer_names = {policy: trainer_name(policy) for policy in trainers}
    return DeploymentKeys(
        server=server,
        services={name: ensure_key(folder, name, Role.SERVICE) for name in SERVICES},
        operators={name: ensure_key(folder, name, Role.OPERATOR) for name in (*operators, GATEWAY)},
        viewers={name: ensure_key(folder, name, Role.VIEWER) for name in viewers},
        agents={name: ensure_key(folder, name, Role.AGENT) for name in agents},
        trainers={
            policy: ensure_key(folder, name, Role.TRAINER, policy)
            for policy, name in trainer_names.items()
        },
        signers={
            policy: _ensure_signer(folder, name, policy, root)
            for policy, name in trainer_names.items()
        },
        relays={name: _ensure_relay(folder, name) for name in relays},
        submitters={name: ensure_key(folder, name, Role.SUBMITTER) for name in submitters},
        root=root,
    )


def trainer_name(policy: str) -> str:
    """The key name of a policy's trainer."""
    return "trainer-" + policy.replace("/", "-")


def load_server_key(folder: Path) -> str:
    """The public key of every hub of the deployment whose keys are in ``folder``.

    Raises:
        ConfigError: there is none.
    """
    return load_toml(folder / "server.public.toml", PublicKey).public_key


def load_relay_key(folder: Path, name: str) -> str:
    """The public key of a relay of the deployment whose keys are in ``folder``.

    Raises:
        ConfigError: there is none, or it is not a relay's.
    """
    path = folder / "relays" / f"{name}.toml"
    public = load_toml(path, PublicKey)
    if public.role is not Role.RELAY:
        owner = f"{public.role.value} {public.name!r}"
        raise ConfigError(f"{path}: is the key of {owner}, not of a relay")
    return public.public_key


def load_signers(folder: Path) -> dict[str, SignerKey]:
    """The believed signers by ``key_id``.

    Raises:
        ConfigError: a file does not load, or two have the same ``key_id``.
    """
    signers: dict[str, SignerKey] = {}
    for path in sorted(folder.glob("*.toml")):
        signer = load_toml(path, SignerKey)
        if signer.key_id in signers:
            raise ConfigError(f"{path}: the key of {signers[signer.key_id].name} again; remove one")
        signers[signer.key_id] = signer
    return signers


def ensure_key(
    folder: Path, name: str, role: Role, policy: str | None = None, public_path: Path | None = None
) -> KeyPair:
    """The key of that name, made and let in where there is none; raises as ``create_keys``, and
    ConfigError for one that was revoked."""
    path = folder / f"{name}.toml"
    if path.exists():
        pair = KeyPair.load(path)
        if any(files_with(folder / "revoked", pair.public_key)):
            raise ConfigError(
                f"{path}: this key was revoked and does not come back; move the file away to make a"
                f" new key for {name!r}"
            )
        if (pair.name, pair.role, pair.policy) != (name, role, policy):
            raise ConfigError(
                f"{path} is the key of {pair.role.value} {pair.name!r}, not of {role.value} "
                f"{name!r}; choose another name or move the file away"
            )
    else:
        try:
            pair = KeyPair.generate(name, role, policy)
        except ValueError as error:
            raise ConfigError(f"no key for {role.value} {name!r}: {error}") from error
        pair.save(path)
    public_path = public_path or folder / "authorized" / f"{name}.toml"
    if not public_path.exists():
        write_new(public_path, to_toml(pair.public), mode=0o644)
    return pair


def _ensure_relay(folder: Path, name: str) -> KeyPair:
    pair = ensure_key(folder, name, Role.RELAY)
    path = folder / "relays" / f"{name}.toml"
    if not path.exists():
        write_new(path, to_toml(pair.public), mode=0o644)
    return pair


def _ensure_root(folder: Path) -> RootKey | None:
    """None where the root key is kept elsewhere: it must not be replaced by another one."""
    path, public_path = folder / "signing" / "root.toml", folder / "root.public.toml"
    if path.exists():
        root = RootKey.load(path)
    elif public_path.exists():
        return None
    else:
        root = RootKey.generate()
        root.save(path)
    if not public_path.exists():
        write_new(public_path, to_toml(root.public), mode=0o644)
    return root


def _ensure_signer(folder: Path, name: str, policy: str, root: RootKey | None) -> SigningKey:
    path = folder / "signing" / f"{name}.toml"
    if path.exists():
        key = SigningKey.load(path)
        if (key.name, key.policy) != (name, policy):
            raise ConfigError(f"{path} signs for {key.policy!r}, not for {policy!r}")
    else:
        key = SigningKey.generate(name, policy)
        key.save(path)
    public_path = folder / "signers" / f"{name}.toml"
    if not public_path.exists():
        write_new(public_path, to_toml(key.public), mode=0o644)
    certificate_path = folder / "certificates" / f"{name}.toml"
    if root is None:
        if certificate_path.exists():
            return key
        raise ConfigError(
            f"{folder / 'signing' / 'root.toml'}: no such file, and without the root key agents do"
            f" not believe the signer of {policy}; put the root key there for this command"
        )
    certificate = certify(root, policy, key.verify_key)
    if not certificate_path.exists():
        write_new(certificate_path, to_toml(certificate), mode=0o644)
    elif load_certificate(certificate_path) != certificate:
        raise ConfigError(
            f"{certificate_path}: certifies another key, or is another root's; move it away"
        )
    return key


def _check_owner(name: str, role: Role, policy: str | None) -> None:
    check_name(name)
    if (role is Role.TRAINER) != (policy is not None):
        raise ValueError("policy is set for the role trainer and for no other")
    if policy is not None:
        check_policy(policy)


def _verify_key(private: Ed25519PrivateKey) -> str:
    return private.public_key().public_bytes_raw().hex()
