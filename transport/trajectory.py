"""The packed trajectory: every sibling of one group, token by token, without loss.

What always holds: ``unpack(pack(group)) == group`` bit for bit; equal groups give equal bytes;
siblings share a prompt once; hostile bytes cost memory of at most a dozen times ``max_bytes`` and
either give a fully checked group or raise ``RemoteProtocolError`` or an ``IntegrityError``.

Layout, integers little-endian:

    "fftg"  format byte 1  u32 body size  zstd(body)
    body    u32 header size, MessagePack header (``_Header``), columns without holes

Columns in order (P prompts, S sequences, R segments): prompt lengths u32[P], sequence prompts
u32[S], sequence lengths u32[S], segments per sequence u32[S], finish reasons u32[S] (index into
the header's table), rewards f64[S], segment lengths u32[R], segment policies i32[R], segment
versions i64[R], prompt tokens u32, tokens u32, log-probabilities f32. Each column is stored as
byte planes (all lowest bytes first): token ids and log-probabilities then compress by up to a
fifth more than as plain arrays.
"""

import hashlib
import math
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from transport.compression import compress, decompress
from transport.errors import (
    LocalProtocolError,
    RemoteProtocolError,
    SizeLimitExceeded,
    TruncatedBlob,
)
from transport.ids import Fence
from transport.messages import GroupSummary
from transport.summaries import MAX_BODY_BYTES, MAX_TOKEN

_MAGIC = b"fftg"
_FORMAT = 1
_PREFIX_BYTES = 9
_MAX_HEADER_BYTES = 64 * 2**10

Segment = tuple[int, int, int]


class SequenceRecord(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One sibling. ``prompt`` indexes the group's prompts; ``logprobs`` is f32[tokens];
    ``segments`` are (count, policy, version) run-length over the tokens, where ``policy`` indexes
    the group's policies and -1 marks tokens that no policy drew (tool output: never trained on)."""

    prompt: int
    tokens: tuple[int, ...]
    logprobs: NDArray[np.float32]
    segments: tuple[Segment, ...]
    reward: float
    finish_reason: str

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SequenceRecord):
            return NotImplemented
        return (
            self.prompt == other.prompt
            and self.tokens == other.tokens
            and self.logprobs.tobytes() == other.logprobs.tobytes()
            and self.segments == other.segments
            and self.reward == other.reward
            and self.finish_reason == other.finish_reason
        )

    __hash__ = None  # type: ignore[assignment]  # holds an array


class TrajectoryGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one attempt: its siblings over shared ``prompts``; ``policies`` are ids."""

    job: str
    attempt: str
    policies: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    sequences: tuple[SequenceRecord, ...]


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    attempt: str
    policies: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    prompts: int
    sequences: int
    segments: int
    prompt_tokens: int
    tokens: int


def run_length(policies: tuple[int, ...], versions: tuple[int, ...]) -> tuple[Segment, ...]:
    """Segments of per-token policy indices and versions, which are of equal length."""
    segments: list[Segment] = []
    for policy, version in zip(policies, versions, strict=True):
        if segments and segments[-1][1:] == (policy, version):
            segments[-1] = (segments[-1][0] + 1, policy, version)
        else:
            segments.append((1, policy, version))
    return tuple(segments)


def expand(segments: tuple[Segment, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Per-token policy indices and versions of segments: the inverse of ``run_length``."""
    policies: list[int] = []
    versions: list[int] = []
    for count, policy, version in segments:
        policies += [policy] * count
        versions += [version] * count
    return tuple(policies), tuple(versions)


def body_digest(data: bytes) -> str:
    """SHA-256 of a packed group in hex: its name in the log."""
    return hashlib.sha256(data).hexdigest()


def summarise(
    group: TrajectoryGroup,
    data: bytes,
    *,
    fence: Fence,
    queued_s: float,
    generating_s: float,
) -> GroupSummary:
    """What the scheduler sees of ``group``, whose packed form is ``data``.

    ``prompt_tokens`` counts each distinct prompt once. The trajectory log and the trainer rebuild
    it from a body to compare (a body unlike its summary is evidence against the agent).
    """
    versions: dict[str, tuple[int, int]] = {}
    members: dict[str, dict[int, None]] = {}
    for place, sequence in enumerate(group.sequences):
        for _, policy, version in sequence.segments:
            if policy < 0:
                continue
            name = group.policies[policy]
            oldest, newest = versions.get(name, (version, version))
            versions[name] = (min(oldest, version), max(newest, version))
            members.setdefault(name, {})[place] = None
    return GroupSummary(
        attempt=group.attempt,
        fence=fence,
        job=group.job,
        digest=body_digest(data),
        size_bytes=len(data),
        rewards=tuple(sequence.reward for sequence in group.sequences),
        lengths=tuple(len(sequence.tokens) for sequence in group.sequences),
        versions=versions,
        prompt_tokens=sum(map(len, group.prompts)),
        queued_s=queued_s,
        generating_s=generating_s,
        truncated=sum(sequence.finish_reason == "length" for sequence in group.sequences),
        members={
            name: tuple(places)
            for name, places in members.items()
            if len(places) < len(group.sequences)
        },
    )


