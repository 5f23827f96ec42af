"""A second reader of weight files, written from `docs/weight-format.md` alone.

What always holds: it imports nothing of this project, and whoever changes it reads the page and
not the code. So what it reads as the project wrote it proves that the page is enough to write a
reader. It is simple and slow, and refuses (`Refused`) everything that the page lets a reader
refuse.
"""

import hashlib
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgpack
import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from independent_coders import DTYPES, Refused, check, decode_body

DELTA_FORMAT = "farflow.delta.2"
HEADER_KEYS = ("run", "policy", "version", "parent", "base_digest", "digest", "fingerprint")
MANIFEST_KEYS = (
    *("run", "policy", "version", "parent", "step", "digest", "base_digest", "files"),
    *("full_bytes", "fingerprint", "created_wall_s", "full_digest"),
)
FILE_KEYS = ("name", "kind", "digest", "size_bytes", "chunk_bytes", "chunk_digests", "segments")
CELLS_MAX = 2**31 - 1
SEGMENTS_MAX = 1_000_000


class Tensor(NamedTuple):
    """One tensor: `cells` is flat, unsigned, little-endian, in C order."""

    dtype: str
    shape: tuple[int, ...]
    cells: np.ndarray


Model = dict[str, Tensor]


def cell_type(dtype: str) -> str:
    check(dtype in DTYPES, f"unknown dtype {dtype}")
    return f"<u{DTYPES[dtype][0]}"


# --- safetensors and snapshots ---


