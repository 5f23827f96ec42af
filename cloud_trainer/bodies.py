"""From the bytes of a body to what the loss sees.

What always holds: bytes that are not those of the digest, or not a well-formed group, never reach
the trainer; the work happens off the event loop; siblings without tokens of our policy stay in
their group, with an empty mask, because advantages are taken over the whole group.
"""

from typing import NamedTuple

from cloud_trainer.core.events import BodyChecked
from cloud_trainer.trainer import TrainingSequence
from transport.errors import IntegrityError, ProtocolError
from transport.trajectory import TrajectoryGroup, body_digest, expand, unpack

Group = tuple[TrainingSequence, ...]


class CheckedBody(NamedTuple):
    """The event for the core, and the group unless something is wrong with it."""

    event: BodyChecked
    group: Group
    reason: str = ""


def check_body(digest: str, data: bytes, policy: str) -> CheckedBody:
    """Hash and unpack a body for ``policy``. Total: faults become the event's code."""
    if body_digest(data) != digest:
        return CheckedBody(
            BodyChecked(digest=digest, code="body.digest"), (), "SHA-256 of the body differs"
        )
    try:
        unpacked = unpack(data)
    except (IntegrityError, ProtocolError) as error:
        return CheckedBody(BodyChecked(digest=digest, code="body.malformed"), (), str(error))
    group = training_group(unpacked, policy)
    event = BodyChecked(
        digest=digest,
        job=unpacked.job,
        size_bytes=len(data),
        trainable_tokens=sum(sum(sequence.loss_mask) for sequence in group),
    )
    return CheckedBody(event, group)


def training_group(group: TrajectoryGroup, policy: str) -> Group:
    """Every sibling, with the tokens of ``policy`` unmasked."""
    ours = group.policies.index(policy) if policy in group.policies else None
    sequences = []
    for record in group.sequences:
        policies, versions = expand(record.segments)
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
