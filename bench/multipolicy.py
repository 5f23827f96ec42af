"""Several policies without a barrier: what one trainer's trouble costs the others, and what the
barrier of a synchronous loop costs.

    trouble    one of two trainers takes five times as long, or is silent for good: the other one's
               steps per hour against the same seed without trouble; in the simulator, and with real
               daemons (``solve_and_verify``, fake engines, trainers that take the time they are
               told)
    barrier    ``mode = "sync"`` (everything waits for everything before each step, groups are made
               by the newest weights alone) against the usual mode, with the same fleet, work, batch
               and steps: in the simulator on unequal agents in 12 regions and on equal ones without
               distance, and with real daemons behind unequal links and without links
    learning   the same with a model that learns: `farflow up examples/arithmetic.toml` in both
               modes, with its links and without, and the accuracy that each ends with

Both modes take batches of the same size. Rows of daemons are medians over windows of real time on
this machine; emulated trainers sleep, so that two cores do not bind. Where a model learns they do:
generation and training share them.

``--quick`` has one seed, fewer steps, one pair of daemons' runs, and 20 steps without a target of
the model that learns.
"""

import asyncio
import os
import signal
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal

import msgspec

from bench.learning import EXAMPLE, up
from bench.report import Row, main
from bench.toy import Running, running
from farflow.emulate_files import make_model, write_items
from sim.faults import FaultSpec
from sim.run import Simulation
from sim.scenario import AgentsSpec, PolicyShape, Scenario, load_scenario
from sim.workload import Workload
from transport.runtime.clock import SystemClock
from transport.runtime.logs import configure_logging

Mode = Literal["async", "sync"]
Trouble = Literal["none", "slow", "silent"]

ALPHA, BETA = "alpha", "beta"
SLOWER: Final = 5.0
TRAIN_S: Final = 10.0
KEPT: Final = 0.95
SEEDS, STEPS = 4, 30
QUICK_STEPS = 12

STEP_S: Final = 0.4
WARM_STEPS, WINDOW_STEPS, QUICK_WINDOW_STEPS = 5, 30, 12
LIMIT_S: Final = 240.0
SILENT_S: Final = 4.0
"""How long one trainer has been silent when the window begins."""

LEARNING_SEEDS, QUICK_LEARNING_STEPS = 3, 20
ACCURACY_LOST: Final = 0.02
"""As much accuracy may go with the barrier, of the mean over the seeds; one seed's standard error
is half a percent at 1024 items."""

REAL: Final = """
[run]
name = "two"
seed = 1
mode = "{mode}"

[policies.solver]
model = "model"
trainer = "emulated"
steps = 400
batch_groups = 8
max_policy_lag = 4
settings = {{ step_s = {step_s}, changed_share = 0.01 }}

[policies.verifier]
model = "model"
trainer = "emulated"
steps = 400
batch_groups = 8
max_policy_lag = 4
settings = {{ step_s = {other_s}, changed_share = 0.01 }}

[task]
source = "jsonl"
path = "items.jsonl"
reward = "exact"

[workflow]
reference = "solve_and_verify"
policies = ["solver", "verifier"]
group_size = 4
max_new_tokens = 64

[scheduler]
heartbeat_s = 0.5

[agent]
engine = "fake"

[agent.fake]
first_token_s = 0.02
mean_tokens = 24.0
cv_tokens = 0.8

[local.agents.a]
slots = 16
fake.tokens_per_s = {fast}
{near}
[local.agents.b]
slots = 16
fake.tokens_per_s = {slow}
{far}
"""


# ---- in the simulator --------------------------------------------------------------------------


def two_policies(
    steps: int, *, beta_s: float = TRAIN_S, faults: FaultSpec | None = None
) -> Scenario:
    """Two policies that learn from the same groups, generation enough for both."""
    shape = PolicyShape(batch_groups=16, max_policy_lag=4, train_s=TRAIN_S)
    return Scenario(
        name="two policies",
        sites={"near": 20.0, "far": 150.0},
        agents=AgentsSpec(per_site=6, slots=(8,), tokens_per_s=(50.0,), link_mbit=(1000.0,)),
        policies={ALPHA: shape, BETA: msgspec.structs.replace(shape, train_s=beta_s)},
        steps=steps,
        limit_s=steps * SLOWER * TRAIN_S * 3,
        workload=Workload(mean_tokens=300.0, delta_bytes=10_000_000),
        faults=faults or FaultSpec(),
    )


def pace(scenario: Scenario, seed: int, policy: str, steps: int) -> float:
    """Steps per virtual hour of one policy over its first ``steps``, the other one going on."""
    simulation = Simulation(scenario, seed=seed)
    result = simulation.run()
    assert not result.problems, result.problems
    done = simulation.ledger.steps[f"sim/{policy}"]
    assert len(done) >= steps, f"{policy} made {len(done)} of {steps} steps"
    return steps / done[steps - 1].at_s * 3600.0


