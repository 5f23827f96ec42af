"""The bounds of a group's body and of what is said about it; light, because the deciding loop reads
summaries and never a body.

What always holds: a summary without a fault is of bounded size, and its numbers and the sums of
them fit 64 bits.
"""

import itertools
import re

import msgspec

from transport.ids import job_of
from transport.messages import (
    MAX_COUNT,
    MAX_FINITE,
    MAX_ID_LENGTH,
    GroupSummary,
    PartialSummary,
)

MAX_BODY_BYTES = MAX_PACKED_BYTES = 64 * 2**20
WHOLE_BODY_BYTES = 64 * 2**10
"""Up to this a packed group is put in one frame; a larger one is asked for in chunks."""

MAX_PARTIAL_BYTES = 8 * 2**20
"""Packed finished turns. What is larger is not kept: its attempt begins anew where it must."""

MAX_SEQUENCES = 1024
"""Siblings of a group, or items of an evaluation job."""

MAX_SEQUENCE_TOKENS = 2**31
MAX_SUMMARY_BYTES = 32 * 1024
MAX_TOKEN = 2**32 - 1
MAX_LOGPROB = 1e-3
"""Of a drawn token; what is above 0 is the rounding of an engine."""

MAX_GROUP_TOKENS = 2**23
"""Of all siblings of a group, each with its prompt."""

MAX_FINISH_REASON = 64

_DIGEST = re.compile(r"[0-9a-f]{64}")
_encode = msgspec.msgpack.Encoder().encode


def summary_fault(summary: GroupSummary) -> str:
    """The first rule that a summary breaks, or nothing; looks at the summary alone.

    What passes is of bounded size, and its numbers and the sums of them fit 64 bits.
    """
    if max(len(summary.attempt), len(summary.job), len(summary.agent)) > MAX_ID_LENGTH:
        return f"attempt: longer than {MAX_ID_LENGTH} characters"
    if job_of(summary.attempt) != summary.job:
        return f"attempt: {summary.attempt!r} is not one of job {summary.job!r}"
    if _DIGEST.fullmatch(summary.digest) is None:
        return "digest: is not 64 hexadecimal digits"
    if not 0 < summary.size_bytes <= MAX_PACKED_BYTES:
        return f"size_bytes: {summary.size_bytes}, at most {MAX_PACKED_BYTES}"
    if not 0 < len(summary.rewards) == len(summary.lengths) <= MAX_SEQUENCES:
        return f"rewards: {len(summary.rewards)} for {len(summary.lengths)} sequences"
    for number in (*summary.rewards, summary.queued_s, summary.generating_s):
        if not -MAX_FINITE <= number <= MAX_FINITE:  # NaN is not either
            return "rewards or times are not finite"
    if min(summary.queued_s, summary.generating_s) < 0:
        return "times are negative"
    lengths = (*summary.lengths, summary.prompt_tokens)
    if min(lengths) < 0 or max(lengths) > MAX_SEQUENCE_TOKENS:
        return f"lengths or prompt_tokens: not within 0 and {MAX_SEQUENCE_TOKENS}"
    term, fence = summary.fence
    if not (0 <= term <= MAX_COUNT and 0 <= fence <= MAX_COUNT):
        return "fence: impossible"
    for low, high in summary.versions.values():
        if not 0 <= low <= high <= MAX_COUNT:
            return "versions: the oldest is newer than the newest, or out of range"
    if not 0 <= summary.truncated <= len(summary.lengths):
        return f"truncated: {summary.truncated} of {len(summary.lengths)} sequences"
    for name, places in summary.members.items():
        ordered = all(low < high for low, high in itertools.pairwise(places))
        if name not in summary.versions or not places or not ordered:
            return f"members: of {name} are none, or not in order"
        if places[0] < 0 or places[-1] >= len(summary.lengths):
            return f"members: of {name} are not within {len(summary.lengths)} sequences"
    size_bytes = len(_encode(summary))
    if size_bytes > MAX_SUMMARY_BYTES:
        return f"the summary takes {size_bytes} bytes, at most {MAX_SUMMARY_BYTES}"
    return ""


def partial_fault(summary: PartialSummary) -> str:
    """The first rule that a summary breaks, or nothing; looks at the summary alone."""
    if job_of(summary.attempt) != summary.job:
        return f"attempt: {summary.attempt!r} is not one of job {summary.job!r}"
    if _DIGEST.fullmatch(summary.digest) is None:
        return "digest: is not 64 hexadecimal digits"
    if not 0 < summary.size_bytes <= MAX_PARTIAL_BYTES:
        return f"size_bytes: {summary.size_bytes}, at most {MAX_PARTIAL_BYTES}"
    if not 0 < summary.turns <= MAX_COUNT or not summary.oldest:
        return "turns: no turn is finished"
    if not all(0 <= part <= MAX_COUNT for part in summary.fence):
        return "fence: impossible"
    return ""
