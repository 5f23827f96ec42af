"""The same scenario under several placement rules and seeds, side by side on the machine's cores.

What always holds: a seed gives every rule the same fleet, work and faults, so rules are compared
seed by seed; results come in the order of rules and seeds, whatever finished first.
"""

import math
import multiprocessing
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from scheduler.core.settings import PlacementName
from sim.run import Result, simulate
from sim.scenario import Scenario

RULES: Final[tuple[PlacementName, ...]] = (
    "finish-time",
    "least-outstanding",
    "round-robin",
    "nearest",
    "two-choices",
)

_T_95: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Two-sided 95 % quantiles of Student's t for 1 to 10 degrees of freedom."""


class Task(NamedTuple):
    scenario: Scenario
    placement: PlacementName
    seed: int


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and its two-sided 95 % confidence interval (Student's t)."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"


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
    """Steps per hour of the one over the other, seed by seed."""
    by_seed = {result.seed: result.steps_hour for result in references}
    return [result.steps_hour / by_seed[result.seed] for result in results]


def simulate_all(tasks: Sequence[Task], processes: int) -> list[Result]:
    """Results in the order of ``tasks``."""
    if processes <= 1 or len(tasks) <= 1:
        return [simulate(*task) for task in tasks]
    with multiprocessing.get_context("spawn").Pool(min(processes, len(tasks))) as pool:
        return pool.starmap(simulate, tasks, chunksize=1)
