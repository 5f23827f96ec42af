"""Several tries at one question: a wrong answer is said to be wrong, and the policy tries again.

``[workflow.settings]``: ``turns`` is how many tries there are (2), ``retry`` what is said after a
wrong one. What is said is encoded like a prompt of its own and belongs to no policy, so it is never
trained on. The reward is that of the last answer. An answer that was cut off is the last one.
"""

import asyncio
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from edge_agent.workflow import (
    Observed,
    PolicyHandle,
    Rollout,
    Sibling,
    WorkflowContext,
    workflow,
)
from transport.messages import Item
from transport.runs import MAX_TURNS

RIGHT: Final = 1.0
RETRY: Final = "That is not right. Try again."


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module."""

    turns: Annotated[int, Meta(ge=1, le=MAX_TURNS)] = 2
    retry: Annotated[str, Meta(max_length=8000)] = RETRY


@workflow("multi_turn", settings=Settings)
async def multi_turn(context: WorkflowContext, item: Item) -> list[Rollout]:
    """Up to ``turns`` answers of the run's only policy per sibling, until one is right. Siblings do
    not wait for each other after the first turn."""
    settings = context.settings_as(Settings)
    policy = context.policy()
    siblings = list(context.resumed)
    if not siblings:
        first = await policy.generate(item.prompt, n=context.group_size, label="turn-1")
        rewards = await context.score([generated.text for generated in first])
        siblings = [
            Sibling(rollout=Rollout.of(generated, reward), turns=1)
            for generated, reward in zip(first, rewards, strict=True)
        ]
        context.turn_finished(siblings)

    async def finish(number: int) -> None:
        feedback = policy.encode(settings.retry)
        while _goes_on(context, siblings[number], settings.turns, len(feedback)):
            siblings[number] = await _next_turn(context, policy, siblings, number, feedback)
            context.turn_finished(siblings)

    async with asyncio.TaskGroup() as tasks:
        for number in range(context.group_size):
            tasks.create_task(finish(number))
    return [sibling.rollout for sibling in siblings]


def _goes_on(context: WorkflowContext, sibling: Sibling, turns: int, feedback_tokens: int) -> bool:
    """Whether there is another try: no sequence may be longer than a run's workflow allows."""
    rollout = sibling.rollout
    tokens = sum(len(part.tokens) for part in rollout.parts) + feedback_tokens
    return (
        sibling.turns < turns
        and rollout.finish_reason == "stop"
        and (rollout.reward or 0.0) < RIGHT
        and tokens + context.max_new_tokens <= MAX_TURNS * context.max_new_tokens
    )


async def _next_turn(
    context: WorkflowContext,
    policy: PolicyHandle,
    siblings: list[Sibling],
    number: int,
    feedback: tuple[int, ...],
) -> Sibling:
    before = siblings[number]
    rollout, turn = before.rollout, before.turns + 1
    said = [token for part in rollout.parts for token in part.tokens]
    [generated] = await policy.generate(
        (*rollout.prompt_tokens, *said, *feedback), label=f"turn-{turn}.{number + 1}"
    )
    [reward] = await context.score([generated.text])
    after = Rollout(
        prompt_tokens=rollout.prompt_tokens,
        parts=(*rollout.parts, Observed(tokens=feedback), generated),
        text=generated.text,
        finish_reason=generated.completion.finish_reason,
        reward=reward,
    )
    return Sibling(rollout=after, turns=turn)