def trouble_rows(seeds: Iterable[int], steps: int) -> list[Row]:
    """What is left of alpha's pace with beta in trouble."""
    dead = FaultSpec(dead_trainers=(BETA,), trainer_dies_s=3.0 * TRAIN_S)
    cases = {
        f"takes {SLOWER:g} x as long": two_policies(steps, beta_s=SLOWER * TRAIN_S),
        "dies for good": msgspec.structs.replace(
            two_policies(steps, faults=dead), limit_s=steps * TRAIN_S * 3
        ),
    }
    seeds = list(seeds)
    usual = [pace(two_policies(steps), seed, ALPHA, steps) for seed in seeds]
    rows = []
    for what, scenario in cases.items():
        found = [pace(scenario, seed, ALPHA, steps) for seed in seeds]
        kept = min(one / other for one, other in zip(found, usual, strict=True))
        rows.append(
            Row(
                metric=f"simulated: one trainer {what}, the other's steps",
                value=statistics.mean(found),
                unit="steps/h",
                reference=f"the same without trouble, {statistics.mean(usual):.1f} steps/h,"
                f" worst of {len(seeds)} seeds",
                ratio=kept,
                target=f">= {KEPT:g}",
                ok=kept >= KEPT,
            )
        )
    return rows


def barrier_rows(seeds: Iterable[int], steps: int) -> list[Row]:
    """Steps per hour without and with the barrier."""
    unequal = load_scenario("aws12-mixed")
    equal = msgspec.structs.replace(
        load_scenario("identical"), sites={"here": 0.0}, agents=AgentsSpec(
            per_site=24, slots=(8,), tokens_per_s=(50.0,), link_mbit=(100_000.0,)
        ),
    )  # fmt: skip
    pair = two_policies(steps)
    seeds = list(seeds)
    rows = []
    for what, scenario in (
        ("unequal agents in 12 regions", unequal),
        ("two policies, two sites", pair),
        ("equal agents without distance", equal),
    ):
        rates: dict[Mode, list[float]] = {"async": [], "sync": []}
        for mode, found in rates.items():
            changed = msgspec.structs.replace(scenario, mode=mode, steps=steps)
            for seed in seeds:
                result = Simulation(changed, seed=seed).run()
                assert result.finished, f"{what}, {mode}: not finished"
                found.append(result.steps_hour)
        rows.append(_barrier_row(f"simulated: {what}", rates["async"], rates["sync"], "steps/h"))
    return rows


def _barrier_row(what: str, ours: list[float], theirs: list[float], unit: str) -> Row:
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return Row(
        metric=f"{what}, without a barrier",
        value=statistics.median(ours),
        unit=unit,
        reference=f'mode = "sync", {statistics.median(theirs):.4g} {unit}; {min(ratios):.2f} to'
        f" {max(ratios):.2f} over {len(ratios)} pairs",
        ratio=statistics.median(ratios),
    )


# ---- with real daemons -------------------------------------------------------------------------


def write_real(folder: Path, *, mode: Mode, links: bool, other_s: float = STEP_S) -> Path:
    """The file of a deployment of two policies; with ``links``, agents of unequal speed and
    distance."""
    make_model(folder / "model", 2_000_000)
    write_items(folder / "items.jsonl", 16)
    text = REAL.format(
        mode=mode,
        step_s=STEP_S,
        other_s=other_s,
        fast=400.0,
        slow=100.0 if links else 400.0,
        near='link = "near"' if links else "",
        far='link = "far"' if links else "",
    )
    if links:
        text += '\n[links.near]\nrtt = "20ms"\nrate = "1Gbit/s"\n'
        text += '\n[links.far]\nrtt = "200ms"\nrate = "100Mbit/s"\n'
    path = folder / "two.toml"
    path.write_text(text, encoding="utf-8")
    return path


async def real_pace(
    *, mode: Mode = "async", links: bool = False, trouble: Trouble = "none", window: int
) -> float:
    """Steps per minute of the solver over ``window`` steps after the first ones."""
    clock = SystemClock()
    with tempfile.TemporaryDirectory(prefix="farflow-multipolicy-") as scratch:
        folder = Path(scratch)
        other_s = SLOWER * STEP_S if trouble == "slow" else STEP_S
        file = write_real(folder, mode=mode, links=links, other_s=other_s)
        async with running(file, folder / "run") as run:
            await run.reach_step(WARM_STEPS, LIMIT_S)
            if trouble == "silent":
                os.kill(run.deployment.child("trainer-verifier").pid, signal.SIGSTOP)
                await asyncio.sleep(SILENT_S)
            try:
                return await _rate(run, window, clock)
            finally:
                if trouble == "silent":
                    os.kill(run.deployment.child("trainer-verifier").pid, signal.SIGCONT)


