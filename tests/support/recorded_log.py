"""Event logs as the daemon writes them, made by simulations."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler.core.events import Event
from scheduler.core.machine import SchedulerCore
from scheduler.event_log import EventLog, EventLogStart
from sim.run import Result, Simulation
from sim.scenario import Scenario
from transport.runtime.build import build_id

if TYPE_CHECKING:
    from scheduler.core.effects import Effect

BATCH = 7
"""Events that are committed together."""


def recorded(scenario: Scenario, seed: int = 0) -> tuple[Result, list[tuple[Event, float]]]:
    """A simulation, and all that its scheduler was told."""
    simulation = Simulation(scenario, seed=seed)
    simulation.scheduler.recorded = told = []
    return simulation.run(), told


def write_log(
    folder: Path,
    scenario: Scenario,
    told: Sequence[tuple[Event, float]],
    *,
    seed: int = 0,
    build: str = "",
) -> None:
    """The log of a scheduler that was told this, in batches."""
    settings = scenario.core_settings("finish-time")
    core = SchedulerCore(settings, term=1, rng=random.Random(seed), build=build or build_id())
    log = EventLog(folder)
    log.begin(
        EventLogStart(
            build=build or build_id(),
            term=1,
            now=0.0,
            seed=seed,
            settings=settings,
            wall_s=0.0,
            rows=0,
        ),
        (),
    )
    for place in range(0, len(told), BATCH):
        batch = told[place : place + BATCH]
        effects: list[Effect] = []
        for event, now in batch:
            effects += core.handle(event, now)
        core.take_changes()
        log.append([(now, event) for event, now in batch], effects)
    log.close()