def read_safetensors(data: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    """Metadata, and name -> (dtype, shape, bytes), in the order of the data."""
    check(len(data) >= 8, "no length of a header")
    size = int.from_bytes(data[:8], "little")
    check(8 + size <= len(data), "the header is longer than the file")
    header = json.loads(data[8 : 8 + size])
    metadata = header.pop("__metadata__", {})
    entries, at = {}, 0
    for name, row in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = row["data_offsets"]
        check(begin == at <= end, f"{name} leaves a hole or overlaps")
        entries[name] = (row["dtype"], tuple(row["shape"]), data[8 + size + begin : 8 + size + end])
        at = end
    check(8 + size + at == len(data), "the data has another size than the tensors")
    return metadata, entries


def read_tensors(data: bytes) -> Model:
    model = {}
    for name, (dtype, shape, body) in read_safetensors(data)[1].items():
        cells = np.frombuffer(body, np.uint8)
        width = np.dtype(cell_type(dtype)).itemsize
        check(len(body) == width * int(np.prod(shape, dtype=np.int64)), f"{name}: wrong size")
        model[name] = Tensor(dtype, shape, cells.view(cell_type(dtype)).copy())
    return model


def read_snapshot(folder: Path) -> Model:
    """The tensors of a Hugging Face folder, of one file or of shards with an index."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return read_tensors((folder / "model.safetensors").read_bytes())
    weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
    model: Model = {}
    for shard in sorted(set(weight_map.values())):
        tensors = read_tensors((folder / shard).read_bytes())
        check(all(weight_map.get(name) == shard for name in tensors), f"{shard} is not as indexed")
        model.update(tensors)
    check(set(model) == set(weight_map), "the index names tensors that no shard has")
    return model


# --- digests ---


def tag(text: str) -> bytes:
    return b"farflow " + text.encode() + b"\0"


def field(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def kind(tensor: Tensor) -> bytes:
    shape = b"".join(struct.pack("<Q", size) for size in tensor.shape)
    return field(tensor.dtype.encode()) + field(shape)


def tensor_key(name: str, tensor: Tensor) -> int:
    made_of = tag("tensor key 2") + field(name.encode()) + kind(tensor)
    return int.from_bytes(hashlib.sha256(made_of).digest()[:8], "little")


def tensor_sum(name: str, tensor: Tensor) -> bytes:
    bits = tensor.cells
    if bits.dtype.itemsize == 8:
        bits = bits.view("<u4")
    u64 = np.uint64
    position = np.arange(bits.size, dtype=u64)
    x = (position << u64(32)) | (position >> u64(32))
    x ^= bits.astype(u64) ^ u64(tensor_key(name, tensor))
    x ^= x >> u64(32)
    x *= u64(0x9E6F0DBA6F2E4C35)
    x ^= x >> u64(29)
    x *= u64(0xD1B54A32D192ED03)
    x ^= x >> u64(32)
    y = (x ^ (x >> u64(31))) * u64(0xAEF17502108EF2D9)
    y ^= y >> u64(29)
    return struct.pack("<QQ", int(x.sum(dtype=u64)), int(y.sum(dtype=u64)))


def digest_of(label: str, model: Model, last: Callable[[str, Tensor], bytes]) -> str:
    state = hashlib.sha256(tag(label))
    for name in sorted(model):
        state.update(field(name.encode()) + last(name, model[name]))
    return state.hexdigest()


def state_digest(model: Model) -> str:
    return digest_of("state 2", model, lambda name, t: kind(t) + tensor_sum(name, t))


def fingerprint(model: Model) -> str:
    return digest_of("model 1", model, lambda _, t: kind(t))


def full_digest(model: Model) -> str:
    def of_tensor(_: str, t: Tensor) -> bytes:
        return hashlib.sha256(tag("tensor 1") + kind(t) + t.cells.tobytes()).digest()

    return digest_of("full state 1", model, of_tensor)


# --- deltas and composites ---


def read_rows(data: bytes) -> tuple[dict[str, Any], list[list[Any]], list[bytes]]:
    """Header, rows and bodies of a delta or composite."""
    metadata, entries = read_safetensors(data)
    check(metadata.get("format") == DELTA_FORMAT, "another format")
    header, rows = json.loads(metadata["header"]), json.loads(metadata["segments"])
    check(all(key in header for key in HEADER_KEYS), "the header lacks a value")
    check(len(rows) <= SEGMENTS_MAX, "too many segments")
    check(
        list(entries) == [f"segment.{i:06d}" for i in range(len(rows))], "other tensors than rows"
    )
    bodies = []
    for (dtype, shape, body), row in zip(entries.values(), rows, strict=True):
        check(dtype == "U8" and shape == (len(body),), "a segment is not a row of bytes")
        changed, size, crc = row[3:]
        check(changed >= 1 and size >= 1 and size == len(body), "wrong size of a segment")
        check(zlib.crc32(body) == crc, "wrong CRC-32")
        bodies.append(body)
    return header, rows, bodies


def read_delta(data: bytes, old: Model, manifest: dict[str, Any] | None = None) -> Model:
    """The model after a delta or composite; `old` stays as it is. `manifest` is the version's, or
    the catalogue of the composite."""
    header, rows, bodies = read_rows(data)
    for key in HEADER_KEYS if manifest else ():
        check(header[key] == manifest[key], f"{key} is not the manifest's")
    check(header["base_digest"] == state_digest(old), "the base is another one")
    new = {name: tensor._replace(cells=tensor.cells.copy()) for name, tensor in old.items()}
    taken = {name: np.zeros(tensor.cells.size, bool) for name, tensor in old.items()}
    for (coder, dtype, spans, changed, _, _), body in zip(rows, bodies, strict=True):
        for name, start, cells in spans:
            check(name in old and old[name].dtype == dtype, f"no tensor {name} of {dtype}")
            inside = 0 <= start < start + cells <= old[name].cells.size
            check(inside, f"a span outside {name}")
            check(not taken[name][start : start + cells].any(), f"spans of {name} overlap")
            taken[name][start : start + cells] = True
        check(sum(span[2] for span in spans) <= CELLS_MAX, "too large a segment")
        before = np.concatenate([old[name].cells[start:][:cells] for name, start, cells in spans])
        after = decode_body(body, before, dtype, coder, changed)
        check(int((before != after).sum()) == changed, "another number of cells changed")
        at = 0
        for name, start, cells in spans:
            new[name].cells[start : start + cells] = after[at : at + cells]
            at += cells
    check(header["fingerprint"] == fingerprint(new), "the model is another one")
    check(header["digest"] == state_digest(new), "the result is another one")
    return new


# --- manifests ---


def decode_manifest(packed: bytes) -> dict[str, Any]:
    manifest = msgpack.unpackb(packed)
    check(all(key in manifest for key in MANIFEST_KEYS), "the manifest lacks a value")
    for entry in manifest["files"]:
        check(all(key in entry for key in FILE_KEYS), "a file entry lacks a value")
    return manifest


def read_signed(signed: bytes, verify_key: str, policy: str) -> dict[str, Any]:
    """The manifest in a signed one; `verify_key`, in hexadecimal, is good for `policy` only."""
    outer = msgpack.unpackb(signed)
    check(outer["key_id"] == verify_key[:16], "signed by another key")
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(verify_key))
    try:
        key.verify(outer["signature"], tag("manifest 1") + outer["manifest"])
    except InvalidSignature as error:
        raise Refused("a wrong signature") from error
    manifest = decode_manifest(outer["manifest"])
    check(manifest["policy"] == policy, "the key is good for another policy")
    return manifest


def read_catalogue(signed: bytes, of: dict[str, Any]) -> dict[str, Any]:
    """A catalogue of the weight store, if it is one of the version of the signed manifest `of`."""
    outer = msgpack.unpackb(signed)
    check(outer["signature"] == b"" and outer["key_id"] == "", "a catalogue is not signed")
    catalogue = decode_manifest(outer["manifest"])
    free = {"files"}
    if [entry["kind"] for entry in catalogue["files"]] == ["composite"]:
        free |= {"parent", "base_digest"}
    for key in set(MANIFEST_KEYS) - free:
        check(catalogue[key] == of[key], f"{key} differs from the signed manifest")
    return catalogue


def check_file(data: bytes, entry: dict[str, Any]) -> None:
    """Refuse a file that is not the one of a manifest's entry."""
    check(len(data) == entry["size_bytes"], "the file has another size")
    check(hashlib.sha256(data).hexdigest() == entry["digest"], "the file has another digest")
    step = entry["chunk_bytes"]
    chunks = [data[at : at + step] for at in range(0, len(data), step)]
    digests = [hashlib.sha256(chunk).digest()[:16] for chunk in chunks]
    check(digests == entry["chunk_digests"], "a chunk has another digest")


def policy_folder(weight_store: Path, policy: str) -> Path:
    """Where a weight store keeps the versions of a policy."""
    return weight_store / "versions" / quote(policy, safe="").replace(".", "%2E")
