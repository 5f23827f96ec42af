"""What the jobs of a run ask of the code on an agent: the run's own, or that of an evaluation with
a workflow, a task or settings of its own.

What always holds: all items of a job have one reward; a run's training, its submitters' jobs and
each of its evaluations have one ``Work``, made from the run's spec alone.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from scheduler.core.state import Agent, Job
from transport.ids import policy_id
from transport.messages import FEATURE_ANSWER, FEATURE_TEMPLATE, Item, RewardSpec
from transport.runs import PartSpec, RunSpec, TaskSpec, WorkflowSpec

if TYPE_CHECKING:
    from scheduler.core.context import Context

TOOL_USE = "tool_use"
TRAINING = ""
"""The name of the work that belongs to no evaluation."""


@dataclass(frozen=True, slots=True)
class Work:
    """``workflow`` is the effective one; ``rewards`` are by task family, of a mixture; items of no
    such family have the first. ``name`` is the evaluation's; ``arguments`` are those of
    chat templates, by policy id; ``features`` are what an agent must heed in its offers."""

    name: str
    workflow: WorkflowSpec
    rewards: dict[str, RewardSpec]
    arguments: dict[str, dict[str, Any]] = field(default_factory=dict)
    features: tuple[str, ...] = ()

    def family(self, item: Item) -> str:
        """The part of a mixture that the item is of; nothing where there is no mixture."""
        return item.family if item.family in self.rewards else ""

    def reward(self, items: tuple[Item, ...]) -> RewardSpec:
        """The reward of a job's items."""
        found = self.rewards.get(items[0].family) if items else None
        return found or next(iter(self.rewards.values()))

    def missing(self, agent: Agent) -> str:
        """A reward or feature that the agent does not have, or nothing. A tool that runs programs
        needs the same sandbox as the reward that does."""
        wanted = [one.name for one in self.rewards.values()]
        if self.workflow.reference == TOOL_USE and "python" in self._tools():
            wanted.append("code")
        for name in wanted:
            if name not in agent.rewards:
                return f"reward {name}"
        for feature in self.features:
            if feature not in agent.features:
                return f"{feature} (it is of an older version)"
        return ""

    def _tools(self) -> list[object]:
        found = self.workflow.settings.get("tools")
        return list(found) if isinstance(found, (list, tuple)) else []


def works_of(run: RunSpec) -> dict[str, Work]:
    """All works of a run by name."""
    rewards = rewards_of(run.task)
    arguments: dict[str, dict[str, Any]] = {
        policy_id(run.name, name): run.policies[name].chat_template_kwargs
        for name in run.workflow.policies
        if run.policies[name].chat_template_kwargs
    }

    def work(name: str, workflow: WorkflowSpec, rewards: dict[str, RewardSpec]) -> Work:
        answer = any(reward.answer != "whole" for reward in rewards.values())
        features = (FEATURE_TEMPLATE,) * bool(arguments) + (FEATURE_ANSWER,) * answer
        return Work(name, workflow, rewards, arguments, features)

    found = {TRAINING: work(TRAINING, run.workflow, rewards)}
    for name, spec in run.all_evaluations().items():
        own = rewards if spec.task is None else rewards_of(spec.task)
        found[name] = work(name, spec.workflow_of(run.workflow), own)
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
            return RewardSpec(name="reasoning-gym", dataset=task.dataset, answer=task.answer)
        case "code":
            return RewardSpec(name="code", code=task.code)
        case "exact" | "math-verify":
            return RewardSpec(name=task.reward, answer=task.answer)
