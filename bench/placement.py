"""What the placement rule is worth, on the simulator: the production cores in virtual time.

Only the rule changes between two runs of a seed: fleet, work, admission, buffers, prefetch and what
is dropped are the same. Rows by scenario:

    aws12-mixed           12 AWS regions; slots, speed, links and lengths drawn by the seed; one
                          sequence per group and 64 groups per batch, as in the study that the
                          profile is from
    aws12-mixed, groups   the same work in groups of 8 siblings, 8 groups per batch
    failures              each agent crashes every 600 s on average, leases of 30 s
    identical             24 equal agents: where a group goes does not matter; what ours gains here
                          is not placement's but comes of stopping, as part of its freshness, what
                          has missed its last batch, which the baselines do not
    no deadlock           all agents slow and bound 0; a dead trainer beside a live one; a trainer
                          that dies and comes back

Beside the first two stands what ``bench.oracle`` makes of the same seeds, knowing every length.

``steps_hour`` is over 60 steps from time 0 (8 seeds); intervals, in ``reference``, are 95 % over
the seeds; ratios are taken seed by seed. ``wasted`` counts attempts that began and were not trained
on: results that came too late or twice, and attempts that were stopped. ``--quick`` has 2 seeds and
12 steps; its intervals are too wide for targets, so that rows with an interval have none.
"""

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from bench.oracle import Schedule, clairvoyant, fresh_capacity, trainer_bound
from bench.placement_speed import decision_row
from bench.report import Row, main
from scheduler.core.settings import PlacementName
from sim.compare import RULES, Interval, Task, interval, ratios, simulate_all
from sim.faults import FaultSpec
from sim.parallel import cores, map_some
from sim.run import Result
from sim.scenario import AgentsSpec, PolicyShape, Scenario, load_scenario
from sim.workload import Workload

OURS: PlacementName = "finish-time"
REFERENCE: PlacementName = "least-outstanding"
MIXED = "aws12-mixed"
SEEDS, STEPS = 8, 60
QUICK_SEEDS, QUICK_STEPS = 2, 12

RATIO_TARGET, RATIO_LOW_TARGET = 1.25, 1.15
WASTED_TARGET = 0.5
IDENTICAL_TARGET = 0.99
LIVE_SHARE_TARGET = 0.95

Measured = dict[PlacementName, list[Result]]


def mixed() -> Scenario:
    return load_scenario(MIXED)


def grouped(scenario: Scenario) -> Scenario:
    """The same number of sequences per batch, in groups of 8."""
    shape = PolicyShape(batch_groups=8, max_policy_lag=2)
    return msgspec.structs.replace(
        scenario, name=f"{MIXED}, groups of 8", group_size=8, policies={"policy": shape}
    )


def identical(scenario: Scenario) -> Scenario:
    agents = AgentsSpec(per_site=2, slots=(8,), tokens_per_s=(50.0,), link_mbit=(1000.0,))
    return msgspec.structs.replace(scenario, name="identical", agents=agents)


def failing(scenario: Scenario) -> Scenario:
    return msgspec.structs.replace(
        scenario,
        name="failures",
        faults=FaultSpec(agent_mtbf_s=600.0, agent_down_s=30.0),
        scheduler={"lease_s": 30.0},
    )


def all_slow(steps: int) -> Scenario:
    """Four agents over 20 Mbit/s and 25 tokens/s, and nothing older than the head is taken."""
    return Scenario(
        name="all slow, bound 0",
        sites={"far": 300.0},
        agents=AgentsSpec(per_site=4, slots=(4,), tokens_per_s=(25.0,), link_mbit=(20.0,)),
        policies={"policy": PolicyShape(batch_groups=8, max_policy_lag=0)},
        steps=steps,
        limit_s=steps * 3000.0,
        workload=Workload(mean_tokens=600.0),
    )


def two_policies(steps: int, faults: FaultSpec) -> Scenario:
    """Both learn from the same groups."""
    return Scenario(
        name="two policies",
        sites={"near": 20.0, "far": 150.0},
        agents=AgentsSpec(per_site=6, slots=(8,), tokens_per_s=(50.0,), link_mbit=(1000.0,)),
        policies={
            name: PolicyShape(batch_groups=16, max_policy_lag=4) for name in ("alpha", "beta")
        },
        steps=steps,
        limit_s=steps * 300.0,
        workload=Workload(mean_tokens=300.0, delta_bytes=10_000_000),
        faults=faults,
    )


# ---- rules against each other ------------------------------------------------------------------


def compared(scenario: Scenario, rules: Sequence[PlacementName], seeds: int) -> Measured:
    tasks = [Task(scenario, rule, seed) for seed in range(seeds) for rule in rules]
    results = simulate_all(tasks, cores())
    return {rule: [r for r in results if r.placement == rule] for rule in rules}


