"""Faults in virtual time through the production cores and the production store.

    python -m bench.virtual_chaos --json [--quick] [--faults N] [--seed S]

A scheduler with its rows on disk, six agents at three distances, two trainers, trajectory log,
weight store, an operator and a submitter (``virtual_chaos_world``) suffer faults every two or three
seconds (``virtual_chaos_faults``); then they are left in peace, train on, deliver what is owed and
end. All constants are the product's own. A second world in which nothing fails but agents, one
after another, gives the time from a loss to the next attempt.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from bench import report
from bench.report import Row
from bench.virtual_chaos_faults import lose_agents, strike_many
from bench.virtual_chaos_world import World
from scheduler.core.settings import CoreSettings

FULL_FAULTS: Final = 1000
QUICK_FAULTS: Final = 150
FULL_KILLS: Final = 60
QUICK_KILLS: Final = 12
MOST_S: Final = 15.0


def chaos(folder: Path, *, faults: int, seed: int, check_every: int) -> World:
    """Let ``faults`` happen and give the audited world."""
    world = World(folder, seed=seed, check_every=check_every)
    world.begin()
    strike_many(world, faults)
    world.settle()
    world.scheduler.close()
    return world


def losses(folder: Path, *, kills: int, seed: int) -> World:
    """Kill agents one by one, with room on the others, and give the audited world."""
    world = World(folder, seed=seed, check_every=50)
    world.begin()
    lose_agents(world, kills)
    world.settle()
    world.scheduler.close()
    return world


def measure(faults: int, kills: int, seed: int) -> list[Row]:
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="farflow-chaos-") as folder:
        world = chaos(Path(folder), faults=faults, seed=seed, check_every=50)
    took_s = time.perf_counter() - began_s
    with tempfile.TemporaryDirectory(prefix="farflow-chaos-") as folder:
        peace = losses(Path(folder), kills=kills, seed=seed)
    problems = world.problems + peace.problems
    scheduler, submitter = world.scheduler, world.submitter
    trained = sum(len(trainer.lineage()) for trainer in world.trainers)
    lost_after_s = CoreSettings().lost_after_s
    longest_s = max(peace.replaced_s, default=float("inf"))
    return [
        Row(
            metric="faults (virtual time, production cores and store)",
            value=world.faults.total(),
            unit="; ".join(f"{n} {name}" for name, n in sorted(world.faults.items())),
            target=f">= {faults}",
            ok=world.faults.total() >= faults,
        ),
        Row(
            metric="groups lost, trained twice, miscounted or left over",
            value=len(problems),
            unit="; ".join(problems[:5]) or "groups",
            target="0",
            ok=not problems,
        ),
        Row(
            metric="groups trained along the surviving lineages",
            value=trained,
            unit=f"groups, {sum(row.abandoned for row in world.accounting())} taken back",
            target="> 0",
            ok=trained > 0,
        ),
        Row(
            metric="submitters' jobs with exactly one result",
            value=len(submitter.results),
            unit="jobs",
            reference="jobs submitted",
            ratio=len(submitter.results) / max(1, len(submitter.wanted)),
            target="1.00 x",
            ok=len(submitter.results) == len(submitter.wanted) > 0,
        ),
        Row(
            metric="lives of the scheduler that began with the rows of the last one",
            value=scheduler.lives,
            unit=f"lives, {scheduler.restored_rows} rows equal, {scheduler.torn} torn commits,"
            f" {scheduler.commits} commits",
            target="> 1",
            ok=scheduler.lives > 1 and not scheduler.problems,
        ),
        Row(
            metric="invariants checked",
            value=scheduler.checked,
            unit=f"times in {scheduler.handled} events",
        ),
        Row(
            metric="messages handed over again or late",
            value=world.network.repeated + world.network.overtaken,
            unit=f"messages, {world.network.lost + world.network.severed} lost",
        ),
        Row(
            metric=f"loss of an agent to the new attempt, longest of {len(peace.replaced_s)}",
            value=longest_s,
            unit=f"s, median {statistics.median(peace.replaced_s or [longest_s]):.1f} s",
            reference="silence after which an agent is lost",
            ratio=longest_s / lost_after_s,
            target=f"<= {MOST_S:.0f} s",
            ok=longest_s <= MOST_S,
        ),
        Row(
            metric="virtual time per second of run time",
            value=world.kernel.now / took_s,
            unit=f"s, {world.kernel.events} events of the simulation",
        ),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    own, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    report.main(
        "virtual_chaos",
        lambda quick: measure(
            own.faults or (QUICK_FAULTS if quick else FULL_FAULTS),
            QUICK_KILLS if quick else FULL_KILLS,
            own.seed,
        ),
    )
