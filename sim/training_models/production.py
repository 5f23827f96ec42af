"""farflow itself on the same setting: the production cores in ``sim.run.Simulation``.

What always holds: GPUs are split as for the other decoupled systems; an agent has one GPU per
policy of the run, whose engines its trajectories pass through. Its engine model has a
constant rate per slot, that of a full GPU: where slots are empty, a real one would be faster.
"""

import math
from typing import Final

from sim.run import Simulation
from sim.scenario import AgentsSpec, PolicyShape, Scenario
from sim.training_models.astraflow import CHANGED
from sim.training_models.parameters import Outcome, Setting, pace
from sim.workload import Workload

CHANGED_BYTES: Final = 2.0
"""Of a delta per changed element: the upper end of 1.2 to 2.0 [study]."""
CELLS_S: Final = 75e6 * 32
"""Elements per second that are compared and encoded, and again decoded: 2.65 s for 397 M on two
cores [bench: fanout], on 32 cores [assumed to scale]."""
SWAP_S: Final = 0.3
"""Pause of an engine for new weights: 1.1 ms measured on a CPU engine [bench: fanout]; on a GPU,
with copies of changed cells and their places over PCIe, more [assumed]."""


MAX_PREFETCH: Final = 64
"""The most that the daemon's configuration takes."""


def publish_s(setting: Setting) -> float:
    """From a step's end until its version serves, beside network and pause: encoding, the store's
    own copy, decoding. The trainer goes on meanwhile."""
    return 3.0 * setting.model.parameters / CELLS_S


def tuned_prefetch(setting: Setting) -> int:
    """Groups that an agent holds beyond its slots, so that slots do not stay empty. The scheduler
    counts a group as a whole until its last sibling is done, so a full engine of n slots needs
    n x longest / mean sequences at the agent; one group more covers the round trip.

    Example: 64 slots, groups of 8 whose longest is 2.5 means: 64 x 1.5 / 8 + 1 = 13 groups.
    """
    slots = setting.slots * setting.policies
    beyond = slots * (setting.longest / setting.mean - 1.0) / setting.group_size
    return min(MAX_PREFETCH, math.ceil(beyond) + 1)


def scenario(
    setting: Setting,
    *,
    swap_s: float = SWAP_S,
    prefetch_groups: int | None = None,
    tokens_share: float = 1.0,
) -> Scenario:
    """The setting as a scenario; ``prefetch_groups`` None: ``tuned_prefetch``; ``tokens_share``
    slows decoding.

    Raises:
        ValueError: there are too few GPUs.
    """
    rollout, each = setting.split()
    if not rollout:
        raise ValueError("gpus: too few to give generation and training their own")
    slots = setting.slots * setting.policies
    if prefetch_groups is None:
        prefetch_groups = tuned_prefetch(setting)
    names = [f"policy{n}" for n in range(setting.policies)]
    shape = PolicyShape(
        batch_groups=setting.batch_groups,
        max_policy_lag=setting.max_lag,
        train_s=setting.train_s(each),
    )
    return Scenario(
        name="experiment",
        sites={"pool": 1.0},
        nic_mbit=1e6,
        agents=AgentsSpec(
            per_site=max(1, rollout // setting.policies),
            slots=(slots,),
            tokens_per_s=(tokens_share / setting.token_s(setting.slots),),
            link_mbit=(10_000.0,),
        ),
        policies=dict.fromkeys(names, shape),
        group_size=setting.group_size,
        steps=setting.steps,
        limit_s=1e7,
        workload=Workload(
            mean_tokens=setting.mean_tokens,
            cv_tokens=setting.cv_tokens,
            max_new_tokens=setting.max_tokens,
            prompt_tokens=setting.prompt_tokens,
            train_s=shape.train_s or 0.0,
            publish_s=publish_s(setting),
            delta_bytes=round(CHANGED * setting.model.parameters * CHANGED_BYTES),
            full_bytes=round(setting.model.weight_bytes),
            swap_s=swap_s,
        ),
        scheduler={"prefetch_groups": prefetch_groups},
    )


def train_farflow(
    setting: Setting,
    *,
    swap_s: float = SWAP_S,
    prefetch_groups: int | None = None,
    tokens_share: float = 1.0,
) -> Outcome:
    """Simulate it under the default placement rule.

    Raises:
        ValueError: there are too few GPUs.
    """
    _, each = setting.split()
    plan = scenario(
        setting, swap_s=swap_s, prefetch_groups=prefetch_groups, tokens_share=tokens_share
    )
    return measure("farflow", plan, setting.warm_up, setting.train_s(each))


def measure(system: str, plan: Scenario, warm_up: int, train_s: float) -> Outcome:
    """Run a scenario; the slowest policy's pace after the first steps."""
    simulation = Simulation(plan)
    result = simulation.run()
    if result.problems or not result.finished:
        raise ValueError(f"scenario {plan.name}: {result.problems or 'limit_s came first'}")
    ledger = simulation.ledger
    ends_s = [
        [step.at_s for step in steps if step.step <= plan.steps] for steps in ledger.steps.values()
    ]
    step_s = max(pace(ends, warm_up) for ends in ends_s)
    return Outcome(
        system=system,
        step_s=step_s,
        waiting_share=max(0.0, 1.0 - train_s / step_s),
        wasted_share=result.wasted_share,
        lag_mean=result.lag_mean,
        drawn_tokens=ledger.drawn_tokens,
        trained_tokens=ledger.trained_tokens,
    )