def pack(group: TrajectoryGroup) -> bytes:
    """The wire and disk form of a group.

    Raises:
        LocalProtocolError: the group breaks a rule of the format; names sequence and rule.
    """
    reasons = tuple(sorted({sequence.finish_reason for sequence in group.sequences}))
    sequences = group.sequences
    segments = [segment for sequence in sequences for segment in sequence.segments]
    header = _Header(
        job=group.job,
        attempt=group.attempt,
        policies=group.policies,
        finish_reasons=reasons,
        prompts=len(group.prompts),
        sequences=len(sequences),
        segments=len(segments),
        prompt_tokens=sum(map(len, group.prompts)),
        tokens=sum(len(sequence.tokens) for sequence in sequences),
    )
    for number, sequence in enumerate(sequences):
        if sequence.logprobs.dtype != np.float32 or sequence.logprobs.shape != (
            len(sequence.tokens),
        ):
            raise LocalProtocolError(
                f"sequence {number}: log-probabilities must be float32[{len(sequence.tokens)}], "
                f"got {sequence.logprobs.dtype}{list(sequence.logprobs.shape)}"
            )
    try:
        columns = (
            _planes([len(prompt) for prompt in group.prompts], "<u4"),
            _planes([sequence.prompt for sequence in sequences], "<u4"),
            _planes([len(sequence.tokens) for sequence in sequences], "<u4"),
            _planes([len(sequence.segments) for sequence in sequences], "<u4"),
            _planes([reasons.index(sequence.finish_reason) for sequence in sequences], "<u4"),
            _planes([sequence.reward for sequence in sequences], "<f8"),
            _planes([segment[0] for segment in segments], "<u4"),
            _planes([segment[1] for segment in segments], "<i4"),
            _planes([segment[2] for segment in segments], "<i8"),
            _planes([token for prompt in group.prompts for token in prompt], "<u4"),
            _planes([token for sequence in sequences for token in sequence.tokens], "<u4"),
            _planes(_joined([sequence.logprobs for sequence in sequences]), "<f4"),
        )
    except (OverflowError, TypeError, ValueError) as error:
        raise LocalProtocolError(f"trajectory of {group.attempt} does not fit: {error}") from error
    head = msgspec.msgpack.encode(header)
    body = b"".join((len(head).to_bytes(4, "little"), head, *columns))
    if len(head) > _MAX_HEADER_BYTES or len(body) > MAX_BODY_BYTES:
        raise LocalProtocolError(f"trajectory of {group.attempt} is too large: {len(body)} bytes")
    fault = _fault(group)
    if fault:
        raise LocalProtocolError(f"trajectory of {group.attempt}: {fault}")
    return _MAGIC + bytes((_FORMAT,)) + len(body).to_bytes(4, "little") + compress("zstd", body)


def unpack(data: bytes, max_bytes: int = MAX_BODY_BYTES) -> TrajectoryGroup:
    """The group in ``data``, checked as ``pack`` checks it.

    Raises:
        SizeLimitExceeded: the body is larger than ``max_bytes`` (raised before decompressing).
        TruncatedBlob, ChecksumMismatch: bytes are missing or damaged.
        RemoteProtocolError: anything else that is not a packed group.
    """
    columns = _Columns(_body(data, max_bytes))
    header = columns.header()
    prompt_lengths = columns.take(header.prompts, "<u4")
    sequence_prompts = columns.take(header.sequences, "<u4").tolist()
    lengths = columns.take(header.sequences, "<u4")
    segment_counts = columns.take(header.sequences, "<u4")
    reasons = columns.take(header.sequences, "<u4").tolist()
    rewards = columns.take(header.sequences, "<f8").tolist()
    counts = columns.take(header.segments, "<u4").tolist()
    policies = columns.take(header.segments, "<i4").tolist()
    versions = columns.take(header.segments, "<i8").tolist()
    prompt_tokens = columns.take(header.prompt_tokens, "<u4").tolist()
    tokens = columns.take(header.tokens, "<u4").tolist()
    logprobs = columns.take(header.tokens, "<f4")
    columns.finish()
    if max(reasons, default=-1) >= len(header.finish_reasons):
        raise RemoteProtocolError("trajectory names a finish reason that its table lacks")
    prompt_ends = _ends(prompt_lengths, header.prompt_tokens, "prompt lengths")
    token_ends = _ends(lengths, header.tokens, "sequence lengths")
    segment_ends = _ends(segment_counts, header.segments, "segment counts")
    segments = list(zip(counts, policies, versions, strict=True))
    sequences = []
    for index in range(header.sequences):
        start, end = token_ends[index], token_ends[index + 1]
        sequences.append(
            SequenceRecord(
                prompt=sequence_prompts[index],
                tokens=tuple(tokens[start:end]),
                logprobs=logprobs[start:end],
                segments=tuple(segments[segment_ends[index] : segment_ends[index + 1]]),
                reward=rewards[index],
                finish_reason=header.finish_reasons[reasons[index]],
            )
        )
    group = TrajectoryGroup(
        job=header.job,
        attempt=header.attempt,
        policies=header.policies,
        prompts=tuple(
            tuple(prompt_tokens[prompt_ends[index] : prompt_ends[index + 1]])
            for index in range(header.prompts)
        ),
        sequences=tuple(sequences),
    )
    fault = _fault(group)
    if fault:
        raise RemoteProtocolError(f"trajectory is malformed: {fault}")
    return group


