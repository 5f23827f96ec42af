"""What a version consists of, in a form that can be signed and checked.

What always holds: a manifest that ``verify`` returned was signed, byte for byte, by a key that the
caller trusts for that policy; its names are plain file names of an expected form, its sizes and
counts are within the limits, and every chunk of every file has a digest. So whoever holds one may
fetch the files from anybody.

Signature: over a tag and the manifest's MessagePack bytes, by a key of ``transport.keys``
(Ed25519); a key's id only says which key to try.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

from transport.errors import (
    AuthenticationFailed,
    RemoteProtocolError,
    SizeLimitExceeded,
)
from transport.weights.tensors import Buffer

CHUNK_BYTES = 1 << 20
LARGE_CHUNK_BYTES = 4 << 20
"""Chunks of files over ``LARGE_FILE_BYTES``: manifests stay small, frames stay deliverable."""
LARGE_FILE_BYTES = 1 << 30

MAX_MANIFEST_BYTES = 3 << 20
MAX_FILES = 4096
MAX_FILE_BYTES = 1 << 40
MAX_ARTEFACT_BYTES = 64 << 20
CHUNK_DIGEST_BYTES = 16

DELTA_NAME = "delta.safetensors"
INDEX_NAME = "model.safetensors.index.json"
ADAPTER_NAME = "adapter_model.safetensors"
ADAPTER_CONFIG_NAME = "adapter_config.json"
BASE_NAME = "base_model.json"
"""The three files of an adapter's folder: peft's two, and which model they belong to."""

FileKind = Literal["delta", "composite", "snapshot", "artefact"]

_NAMES: dict[FileKind, re.Pattern[str]] = {
    "delta": re.compile(r"delta\.safetensors"),
    "composite": re.compile(r"delta-from-\d{8}\.safetensors"),
    "snapshot": re.compile(
        r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
        r"|adapter_model\.safetensors"
    ),
    # Only what describes a model or tokenizer as data; never program text.
    "artefact": re.compile(
        r"((generation_|tokenizer_|preprocessor_|processor_|adapter_)?config|tokenizer|vocab"
        r"|added_tokens|special_tokens_map|chat_template|base_model)\.json"
        r"|chat_template\.jinja|(vocab|merges)\.txt|[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\.model"
    ),
}
_TAG = b"farflow manifest 1\0"
_HEX_64 = re.compile(r"[0-9a-f]{64}")


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A file by digest: ``digest`` is SHA-256 (hexadecimal) of all of it, ``chunk_digests`` the
    first 16 bytes of each chunk's SHA-256; all chunks but the last have ``chunk_bytes``.
    ``segments`` of a delta or composite are (offset in the file, size in bytes), in order: what a
    receiver may decode once its bytes are there."""

    name: str
    kind: FileKind
    digest: str
    size_bytes: int
    chunk_bytes: int
    chunk_digests: tuple[bytes, ...]
    segments: tuple[tuple[int, int], ...] = ()

    def chunk_size_bytes(self, index: int) -> int:
        """Size of one chunk; ``index`` must be in range."""
        return min(self.chunk_bytes, self.size_bytes - index * self.chunk_bytes)

    def chunk_matches(self, index: int, data: Buffer) -> bool:
        """Whether ``data`` is chunk ``index``; false also for an index out of range."""
        return (
            0 <= index < len(self.chunk_digests)
            and len(data) == self.chunk_size_bytes(index)
            and chunk_digest(data) == self.chunk_digests[index]
        )


