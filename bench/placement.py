"""What the placement rule is worth, on the simulator: the production cores in virtual time.

Only the rule changes between two runs of a seed: fleet, work, admission, buffers, prefetch and what
is dropped are the same. Rows by scenario:

    aws12-mixed           12 AWS regions, slots, speed and links drawn by the seed; one sequence per
                          group and 64 groups per batch, as in the study that the profile is from
    aws12-mixed, groups   the same work in groups of 8 siblings, 8 groups per batch
    identical             24 equal agents: no rule may matter
    failures              each agent crashes every 600 s on average, leases of 30 s
    no deadlock           all agents slow and bound 0; a dead trainer beside a live one; a trainer
                          that dies and comes back

``steps_hour`` is over 60 steps from time 0 (8 seeds), intervals are 95 % over the seeds, ratios are
taken seed by seed. ``wasted`` counts attempts that began and were not trained on: results that came
too late or twice, and attempts that were stopped. ``--quick`` has 2 seeds and 20 steps; its
intervals are too wide for targets, so that rows with an interval have none.
"""

import os
import statistics
from collections.abc import Sequence

import msgspec

from bench.placement_speed import decision_row, speed_rows
from bench.report import Row, main
from scheduler.core.settings import PlacementName
from sim.compare import RULES, Task, interval, ratios, simulate_all
from sim.faults import FaultSpec
from sim.run import Result
from sim.scenario import AgentsSpec, PolicyShape, Scenario, load_scenario
from sim.workload import Workload

OURS: PlacementName = "finish-time"
REFERENCE: PlacementName = "least-outstanding"
MIXED = "aws12-mixed"

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
    results = simulate_all(tasks, os.cpu_count() or 1)
    return {rule: [r for r in results if r.placement == rule] for rule in rules}


def rule_rows(scenario: Scenario, found: Measured, *, targets: bool) -> list[Row]:
    """Steps per hour and wasted share of every rule, and ours against the reference."""
    name = scenario.name
    rows: list[Row] = []
    for rule, results in found.items():
        at_all = all(result.finished and not result.problems for result in results)
        steps = statistics.fmean(result.steps_hour for result in results)
        wasted = statistics.fmean(result.wasted_share for result in results)
        beside = rule != REFERENCE and REFERENCE in found
        ratio = statistics.fmean(ratios(results, found[REFERENCE])) if beside else None
        rows.append(
            Row(
                metric=f"{name}: {rule}",
                value=steps,
                unit="steps/h",
                reference=REFERENCE if beside else None,
                ratio=ratio,
                target="every run ends and its books balance",
                ok=at_all,
            )
        )
        rows.append(Row(metric=f"{name}: {rule}, wasted", value=wasted, unit="share of attempts"))
    return rows + gain_rows(name, found, targets=targets)


def gain_rows(name: str, found: Measured, *, targets: bool) -> list[Row]:
    gain = interval(ratios(found[OURS], found[REFERENCE]))
    wasted = [statistics.fmean(r.wasted_share for r in found[rule]) for rule in (OURS, REFERENCE)]
    share = wasted[0] / max(wasted[1], 1e-9)
    enough = gain.mean >= RATIO_TARGET and gain.low > RATIO_LOW_TARGET
    return [
        Row(
            metric=f"{name}: gain, 95 % [{gain.low:.3f}, {gain.high:.3f}]",
            value=gain.mean,
            unit="x",
            reference=REFERENCE,
            ratio=gain.mean,
            target=f">= {RATIO_TARGET}, lower end > {RATIO_LOW_TARGET}" if targets else "",
            ok=enough or not targets,
        ),
        Row(
            metric=f"{name}: wasted against the reference",
            value=share,
            unit="x",
            reference=REFERENCE,
            ratio=share,
            target=f"<= {WASTED_TARGET}" if targets else "",
            ok=share <= WASTED_TARGET or not targets,
        ),
    ]


def identical_rows(scenario: Scenario, seeds: int, rules: Sequence[PlacementName]) -> list[Row]:
    """Ours against the best of all rules where none can be better."""
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
        )
    ]


# ---- no deadlock -------------------------------------------------------------------------------


def deadlock_rows(steps: int) -> list[Row]:
    """Every rule gets to the end with slow agents and bound 0; a dead trainer holds up nobody."""
    dead = FaultSpec(dead_trainers=("beta",), trainer_dies_s=60.0)
    back = FaultSpec(dead_trainers=("beta",), trainer_dies_s=60.0, trainer_down_s=120.0)
    tasks = [Task(all_slow(max(3, steps // 8)), rule, 0) for rule in RULES]
    tasks += [Task(two_policies(steps, spec), OURS, 0) for spec in (FaultSpec(), dead, back)]
    *slow, both, one, returned = simulate_all(tasks, os.cpu_count() or 1)
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
    seeds, steps = (2, 20) if quick else (8, 60)
    base = msgspec.structs.replace(mixed(), steps=steps)
    rows = rule_rows(base, compared(base, RULES, seeds), targets=not quick)
    pair: tuple[PlacementName, ...] = (OURS, REFERENCE)
    for scenario in (grouped(base), failing(base)):
        rows += rule_rows(scenario, compared(scenario, pair, seeds), targets=False)
    if quick:
        rows += identical_rows(identical(base), 1, pair)
    else:
        rows += identical_rows(identical(base), 4, RULES)
    rows += deadlock_rows(steps)
    rows += speed_rows(msgspec.structs.replace(base, steps=min(steps, 20)))
    rows.append(decision_row(10_000))
    return rows


if __name__ == "__main__":
    main("placement", measure)