def _fault(group: TrajectoryGroup) -> str:
    """The first broken rule, or nothing."""
    if not group.sequences:
        return "a group has at least one sequence"
    for number, sequence in enumerate(group.sequences):
        if not 0 <= sequence.prompt < len(group.prompts):
            return f"sequence {number}: prompt {sequence.prompt} of {len(group.prompts)}"
        if not math.isfinite(sequence.reward):
            return f"sequence {number}: reward is {sequence.reward}"
        if not np.isfinite(sequence.logprobs).all():
            return f"sequence {number}: a log-probability is not finite"
        covered = 0
        for count, policy, version in sequence.segments:
            if count < 1 or not -1 <= policy < len(group.policies) or version < 0:
                return f"sequence {number}: impossible segment {(count, policy, version)}"
            covered += count
        if covered != len(sequence.tokens):
            return f"sequence {number}: segments cover {covered} of {len(sequence.tokens)} tokens"
    return ""


def _joined(arrays: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.float32)


def _planes(values: Any, dtype: str) -> bytes:
    if isinstance(values, list) and dtype == "<u4" and values and max(values) > MAX_TOKEN:
        raise OverflowError(f"{max(values)} is above {MAX_TOKEN}")
    array = np.ascontiguousarray(np.asarray(values, dtype=dtype))
    return array.view(np.uint8).reshape(-1, array.itemsize).T.tobytes()


def _ends(lengths: NDArray[Any], total: int, what: str) -> list[int]:
    """Cumulative offsets, which must end at ``total``."""
    ends = [0, *np.cumsum(lengths, dtype=np.uint64).tolist()]
    if ends[-1] != total:
        raise RemoteProtocolError(f"trajectory's {what} add up to {ends[-1]}, not {total}")
    return ends


def _body(data: bytes, max_bytes: int) -> bytes:
    if len(data) < _PREFIX_BYTES:
        raise TruncatedBlob(f"a packed trajectory has more than {_PREFIX_BYTES} bytes")
    if data[:4] != _MAGIC or data[4] != _FORMAT:
        raise RemoteProtocolError("not a packed trajectory of format 1")
    size = int.from_bytes(data[5:_PREFIX_BYTES], "little")
    if size > max_bytes:
        raise SizeLimitExceeded(f"trajectory of {size} bytes is over the limit of {max_bytes}")
    return decompress("zstd", data[_PREFIX_BYTES:], max_bytes=size, size_bytes=size)


class _Columns:
    """Takes checked columns off a body, front to back."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def _bytes(self, count: int) -> bytes:
        if count > len(self._body) - self._at:
            raise TruncatedBlob(f"trajectory ends at byte {len(self._body)} inside a column")
        part = self._body[self._at : self._at + count]
        self._at += count
        return part

    def header(self) -> _Header:
        size = int.from_bytes(self._bytes(4), "little")
        if size > _MAX_HEADER_BYTES:
            raise SizeLimitExceeded(f"trajectory header of {size} bytes")
        try:
            header = msgspec.msgpack.decode(self._bytes(size), type=_Header)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RemoteProtocolError(f"trajectory header is malformed: {error}") from error
        counts = (header.prompts, header.sequences, header.segments, header.prompt_tokens)
        if min(*counts, header.tokens) < 0:
            raise RemoteProtocolError("trajectory header has a negative count")
        return header

    def take(self, count: int, dtype: str) -> NDArray[Any]:
        width = np.dtype(dtype).itemsize
        planes = np.frombuffer(self._bytes(count * width), dtype=np.uint8)
        return np.ascontiguousarray(planes.reshape(width, count).T).view(dtype).reshape(count)

    def finish(self) -> None:
        if self._at != len(self._body):
            raise RemoteProtocolError(f"trajectory has {len(self._body) - self._at} bytes too many")
