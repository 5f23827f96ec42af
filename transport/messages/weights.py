"""Weights plane."""

from typing import Annotated

import msgspec
from msgspec import Meta

from transport.messages.base import Count, Finite, Id, Message


class VersionOffer(Message, frozen=True, kw_only=True):
    """A trainer has a new version; ``manifest`` is signed MessagePack (``transport.weights``).
    The store asks for the chunks that it lacks. Offered again until durable or refused."""

    manifest: bytes
    signature: bytes
    key_id: str


class VersionDurable(Message, frozen=True, kw_only=True):
    policy: str
    version: int


class VersionRejected(Message, frozen=True, kw_only=True):
    policy: str
    version: int
    code: str
    message: str


class WeightsRequest(Message, frozen=True, kw_only=True):
    """Standing request: send a plan as soon as there is anything beyond what the agent has.
    ``upto`` bounds the version (pinned work); None means the newest. With ``rate_bytes_s`` (what
    its link brings in, 0: unknown) and ``decode_cells_s`` the plan is the quickest one, else the
    one of fewest bytes. ``ahead_bytes`` of the plan's files may follow the plan unasked, in pieces
    of at most ``ahead_piece_bytes``: what the agent's window for its link holds."""

    policy: Id
    have_version: Count | None
    have_digest: Id = ""
    upto: Count | None = None
    rate_bytes_s: Finite = 0.0
    decode_cells_s: Finite = 0.0
    ahead_bytes: Count = 0
    ahead_piece_bytes: Count = 0


class PlanStep(msgspec.Struct, frozen=True, kw_only=True):
    """One version on the way: its signed manifest and which of its files to fetch.

    A snapshot or composite that the weight store made itself comes as two steps: the trainer's
    signed manifest without files, then an unsigned one (empty ``signature`` and ``key_id``) that
    lists the store's files, for a composite with its base as parent. What they add up to is proved
    by the signed state digest.
    """

    manifest: bytes
    signature: bytes
    key_id: str
    files: tuple[str, ...]


class Ahead(msgspec.Struct, frozen=True, kw_only=True):
    """Pieces of a file that come unasked; as a ``ChunkRequest`` would name them."""

    digest: Id
    indices: tuple[Count, ...]
    part_bytes: Count = 0


class WeightsPlan(Message, frozen=True, kw_only=True):
    """The cheapest way from what the agent has to ``version``. What ``ahead`` names follows on the
    same connection, as if it had been asked for."""

    policy: str
    version: int
    steps: tuple[PlanStep, ...]
    ahead: tuple[Ahead, ...] = ()


class ChunkRequest(Message, frozen=True, kw_only=True):
    """Chunks of a hash-addressed file; asked for by whoever receives the file. With
    ``part_bytes`` (64 KiB to the chunk size, which it divides) an index is of such a part of the
    file. A relay, which knows no manifest, is also told what the chunk of each index must hash to
    and the file's measures; everybody else ignores these."""

    digest: Id
    indices: tuple[Count, ...]
    part_bytes: Count = 0
    chunk_digests: tuple[Annotated[bytes, Meta(max_length=32)], ...] = ()
    chunk_bytes: Count = 0
    file_bytes: Count = 0


class Chunk(Message, frozen=True, kw_only=True):
    """Payload: one frame with the bytes of the chunk, or of the part where the request had
    ``part_bytes``; none when ``found`` is false."""

    digest: Id
    index: Count
    found: bool = True
    part_bytes: Count = 0
