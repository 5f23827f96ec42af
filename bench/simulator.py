"""The simulator against real daemons in real time, and what distance costs on both.

    python -m bench.simulator --json [--quick]

Calibration: each scenario of ``sim/data/calibration-*`` runs once with the real scheduler,
trajectory log, weight store, trainer and agents as processes behind link proxies (``farflow sim
emulate``), and once in the simulator with the same seed, so the same jobs, lengths, fleet and times
of crashes. The simulator is told how long this machine's own work took meanwhile (encoding, fsync,
decoding: ``farflow.emulate_times``); what it has to predict is how the whole behaves. The value of
a row is the simulator's, the reference the daemons'.

WAN gap: steps per hour at 150 ms and 500 Mbit/s per agent against the same run without delay and
with unlimited rate, with real daemons and in the simulator.

Processes share this machine's cores, so the numbers want a quiet one: about 14 minutes. ``--quick``
calibrates one scenario at a third of its length, computes the WAN gap in the simulator and reads
the daemons' from ``bench/results``.
"""

import asyncio
import json
import os
import sys
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Final

import msgspec

from bench.report import Row, main
from farflow.emulate import Emulated, emulate
from farflow.emulate_times import with_service
from sim.measures import Measures
from sim.run import Simulation
from sim.scenario import Scenario, load_scenario
from transport.runtime.logs import configure_logging

CALIBRATIONS: Final = ("near", "far", "mixed", "delta", "churn")
QUICK: Final = "far"
QUICK_STEPS: Final = 18
WAN: Final = "wan-gap"
WAN_TARGET: Final = 0.95
BOUNDS: Final = {
    "steps_hour": ("steps/h", 0.10),
    "lag_mean": ("steps", 0.10),
    "turnaround_p50_s": ("s", 0.10),
    "turnaround_p95_s": ("s", 0.20),
}
SEED: Final = 1


def emulated(scenario: Scenario, seed: int = SEED) -> Emulated:
    """One run of real daemons in a folder that is removed afterwards."""

    def notice(text: str) -> None:
        print(f"  {text}", file=sys.stderr)

    with tempfile.TemporaryDirectory(prefix="farflow-calibration-") as folder:
        return asyncio.run(emulate(scenario, Path(folder) / "out", seed=seed, notice=notice))


def simulated(scenario: Scenario, real: Emulated, seed: int = SEED) -> Measures:
    """The same in the simulator, with the service times of the machine that ``real`` ran on."""
    told = with_service(scenario, real.service)
    if real.back_s:
        start_s = sum(real.back_s) / len(real.back_s)
        faults = msgspec.structs.replace(told.faults, agent_start_s=start_s)
        told = msgspec.structs.replace(told, faults=faults)
    simulation = Simulation(told, seed=seed)
    simulation.run()
    return simulation.measures()


def compared(name: str, sim: Measures, real: Measures) -> list[Row]:
    """A row per measure; ``ok`` says that they agree."""
    rows = []
    for field, (unit, bound) in BOUNDS.items():
        value, reference = getattr(sim, field), getattr(real, field)
        ratio = value / reference if reference else 0.0
        rows.append(
            Row(
                metric=f"calibration {name}: {field}",
                value=round(value, 3),
                unit=unit,
                reference=f"real daemons, {real.groups} groups: {reference:.3f} {unit}",
                ratio=round(ratio, 3),
                target=f"within {bound:.0%}",
                ok=abs(ratio - 1.0) <= bound,
            )
        )
    return rows


def untold(scenario: Scenario) -> Measures:
    """In the simulator, with the scenario's own service times."""
    simulation = Simulation(scenario, seed=SEED)
    simulation.run()
    return simulation.measures()


def untold_row(name: str, scenario: Scenario, real: Measures) -> Row:
    """For comparison: what the simulator says of a machine that it was told nothing about."""
    value = untold(scenario).steps_hour
    return Row(
        metric=f"calibration {name}: steps_hour with the scenario's own service times",
        value=round(value, 3),
        unit="steps/h",
        reference=f"real daemons: {real.steps_hour:.3f} steps/h",
        ratio=round(value / max(real.steps_hour, 1e-9), 3),
    )


def without_distance(scenario: Scenario) -> Scenario:
    """No delay, unlimited rates."""
    agents = msgspec.structs.replace(scenario.agents, link_mbit=(1e6,), up_mbit=())
    return msgspec.structs.replace(
        scenario, sites=dict.fromkeys(scenario.sites, 0.0), agents=agents
    )


def wan_row(where: str, far: Measures, near: Measures) -> Row:
    return Row(
        metric=f"WAN gap, {where}: steps/hour at 150 ms, 500 Mbit/s",
        value=round(far.steps_hour, 1),
        unit="steps/h",
        reference=f"no delay, unlimited rate: {near.steps_hour:.1f} steps/h",
        ratio=round(far.steps_hour / max(near.steps_hour, 1e-9), 4),
        target=f">= {WAN_TARGET:.0%}",
        ok=far.steps_hour >= WAN_TARGET * near.steps_hour,
    )


def load_row() -> Row:
    """How busy the machine was: above its number of cores, calibration rows say little."""
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[1]
    return Row(
        metric="load of the last 5 minutes",
        value=round(load, 2),
        unit="processes",
        reference=f"{cores} cores",
        ratio=round(load / cores, 2),
    )


def quick_rows() -> list[Row]:
    scenario = msgspec.structs.replace(load_scenario(f"calibration-{QUICK}"), steps=QUICK_STEPS)
    real = emulated(scenario)
    rows = compared(f"{QUICK}, {QUICK_STEPS} steps", simulated(scenario, real), real.measures)
    wan = load_scenario(WAN)
    # What was measured belongs to the other scenario's model and step.
    rows.append(wan_row("simulator", untold(wan), untold(without_distance(wan))))
    return rows + kept_rows("WAN gap, real daemons") + [load_row()]


def full_rows() -> list[Row]:
    rows = []
    for name in CALIBRATIONS:
        scenario = load_scenario(f"calibration-{name}")
        real = emulated(scenario)
        found = compared(name, simulated(scenario, real), real.measures)
        found.append(untold_row(name, scenario, real.measures))
        for row in found:
            print(f"  {row.metric} {row.value} {row.ratio} {row.ok}", file=sys.stderr)
        rows += found
    wan = load_scenario(WAN)
    far, near = emulated(wan), emulated(without_distance(wan))
    rows.append(wan_row("real daemons", far.measures, near.measures))
    rows.append(wan_row("simulator", simulated(wan, far), simulated(without_distance(wan), near)))
    return [*rows, load_row()]


def kept_rows(prefix: str) -> list[Row]:
    """Rows of the last full run, marked so; none when there was none."""
    path = Path(__file__).parent / "results" / "simulator.json"
    if not path.is_file():
        return []
    names = {field.name for field in fields(Row)}
    rows = []
    for kept in json.loads(path.read_text("utf-8"))["rows"]:
        if kept["metric"].startswith(prefix):
            row = Row(**{key: value for key, value in kept.items() if key in names})
            rows.append(replace(row, metric=f"{row.metric} (from bench/results)"))
    return rows


def measure(quick: bool) -> list[Row]:
    configure_logging("error", component="bench")
    return quick_rows() if quick else full_rows()


if __name__ == "__main__":
    main("simulator", measure)
