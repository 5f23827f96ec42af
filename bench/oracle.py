"""What placement could reach at most: a bound, and a schedule that knows everything beforehand.

Both know what no scheduler can: the length of every sequence (``sim.workload.Draws``), every
agent's rate, the links' delays and when each version will have arrived. They exist to be compared
with, and are no part of any product.

``trainer_bound``   the trainer works without a pause from when the first batch can be complete.
                    No rule can be above it.
``fresh_capacity``  steps per hour at which the agents that can be fresh have enough tokens for the
                    mix as it is drawn, and the trainer keeps up. Not a bound: rules that drop long
                    groups train on a cheaper mix.
``clairvoyant``     event-driven list scheduling under the same quota and lag bound. A group is
                    begun only where it will be back in time for the last step that may use it, and
                    a place in a batch is left for it until then (earliest deadline first), so that
                    no token is wasted.

Where the clairvoyant schedule is better off than the simulator: agents get work in the instant in
which a slot is free; transfers are alone on their links; a swap pauses nothing; a batch is put
together when the trainer is free; nobody crashes. It is not optimal: each of ``PACES`` (the time
between steps that it counts on) times ``ORDERS`` (which of the groups that fit goes first) is
tried, and the best is taken.

What is dropped: a group that could not be back in time on any agent even if it got its slots in the
very moment of a swap, at the pace counted on. Rules find that out by trying: their groups are
stopped once they are overtaken. ``Schedule.dropped_share`` says how many; all others are used.
"""

import heapq
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from bench.oracle_world import Agent, Group, Policy, Work, fleet, the_policy
from sim.scenario import Scenario
from transport.errors import ConfigError

PACES: Final = (
    *(1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.5, 9.0),
    *(10.0, 11.0, 12.0, 13.0, 14.0, 16.0, 18.0, 20.0),
)
"""In units of ``train_s``."""
ORDERS: Final = ("longest", "shortest")
TINY_S: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one clairvoyant schedule gives; ``finished`` false: at this pace it cannot go on."""

    steps_hour: float
    finished: bool
    dropped_share: float
    pace_s: float
    order: str


class Open(NamedTuple):
    """A group under way or waiting to be used."""

    deadline: int
    back_s: float
    item: int


class Begun(NamedTuple):
    """A group that got its first slot, at a version, on the agent of that number."""

    group: Group
    agent: int
    version: int
    at_s: float
    back_s: float


def trainer_bound(scenario: Scenario, seed: int) -> float:
    """Steps per hour that no rule exceeds: the first batch cannot be complete before as many of the
    first quota's groups have had the fastest way each; then the trainer never waits."""
    policy, work, agents = the_policy(scenario), Work(scenario, seed), fleet(scenario, seed)
    quota = policy.batch * (policy.lag + 1)
    soonest = sorted(
        min(agent.soonest_s(work[index], scenario) for agent in agents) for index in range(quota)
    )
    # Nothing can expire before the first step, so the quota's groups are all that there is.
    first_s = soonest[policy.batch - 1]
    return 3600.0 * scenario.steps / (first_s + scenario.steps * policy.train_s)


def fresh_capacity(scenario: Scenario, seed: int) -> float:
    """Steps per hour: at an interval I between steps, an agent counts with all its slots when a
    group of average length, begun in the moment of a swap, is back within the window."""
    policy, work, agents = the_policy(scenario), Work(scenario, seed), fleet(scenario, seed)
    sample = [work[index].lengths for index in range(policy.batch * scenario.steps)]
    tokens = sum(sum(lengths) for lengths in sample) / len(sample)
    mean = Group(round(tokens), 0, (round(tokens / scenario.group_size),) * scenario.group_size)

    def enough(interval_s: float) -> bool:
        rate = sum(
            agent.plan.slots * agent.plan.tokens_per_s
            for agent in agents
            if agent.behind_s + agent.soonest_s(mean, scenario)
            <= _window_s(policy, interval_s) + TINY_S
        )
        return rate * interval_s >= policy.batch * tokens

    low, high = policy.train_s, 1000.0 * policy.train_s + 1e6
    if enough(low):
        return 3600.0 / low
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return 3600.0 / high


def _window_s(policy: Policy, pace_s: float) -> float:
    """From the end of a step until the last step begins that may use groups of its version."""
    return (policy.lag + 1) * pace_s - policy.train_s