class VersionManifest(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a policy. ``digest`` is of the whole state, ``base_digest`` of its parent's
    (None for the first), ``fingerprint`` of names, dtypes and shapes; ``full_bytes`` is the size
    of all tensors; ``created_wall_s`` is for people. ``full_digest`` is SHA-256 over the whole
    state, in version 0 and in the versions that the trainer computed it for (``digest`` finds
    accidents, this one a forger too)."""

    run: str
    policy: str
    version: int
    parent: int | None
    step: int
    digest: str
    base_digest: str | None
    files: tuple[FileEntry, ...]
    full_bytes: int
    fingerprint: str
    created_wall_s: float
    full_digest: str | None = None

    def of_kind(self, kind: FileKind) -> tuple[FileEntry, ...]:
        return tuple(entry for entry in self.files if entry.kind == kind)

    @property
    def is_adapter(self) -> bool:
        """Of a version with artefacts: whether its policy is published as an adapter."""
        return any(entry.name == ADAPTER_CONFIG_NAME for entry in self.files)

    @property
    def delta(self) -> FileEntry | None:
        return next(iter(self.of_kind("delta")), None)

    @property
    def composite(self) -> FileEntry | None:
        return next(iter(self.of_kind("composite")), None)


class SignedManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A manifest's bytes as signed."""

    manifest: bytes
    signature: bytes
    key_id: str


def chunk_digest(data: Buffer) -> bytes:
    return hashlib.sha256(data).digest()[:CHUNK_DIGEST_BYTES]


def chunk_bytes_for(size_bytes: int) -> int:
    return LARGE_CHUNK_BYTES if size_bytes > LARGE_FILE_BYTES else CHUNK_BYTES


def composite_name(base_version: int) -> str:
    """File name of a composite that starts from ``base_version``."""
    return f"delta-from-{base_version:08d}.safetensors"


def describe_file(
    name: str,
    kind: FileKind,
    data: Buffer,
    *,
    chunk_bytes: int | None = None,
    segments: tuple[tuple[int, int], ...] = (),
) -> FileEntry:
    """Entry of a file with these contents."""
    view = memoryview(data)
    size = chunk_bytes_for(len(view)) if chunk_bytes is None else chunk_bytes
    return FileEntry(
        name=name,
        kind=kind,
        digest=hashlib.sha256(view).hexdigest(),
        size_bytes=len(view),
        chunk_bytes=size,
        chunk_digests=tuple(
            chunk_digest(view[start : start + size]) for start in range(0, len(view), size)
        ),
        segments=segments,
    )


def is_artefact_name(name: str) -> bool:
    """Whether a file of this name travels with a model (config, tokenizer, chat template)."""
    return _NAMES["artefact"].fullmatch(name) is not None


def check_manifest(manifest: VersionManifest) -> None:
    """Check everything that a manifest says about itself.

    Raises:
        SizeLimitExceeded: too many files or too large ones.
        RemoteProtocolError: names the field that is wrong.
    """
    m = manifest
    first = m.parent is None
    if m.version < 0 or m.step < 0 or m.full_bytes < 0:
        raise RemoteProtocolError("manifest: version, step and full_bytes must not be negative")
    if first != (m.base_digest is None) or (m.parent is not None and m.parent >= m.version):
        raise RemoteProtocolError(f"manifest: version {m.version} cannot have parent {m.parent}")
    for field, text in (("digest", m.digest), ("fingerprint", m.fingerprint)):
        if not _HEX_64.fullmatch(text):
            raise RemoteProtocolError(f"manifest: {field} is not 64 hexadecimal digits")
    for field, optional in (("base_digest", m.base_digest), ("full_digest", m.full_digest)):
        if optional is not None and not _HEX_64.fullmatch(optional):
            raise RemoteProtocolError(f"manifest: {field} is not 64 hexadecimal digits")
    if len(m.files) > MAX_FILES:
        raise SizeLimitExceeded(f"manifest: {len(m.files)} files, at most {MAX_FILES} are allowed")
    if len({entry.name for entry in m.files}) != len(m.files):
        raise RemoteProtocolError("manifest: two files have the same name")
    for entry in m.files:
        _check_file(entry)


def _check_file(entry: FileEntry) -> None:
    if not _NAMES[entry.kind].fullmatch(entry.name):
        raise RemoteProtocolError(f"manifest: {entry.name!r} is no name for a {entry.kind}")
    if not _HEX_64.fullmatch(entry.digest):
        raise RemoteProtocolError(f"manifest: digest of {entry.name} is not 64 hexadecimal digits")
    limit = MAX_ARTEFACT_BYTES if entry.kind == "artefact" else MAX_FILE_BYTES
    if entry.size_bytes > limit:
        raise SizeLimitExceeded(
            f"manifest: {entry.name} has {entry.size_bytes} bytes, over {limit}"
        )
    if entry.size_bytes < 0 or not 1 <= entry.chunk_bytes <= LARGE_CHUNK_BYTES:
        raise RemoteProtocolError(f"manifest: sizes of {entry.name} are impossible")
    if len(entry.chunk_digests) != -(-entry.size_bytes // entry.chunk_bytes) or any(
        len(digest) != CHUNK_DIGEST_BYTES for digest in entry.chunk_digests
    ):
        raise RemoteProtocolError(f"manifest: chunk digests of {entry.name} do not fit its size")
    if entry.segments and entry.kind not in ("delta", "composite"):
        raise RemoteProtocolError(f"manifest: {entry.name} is a {entry.kind} and has no segments")
    position = 0
    for offset, size_bytes in entry.segments:
        if offset < position or not 1 <= size_bytes <= entry.size_bytes - offset:
            raise RemoteProtocolError(
                f"manifest: segment of {size_bytes} bytes at {offset} of {entry.name} overlaps "
                "another one, is empty or lies outside the file"
            )
        position = offset + size_bytes


class ManifestKey(Protocol):
    """What signs manifests (``transport.keys.SigningKey``)."""

    @property
    def key_id(self) -> str: ...

    def sign(self, data: bytes) -> bytes: ...


class Signer(Protocol):
    """A public key and the one policy whose manifests it may sign (``SignerKey``)."""

    @property
    def policy(self) -> str: ...

    def verify(self, data: bytes, signature: bytes) -> bool: ...


def sign(manifest: VersionManifest, key: ManifestKey) -> SignedManifest:
    """Raises SizeLimitExceeded or RemoteProtocolError for a manifest that all would refuse."""
    check_manifest(manifest)
    data = msgspec.msgpack.encode(manifest)
    if len(data) > MAX_MANIFEST_BYTES:
        raise SizeLimitExceeded(f"manifest has {len(data)} bytes, over {MAX_MANIFEST_BYTES}")
    return SignedManifest(manifest=data, signature=key.sign(_TAG + data), key_id=key.key_id)


def verify(signed: SignedManifest, trusted: Mapping[str, Signer]) -> VersionManifest:
    """The manifest, if well-formed and signed by one of ``trusted`` (by key id) for its policy.

    Raises:
        AuthenticationFailed: unknown key, wrong signature, or a key of another policy.
        SizeLimitExceeded, RemoteProtocolError: as ``decode_manifest``.
    """
    signer = trusted.get(signed.key_id)
    if signer is None:
        raise AuthenticationFailed(f"manifest is signed by key {signed.key_id!r}, not trusted here")
    if not signer.verify(_TAG + signed.manifest, signed.signature):
        raise AuthenticationFailed("manifest: the signature is wrong")
    manifest = decode_manifest(signed.manifest)
    if manifest.policy != signer.policy:
        raise AuthenticationFailed(f"manifest of {manifest.policy} has a key of {signer.policy}")
    return manifest


def decode_manifest(data: bytes) -> VersionManifest:
    """A well-formed manifest, whoever made it.

    Raises:
        SizeLimitExceeded: the manifest, or what it lists, is over a limit.
        RemoteProtocolError: malformed, or names the field that is wrong.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise SizeLimitExceeded(f"manifest has {len(data)} bytes, over {MAX_MANIFEST_BYTES}")
    try:
        manifest = msgspec.msgpack.decode(data, type=VersionManifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"manifest is malformed: {error}") from error
    check_manifest(manifest)
    return manifest
