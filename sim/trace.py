"""A production event log as a world to simulate: the same arrivals, under any placement rule.

What is taken from the log: which agents there were and when they came, went and came back; their
slots, and speed per slot (from results that waited least for one); their round trip as the
scheduler's own core had learnt it by the end, and what they fetched weights with; lengths and
rewards of every job whose result was announced; the times of training steps and weight swaps, the
sizes of versions; group size, batch and bound of the run.

What the log does not say is assumed: rates up are those down, links are not shared, tool time is
part of an agent's speed, and a job without any result gets the lengths of another one, chosen by
its seed (such jobs are counted; they are the longer ones, so with many of them all rules look
better than they were). So the recorded rule is simulated as well, and only the ratio between rules
is an answer. Jobs are known by their place in the order of the run. Of several
runs in a log it is the first; evaluations are left out.
"""

import math
import random
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from scheduler.core.effects import RecordStep, Send
from scheduler.core.events import Event, FromAgent, FromService
from scheduler.core.machine import SchedulerCore
from scheduler.core.settings import PlacementName
from scheduler.event_log import RecordedTerm, unpack_event
from sim.faults import Fault
from sim.scenario import AgentPlan, PolicyShape, Scenario
from sim.workload import Workload
from transport.errors import ConfigError
from transport.ids import policy_name
from transport.messages import (
    GroupSummary,
    Hello,
    TrajectoriesStored,
    VersionServing,
    Welcome,
)
from transport.runs import RunSpec

if TYPE_CHECKING:
    from transport.status import StepStatus

UNKNOWN_RATE: Final = 12_500_000.0
"""Bytes per second down where no agent has fetched anything."""

UNKNOWN_RTT_S: Final = 0.05
UNKNOWN_TOKENS_S: Final = 50.0
GONE_S: Final = 30.0
"""An agent that says nothing for so long before the end has left."""

_LEAST_FETCH_BYTES: Final = 64 * 1024


@dataclass(slots=True)
class Life:
    """One start of an agent, in seconds since the log's begin."""

    incarnation: int
    began_s: float
    heard_s: float


@dataclass(slots=True)
class Heard:
    """What a log says of one agent."""

    slots: int = 1
    usd_hour: float = 0.0
    lives: list[Life] = field(default_factory=list)
    rates_down: list[float] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Trace:
    """A world: ``unknown`` of ``jobs`` have no recorded result; ``steps_hour`` is what the
    deployment itself made."""

    scenario: Scenario
    placement: PlacementName
    plans: list[AgentPlan]
    faults: list[Fault]
    lengths: dict[int, tuple[int, ...]]
    rewards: dict[int, tuple[float, ...]]
    jobs: int
    unknown: int
    steps_hour: float


class _Reader:
    """Goes through a log with the core beside it."""

    def __init__(self, folder: Path) -> None:
        term = RecordedTerm(folder)
        start = term.start
        self.begin_s = start.now
        self.end_s = start.now
        self.settings = start.settings
        self.agents: dict[str, Heard] = {}
        self.summaries: dict[str, GroupSummary] = {}
        self.steps: list[StepStatus] = []
        self.run: RunSpec | None = None
        self.core = SchedulerCore(
            start.settings,
            term=start.term,
            rng=random.Random(start.seed),  # noqa: S311 - what the log was made with
            build=start.build,
            rows=list(term.rows()),
            now=start.now,
        )
        for batch in term.batches():
            for now, packed in batch.inputs:
                event = unpack_event(packed)
                for effect in self.core.handle(event, now):
                    if isinstance(effect, RecordStep):
                        self.steps.append(effect.step)
                    elif isinstance(effect, Send) and isinstance(effect.message, Welcome):
                        self.run = self.run or effect.message.run
                self._hear(event, now - start.now)
                self.end_s = now
            self.core.take_changes()
        status = self.core.status(self.end_s)
        self.learnt = {agent.name: agent for agent in status.agents}

    def _hear(self, event: Event, at_s: float) -> None:
        match event:
            case FromAgent(name, message):
                self._from_agent(name, message, at_s)
            case FromService(_, TrajectoriesStored(summaries=summaries)):
                for summary in summaries:
                    self.summaries.setdefault(summary.job, summary)
            case _:
                pass

    def _from_agent(self, name: str, message: object, at_s: float) -> None:
        agent = self.agents.setdefault(name, Heard())
        if isinstance(message, Hello) and message.agent is not None:
            agent.slots = max(1, message.agent.slots)
            agent.usd_hour = max(0.0, message.agent.price_usd_hour)
            if not agent.lives or agent.lives[-1].incarnation != message.incarnation:
                agent.lives.append(Life(message.incarnation, at_s, at_s))
        elif isinstance(message, VersionServing):
            if message.fetched_bytes >= _LEAST_FETCH_BYTES and message.fetch_s > 0.0:
                agent.rates_down.append(message.fetched_bytes / message.fetch_s)
            agent.pauses_s.append(message.pause_s)
        if agent.lives:
            agent.lives[-1].heard_s = at_s


