"""What the deployment's root key says: who signs a policy's manifests, which server key comes next.

What always holds: a signature is over bytes that begin with what it is for, so that none is ever
taken for one of another purpose (a manifest's begin with a tag of their own); every part of those
bytes has its length before it, so that no two different statements have the same bytes; a signature
is Ed25519 (RFC 8032), the same for the same statement.

    statement = purpose, 0, then per part: length (u32, little-endian), UTF-8 bytes

Agents pin the root's public half at enrolment. They believe a signer that is in their own folder
``signers/`` or that the root has certified, and no other.
"""

import struct
from collections.abc import Iterable
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from transport.errors import ConfigError
from transport.key_files import check_curve, check_hex, check_policy, load_toml, to_toml, write_new
from transport.messages import NextServerKey, SignerCertificate

SIGNATURE_BYTES = 64

_SIGNER = b"farflow signer certificate v1"
_SERVER = b"farflow next server key v1"
_LENGTH = struct.Struct("<I")


class RootPublic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The public half of the root key; content of ``root.public.toml``."""

    verify_key: str

    def __post_init__(self) -> None:
        check_hex("verify_key", self.verify_key)

    def certifies(self, certificate: SignerCertificate) -> bool:
        """Whether the root has said so, and the certificate is well-formed."""
        try:
            check_policy(certificate.policy)
            check_hex("verify_key", certificate.verify_key)
        except ValueError:
            return False
        return self._verify(
            _statement(_SIGNER, certificate.policy, certificate.verify_key), certificate.signature
        )

    def names_next(self, following: NextServerKey) -> bool:
        """Whether the root has said that the hubs will have this key."""
        try:
            check_curve("public_key", following.public_key)
        except ValueError:
            return False
        return self._verify(_statement(_SERVER, following.public_key), following.signature)

    def _verify(self, data: bytes, signature: bytes) -> bool:
        try:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.verify_key))
            key.verify(signature, data)
        except (InvalidSignature, ValueError):
            return False
        return True


class RootKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The deployment's root key; content of ``signing/root.toml``. No daemon needs it: it may be
    kept elsewhere between uses of ``farflow keys``."""

    verify_key: str
    secret_key: str

    def __post_init__(self) -> None:
        check_hex("secret_key", self.secret_key)
        if self._private().public_key().public_bytes_raw().hex() != self.verify_key:
            raise ValueError("verify_key does not belong to secret_key")

    def __repr__(self) -> str:
        return f"RootKey({self.verify_key!r})"

    @classmethod
    def generate(cls) -> "RootKey":
        private = Ed25519PrivateKey.generate()
        return cls(
            verify_key=private.public_key().public_bytes_raw().hex(),
            secret_key=private.private_bytes_raw().hex(),
        )

    @classmethod
    def load(cls, path: Path) -> "RootKey":
        """Raises ``ConfigError`` naming the file and the remedy."""
        return load_toml(path, cls, secret=True)

    def save(self, path: Path) -> None:
        """Write a new file with mode 0600; never replaces one."""
        write_new(path, to_toml(self), mode=0o600)

    @property
    def public(self) -> RootPublic:
        return RootPublic(verify_key=self.verify_key)

    def sign(self, data: bytes) -> bytes:
        return self._private().sign(data)

    def _private(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(self.secret_key))


class CertificateFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of ``certificates/NAME.toml``; the signature in hexadecimal."""

    policy: str
    verify_key: str
    signature: str

    def __post_init__(self) -> None:
        check_policy(self.policy)
        check_hex("verify_key", self.verify_key)
        check_hex("signature", self.signature, SIGNATURE_BYTES)

    @property
    def certificate(self) -> SignerCertificate:
        return SignerCertificate(
            policy=self.policy,
            verify_key=self.verify_key,
            signature=bytes.fromhex(self.signature),
        )


class NextServerFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of ``server.next.public.toml``; the signature in hexadecimal."""

    public_key: str
    signature: str

    def __post_init__(self) -> None:
        check_curve("public_key", self.public_key)
        check_hex("signature", self.signature, SIGNATURE_BYTES)

    @property
    def message(self) -> NextServerKey:
        return NextServerKey(public_key=self.public_key, signature=bytes.fromhex(self.signature))


def certify(root: RootKey, policy: str, verify_key: str) -> CertificateFile:
    """The root's word that ``verify_key`` signs the manifests of ``policy``."""
    signature = root.sign(_statement(_SIGNER, policy, verify_key))
    return CertificateFile(policy=policy, verify_key=verify_key, signature=signature.hex())


def name_next(root: RootKey, public_key: str) -> NextServerFile:
    """The root's word that the hubs will have ``public_key``."""
    signature = root.sign(_statement(_SERVER, public_key))
    return NextServerFile(public_key=public_key, signature=signature.hex())


def load_certificate(path: Path) -> CertificateFile:
    """Raises ``ConfigError`` naming the file; the signature is not checked here."""
    return load_toml(path, CertificateFile)


def load_root(folder: Path) -> RootPublic | None:
    """The pinned root of the folder of keys; None where nobody has put one.

    Raises:
        ConfigError: the file does not load.
    """
    path = folder / "root.public.toml"
    return load_toml(path, RootPublic) if path.exists() else None


def load_certificates(
    folder: Path, root: RootPublic | None
) -> tuple[list[SignerCertificate], list[str]]:
    """Every certificate of a folder that the root has signed, by file name, and why the others are
    left out."""
    found: list[SignerCertificate] = []
    warnings: list[str] = []
    for path in sorted(folder.glob("*.toml")):
        try:
            certificate = load_certificate(path).certificate
        except ConfigError as error:
            warnings.append(f"{error}; skipped")
            continue
        if root is None or not root.certifies(certificate):
            warnings.append(
                f"{path}: not signed by the root of root.public.toml; skipped, make it again with"
                " `farflow keys create FOLDER --trainer RUN/POLICY`"
            )
            continue
        found.append(certificate)
    return found, warnings


def of_policies(
    certificates: Iterable[SignerCertificate], policies: Iterable[str]
) -> tuple[SignerCertificate, ...]:
    """The certificates of these policies, in the order of ``certificates``."""
    wanted = set(policies)
    return tuple(one for one in certificates if one.policy in wanted)


def _statement(purpose: bytes, *parts: str) -> bytes:
    data = [purpose, b"\0"]
    for part in parts:
        encoded = part.encode()
        data += [_LENGTH.pack(len(encoded)), encoded]
    return b"".join(data)
