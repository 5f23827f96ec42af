"""A large body on its way into the trajectory log: what is known of it, and its partial file.

What always holds: the partial file of one agent's body is never touched for another agent's,
whatever digest that one claims; an offer whose chunks do not add up is not accepted.
"""

import hashlib
from dataclasses import dataclass, field

from transport.chunk_parts import WantedChunk
from transport.delivery_window import MIN_PIECE_BYTES
from transport.envelope import BULK_FRAME_BYTES
from transport.messages import GroupSummary, OfferedBody
from transport.weights.blobs import BlobFolder
from transport.weights.manifest import CHUNK_DIGEST_BYTES, FileEntry
from transport.weights.tensors import Buffer


@dataclass(slots=True)
class Incoming:
    """A body. ``missing`` is None before it was looked for on disk; ``whole``: handed on;
    ``held`` are chunks that are in memory alone, the first of them since ``held_s``."""

    summary: GroupSummary
    route: bytes
    entry: FileEntry
    missing: set[int] | None = None
    whole: bool = False
    held: dict[int, Buffer] = field(default_factory=dict)
    held_s: float = 0.0

    def wanted(self, index: int) -> WantedChunk:
        entry, digest = self.entry, self.summary.digest
        digests = entry.chunk_digests
        return WantedChunk(digest, index, entry.size_bytes, entry.chunk_bytes, digests[index])


def partial_entry(agent: str, body: OfferedBody) -> FileEntry:
    """The file that a partial body is in."""
    name = hashlib.sha256(f"{agent}/{body.summary.digest}".encode()).hexdigest()
    return FileEntry(
        name=body.summary.digest,
        kind="artefact",
        digest=name,
        size_bytes=body.summary.size_bytes,
        chunk_bytes=body.chunk_bytes,
        chunk_digests=body.chunk_digests,
    )


def chunks_fault(body: OfferedBody) -> str:
    """What is wrong with how a body is cut, or nothing."""
    if not MIN_PIECE_BYTES <= body.chunk_bytes <= BULK_FRAME_BYTES:
        return f"chunk_bytes: {body.chunk_bytes}, {MIN_PIECE_BYTES} to {BULK_FRAME_BYTES} are taken"
    count = -(-body.summary.size_bytes // body.chunk_bytes)
    if len(body.chunk_digests) != count:
        return f"chunk_digests: {len(body.chunk_digests)}, the body has {count} chunks"
    if any(len(digest) != CHUNK_DIGEST_BYTES for digest in body.chunk_digests):
        return f"chunk_digests: one is not of {CHUNK_DIGEST_BYTES} bytes"
    return ""


def write_chunks(blobs: BlobFolder, entry: FileEntry, chunks: dict[int, Buffer]) -> None:
    """Blocks: write these beside the log. Raises StoreError."""
    for index, data in chunks.items():
        blobs.write_chunk(entry, index, data)


def read_whole(blobs: BlobFolder, entry: FileEntry) -> bytes:
    """Blocks: a body of which every chunk was written. Raises StoreError."""
    with blobs.open_incoming(entry) as file:
        return file.read(entry.size_bytes)