def clairvoyant(
    scenario: Scenario,
    seed: int,
    *,
    paces: Sequence[float] = PACES,
    orders: Sequence[str] = ORDERS,
    most_dropped: float = 1.0,
) -> Schedule:
    """The best of all paces (ascending) and orders that drop no more than that share of groups.

    Raises:
        ConfigError: several policies, or no paces, or no orders.
    """
    policy, steps = the_policy(scenario), scenario.steps
    best: Schedule | None = None
    for pace in paces:
        # At this pace the last step cannot end before.
        least_s = (steps - 1) * pace * policy.train_s + policy.train_s
        if best is not None and best.steps_hour >= 3600.0 * steps / least_s:
            break
        for order in orders:
            found = ListSchedule(scenario, seed, pace * policy.train_s, order).run()
            if found.dropped_share > most_dropped:
                found = replace(found, steps_hour=0.0, finished=False)
            if best is None or found.steps_hour > best.steps_hour:
                best = found
    if best is None:
        raise ConfigError("the oracle: paces and orders: give at least one of each")
    return best


class ListSchedule:
    """One schedule at one pace and order. Steps are numbered from 1; a group of version v may be
    used by the steps up to v + lag + 1, which is its deadline. ``begun`` and ``used`` are what was
    done, in order."""

    def __init__(self, scenario: Scenario, seed: int, pace_s: float, order: str) -> None:
        self._scenario = scenario
        self._policy = the_policy(scenario)
        self._pace_s = pace_s
        self._order = order
        self._work = Work(scenario, seed)
        self._agents = fleet(scenario, seed)
        self._waiting: list[Group] = []
        self.begun: list[Begun] = []
        self.used: list[tuple[int, ...]] = []
        self._open: list[Open] = []
        self._next_item = 0
        self._dropped = 0
        self._step = 1  # that begins next
        self._ready_s = 0.0  # the trainer is free, and the pace is kept
        self._events: list[tuple[float, int, int, int]] = []
        self._counted = 0
        self.ends_s: list[float] = []
        self._stored: list[float] = [0.0]

    def run(self) -> Schedule:
        steps, limit_s = self._scenario.steps, self._scenario.limit_s
        self._admit()
        for number in range(len(self._agents)):
            self._at(0.0, "free", number)
        while self._events and len(self.ends_s) < steps:
            now, _, kind, number = heapq.heappop(self._events)
            if now > limit_s:
                break
            if kind == _KINDS["stored"]:
                for agent_number in range(len(self._agents)):
                    self._fetch(agent_number, now)
            elif kind == _KINDS["arrived"]:
                agent = self._agents[number]
                assert agent.fetching is not None
                agent.version, agent.fetching = agent.fetching, None
                self._fetch(number, now)
                self._place(number, now)
            elif kind == _KINDS["free"]:
                self._place(number, now)
            if self._begin_step(now):
                for agent_number in range(len(self._agents)):
                    self._place(agent_number, now)
        finished = len(self.ends_s) >= steps
        seen = self._next_item - len(self._waiting)
        return Schedule(
            steps_hour=3600.0 * steps / self.ends_s[steps - 1] if finished else 0.0,
            finished=finished,
            dropped_share=self._dropped / max(1, seen),
            pace_s=self._pace_s,
            order=self._order,
        )

    def _at(self, at_s: float, kind: str, number: int) -> None:
        self._counted += 1
        heapq.heappush(self._events, (at_s, self._counted, _KINDS[kind], number))

    def _admit(self) -> None:
        """Fill the quota from the items, in their order."""
        quota = self._policy.batch * (self._policy.lag + 1)
        window_s = _window_s(self._policy, self._pace_s)
        most = self._next_item + 50 * quota
        # What is dropped before the first step has begun cannot have been overtaken.
        held = self._dropped if self._step == 1 else 0
        while len(self._waiting) + len(self._open) + held < quota and self._next_item < most:
            group = self._work[self._next_item]
            self._next_item += 1
            soonest_s = min(
                agent.behind_s + agent.soonest_s(group, self._scenario) for agent in self._agents
            )
            if soonest_s > window_s - TINY_S:
                self._dropped += 1
                held += self._step == 1
            else:
                insort(self._waiting, group)

    # ---- the trainer ---------------------------------------------------------------------------

    def _begin_step(self, now: float) -> bool:
        """Begin the next step when the trainer is free and a batch is there."""
        policy = self._policy
        if now < self._ready_s - TINY_S:
            return False
        back = sorted(entry for entry in self._open if entry.back_s <= now + TINY_S)
        if len(back) < policy.batch:
            return False
        for entry in back[: policy.batch]:
            self._open.remove(entry)
        self.used.append(tuple(entry.item for entry in back[: policy.batch]))
        end_s = now + policy.train_s
        self.ends_s.append(end_s)
        work = self._scenario.workload
        self._stored.append(end_s + work.publish_s + work.store_s)
        self._at(self._stored[-1], "stored", self._step)
        self._step += 1
        self._ready_s = now + self._pace_s
        self._at(self._ready_s, "look", 0)
        self._admit()
        return True

    def _begin_times(self, entries: list[Open], last: int, now: float) -> list[float]:
        """The soonest that the coming steps up to ``last`` begin: at the pace counted on, and when
        as many groups are back as they and the steps before use; all, where there are fewer."""
        backs = sorted(entry.back_s for entry in entries)
        begins_s = max(now, self._ready_s) - self._pace_s
        found = []
        for number in range(1, last - self._step + 2):
            begins_s += self._pace_s
            if backs:
                begins_s = max(begins_s, backs[min(len(backs), number * self._policy.batch) - 1])
            found.append(begins_s)
        return found

    # ---- agents --------------------------------------------------------------------------------

    def _fetch(self, number: int, now: float) -> None:
        agent, scenario = self._agents[number], self._scenario
        newest = len(self._stored) - 1
        while self._stored[newest] > now + TINY_S:
            newest -= 1
        if agent.fetching is not None or newest <= agent.version:
            return
        agent.fetching = newest
        size = min(
            scenario.workload.full_bytes, scenario.workload.gap_bytes(newest - agent.version)
        )
        latency_s = agent.behind_s - scenario.workload.delta_bytes / agent.plan.down
        latency_s -= scenario.workload.publish_s + scenario.workload.store_s
        self._at(now + latency_s + size / agent.plan.down, "arrived", number)

    def _place(self, number: int, now: float) -> None:
        agent = self._agents[number]
        deadline = agent.version + self._policy.lag + 1
        if deadline < self._step:
            return
        while self._waiting and agent.free_s[0] <= now + TINY_S:
            if not self._has_place(deadline, now, now):
                return
            group = self._in_order(agent, now, deadline) or self._needed(agent, now, deadline)
            if group is None:
                return
            self._waiting.remove(group)
            back_s = agent.take(group, now, self._scenario)
            self._open.append(Open(deadline, back_s, group.item))
            self.begun.append(Begun(group, number, agent.version, now, back_s))
            self._at(back_s, "look", 0)
            for free_s in dict.fromkeys(agent.free_s):
                self._at(free_s, "free", number)

    def _in_order(self, agent: Agent, now: float, deadline: int) -> Group | None:
        """The first that is back in time if the trainer never waits, and finds a place."""
        latest_s = max(now, self._ready_s) + (deadline - self._step) * self._pace_s
        most = (latest_s - now - agent.one_way_s) * agent.plan.tokens_per_s
        candidates = reversed(self._waiting) if self._order == "longest" else iter(self._waiting)
        for group in candidates:
            if group.longest > most:
                if self._order == "shortest":
                    return None
                continue
            back_s = agent.back_s(group, now, self._scenario)
            if back_s <= latest_s and self._has_place(deadline, back_s, now):
                return group
        return None

    def _needed(self, agent: Agent, now: float, deadline: int) -> Group | None:
        """The shortest, where the trainer waits for it anyhow and no agent has it back sooner."""
        group = self._waiting[0]
        back_s = agent.back_s(group, now, self._scenario)
        sooner = any(
            other.back_s(group, now, self._scenario) < back_s - TINY_S
            for other in self._agents
            if other.version + self._policy.lag + 1 >= self._step
        )
        return group if not sooner and self._has_place(deadline, back_s, now) else None

    def _has_place(self, deadline: int, back_s: float, now: float) -> bool:
        """Whether batches, earliest deadline first, can take all that is open and one more."""
        open_ones = sorted([*self._open, Open(deadline, back_s, -1)])
        last = open_ones[-1].deadline
        for number, begins_s in enumerate(self._begin_times(open_ones, last, now)):
            left, room = [], self._policy.batch
            for entry in open_ones:
                if room and entry.back_s <= begins_s + TINY_S:
                    room -= 1
                elif entry.deadline <= self._step + number:
                    return False
                else:
                    left.append(entry)
            open_ones = left
        return True


_KINDS: Final = {"stored": 0, "arrived": 1, "free": 2, "look": 3}
