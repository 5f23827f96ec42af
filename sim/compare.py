"""The same scenario under several placement rules and seeds, side by side on the machine's cores.

What always holds: a seed gives every rule the same fleet, work and faults, so rules are compared
seed by seed; results come in the order of rules and seeds, whatever finished first; a rule's ratio
is taken over the seeds that both rules finished.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from scheduler.core.settings import PlacementName
from sim.parallel import OnDone, Task, simulate_some
from sim.run import Result
from sim.scenario import Scenario
from transport.errors import ConfigError

__all__ = [
    "RULES",
    "Comparison",
    "Interval",
    "Measure",
    "Task",
    "compare",
    "interval",
    "parse_rules",
    "ratios",
    "simulate_all",
]

RULES: Final[tuple[PlacementName, ...]] = (
    "finish-time",
    "least-outstanding",
    "round-robin",
    "nearest",
    "two-choices",
)

_T_95: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Two-sided 95 % quantiles of Student's t for 1 to 10 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and its two-sided 95 % confidence interval (Student's t)."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True, slots=True)
class Measure:
    """One way to run a scenario, over its seeds. ``ratio`` is steps per hour over the reference's,
    seed by seed; None for the reference itself. ``finished`` counts the seeds that made all steps
    within the scenario's limit."""

    name: str
    seeds: tuple[int, ...]
    finished: int
    steps_hour: Interval
    wasted_share: Interval
    lag_mean: Interval
    waiting_share: Interval
    turnaround_p50_s: Interval
    turnaround_p95_s: Interval
    ratio: Interval | None = None


@dataclass(slots=True)
class Comparison:
    """``asked`` results were asked for; fewer came when it was interrupted. ``problems`` are those
    of the books, and must be none."""

    scenario: str
    reference: str
    asked: int
    measures: list[Measure]
    results: list[Result]
    problems: list[str] = field(default_factory=list)


def parse_rules(text: str) -> list[PlacementName]:
    """``finish-time,nearest`` or ``all``; raises ConfigError for a rule that is not there."""
    if text == "all":
        return list(RULES)
    found: list[PlacementName] = []
    for name in text.split(","):
        known = [rule for rule in RULES if rule == name.strip()]
        if not known:
            raise ConfigError(f"--placement: no rule {name!r}; there are {', '.join(RULES)}, all")
        found += [rule for rule in known if rule not in found]
    return found


def compare(
    scenario: Scenario,
    rules: Sequence[PlacementName],
    seeds: Sequence[int],
    *,
    processes: int = 1,
    on_done: OnDone | None = None,
) -> Comparison:
    """All rules on all seeds; the first rule is the reference."""
    # Seed by seed, so that an interruption leaves pairs.
    tasks = [Task(scenario, rule, seed) for seed in seeds for rule in rules]
    results = [r for r in simulate_some(tasks, processes, on_done) if r is not None]
    by_rule = {rule: [r for r in results if r.placement == rule] for rule in rules}
    reference = by_rule[rules[0]]
    measures = [
        measure(rule, found, None if rule == rules[0] else reference)
        for rule, found in by_rule.items()
        if found
    ]
    return Comparison(
        scenario=scenario.name,
        reference=rules[0],
        asked=len(tasks),
        measures=measures,
        results=[result for found in by_rule.values() for result in found],
        problems=problems(results),
    )


def measure(
    name: str, results: Sequence[Result], reference: Sequence[Result] | None = None
) -> Measure:
    """At least one result."""
    paired = ratios(results, reference or ())

    def of(value: str) -> Interval:
        return interval([getattr(result, value) for result in results])

    return Measure(
        name=name,
        seeds=tuple(result.seed for result in results),
        finished=sum(result.finished for result in results),
        steps_hour=of("steps_hour"),
        wasted_share=of("wasted_share"),
        lag_mean=of("lag_mean"),
        waiting_share=of("waiting_share"),
        turnaround_p50_s=of("turnaround_p50_s"),
        turnaround_p95_s=of("turnaround_p95_s"),
        ratio=interval(paired) if paired else None,
    )


def problems(results: Sequence[Result]) -> list[str]:
    """Where books contradict each other, with the run."""
    return [
        f"{result.placement}, seed {result.seed}: {problem}"
        for result in results
        for problem in result.problems
    ]


def interval(values: Sequence[float]) -> Interval:
    """At least one value; a single one gives no width."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, mean, mean)
    freedom = len(values) - 1
    t = _T_95[freedom - 1] if freedom <= len(_T_95) else 1.96 + 2.4 / freedom
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def ratios(results: Sequence[Result], references: Sequence[Result]) -> list[float]:
    """Steps per hour of the one over the other, seed by seed where there are both."""
    by_seed = {result.seed: result.steps_hour for result in references}
    return [
        result.steps_hour / by_seed[result.seed]
        for result in results
        if by_seed.get(result.seed, 0.0) > 0.0
    ]


def simulate_all(tasks: Sequence[Task], processes: int) -> list[Result]:
    """Results in the order of ``tasks``.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    found = simulate_some(tasks, processes)
    results = [result for result in found if result is not None]
    if len(results) < len(tasks):
        raise KeyboardInterrupt
    return results
