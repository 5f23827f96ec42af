"""Rewards found again: the responses of a group that another agent made, scored here.

What is found again, by the workflow that made the group:

    single_turn         every reward, of all that the policy drew
    multi_turn          every reward, of what the policy drew last
    solve_and_verify    the rewards of the solver's half

What always holds: nothing is generated, and what is sent back is the group that was fetched, token
by token, with the rewards that this agent's own verifier finds, and as they were recorded where
that is not to be found (a verifier's reward; a program's that was not too high for sure, see
``code_reward.surely_lower``). A body other than the one that the offer names, or one whose
responses cannot be read off its tokens, is refused.
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

ROLLOUTS: Final = {"single_turn": 1, "multi_turn": 1, "solve_and_verify": 2}
"""Per sibling, of which the first one's reward is that of the run's verifier."""
TRIES: Final = 3
_NOBODY: Final = -1
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
    several_turns = offer.workflow == "multi_turn"
    scored = group.sequences[: len(group.sequences) // ROLLOUTS[offer.workflow]]
    pairs = [(item, _response(group, one, engine, several_turns)) for one in scored]
    recorded = [sequence.reward for sequence in scored]
    found = await rewards.score_again(offer.reward, pairs, recorded)
    again = (
        msgspec.structs.replace(sequence, reward=float(reward))
        for sequence, reward in zip(scored, found, strict=True)
    )
    return msgspec.structs.replace(
        group,
        job=offer.job,
        attempt=offer.attempt,
        sequences=(*again, *group.sequences[len(scored) :]),
    )


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
    rollouts = ROLLOUTS.get(offer.workflow)
    if rollouts is None or offer.group_size % rollouts:
        raise NotRechecked(f"rewards of {offer.workflow} with {offer.group_size} sequences")
    if body_digest(data) != offer.recheck:
        raise NotRechecked("another body came than the one that the offer names")
    group = unpack(data)
    if len(offer.items) != 1 or len(group.sequences) != offer.group_size:
        raise NotRechecked(
            f"{len(group.sequences)} sequences for {len(offer.items)} items of {offer.group_size}"
        )
    return group


def _response(
    group: TrajectoryGroup, sequence: SequenceRecord, engine: Engine, several_turns: bool
) -> str:
    """What the sequence's one policy drew, or drew last, as the workflow has it scored."""
    drawn_by = {policy for _, policy, _ in sequence.segments}
    if several_turns:
        drawn_by.discard(_NOBODY)
    if len(drawn_by) != 1 or min(drawn_by) < 0:
        raise NotRechecked("not drawn by one policy")
    last = 0
    for count, policy, _ in reversed(sequence.segments):
        if policy == _NOBODY:
            break
        last += count
    if not last:
        raise NotRechecked("its last tokens are of no policy")
    return engine.decode(group.policies[drawn_by.pop()], sequence.tokens[-last:])