def read_trace(folder: Path) -> Trace:
    """The world of a recorded term.

    Raises:
        ConfigError: there is too little in it to simulate; says what is missing.
        StoreError: it is no log of this farflow.
    """
    reader = _Reader(folder)
    run = reader.run
    agents = {name: heard for name, heard in reader.agents.items() if heard.lives}
    results = {
        place: summary
        for job, summary in reader.summaries.items()
        if (place := place_of(job)) is not None and summary.lengths and _is_of(job, run)
    }
    missing = [
        what
        for what, there in (
            ("a run with a trainer", run),
            ("an agent", agents),
            ("a training step", reader.steps),
            ("a result", results),
        )
        if not there
    ]
    if missing or run is None:
        raise ConfigError(f"{folder}: the log has no {' and no '.join(missing)} to simulate from")
    first = min(results)
    places = {place - first: summary for place, summary in sorted(results.items())}
    jobs = max(places) + 1
    shapes, steps_hour = _shapes(run, reader)
    plans = [_plan(name, heard, reader) for name, heard in sorted(agents.items())]
    sites = {plan.site: _rtt_s(plan.name, reader) * 1e3 for plan in plans}
    steps = min(sum(s.policy == policy for s in reader.steps) for policy in _policies(reader))
    scenario = Scenario(
        name=f"replay of {folder.name}",
        about=f"Arrivals of {run.name}, from a production event log.",
        sites=sites,
        cloud="cloud",
        policies=shapes,
        group_size=run.workflow.group_size,
        steps=steps,
        limit_s=max(60.0, 20.0 * (reader.end_s - reader.begin_s)),
        workload=_workload(run, reader, list(places.values())),
        scheduler=_settings(reader),
    )
    return Trace(
        scenario=scenario,
        placement=reader.settings.placement,
        plans=plans,
        faults=_faults(agents, reader.end_s - reader.begin_s),
        lengths={place: summary.lengths for place, summary in places.items()},
        rewards={place: summary.rewards for place, summary in places.items()},
        jobs=jobs,
        unknown=jobs - len(places),
        steps_hour=steps_hour,
    )


def steps_hour_of(ends_s: list[float]) -> float:
    """From the first end of a step to the last."""
    if len(ends_s) < 2:
        return 0.0
    return 3600.0 * (len(ends_s) - 1) / max(ends_s[-1] - ends_s[0], 1e-9)


def _policies(reader: _Reader) -> list[str]:
    return list(dict.fromkeys(s.policy for s in reader.steps if _is_of(s.policy, reader.run)))


def _shapes(run: RunSpec, reader: _Reader) -> tuple[dict[str, PolicyShape], float]:
    """The policies that made steps, and the steps per hour of the slowest."""
    shapes: dict[str, PolicyShape] = {}
    rates: list[float] = []
    for policy in _policies(reader):
        own = [step for step in reader.steps if step.policy == policy]
        spec = run.policies[policy_name(policy)]
        shapes[policy_name(policy)] = PolicyShape(
            batch_groups=spec.batch_groups,
            max_policy_lag=spec.max_policy_lag,
            train_s=statistics.median(step.busy_s for step in own),
        )
        rates.append(steps_hour_of([step.at_s for step in own]))
    return shapes, min(rates)


