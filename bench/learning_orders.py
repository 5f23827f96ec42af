"""The order of the buffer, earliest deadline first against first in first out, in a scenario where
it matters: what lags and what waste it gives, in virtual time, with the production cores.

Named "slow and fast": four agents near the trainer and two far from it that draw at an eighth of
their speed, so that groups arrive whose deadline is near while younger ones wait; the trainer
binds, so that the buffer is full. Lengths are log-normal (mean 1200 tokens, cv 1.2).
"""

import math
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import numpy as np

from bench.learning_loop import GROUPS, SIBLINGS
from sim.run import Simulation
from sim.scenario import MBIT, RUN, AgentPlan, PolicyShape, Scenario
from sim.workload import Workload
from transport.ids import policy_id
from transport.runs import DataSpec

Order = Literal["edf", "fifo"]

NAME: Final = "policy"
FAST_TOKENS_S, SLOW_TOKENS_S = 100.0, 12.5
SLOTS: Final = 64
LINK: Final = 100.0 * MBIT
SLOW_AND_FAST: Final = (
    *(AgentPlan(f"near-{n}", "near", SLOTS, FAST_TOKENS_S, LINK, LINK) for n in range(4)),
    *(AgentPlan(f"far-{n}", "far", SLOTS, SLOW_TOKENS_S, LINK, LINK) for n in range(2)),
)


class Ordered(NamedTuple):
    """One simulation. ``lags`` are those of each step's groups; ``wasted`` is the share of drawn
    tokens that were never trained on, ``expired`` the groups that became too old."""

    lags: tuple[tuple[int, ...], ...]
    wasted: float
    expired: int

    @property
    def lag_mean(self) -> float:
        return sum(map(sum, self.lags)) / sum(map(len, self.lags))


def scenario(order: Order, max_policy_lag: int, steps: int) -> Scenario:
    """The main job's batch on "slow and fast"."""
    shape = PolicyShape(
        batch_groups=GROUPS, max_policy_lag=max_policy_lag, data=DataSpec(order=order)
    )
    return Scenario(
        name="slow and fast",
        sites={"near": 20.0, "far": 250.0},
        policies={NAME: shape},
        group_size=SIBLINGS,
        steps=steps,
        workload=Workload(mean_tokens=1200.0, cv_tokens=1.2, train_s=40.0),
    )


def ordered(order: Order, max_policy_lag: int, steps: int, seed: int) -> Ordered:
    """Simulate ``steps`` steps."""
    world = Simulation(scenario(order, max_policy_lag, steps), seed=seed, plans=SLOW_AND_FAST)
    result = world.run()
    assert result.finished, f"{order} has not finished {steps} steps"
    made = world.ledger.steps[policy_id(RUN, NAME)][:steps]
    return Ordered(
        lags=tuple(step.lags for step in made),
        wasted=result.wasted_token_share,
        expired=sum(row.expired for row in result.accounting),
    )


def per_drawn(accuracies: Sequence[float], every: int, wasted: float, steps: int) -> float:
    """Mean accuracy over the samples that were drawn, of which a share of ``wasted`` was never
    trained on: the accuracy after as much drawing as ``every``, 2 ``every`` ... ``steps`` batches
    take. ``accuracies`` are those after 0, ``every``, 2 ``every`` ... steps of training.

    Example: every = 10, wasted = 1/5: after drawing 10 batches 8 were trained on, and the accuracy
    is taken on the line between those after 0 and 10 steps.
    """
    trained = [every * n * (1.0 - wasted) for n in range(1, math.floor(steps / every) + 1)]
    known = [every * n for n in range(len(accuracies))]
    return float(np.mean(np.interp(trained, known, accuracies)))
