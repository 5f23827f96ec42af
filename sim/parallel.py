"""Many simulations on the machine's cores.

What always holds: results come in the order of the tasks, whatever finished first; the first Ctrl-C
ends the work and keeps what is done; a simulation that fails ends the rest with its error.
"""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from scheduler.core.settings import PlacementName
from sim.run import Result, simulate
from sim.scenario import Scenario

OnDone = Callable[[int, int], None]
"""Called with the number of tasks that are done, and of all."""


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
    found: list[Result | None] = [None] * len(tasks)
    with contextlib.suppress(KeyboardInterrupt):
        for done, (place, result) in enumerate(_stream(tasks, processes), 1):
            found[place] = result
            if on_done is not None:
                on_done(done, len(tasks))
    return found


def _stream(tasks: Sequence[Task], processes: int) -> Iterator[tuple[int, Result]]:
    if processes <= 1 or len(tasks) <= 1:
        for place, task in enumerate(tasks):
            yield place, simulate(*task)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(processes, len(tasks)), initializer=_ignore_interrupts) as pool:
        yield from pool.imap_unordered(_numbered, list(enumerate(tasks)), chunksize=1)


def _numbered(numbered: tuple[int, Task]) -> tuple[int, Result]:
    place, task = numbered
    return place, simulate(*task)


def _ignore_interrupts() -> None:
    """The parent is interrupted, and ends its children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
