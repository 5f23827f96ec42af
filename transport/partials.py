"""Packed finished turns: where the siblings of an attempt stand, so that another agent goes on.

What always holds: ``unpack_partial(pack_partial(partial)) == partial``; every token says which
policy and version drew it, or that none did, as in a result; hostile bytes cost memory of at most a
dozen times the bounds and either give a fully checked partial or raise ``RemoteProtocolError`` or
an ``IntegrityError``.

Layout, integers little-endian:

    "fpar"  format byte 1  u32 state size  u32 packed state size  zstd(state)  packed group
    state   MessagePack ``_State``: for every sequence of the group, in order, what a result does
            not say of it
    group   as in ``transport.trajectory``; a sibling that has not begun has no tokens
"""

import msgspec

from transport.compression import compress, decompress
from transport.errors import (
    LocalProtocolError,
    RemoteProtocolError,
    SizeLimitExceeded,
    TruncatedBlob,
)
from transport.ids import Fence
from transport.messages import MAX_ID_LENGTH, PartialSummary
from transport.summaries import MAX_PARTIAL_BYTES
from transport.trajectory import SequenceRecord, TrajectoryGroup, body_digest, pack, unpack

_MAX_UNPACKED_BYTES = 4 * MAX_PARTIAL_BYTES
"""Of the group's columns."""

_MAX_STATE_BYTES = 4 * 2**20
_MAX_TURNS = 2**20
_MAGIC = b"fpar"
_FORMAT = 1
_PREFIX_BYTES = 13


