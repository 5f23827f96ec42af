"""What an attempt's rollouts are as a group of sequences."""

from collections.abc import Sequence

from edge_agent.rollouts import MalformedWorkflow, Rollout, check_reward, record_of
from transport.messages import LeaseOffer
from transport.runs import MAX_TURNS
from transport.summaries import MAX_GROUP_TOKENS, MAX_SEQUENCES
from transport.trajectory import TrajectoryGroup


def group_of(
    offer: LeaseOffer, rollouts: Sequence[Rollout], rewards: Sequence[float]
) -> TrajectoryGroup:
    """The rollouts, of all items in order, with their rewards; equal prompts are kept once.

    Raises:
        MalformedWorkflow: a rollout does not add up or is too long, or there are too many.
    """
    if len(rollouts) > MAX_SEQUENCES:
        raise MalformedWorkflow(
            f"returned {len(rollouts)} rollouts, a group has room for {MAX_SEQUENCES}; lower"
            " group_size"
        )
    policies = tuple(sorted(set(offer.policies.values())))
    index = {policy: number for number, policy in enumerate(policies)}
    prompts: dict[tuple[int, ...], int] = {}
    for reward in rewards:
        check_reward(reward)
    try:
        for rollout in rollouts:
            prompts.setdefault(tuple(rollout.prompt_tokens), len(prompts))
        sequences = tuple(
            record_of(rollout, reward, prompts[tuple(rollout.prompt_tokens)], index)
            for rollout, reward in zip(rollouts, rewards, strict=True)
        )
        longest = max(len(sequence.tokens) for sequence in sequences)
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise MalformedWorkflow(f"returned a rollout that does not add up: {error}") from error
    if longest > MAX_TURNS * offer.max_new_tokens:
        # The scheduler would take it for evidence against this agent.
        raise MalformedWorkflow(
            f"returned a sequence of {longest} tokens, with what was observed; a run allows"
            f" {MAX_TURNS} x max_new_tokens {offer.max_new_tokens}"
        )
    tokens = sum(len(r.prompt_tokens) for r in rollouts) + sum(len(s.tokens) for s in sequences)
    if tokens > MAX_GROUP_TOKENS:
        raise MalformedWorkflow(
            f"returned {tokens} tokens, each sequence with its prompt; a group has room for"
            f" {MAX_GROUP_TOKENS}; lower group_size or max_new_tokens, or shorten prompts"
        )
    return TrajectoryGroup(
        job=offer.job,
        attempt=offer.attempt,
        policies=policies,
        prompts=tuple(prompts),
        sequences=sequences,
    )
