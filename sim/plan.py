"""Will the trainer stay busy with these agents and links, what binds, and what would help?

Two answers beside each other. By formula: what the production scheduler says of its demand
(``scheduler/core/demand.py``), evaluated by its core at the end of a simulation of that world. By
experiment: the same seeds with one thing added, so that only the addition differs (common random
numbers: fleet, lengths and faults are those of the seed, a new agent is added at the end).

What always holds: the books of every simulation are checked; a gain counts as one only when the
lower end of its 95 % interval is above ``HELPS``; prices are per hour of virtual time, egress by
the shipped tables of what providers charge.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from scheduler.core.settings import PlacementName
from sim.compare import Interval, interval
from sim.overrides import with_value
from sim.parallel import OnDone, map_some
from sim.run import Simulation
from sim.scenario import AgentPlan, Scenario
from transport.status import DemandStatus

GB: Final = 1e9
HELPS: Final = 1.01
BUSY: Final = 0.05
"""A trainer that waits for no more than this share of its time stays busy."""

MAX_CLASSES: Final = 6

Kind = Literal["nothing", "agent", "links", "delta", "bound", "trainer"]
BINDS: Final[dict[Kind, str]] = {
    "agent": "generation",
    "links": "links",
    "delta": "links",
    "bound": "staleness",
    "trainer": "training",
}


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """The scenario with one thing changed; ``usd_hour`` is what that costs, None: nobody knows."""

    what: str
    kind: Kind
    scenario: Scenario
    added: tuple[AgentPlan, ...] = ()
    link_factor: float = 1.0
    usd_hour: float | None = 0.0


class Costs(msgspec.Struct, frozen=True):
    """US dollars of one simulation: agents' time, bytes of weights and of results."""

    agents_usd: float
    weights_usd: float
    results_usd: float

    @property
    def total_usd(self) -> float:
        return self.agents_usd + self.weights_usd + self.results_usd


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a variant gave under one seed; ``steps`` are those of all policies."""

    seed: int
    steps_hour: float
    steps: int
    waiting_share: float
    wasted_share: float
    lag_mean: float
    finished: bool
    costs: Costs
    demand: DemandStatus | None
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Addition:
    """``ratio`` is steps per hour over the unchanged scenario's, seed by seed; ``formula`` the
    steps per hour that the scheduler's formula gives for the changed world."""

    what: str
    kind: Kind
    usd_hour: float | None
    steps_hour: Interval
    ratio: Interval
    formula_steps_hour: float | None
    helps: bool
    finished: int


@dataclass(frozen=True, slots=True)
class Plan:
    """``binds`` by formula and by experiment; ``best`` is the cheapest addition that helps, ``""``
    when none does."""

    scenario: str
    placement: str
    seeds: tuple[int, ...]
    steps_hour: Interval
    waiting_share: Interval
    wasted_share: Interval
    lag_mean: Interval
    stays_busy: bool
    formula: DemandStatus | None
    binds_by_formula: str
    binds_by_experiment: str
    cost_step_usd: Interval
    egress_step_usd: Interval
    additions: list[Addition]
    best: str
    interrupted: bool
    problems: list[str]


def make_plan(
    scenario: Scenario,
    *,
    placement: PlacementName,
    seeds: Sequence[int],
    processes: int = 1,
    on_done: OnDone | None = None,
) -> Plan:
    """Simulate the scenario and its candidate additions.

    Raises:
        ConfigError: the scenario does not fit.
        KeyboardInterrupt: interrupted before the scenario itself was simulated once.
    """
    base = Variant(what="as it is", kind="nothing", scenario=scenario)
    variants = [base, *candidates(scenario, seeds[0])]
    tasks = [(variant, placement, seed) for seed in seeds for variant in variants]
    found = map_some(_try, tasks, processes, on_done)
    by_variant = [
        [o for o in found[place :: len(variants)] if o is not None]
        for place in range(len(variants))
    ]
    own = by_variant[0]
    if not own:
        raise KeyboardInterrupt
    additions = [
        _addition(variant, outcomes, own)
        for variant, outcomes in zip(variants[1:], by_variant[1:], strict=True)
        if outcomes
    ]
    waiting = interval([outcome.waiting_share for outcome in own])
    formula = own[0].demand
    return Plan(
        scenario=scenario.name,
        placement=placement,
        seeds=tuple(outcome.seed for outcome in own),
        steps_hour=interval([outcome.steps_hour for outcome in own]),
        waiting_share=waiting,
        wasted_share=interval([outcome.wasted_share for outcome in own]),
        lag_mean=interval([outcome.lag_mean for outcome in own]),
        stays_busy=waiting.mean <= BUSY,
        formula=formula,
        binds_by_formula="nothing" if formula is None else formula.binds,
        binds_by_experiment=_binding(additions, waiting.mean),
        cost_step_usd=interval([o.costs.total_usd / max(1, o.steps) for o in own]),
        egress_step_usd=interval(
            [(o.costs.weights_usd + o.costs.results_usd) / max(1, o.steps) for o in own]
        ),
        additions=additions,
        best=_best(additions),
        interrupted=None in found,
        problems=[p for outcomes in by_variant for o in outcomes for p in o.problems],
    )


