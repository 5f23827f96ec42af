"""What a run gave, in numbers that a simulation and a deployment of real daemons both have.

What always holds: both rungs are measured by this code from the same two sources: the steps that
the scheduler's core recorded (``metrics.jsonl``) and its status. Times are the scheduler's.
"""

from collections.abc import Mapping, Sequence

import msgspec

from transport.status import RunStatus, StepStatus


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """``steps_hour`` is of the slowest policy, from its first recorded step after ``skip_steps`` on
    (what comes before is the filling of an empty pipeline); ``lag_mean`` over the groups of these
    steps; turnaround is from a job's creation to its accepted result, over all training jobs."""

    steps: int
    groups: int
    steps_hour: float
    lag_mean: float
    turnaround_p50_s: float
    turnaround_p95_s: float
    busy_share: float
    delta_bytes: float


NAMES = ("steps_hour", "lag_mean", "turnaround_p50_s", "turnaround_p95_s")
"""What is compared."""


def measure(
    steps: Sequence[StepStatus],
    run: RunStatus,
    *,
    most: Mapping[str, int],
    batch_groups: Mapping[str, int],
    skip_steps: int = 2,
) -> Measures:
    """``most`` and ``batch_groups`` by policy id: later steps than ``most`` are left out."""
    rates: list[float] = []
    lags: list[float] = []
    deltas: list[int] = []
    busy_s = span_s = 0.0
    count = groups = 0
    for policy, last in most.items():
        mine = [s for s in steps if s.policy == policy and skip_steps <= s.step <= last]
        if len(mine) < 2:
            rates.append(0.0)
            continue
        took_s = mine[-1].at_s - mine[0].at_s
        rates.append(3600.0 * (mine[-1].step - mine[0].step) / max(took_s, 1e-9))
        lags += [step.policy_lag_mean for step in mine]
        deltas += [step.delta_bytes for step in mine if step.delta_bytes is not None]
        busy_s += sum(step.busy_s for step in mine[1:])
        span_s += took_s
        count = max(count, mine[-1].step)
        groups += mine[-1].step * batch_groups[policy]
    return Measures(
        steps=count,
        groups=groups,
        steps_hour=min(rates, default=0.0),
        lag_mean=sum(lags) / max(1, len(lags)),
        turnaround_p50_s=run.turnaround_p50_s or 0.0,
        turnaround_p95_s=run.turnaround_p95_s or 0.0,
        busy_share=busy_s / max(span_s, 1e-9),
        delta_bytes=sum(deltas) / max(1, len(deltas)),
    )