def rule_rows(scenario: Scenario, found: Measured, *, targets: bool) -> list[Row]:
    """Steps per hour and wasted share of every rule, and ours against the reference."""
    name = scenario.name
    rows: list[Row] = []
    for rule, results in found.items():
        at_all = all(result.finished and not result.problems for result in results)
        steps = interval([result.steps_hour for result in results])
        wasted = interval([result.wasted_share for result in results])
        beside = rule != REFERENCE and REFERENCE in found
        ratio = interval(ratios(results, found[REFERENCE])) if beside else None
        rows += [
            Row(
                metric=f"{name}: {rule}",
                value=steps.mean,
                unit="steps/h",
                reference=f"{REFERENCE}, ratio {_span(ratio)}" if ratio else f"{_span(steps)}",
                ratio=ratio.mean if ratio else None,
                target="every run ends and its books balance",
                ok=at_all,
            ),
            Row(
                metric=f"{name}: {rule}, wasted",
                value=wasted.mean,
                unit="share of attempts",
                reference=_span(wasted),
            ),
        ]
    return rows + gain_rows(name, found, targets=targets)


def gain_rows(name: str, found: Measured, *, targets: bool) -> list[Row]:
    """Ours against the reference, seed by seed."""
    gain = interval(ratios(found[OURS], found[REFERENCE]))
    pairs = zip(found[OURS], found[REFERENCE], strict=True)
    wasted = interval([one.wasted_share / max(other.wasted_share, 1e-9) for one, other in pairs])
    enough = gain.mean >= RATIO_TARGET and gain.low > RATIO_LOW_TARGET
    return [
        Row(
            metric=f"{name}: gain",
            value=gain.mean,
            unit="x",
            reference=f"{REFERENCE}, {_span(gain)}",
            ratio=gain.mean,
            target=f">= {RATIO_TARGET}, lower end > {RATIO_LOW_TARGET}" if targets else "",
            ok=enough or not targets,
        ),
        Row(
            metric=f"{name}: wasted against the reference",
            value=wasted.mean,
            unit="x",
            reference=f"{REFERENCE}, {_span(wasted)}",
            ratio=wasted.mean,
            target=f"<= {WASTED_TARGET}" if targets else "",
            ok=wasted.mean <= WASTED_TARGET or not targets,
        ),
    ]


def _span(found: Interval) -> str:
    return f"95 % [{found.low:.4g}, {found.high:.4g}]"


# ---- what could be reached ---------------------------------------------------------------------


def oracle_rows(scenario: Scenario, found: Measured) -> list[Row]:
    """The clairvoyant schedule of each seed, every rule's part of it, and the trainer's bound.
    The second schedule gives up no larger share of the groups than ours did on that seed."""
    name = scenario.name
    free = [(scenario, result.seed, 1.0) for result in found[OURS]]
    bound_by_ours = [(scenario, result.seed, _given_up(result)) for result in found[OURS]]
    schedules = [s for s in map_some(_foresee, [*free, *bound_by_ours], cores()) if s is not None]
    best = {task[1]: schedule for task, schedule in zip(free, schedules, strict=False)}
    same = {task[1]: s for task, s in zip(free, schedules[len(free) :], strict=True)}
    bounds = {seed: trainer_bound(scenario, seed) for seed in best}
    capacity = statistics.fmean(fresh_capacity(scenario, seed) for seed in best)
    reached = interval([best[seed].steps_hour / bound for seed, bound in bounds.items()])
    above = all(
        best[result.seed].steps_hour >= result.steps_hour
        for results in found.values()
        for result in results
    )
    below = all(best[seed].steps_hour <= bound + 1e-9 for seed, bound in bounds.items())
    rows = [
        Row(
            metric=f"{name}: oracle, knows all lengths",
            value=statistics.fmean(s.steps_hour for s in best.values()),
            unit="steps/h",
            reference=f"a trainer that never waits, {_span(reached)}",
            ratio=reached.mean,
            target="above every rule and not above the trainer, on each seed",
            ok=above and below,
        ),
        _share_row(f"{name}: oracle, groups given up", [s.dropped_share for s in best.values()]),
        Row(
            metric=f"{name}: oracle that gives up no more groups than {OURS}",
            value=_mean(s.steps_hour for s in same.values() if s.finished),
            unit="steps/h",
            reference=f"oracle, {sum(s.finished for s in same.values())} of {len(same)} seeds",
            ratio=_mean(s.steps_hour / best[n].steps_hour for n, s in same.items() if s.finished),
        ),
        Row(
            metric=f"{name}: fresh token capacity, lengths as drawn",
            value=capacity,
            unit="steps/h",
            reference="a trainer that never waits",
            ratio=capacity / statistics.fmean(bounds.values()),
        ),
    ]
    rows.append(
        _part_row(f"{name}: {OURS}, of the oracle that gives up no more", found[OURS], same)
    )
    for rule, results in found.items():
        rows.append(_part_row(f"{name}: {rule}, of the oracle", results, best))
        rows.append(_share_row(f"{name}: {rule}, groups given up", map(_given_up, results)))
    return rows