class PartialPart(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of a sibling's tokens. ``policy`` indexes the group's, -1: no policy drew them;
    ``finish_reason`` is the completion's, empty for tokens that no policy drew."""

    tokens: int
    policy: int
    finish_reason: str = ""


class PartialSibling(msgspec.Struct, frozen=True, kw_only=True):
    """What a sequence of the group is not enough for: the ``item`` of the attempt that it answers
    (by position), ``turns`` finished, its ``parts``, the ``text`` that a verifier would look at,
    whether its reward is one (``scored``), and the workflow's own ``state`` as JSON."""

    item: int
    turns: int
    parts: tuple[PartialPart, ...]
    text: str = ""
    scored: bool = False
    state: bytes = b"null"


class Partial(msgspec.Struct, frozen=True, kw_only=True):
    """``code`` is the fingerprint of the workflow that made it; ``siblings`` belong to the group's
    sequences, one each."""

    group: TrajectoryGroup
    code: str
    siblings: tuple[PartialSibling, ...]

    @property
    def turns(self) -> int:
        """Of all siblings together."""
        return sum(sibling.turns for sibling in self.siblings)


class _State(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    siblings: tuple[PartialSibling, ...]


def pack_partial(partial: Partial) -> bytes:
    """The wire and disk form.

    Raises:
        LocalProtocolError: the partial breaks a rule of the format; says which.
        SizeLimitExceeded: it is larger than ``MAX_PARTIAL_BYTES``, or its state than 4 MiB.
    """
    fault = _fault(partial)
    if fault:
        raise LocalProtocolError(f"finished turns of {partial.group.attempt}: {fault}")
    try:
        state = msgspec.msgpack.encode(_State(code=partial.code, siblings=partial.siblings))
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(f"finished turns do not encode: {error}") from error
    if len(state) > _MAX_STATE_BYTES:
        raise SizeLimitExceeded(
            f"the workflow's state takes {len(state)} bytes, at most {_MAX_STATE_BYTES} are kept"
        )
    packed = compress("zstd", state)
    sizes = len(state).to_bytes(4, "little") + len(packed).to_bytes(4, "little")
    data = b"".join((_MAGIC, bytes((_FORMAT,)), sizes, packed, pack(partial.group)))
    if len(data) > MAX_PARTIAL_BYTES:
        raise SizeLimitExceeded(
            f"finished turns take {len(data)} bytes, at most {MAX_PARTIAL_BYTES} are kept"
        )
    return data


def unpack_partial(data: bytes) -> Partial:
    """The partial in ``data``, checked as ``pack_partial`` checks it.

    Raises:
        SizeLimitExceeded: it is too large, packed or not (raised before decompressing).
        TruncatedBlob, ChecksumMismatch: bytes are missing or damaged.
        RemoteProtocolError: anything else that is no packed partial.
    """
    if len(data) > MAX_PARTIAL_BYTES:
        raise SizeLimitExceeded(f"finished turns of {len(data)} bytes")
    if len(data) < _PREFIX_BYTES:
        raise TruncatedBlob(f"packed turns have more than {_PREFIX_BYTES} bytes")
    if data[:4] != _MAGIC or data[4] != _FORMAT:
        raise RemoteProtocolError("not packed turns of format 1")
    size_bytes = int.from_bytes(data[5:9], "little")
    end = _PREFIX_BYTES + int.from_bytes(data[9:_PREFIX_BYTES], "little")
    if size_bytes > _MAX_STATE_BYTES:
        raise SizeLimitExceeded(f"the workflow's state is of {size_bytes} bytes")
    if end > len(data):
        raise TruncatedBlob("packed turns end inside their state")
    state = decompress("zstd", data[_PREFIX_BYTES:end], max_bytes=size_bytes, size_bytes=size_bytes)
    try:
        known = msgspec.msgpack.decode(state, type=_State)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"state of packed turns is malformed: {error}") from error
    group = unpack(data[end:], _MAX_UNPACKED_BYTES)
    partial = Partial(group=group, code=known.code, siblings=known.siblings)
    fault = _fault(partial)
    if fault:
        raise RemoteProtocolError(f"packed turns are malformed: {fault}")
    return partial


def summarise_partial(partial: Partial, data: bytes, *, fence: Fence) -> PartialSummary:
    """What log and scheduler see of ``partial``, whose packed form is ``data``."""
    group = partial.group
    oldest: dict[str, int] = {}
    for sequence in group.sequences:
        for _, policy, version in sequence.segments:
            if policy >= 0:
                name = group.policies[policy]
                oldest[name] = min(oldest.get(name, version), version)
    return PartialSummary(
        attempt=group.attempt,
        fence=fence,
        job=group.job,
        turns=partial.turns,
        digest=body_digest(data),
        size_bytes=len(data),
        oldest=oldest,
    )


def _fault(partial: Partial) -> str:
    """The first broken rule beyond those of the group, or nothing."""
    group = partial.group
    if len(partial.siblings) != len(group.sequences):
        return f"{len(partial.siblings)} siblings for {len(group.sequences)} sequences"
    if len(partial.code) > MAX_ID_LENGTH:
        return "code: is too long"
    for number, (sibling, sequence) in enumerate(
        zip(partial.siblings, group.sequences, strict=True)
    ):
        if sibling.item < 0 or not 0 <= sibling.turns <= _MAX_TURNS:
            return f"sibling {number}: impossible item or turns"
        if any(not -1 <= part.policy < len(group.policies) for part in sibling.parts):
            return f"sibling {number}: a part of no policy"
        if _policies(sibling) != _drawn_by(sequence):
            return f"sibling {number}: its parts are not its tokens"
    return ""


def _policies(sibling: PartialSibling) -> list[tuple[int, int]] | None:
    """Stretches of tokens by policy as the parts have them; None for an impossible part."""
    stretches: list[tuple[int, int]] = []
    for part in sibling.parts:
        if part.tokens < 0:
            return None
        _extend(stretches, part.tokens, part.policy)
    return stretches


def _drawn_by(sequence: SequenceRecord) -> list[tuple[int, int]]:
    """The same as the segments have them."""
    stretches: list[tuple[int, int]] = []
    for count, policy, _ in sequence.segments:
        _extend(stretches, count, policy)
    return stretches


def _extend(stretches: list[tuple[int, int]], tokens: int, policy: int) -> None:
    if not tokens:
        return
    if stretches and stretches[-1][1] == policy:
        stretches[-1] = (stretches[-1][0] + tokens, policy)
    else:
        stretches.append((tokens, policy))