def candidates(scenario: Scenario, seed: int) -> list[Variant]:
    """One more agent of each class, faster links, a smaller delta, a larger bound, a faster
    trainer."""
    workload = scenario.workload
    found = [
        Variant(
            what=f"one more agent like {plan.name} ({plan.slots} slots at {plan.tokens_per_s:g}"
            " tokens/s)",
            kind="agent",
            scenario=scenario,
            added=(msgspec.structs.replace(plan, name=f"{plan.site}-added"),),
            usd_hour=plan.usd_hour,
        )
        for plan in classes(scenario.fleet(seed))
    ]
    found.append(
        Variant(
            what="access links twice as fast",
            kind="links",
            scenario=scenario,
            link_factor=2.0,
            usd_hour=None,
        )
    )
    if workload.delta_bytes > 1 and not workload.deltas_file:
        smaller = with_value(scenario, "workload.delta_bytes", workload.delta_bytes // 2)
        found.append(Variant(what="half the delta", kind="delta", scenario=smaller))
    looser, faster = scenario, with_value(scenario, "workload.train_s", workload.train_s / 2)
    for name, shape in scenario.policies.items():
        key = f"policies.{name}"
        looser = with_value(looser, f"{key}.max_policy_lag", shape.max_policy_lag + 1)
        if shape.train_s is not None:
            faster = with_value(faster, f"{key}.train_s", shape.train_s / 2)
    found.append(Variant(what="a policy lag of one more step", kind="bound", scenario=looser))
    trainer = "a trainer twice as fast"
    found.append(Variant(what=trainer, kind="trainer", scenario=faster, usd_hour=None))
    return found


def classes(fleet: Sequence[AgentPlan]) -> list[AgentPlan]:
    """A typical agent of each kind of hardware, fastest first: of those with the same tokens per
    second the one in the middle by slots and link."""
    kinds: dict[str, list[AgentPlan]] = {}
    for plan in fleet:
        kinds.setdefault(plan.hardware, []).append(plan)
    typical = [
        sorted(plans, key=lambda plan: (plan.slots, plan.down, plan.name))[len(plans) // 2]
        for plans in kinds.values()
    ]
    return sorted(typical, key=lambda plan: (-plan.tokens_per_s, plan.name))[:MAX_CLASSES]


def costs(simulation: Simulation) -> Costs:
    """What a simulation has cost until now, with the egress that providers charge."""
    scenario, topology = simulation.scenario, simulation.scenario.topology()
    hours = simulation.kernel.now / 3600.0
    agents_usd = weights_usd = results_usd = 0.0
    for plan in simulation.plans:
        up, down = simulation.link_bytes(plan.name)
        agents_usd += plan.usd_hour * hours
        weights_usd += topology.egress_usd_gb(scenario.cloud, plan.site) * down / GB
        results_usd += topology.egress_usd_gb(plan.site, scenario.cloud) * up / GB
    return Costs(agents_usd, weights_usd, results_usd)


def _try(task: tuple[Variant, PlacementName, int]) -> Outcome:
    variant, placement, seed = task
    scenario = variant.scenario
    factor = variant.link_factor
    plans = [
        msgspec.structs.replace(plan, up=plan.up * factor, down=plan.down * factor)
        for plan in scenario.fleet(seed)
    ]
    simulation = Simulation(
        scenario, placement=placement, seed=seed, plans=[*plans, *variant.added]
    )
    result = simulation.run()
    demand = simulation.scheduler.core.demand()
    return Outcome(
        seed=seed,
        steps_hour=result.steps_hour,
        steps=sum(result.steps.values()),
        waiting_share=result.waiting_share,
        wasted_share=result.wasted_share,
        lag_mean=result.lag_mean,
        finished=result.finished,
        costs=costs(simulation),
        demand=demand[0] if demand else None,
        problems=tuple(f"{variant.what}, seed {seed}: {text}" for text in result.problems),
    )


def _addition(variant: Variant, outcomes: list[Outcome], own: list[Outcome]) -> Addition:
    before = {outcome.seed: outcome.steps_hour for outcome in own}
    ratio = interval([o.steps_hour / max(before[o.seed], 1e-9) for o in outcomes])
    formulas = [o.demand.steps_hour for o in outcomes if o.demand is not None]
    return Addition(
        what=variant.what,
        kind=variant.kind,
        usd_hour=variant.usd_hour,
        steps_hour=interval([outcome.steps_hour for outcome in outcomes]),
        ratio=ratio,
        formula_steps_hour=sum(formulas) / len(formulas) if formulas else None,
        helps=ratio.low > HELPS,
        finished=sum(outcome.finished for outcome in outcomes),
    )


def _binding(additions: Sequence[Addition], waiting_share: float) -> str:
    """What the addition with the largest gain adds to; training when the trainer never waits."""
    if waiting_share <= BUSY:
        return "training"
    helpful = [addition for addition in additions if addition.helps]
    if not helpful:
        return "nothing alone"
    return BINDS[max(helpful, key=lambda addition: addition.ratio.mean).kind]


def _best(additions: Sequence[Addition]) -> str:
    """The lowest known price that helps; among equals the largest gain."""
    helpful = [addition for addition in additions if addition.helps]
    priced = [addition for addition in helpful if addition.usd_hour is not None]
    if not helpful:
        return ""
    return min(priced or helpful, key=lambda one: (one.usd_hour or 0.0, -one.ratio.mean)).what
