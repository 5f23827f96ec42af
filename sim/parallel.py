"""Many simulations on the machine's cores.

What always holds: results come in the order of the tasks, whatever finished first; the first Ctrl-C
ends the work and keeps what is done; a simulation that fails ends the rest with its error.
"""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from scheduler.core.settings import PlacementName
from sim.run import Result, simulate
from sim.scenario import Scenario

OnDone = Callable[[int, int], None]
"""Called with the number of tasks that are done, and of all."""

T = TypeVar("T")
R = TypeVar("R")


class Task(NamedTuple):
    scenario: Scenario
    placement: PlacementName
    seed: int


def cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def simulate_some(
    tasks: Sequence[Task], processes: int, on_done: OnDone | None = None
) -> list[Result | None]:
    """Results in the order of ``tasks``; None: interrupted before it was done."""
    return map_some(_simulate, tasks, processes, on_done)


def map_some(
    work: Callable[[T], R], tasks: Sequence[T], processes: int, on_done: OnDone | None = None
) -> list[R | None]:
    """``work`` (a function of a module) of each task, in their order; None: interrupted before."""
    found: list[R | None] = [None] * len(tasks)
    with contextlib.suppress(KeyboardInterrupt):
        for done, (place, result) in enumerate(_stream(work, tasks, processes), 1):
            found[place] = result
            if on_done is not None:
                on_done(done, len(tasks))
    return found


def _stream(work: Callable[[T], R], tasks: Sequence[T], processes: int) -> Iterator[tuple[int, R]]:
    if processes <= 1 or len(tasks) <= 1:
        for place, task in enumerate(tasks):
            yield place, work(task)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(processes, len(tasks)), initializer=_ignore_interrupts) as pool:
        yield from pool.imap_unordered(partial(_numbered, work), list(enumerate(tasks)))


def _simulate(task: Task) -> Result:
    return simulate(*task)


def _numbered(work: Callable[[T], R], numbered: tuple[int, T]) -> tuple[int, R]:
    place, task = numbered
    return place, work(task)


def _ignore_interrupts() -> None:
    """The parent is interrupted, and ends its children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
