"""What the jobs of a run ask of the code on an agent: the run's own, or that of an evaluation with
a workflow, a task or settings of its own.

What always holds: all items of a job have one reward; a run's training, its submitters' jobs and
each of its evaluations have one ``Work``, made from the run's spec alone.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler.core.state import Job
from transport.messages import Item, RewardSpec
from transport.runs import PartSpec, RunSpec, TaskSpec, WorkflowSpec

if TYPE_CHECKING:
    from scheduler.core.context import Context

TOOL_USE = "tool_use"
TRAINING = ""
"""The name of the work that belongs to no evaluation."""


@dataclass(frozen=True, slots=True)
class Work:
    """``workflow`` is the effective one; ``rewards`` are by task family, of a mixture; items of no
    such family have the first. ``name`` is the evaluation's."""

    name: str
    workflow: WorkflowSpec
    rewards: dict[str, RewardSpec]

    def family(self, item: Item) -> str:
        """The part of a mixture that the item is of; nothing where there is no mixture."""
        return item.family if item.family in self.rewards else ""

    def reward(self, items: tuple[Item, ...]) -> RewardSpec:
        """The reward of a job's items."""
        found = self.rewards.get(items[0].family) if items else None
        return found or next(iter(self.rewards.values()))

    def missing_reward(self, rewards: tuple[str, ...]) -> str:
        """A reward that an agent with these does not have, or nothing. A tool that runs programs
        needs the same sandbox as the reward that does."""
        wanted = [one.name for one in self.rewards.values()]
        if self.workflow.reference == TOOL_USE and "python" in self._tools():
            wanted.append("code")
        return next((name for name in wanted if name not in rewards), "")

    def _tools(self) -> list[object]:
        found = self.workflow.settings.get("tools")
        return list(found) if isinstance(found, (list, tuple)) else []


def works_of(run: RunSpec) -> dict[str, Work]:
    """All works of a run by name."""
    rewards = rewards_of(run.task)
    found = {TRAINING: Work(TRAINING, run.workflow, rewards)}
    for name, spec in run.all_evaluations().items():
        own = rewards if spec.task is None else rewards_of(spec.task)
        found[name] = Work(name, spec.workflow_of(run.workflow), own)
    return found


def work_of(ctx: "Context", job: Job) -> Work:
    works = ctx.runs[job.run].works
    return works[ctx.tables.evaluations[job.evaluation].name if job.evaluation else TRAINING]


def rewards_of(task: TaskSpec) -> dict[str, RewardSpec]:
    """By the family of the items; all the same where the task is no mixture."""
    if task.source == "mixture":
        return {part.name: reward_of(part) for part in task.parts}
    return {"": reward_of(task)}


def reward_of(task: TaskSpec | PartSpec) -> RewardSpec:
    match task.reward:
        case "verifier":
            return RewardSpec(name="reasoning-gym", dataset=task.dataset)
        case "code":
            return RewardSpec(name="code", code=task.code)
        case "exact" | "math-verify":
            return RewardSpec(name=task.reward)