def _part_row(metric: str, results: Sequence[Result], schedules: dict[int, Schedule]) -> Row:
    """A rule's steps per hour over a schedule's; seeds for which there is no schedule are out."""
    parts = [
        result.steps_hour / schedules[result.seed].steps_hour
        for result in results
        if schedules[result.seed].finished
    ]
    part = interval(parts or [0.0])
    return Row(
        metric=metric,
        value=part.mean,
        unit="share",
        reference=f"oracle, {len(parts)} of {len(results)} seeds, {_span(part)}",
        ratio=part.mean,
    )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.fmean(found) if found else 0.0


def _share_row(metric: str, shares: Iterable[float]) -> Row:
    return Row(metric=metric, value=statistics.fmean(shares), unit="share of groups")


def _foresee(task: tuple[Scenario, int, float]) -> Schedule:
    scenario, seed, most_dropped = task
    return clairvoyant(scenario, seed, most_dropped=most_dropped)


def _given_up(result: Result) -> float:
    """Of the groups whose fate is known, those that were not trained on."""
    trained = sum(row.trained + row.taken for row in result.accounting if row.kind == "train")
    given_up = sum(
        row.expired + row.dropped + row.failed for row in result.accounting if row.kind == "train"
    )
    return given_up / max(1, trained + given_up)


def identical_rows(scenario: Scenario, seeds: int, rules: Sequence[PlacementName]) -> list[Row]:
    """Ours against the best of all rules where no place is better, and against the reference: what
    it gains by stopping groups alone."""
    found = compared(scenario, rules, seeds)
    means = {rule: statistics.fmean(r.steps_hour for r in found[rule]) for rule in rules}
    best = max(rules, key=lambda rule: means[rule])
    share = means[OURS] / means[best]
    return [
        Row(
            metric=f"{scenario.name}: {OURS}",
            value=means[OURS],
            unit="steps/h",
            reference=f"the best, {best}",
            ratio=share,
            target=f">= {IDENTICAL_TARGET}",
            ok=share >= IDENTICAL_TARGET,
        ),
        Row(
            metric=f"{scenario.name}: gain by stopping groups alone",
            value=means[OURS] / means[REFERENCE],
            unit="x",
            reference=REFERENCE,
            ratio=means[OURS] / means[REFERENCE],
        ),
    ]


# ---- no deadlock -------------------------------------------------------------------------------


def deadlock_rows(steps: int) -> list[Row]:
    """Every rule gets to the end with slow agents and bound 0; a dead trainer holds up nobody."""
    dead = FaultSpec(dead_trainers=("beta",), trainer_dies_s=60.0)
    back = FaultSpec(dead_trainers=("beta",), trainer_dies_s=60.0, trainer_down_s=120.0)
    tasks = [Task(all_slow(max(3, steps // 8)), rule, 0) for rule in RULES]
    tasks += [Task(two_policies(steps, spec), OURS, 0) for spec in (FaultSpec(), dead, back)]
    *slow, both, one, returned = simulate_all(tasks, cores())
    alone = one.steps_hour / both.steps_hour
    return [
        Row(
            metric="no deadlock: slow agents, bound 0, all rules",
            value=float(sum(result.finished for result in slow)),
            unit="rules that finish",
            target=f"{len(RULES)}",
            ok=all(result.finished and not result.problems for result in slow),
        ),
        Row(
            metric="no deadlock: other trainer dead for good",
            value=one.steps_hour,
            unit="steps/h",
            reference="both alive",
            ratio=alone,
            target=f">= {LIVE_SHARE_TARGET}",
            ok=one.finished and not one.problems and alone >= LIVE_SHARE_TARGET,
        ),
        Row(
            metric="no deadlock: trainer dead for 120 s",
            value=returned.steps_hour,
            unit="steps/h",
            reference="both alive",
            ratio=returned.steps_hour / both.steps_hour,
            target="both finish, nothing trained on twice",
            ok=returned.finished and not returned.problems,
        ),
    ]


def measure(quick: bool) -> list[Row]:
    seeds, steps = (QUICK_SEEDS, QUICK_STEPS) if quick else (SEEDS, STEPS)
    base = msgspec.structs.replace(mixed(), steps=steps)
    groups, crashing = grouped(base), failing(base)
    pair: tuple[PlacementName, ...] = (OURS, REFERENCE)
    some = pair if quick else RULES
    rows: list[Row] = []
    for scenario, rules in ((base, RULES), (groups, some)):
        found = compared(scenario, rules, seeds)
        rows += rule_rows(scenario, found, targets=scenario is base and not quick)
        rows += oracle_rows(scenario, found)
    rows += rule_rows(crashing, compared(crashing, pair, seeds), targets=False)
    rows += identical_rows(identical(base), 1 if quick else SEEDS // 2, some)
    rows += deadlock_rows(steps)
    rows.append(decision_row(2_000 if quick else 10_000))
    return rows


if __name__ == "__main__":
    main("placement", measure)