async def _rate(run: Running, window: int, clock: SystemClock) -> float:
    status = await run.until("an answer", lambda _: True, LIMIT_S)
    first = run.policy(status).step
    began_s = clock.monotonic_s()
    status = await run.reach_step(first + window, LIMIT_S)
    return (run.policy(status).step - first) / (clock.monotonic_s() - began_s) * 60.0


def real_rows(window: int, pairs: int) -> list[Row]:
    """The same with daemons."""

    def measured(mode: Mode, links: bool, trouble: Trouble = "none") -> float:
        return asyncio.run(real_pace(mode=mode, links=links, trouble=trouble, window=window))

    rows: list[Row] = []
    usual = [measured("async", False) for _ in range(pairs)]
    troubles: tuple[tuple[Trouble, str], ...] = (
        ("slow", f"takes {SLOWER:g} x as long"), ("silent", "is silent"),
    )  # fmt: skip
    for trouble, what in troubles:
        found = [measured("async", False, trouble) for _ in range(pairs)]
        kept = statistics.median(found) / statistics.median(usual)
        rows.append(
            Row(
                metric=f"daemons: one trainer {what}, the other's steps",
                value=statistics.median(found),
                unit="steps/min",
                reference=f"the same without trouble, {statistics.median(usual):.1f} steps/min",
                ratio=kept,
                target=f">= {KEPT:g}",
                ok=kept >= KEPT,
            )
        )
    for links, what in ((True, "unequal agents and links"), (False, "equal agents, no links")):
        ours = [measured("async", links) for _ in range(pairs)] if links else usual
        theirs = [measured("sync", links) for _ in range(pairs)]
        rows.append(_barrier_row(f"daemons: {what}", ours, theirs, "steps/min"))
    return rows


# ---- with a model that learns ------------------------------------------------------------------


def learning_rows(seeds: Iterable[int], steps: int | None) -> list[Row]:
    """Steps per hour of the main job without and with the barrier, and what each has learnt."""
    seeds = list(seeds)
    near = [f"local.agents.{name}.link=local" for name in ("near", "metro", "far")]
    shorter = [] if steps is None else [f"policies.solver.steps={steps}"]
    rows = []
    for what, changes in (("links of the example", []), ("no links", near)):
        rates: dict[Mode, list[float]] = {"async": [], "sync": []}
        accuracies: dict[Mode, list[float]] = {"async": [], "sync": []}
        for seed in seeds:  # in turn, so that both modes see the same machine
            for mode in rates:
                rate, accuracy = _learnt(f"run.seed={seed}", f"run.mode={mode}", *shorter, *changes)
                rates[mode].append(rate)
                accuracies[mode].append(accuracy)
        ours, theirs = (statistics.mean(found) for found in accuracies.values())
        rows.append(_barrier_row(f"main job, {what}", rates["async"], rates["sync"], "steps/h"))
        rows.append(
            Row(
                metric=f"main job, {what}, without a barrier: accuracy at the end",
                value=ours,
                unit="share",
                reference=f'mode = "sync", {theirs:.3f}, mean of {len(seeds)} seeds',
                ratio=ours / theirs,
                target="" if steps else f">= {theirs - ACCURACY_LOST:.3f}",
                ok=bool(steps) or ours >= theirs - ACCURACY_LOST,
            )
        )
    return rows


def _learnt(*changes: str) -> tuple[float, float]:
    """Steps per hour between the first and the last, and the accuracy after it."""
    with tempfile.TemporaryDirectory(prefix="farflow-multipolicy-") as scratch:
        summary = up(EXAMPLE, Path(scratch) / "run", *changes)
    policy = summary["policies"][0]
    return (policy["steps"] - 1) / summary["training_s"] * 3600.0, policy["accuracy_after"]


def measure(quick: bool) -> list[Row]:
    configure_logging("error", component="bench")
    seeds, steps = (range(1), QUICK_STEPS) if quick else (range(SEEDS), STEPS)
    window, pairs = (QUICK_WINDOW_STEPS, 1) if quick else (WINDOW_STEPS, 3)
    return [
        *trouble_rows(seeds, steps),
        *barrier_rows(seeds, steps),
        *real_rows(window, pairs),
        *learning_rows(
            range(1 if quick else LEARNING_SEEDS), QUICK_LEARNING_STEPS if quick else None
        ),
    ]


if __name__ == "__main__":
    main("multipolicy", measure)
