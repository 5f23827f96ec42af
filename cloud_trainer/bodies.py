"""From the bytes of a body to what the loss sees.

What always holds: bytes that are not those of the digest, or not a well-formed group, or more
tokens than the run can have made, never reach the trainer; the work happens off the event loop; of
a group only sequences with tokens of our policy are left, because advantages are taken over those:
what another role was rewarded for is no baseline of ours.
"""

from typing import NamedTuple

from cloud_trainer.core.events import BodyChecked
from cloud_trainer.trainer import TrainingSequence
from transport.errors import IntegrityError, ProtocolError
from transport.summaries import MAX_GROUP_TOKENS, MAX_SEQUENCES
from transport.trajectory import TrajectoryGroup, body_digest, expand, unpack

MAX_SEQUENCE_TOKENS = 2**20
"""When the run does not say."""

Group = tuple[TrainingSequence, ...]


class CheckedBody(NamedTuple):
    """The event for the core, and the group unless something is wrong with it."""

    event: BodyChecked
    group: Group
    reason: str = ""


def check_body(
    digest: str, data: bytes, policy: str, max_sequence_tokens: int = MAX_SEQUENCE_TOKENS
) -> CheckedBody:
    """Hash and unpack a body for ``policy``. Total: faults become the event's code.

    ``max_sequence_tokens`` is the run's ``WorkflowSpec.max_sequence_tokens``.
    """
    if body_digest(data) != digest:
        return CheckedBody(
            BodyChecked(digest=digest, code="body.digest"), (), "SHA-256 of the body differs"
        )
    try:
        unpacked = unpack(data)
    except (IntegrityError, ProtocolError) as error:
        return CheckedBody(BodyChecked(digest=digest, code="body.malformed"), (), str(error))
    excess = _excess(unpacked, max_sequence_tokens)
    if excess:
        return CheckedBody(BodyChecked(digest=digest, code="body.too_long"), (), excess)
    group = training_group(unpacked, policy)
    event = BodyChecked(
        digest=digest,
        job=unpacked.job,
        size_bytes=len(data),
        trainable_tokens=sum(sum(sequence.loss_mask) for sequence in group),
    )
    return CheckedBody(event, group)


def _excess(group: TrajectoryGroup, max_sequence_tokens: int) -> str:
    """Which bound on tokens a group breaks, or nothing."""
    if len(group.sequences) > MAX_SEQUENCES:
        return f"{len(group.sequences)} sequences, at most {MAX_SEQUENCES}"
    longest = max(len(record.tokens) for record in group.sequences)
    if longest > max_sequence_tokens:
        return f"a sequence of {longest} tokens, the run allows {max_sequence_tokens}"
    tokens = sum(len(group.prompts[r.prompt]) + len(r.tokens) for r in group.sequences)
    if tokens > MAX_GROUP_TOKENS:
        return f"{tokens} tokens with prompts, at most {MAX_GROUP_TOKENS}"
    return ""


def training_group(group: TrajectoryGroup, policy: str) -> Group:
    """Every sequence in which ``policy`` drew tokens, with those unmasked; in order."""
    ours = group.policies.index(policy) if policy in group.policies else None
    sequences = []
    for record in group.sequences:
        policies, versions = expand(record.segments)
        if ours not in policies:
            continue
        sequences.append(
            TrainingSequence(
                group=group.job,
                prompt_tokens=group.prompts[record.prompt],
                tokens=record.tokens,
                logprobs=tuple(record.logprobs.tolist()),
                versions=versions,
                loss_mask=tuple(index == ours for index in policies),
                reward=record.reward,
            )
        )
    return tuple(sequences)
