"""Rewards found again: the responses of a group that another agent made, scored here.

What always holds: nothing is generated, and what is sent back is the group that was fetched, token
by token, with the rewards that this agent's own verifier finds; a body other than the one that the
offer names, or one whose responses cannot be read off its tokens, is refused.
"""

import asyncio
from typing import ClassVar, Final

import msgspec

from edge_agent.engine import Engine
from edge_agent.rewards import RewardPool
from edge_agent.turns import Keeper
from transport.errors import FarflowError
from transport.messages import LeaseOffer
from transport.trajectory import SequenceRecord, TrajectoryGroup, body_digest, unpack

TRIES: Final = 3
AGAIN_S: Final = 1.0
"""The log may hear of the recheck a moment after us."""


class NotRechecked(FarflowError):
    """The rewards could not be found again; says why."""

    code: ClassVar[str] = "recheck.failed"


async def rechecked(
    offer: LeaseOffer, engine: Engine, rewards: RewardPool, keeper: Keeper | None
) -> TrajectoryGroup:
    """The group that ``offer.recheck`` names as the result of this attempt.

    Raises:
        NotRechecked: the body is not there, or is no such group.
        RemoteProtocolError, IntegrityError: it is malformed.
        GenerationFailed: the engine does not host the policy.
        RewardError: a response could not be scored.
    """
    data = await _fetched(offer.recheck, keeper)
    group = await asyncio.to_thread(_unpacked, offer, data)
    (item,) = offer.items
    pairs = [(item, _response(group, sequence, engine)) for sequence in group.sequences]
    found = await rewards.score(offer.reward, pairs)
    sequences = tuple(
        msgspec.structs.replace(sequence, reward=float(reward))
        for sequence, reward in zip(group.sequences, found, strict=True)
    )
    return msgspec.structs.replace(group, job=offer.job, attempt=offer.attempt, sequences=sequences)


async def _fetched(digest: str, keeper: Keeper | None) -> bytes:
    for number in range(TRIES):
        if number:
            await asyncio.sleep(AGAIN_S)
        data = None if keeper is None else await keeper.fetch(digest)
        if data is not None:
            return data
    raise NotRechecked(f"the trajectory log has no body {digest[:12]}")


def _unpacked(offer: LeaseOffer, data: bytes) -> TrajectoryGroup:
    """Blocks."""
    if body_digest(data) != offer.recheck:
        raise NotRechecked("another body came than the one that the offer names")
    group = unpack(data)
    if len(offer.items) != 1 or len(group.sequences) != offer.group_size:
        raise NotRechecked(
            f"{len(group.sequences)} sequences for {len(offer.items)} items of {offer.group_size}"
        )
    return group


def _response(group: TrajectoryGroup, sequence: SequenceRecord, engine: Engine) -> str:
    """What one policy drew, as ``single_turn`` has it scored."""
    drawn_by = {policy for _, policy, _ in sequence.segments}
    if len(drawn_by) != 1 or min(drawn_by) < 0:
        raise NotRechecked("not a single turn of one policy")
    return engine.decode(group.policies[drawn_by.pop()], sequence.tokens)
