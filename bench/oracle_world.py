"""What the oracle knows beforehand: the groups of a scenario and seed, the agents, the policy.

What always holds: the same groups and agents as in a simulation of that scenario and seed.
Scenarios with several policies, or with work whose times are not constants or lengths alone
(several turns, steps of varying time, deltas from a file), are refused.
"""

import heapq
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from sim.scenario import AgentPlan, Scenario
from sim.workload import Draws, Workload, make_items
from transport.errors import ConfigError
from transport.ids import item_seed
from transport.messages import LeaseOffer, RewardSpec

SIMPLE: Final = ("turns", "tool_s", "train_cv", "deltas_file")
"""Keys of the workload that must be what they are unless given."""


class Group(NamedTuple):
    """A job with its siblings' lengths in tokens. They sort by their longest."""

    longest: int
    item: int
    lengths: tuple[int, ...]


class Work:
    """The groups of a scenario and seed, in the order of their items."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._draws = Draws(scenario.workload)
        self._seed = scenario.run_spec(seed).seed
        self._offer = LeaseOffer(
            attempt="sim/t-0#1",
            fence=(1, 1),
            job="sim/t-0",
            kind="train",
            items=make_items(0, 1),
            group_size=scenario.group_size,
            workflow="single_turn",
            settings={},
            policies={"policy": "sim/policy"},
            reward=RewardSpec(name="exact"),
            max_new_tokens=scenario.workload.max_new_tokens,
            temperature=1.0,
            seed=0,
            lease_s=1.0,
        )
        self._known: list[Group] = []

    def __getitem__(self, index: int) -> Group:
        while len(self._known) <= index:
            number = len(self._known)
            job = item_seed(self._seed, "train", number)
            offer = msgspec.structs.replace(self._offer, seed=job)
            lengths = tuple(self._draws.lengths(offer))
            self._known.append(Group(max(lengths), number, lengths))
        return self._known[index]


@dataclass(slots=True)
class Agent:
    """``behind_s`` is from the end of a step until its version can be served, when the agent has
    nothing else to fetch."""

    plan: AgentPlan
    one_way_s: float
    behind_s: float
    version: int = 0
    fetching: int | None = None
    free_s: list[float] = field(default_factory=list)

    def back_s(self, group: Group, now: float, scenario: Scenario) -> float:
        """When the group's body is in the cloud, if it begins now; its slots stay as they are."""
        return self._finish(group, now, list(self.free_s), scenario)

    def take(self, group: Group, now: float, scenario: Scenario) -> float:
        return self._finish(group, now, self.free_s, scenario)

    def soonest_s(self, group: Group, scenario: Scenario) -> float:
        """From the beginning until the body is in the cloud, on an idle agent."""
        return self._finish(group, 0.0, [0.0] * self.plan.slots, scenario)

    def _finish(self, group: Group, now: float, free_s: list[float], scenario: Scenario) -> float:
        work, rate = scenario.workload, self.plan.tokens_per_s
        ended_s = now
        for tokens in group.lengths:
            begins_s = max(now, free_s[0])
            ends_s = begins_s + work.first_token_s + tokens / rate
            heapq.heapreplace(free_s, ends_s)
            ended_s = max(ended_s, ends_s)
        tokens = sum(group.lengths) + work.prompt_tokens
        return ended_s + self.one_way_s + tokens * work.body_bytes_per_token / self.plan.up


def fleet(scenario: Scenario, seed: int) -> list[Agent]:
    """The agents of a seed, all with the first version, all slots free."""
    topology, work = scenario.topology(), scenario.workload
    found = []
    for plan in scenario.fleet(seed):
        down_s = topology.one_way_s(scenario.cloud, plan.site)
        behind_s = work.publish_s + work.store_s + down_s + work.apply_s
        behind_s += work.delta_bytes / plan.down
        up_s = topology.one_way_s(plan.site, scenario.cloud)
        found.append(Agent(plan, up_s, behind_s, free_s=[0.0] * plan.slots))
    return found


class Policy(NamedTuple):
    batch: int
    lag: int
    train_s: float


def the_policy(scenario: Scenario) -> Policy:
    if len(scenario.policies) != 1:
        raise ConfigError(f"scenario {scenario.name}: policies: the oracle knows one; give one")
    simple = Workload()
    for key in SIMPLE:
        if getattr(scenario.workload, key) != getattr(simple, key):
            raise ConfigError(f"workload.{key}: the oracle does not model it; leave it out")
    shape = next(iter(scenario.policies.values()))
    if shape.train_cv:
        raise ConfigError("policies: train_cv: the oracle does not model it; leave it out")
    train_s = scenario.workload.train_s if shape.train_s is None else shape.train_s
    return Policy(shape.batch_groups, shape.max_policy_lag, train_s)
