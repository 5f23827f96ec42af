"""A scenario with its keys varied: every combination of their values, over the same seeds.

What always holds: points come in the order of the values, the last key varying fastest; all points
see the same seeds.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.core.settings import PlacementName
from sim.compare import Measure, measure, problems
from sim.overrides import MAX_POINTS, with_value
from sim.parallel import OnDone, Task, simulate_some
from sim.scenario import Scenario
from transport.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Point:
    """One combination of values, and what it gave; None: interrupted before."""

    values: dict[str, Any]
    measure: Measure | None


@dataclass(frozen=True, slots=True)
class Sweep:
    scenario: str
    placement: str
    keys: tuple[str, ...]
    points: list[Point]
    problems: list[str]


def sweep(
    scenario: Scenario,
    axes: Mapping[str, Sequence[Any]],
    *,
    placement: PlacementName,
    seeds: Sequence[int],
    processes: int = 1,
    on_done: OnDone | None = None,
) -> Sweep:
    """Every combination of the values of ``axes`` (key to values).

    Raises:
        ConfigError: a key or value does not fit, there is nothing to vary or too much.
    """
    combinations = list(itertools.product(*axes.values()))
    if not axes:
        raise ConfigError("sweep: nothing varies; give --set key=v1,v2,v3 or --range key=a:b:n")
    if len(combinations) > MAX_POINTS:
        raise ConfigError(f"sweep: {len(combinations)} points; at most {MAX_POINTS} make sense")
    # Checked before anything runs: a wrong last value should not cost the first hour.
    scenarios = []
    for combination in combinations:
        changed = scenario
        for key, value in zip(axes, combination, strict=True):
            changed = with_value(changed, key, value)
        changed.core_settings(placement)
        scenarios.append(changed)
    tasks = [Task(changed, placement, seed) for changed in scenarios for seed in seeds]
    results = simulate_some(tasks, processes, on_done)
    points = []
    for place, combination in enumerate(combinations):
        found = [r for r in results[place * len(seeds) : (place + 1) * len(seeds)] if r is not None]
        name = ", ".join(f"{k}={v}" for k, v in zip(axes, combination, strict=True))
        values = dict(zip(axes, combination, strict=True))
        points.append(Point(values, measure(name, found) if found else None))
    return Sweep(
        scenario=scenario.name,
        placement=placement,
        keys=tuple(axes),
        points=points,
        problems=problems([result for result in results if result is not None]),
    )
