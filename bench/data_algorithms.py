"""Data algorithms: how many rollouts a target accuracy takes with and without them.

    plain              every group that was drawn is trained on, once
    dynamic sampling   filter ``zero_advantage``: a batch is drawn until it is full of groups whose
                       rewards differ
    replay             half of each batch are groups of earlier batches (``prioritised``)
    curation           curators leave items out: ``greso`` by the item's own history, on the mixture
                       ``difficulty_band`` by the family's before it
    all three

in two settings: the main job's items (two numbers of two digits, which the model half knows), and a
mixture of four families in equal parts, of which one is half known, one nearly unknown, and two are
beyond the model in this time. The scheduler's production core decides (``bench.learning_core``)
with the data functions that ship, the torch engine draws, the torch trainer learns; model, batch
and learning rate are the main job's.

A rollout is a sequence that was drawn for training, trained on or not. The target is reached at the
first evaluation (greedy, on held-out items, about every ``every`` rollouts) where the mean of it
and the one before is at least the target. Values are medians of the seeds; a run that has not
reached the target counts with the rollouts at which it was given up, and its row is not ok.

``--quick``: one seed and lower targets.
"""

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from bench.learning_core import CoreRun, run_spec
from bench.learning_loop import ARITHMETIC, Learner, finished, task
from bench.report import Row, main
from sim.parallel import cores, map_some
from transport.runs import AlgorithmSpec, DataSpec, ReplaySpec, TaskSpec
from transport.runtime.logs import configure_logging

FILTERS: Final = (AlgorithmSpec(name="zero_advantage"),)
REPLAY: Final = ReplaySpec(ratio=0.5, select=AlgorithmSpec(name="prioritised"))
GRESO: Final = AlgorithmSpec(name="greso")
BAND: Final = AlgorithmSpec(name="difficulty_band", settings={"by": "family", "groups": 8})


class Algorithm(NamedTuple):
    data: DataSpec
    curated: bool


ALGORITHMS: Final = {
    "plain": Algorithm(DataSpec(), curated=False),
    "dynamic sampling": Algorithm(DataSpec(filters=FILTERS), curated=False),
    "replay": Algorithm(DataSpec(replay=REPLAY), curated=False),
    "curation": Algorithm(DataSpec(), curated=True),
    "all three": Algorithm(DataSpec(filters=FILTERS, replay=REPLAY), curated=True),
}


class Setting(NamedTuple):
    """Items, the curators that have something to go by there, and the targets in full and quick."""

    task: TaskSpec
    curators: tuple[AlgorithmSpec, ...]
    target: float
    quick_target: float


SETTINGS: Final = {
    "arithmetic": Setting(ARITHMETIC, (GRESO,), 0.90, 0.60),
    "mixture": Setting(
        task({"two_1": (2, 1), "two_2": (2, 2), "two_3": (2, 3), "three_2": (3, 2)}),
        (BAND, GRESO),
        0.27,
        0.18,
    ),
}


class Size(NamedTuple):
    """``budget`` is in rollouts, after which a run is given up; ``items`` are evaluated."""

    seeds: int
    every: int
    items: int
    budget: int


FULL: Final = Size(seeds=3, every=512, items=256, budget=20_480)
QUICK: Final = Size(seeds=1, every=512, items=128, budget=8192)


class Attempt(NamedTuple):
    """One run that is to be made."""

    setting: str
    algorithm: str
    seed: int
    target: float
    size: Size


class Reached(NamedTuple):
    """Where a run ended: at its target, or (``ok`` false) given up. ``counters`` are the core's
    of data functions."""

    rollouts: int
    steps: int
    ok: bool
    counters: dict[str, int]


def attempt(one: Attempt) -> Reached:
    """Train until the target is reached or the budget spent."""
    configure_logging("error", component="bench")
    return asyncio.run(_attempt(one))


async def _attempt(one: Attempt) -> Reached:
    setting, algorithm, size = SETTINGS[one.setting], ALGORITHMS[one.algorithm], one.size
    curators = setting.curators if algorithm.curated else ()
    async with Learner(setting.task, one.seed, {}) as learner:
        run = CoreRun(learner, run_spec(setting.task, one.seed, algorithm.data, curators))
        held_out = learner.source.items("eval", 0, size.items)
        before, due, ok = 0.0, 0, False
        while not ok and run.rollouts < size.budget:
            if run.rollouts >= due:
                accuracy = await learner.accuracy(held_out)
                ok = due > 0 and (before + accuracy) / 2.0 >= one.target
                before, due = accuracy, run.rollouts - run.rollouts % size.every + size.every
            if not ok:
                await run.step()
        return Reached(run.rollouts, run.steps, ok, run.counters())


def rows_of(
    setting: str, target: float, size: Size, found: Mapping[str, Sequence[Reached]]
) -> list[Row]:
    """Rollouts and steps of each algorithm against ``plain``; ``found`` has its runs by seed."""
    rows: list[Row] = []
    plain = found["plain"]
    for name, runs in found.items():
        rollouts = statistics.median(run.rollouts for run in runs)
        steps = statistics.median(run.steps for run in runs)
        span = f"{min(run.rollouts for run in runs)} to {max(run.rollouts for run in runs)}"
        reached = sum(run.ok for run in runs)
        rows.append(
            Row(
                metric=f"{setting}, {name}: rollouts to {target:.2f} (seeds {span})",
                value=rollouts,
                unit="sequences",
                reference="plain",
                ratio=rollouts / statistics.median(run.rollouts for run in plain),
                target=f"every seed within {size.budget}",
                ok=reached == len(runs),
            )
        )
        rows.append(
            Row(
                metric=f"{setting}, {name}: optimizer steps to {target:.2f}{_did(runs)}",
                value=steps,
                unit="steps",
                reference="plain",
                ratio=steps / statistics.median(run.steps for run in plain),
            )
        )
    return rows


def _did(runs: Sequence[Reached]) -> str:
    """Medians of what filters and curators took out."""
    names = sorted(
        {
            name
            for run in runs
            for name in run.counters
            if name.startswith(("filtered.", "curated.")) and name != "curated.kept_anyway"
        }
    )
    counts = (
        f"{name} {statistics.median(run.counters.get(name, 0) for run in runs):.0f}"
        for name in names
    )
    return "".join(f", {one}" for one in counts)


def measure(quick: bool) -> list[Row]:
    size = QUICK if quick else FULL
    targets = {
        name: setting.quick_target if quick else setting.target
        for name, setting in SETTINGS.items()
    }
    attempts = [
        Attempt(setting, algorithm, seed, targets[setting], size)
        for setting in SETTINGS
        for algorithm in ALGORITHMS
        for seed in range(size.seeds)
    ]
    done = finished(map_some(attempt, attempts, cores()))
    rows: list[Row] = []
    for setting, target in targets.items():
        found = {
            algorithm: [
                run
                for one, run in zip(attempts, done, strict=True)
                if (one.setting, one.algorithm) == (setting, algorithm)
            ]
            for algorithm in ALGORITHMS
        }
        rows += rows_of(setting, target, size, found)
    return rows


if __name__ == "__main__":
    main("data_algorithms", measure)
