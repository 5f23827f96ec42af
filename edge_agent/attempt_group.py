"""What an attempt's rollouts are as a group of sequences."""

from collections.abc import Sequence

from edge_agent.workflow import MalformedWorkflow, Rollout, record_of
from transport.messages import LeaseOffer
from transport.trajectory import TrajectoryGroup


def group_of(
    offer: LeaseOffer, rollouts: Sequence[Rollout], rewards: Sequence[float]
) -> TrajectoryGroup:
    """The rollouts, of all items in order, with their rewards; equal prompts are kept once.

    Raises:
        MalformedWorkflow: a rollout does not add up.
    """
    policies = tuple(sorted(set(offer.policies.values())))
    index = {policy: number for number, policy in enumerate(policies)}
    prompts: dict[tuple[int, ...], int] = {}
    try:
        for rollout in rollouts:
            prompts.setdefault(tuple(rollout.prompt_tokens), len(prompts))
        sequences = tuple(
            record_of(rollout, reward, prompts[tuple(rollout.prompt_tokens)], index)
            for rollout, reward in zip(rollouts, rewards, strict=True)
        )
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise MalformedWorkflow(f"returned a rollout that does not add up: {error}") from error
    return TrajectoryGroup(
        job=offer.job,
        attempt=offer.attempt,
        policies=policies,
        prompts=tuple(prompts),
        sequences=sequences,
    )
