"""One question, one answer: the group is ``group_size`` completions of the item's prompt."""

from edge_agent.workflow import Rollout, WorkflowContext, workflow
from edge_agent.workflow_registry import NoSettings
from transport.messages import Item


@workflow("single_turn", settings=NoSettings)
async def single_turn(context: WorkflowContext, item: Item) -> list[Rollout]:
    """Completions of the prompt under the run's only policy, scored by the run's verifier."""
    completions = await context.policy().generate(item.prompt, n=context.group_size)
    return [Rollout.of(completion) for completion in completions]