def _workload(run: RunSpec, reader: _Reader, results: list[GroupSummary]) -> Workload:
    tokens = sum(sum(summary.lengths) + summary.prompt_tokens for summary in results)
    size_bytes = sum(summary.size_bytes for summary in results)
    drawn = [length for summary in results for length in summary.lengths]
    deltas = [step.delta_bytes for step in reader.steps if step.delta_bytes is not None]
    fulls = [step.full_bytes for step in reader.steps if step.full_bytes]
    pauses = [pause for heard in reader.agents.values() for pause in heard.pauses_s]
    return Workload(
        mean_tokens=max(1.0, statistics.fmean(drawn)),
        max_new_tokens=run.workflow.max_new_tokens,
        prompt_tokens=max(1, round(statistics.median(s.prompt_tokens for s in results))),
        body_bytes_per_token=min(1e4, max(1e-3, size_bytes / max(1, tokens))),
        delta_bytes=round(statistics.median(deltas)) if deltas else 0,
        full_bytes=max(1, max(fulls, default=1)),
        swap_s=statistics.median(pauses) if pauses else 0.0,
    )


def _settings(reader: _Reader) -> dict[str, object]:
    """What the deployment changed in its core, except the rule."""
    changed = msgspec.to_builtins(reader.settings)
    changed.pop("placement")
    # The simulator's agents get their prompts in the offers.
    changed.pop("prompts_on_disk", None)
    return dict(changed)


def _plan(name: str, heard: Heard, reader: _Reader) -> AgentPlan:
    usual = _tokens_s(list(reader.summaries.values())) or UNKNOWN_TOKENS_S
    own = _tokens_s([s for s in reader.summaries.values() if s.agent == name])
    down = [rate for one in reader.agents.values() for rate in one.rates_down]
    rate_down = statistics.median(heard.rates_down or down or [UNKNOWN_RATE])
    return AgentPlan(
        name=name,
        site=name,
        slots=heard.slots,
        tokens_per_s=own or usual,
        up=rate_down,
        down=rate_down,
        usd_hour=heard.usd_hour,
    )


def _tokens_s(results: list[GroupSummary]) -> float | None:
    """Tokens per second of one slot. A result's time has its wait for a slot in it, so the faster
    ones tell how fast a slot is; the very fastest may be accidents of the clock."""
    rates = sorted(
        max(summary.lengths) / summary.generating_s
        for summary in results
        if summary.lengths and summary.generating_s > 0.0
    )
    return rates[math.ceil(0.8 * (len(rates) - 1))] if rates else None


def _rtt_s(name: str, reader: _Reader) -> float:
    own = reader.learnt.get(name)
    found = own.rtt_s if own else None
    return UNKNOWN_RTT_S if found is None else found


def _faults(agents: dict[str, Heard], length_s: float) -> list[Fault]:
    """Comings and goings; an agent starts at 0 unless it first came later."""
    faults: list[Fault] = []
    for name, heard in agents.items():
        for number, life in enumerate(heard.lives):
            if number or life.began_s > 1.0:
                faults.append(Fault(life.began_s, name, "return"))
            last = number == len(heard.lives) - 1
            if not last or length_s - life.heard_s > GONE_S:
                ends_s = (
                    life.heard_s if last else min(life.heard_s, heard.lives[number + 1].began_s)
                )
                faults.append(Fault(ends_s, name, "crash"))
    return sorted(faults)


def _is_of(id: str, run: RunSpec | None) -> bool:
    return run is not None and id.startswith(f"{run.name}/")


def place_of(job: str) -> int | None:
    """The place of a training job in its run's order; None for others."""
    kind, dash, number = job.rpartition("/")[2].partition("-")
    return int(number) if kind == "t" and dash and number.isdigit() else None
