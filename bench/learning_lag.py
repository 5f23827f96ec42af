"""Learning under policy lag, and what the order of the buffer makes of it: accuracy per sample.

    constant   every group is exactly so many steps old: 0, 2, 4 and 8, with the loss of the main
               job, without the ratio's clip, and with truncated importance weights
               (``importance_cap``); per sample that was trained on, every one of which was drawn
    order      the lags of each group and the waste that the simulator gives under earliest deadline
               first and first in first out (``bench.learning_orders``), replayed with the main
               job's loss; per sample that was drawn

One process per core: the torch engine draws groups with the version of their lag, the torch trainer
learns from them, so that nothing depends on this machine's speed. Model, items, batch and learning
rate are the main job's; three seeds.

The value of an accuracy is the mean over greedy evaluations every ``every`` steps (the area under
the curve) on items that are never trained on. ``--quick``: 12 steps, one seed, lags 0 and 4.
"""

import asyncio
import statistics
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from bench.learning_loop import ARITHMETIC, GROUPS, Learner, Learnt, finished, learn_late
from bench.learning_orders import Order, Ordered, ordered, per_drawn
from bench.report import Row, main
from sim.parallel import cores, map_some
from transport.runtime.logs import configure_logging

LAGS: Final = (0, 2, 4, 8)
BOUNDS: Final = (2, 4, 8)
ORDERS: Final[tuple[Order, ...]] = ("fifo", "edf")
LOSSES: Final[dict[str, dict[str, Any]]] = {
    "clipped": {},
    "unclipped": {"clip": "none", "ratio_max": 0.0},
    "truncated importance weights": {"importance_cap": 2.0},
}
MAIN_LOSS: Final = "clipped"


class Size(NamedTuple):
    """How long a loop learns, and how it is evaluated."""

    seeds: int
    steps: int
    every: int
    items: int
    lags: tuple[int, ...]
    bounds: tuple[int, ...]


FULL: Final = Size(seeds=3, steps=40, every=5, items=256, lags=LAGS, bounds=BOUNDS)
QUICK: Final = Size(seeds=1, steps=12, every=6, items=64, lags=(0, 4), bounds=(4,))


class Loop(NamedTuple):
    """One loop that is to be run: ``lags`` of each step's groups."""

    loss: str
    seed: int
    lags: tuple[tuple[int, ...], ...]
    every: int
    items: int


class Replayed(NamedTuple):
    """One simulation whose lags are to be replayed."""

    order: Order
    bound: int
    seed: int
    size: Size


def learn(loop: Loop) -> Learnt:
    """Run a loop from the untrained model to its end."""

    async def run() -> Learnt:
        async with Learner(ARITHMETIC, loop.seed, LOSSES[loop.loss]) as learner:
            return await learn_late(learner, loop.seed, loop.lags, loop.every, loop.items)

    configure_logging("error", component="bench")
    return asyncio.run(run())


def replay(one: Replayed) -> tuple[Ordered, Learnt]:
    """Simulate, then learn from groups of these lags."""
    size = one.size
    found = ordered(one.order, one.bound, size.steps, one.seed)
    return found, learn(Loop(MAIN_LOSS, one.seed, found.lags, size.every, size.items))


def constant_rows(size: Size, processes: int) -> list[Row]:
    """Every loss at every lag."""
    loops = [
        Loop(loss, seed, ((lag,) * GROUPS,) * size.steps, size.every, size.items)
        for loss in LOSSES
        for lag in size.lags
        for seed in range(size.seeds)
    ]
    learnt = finished(map_some(learn, loops, processes))
    rows: list[Row] = []
    fresh = 0.0
    for at in range(0, len(loops), size.seeds):
        loss, lag = loops[at].loss, loops[at].lags[0][0]
        found = learnt[at : at + size.seeds]
        means = [statistics.mean(one.accuracies[1:]) for one in found]
        last = statistics.mean(one.accuracies[-1] for one in found)
        mean = statistics.mean(means)
        fresh = mean if lag == 0 else fresh
        rows.append(
            Row(
                metric=f"{loss}, lag {lag}: mean accuracy, at the end {last:.3f}",
                value=mean,
                unit="share",
                reference=f"lag 0, the same loss; seeds {min(means):.3f} to {max(means):.3f},"
                f" KL {statistics.mean(one.kl_behaviour for one in found):.2g}",
                ratio=mean / fresh if fresh else None,
            )
        )
    return rows


def order_rows(size: Size, processes: int) -> list[Row]:
    """Both orders at every bound."""
    tasks = [
        Replayed(order, bound, seed, size)
        for bound in size.bounds
        for order in ORDERS
        for seed in range(size.seeds)
    ]
    done = finished(map_some(replay, tasks, processes))
    rows: list[Row] = []
    for at in range(0, len(tasks), 2 * size.seeds):
        first, second = done[at : at + size.seeds], done[at + size.seeds : at + 2 * size.seeds]
        rows += compared(f"max_policy_lag {tasks[at].bound}", first, second, size)
    return rows


def compared(
    name: str,
    fifo: Sequence[tuple[Ordered, Learnt]],
    edf: Sequence[tuple[Ordered, Learnt]],
    size: Size,
) -> list[Row]:
    """Waste and accuracy of both orders, seed by seed."""
    rows: list[Row] = []
    waste = {
        order: statistics.mean(one.wasted for one, _ in found)
        for order, found in (("fifo", fifo), ("edf", edf))
    }
    expired = statistics.mean(one.expired for one, _ in edf)
    expired_fifo = statistics.mean(one.expired for one, _ in fifo)
    rows.append(
        Row(
            metric=f"edf, {name}: drawn tokens never trained on",
            value=waste["edf"],
            unit="share",
            reference=f"fifo, {waste['fifo']:.3f}; groups expired {expired:.0f}"
            f" against {expired_fifo:.0f}",
            ratio=waste["edf"] / waste["fifo"] if waste["fifo"] else None,
            target="<= fifo",
            ok=waste["edf"] <= waste["fifo"],
        )
    )
    reference = 0.0
    for order, found in (("fifo", fifo), ("edf", edf)):
        drawn = [
            per_drawn(learnt.accuracies, size.every, one.wasted, size.steps)
            for one, learnt in found
        ]
        trained = statistics.mean(statistics.mean(one.accuracies[1:]) for _, one in found)
        mean = statistics.mean(drawn)
        reference = mean if order == "fifo" else reference
        rows.append(
            Row(
                metric=f"{order}, {name}: mean accuracy per drawn sample",
                value=mean,
                unit="share",
                reference=f"fifo; seeds {min(drawn):.3f} to {max(drawn):.3f}, per trained sample"
                f" {trained:.3f}, mean lag {statistics.mean(o.lag_mean for o, _ in found):.2f}",
                ratio=mean / reference if reference else None,
            )
        )
    return rows


def measure(quick: bool) -> list[Row]:
    size = QUICK if quick else FULL
    return constant_rows(size, cores()) + order_rows(size, cores())


if __name__ == "__main__":
    main("learning_lag", measure)
