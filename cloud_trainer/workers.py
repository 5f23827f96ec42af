"""Threads of a trainer's shell, by kind of work.

What always holds: work of one kind with one thread is done in the order in which it was handed
over; its result comes back on the event loop; an error of it ends the task group.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Workers:
    """``threads`` says how many of each kind."""

    def __init__(self, **threads: int) -> None:
        self._pools = {
            name: ThreadPoolExecutor(count, thread_name_prefix=f"trainer-{name}")
            for name, count in threads.items()
        }
        self._tasks: asyncio.TaskGroup | None = None

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Results are delivered in ``tasks``."""
        self._tasks = tasks

    def executor(self, kind: str) -> Executor:
        return self._pools[kind]

    def hand_over(
        self, kind: str, call: Callable[[], T], done: Callable[[T], None] | None = None
    ) -> Future[T]:
        """Do ``call`` in a thread, from now on; ``done`` gets its result on the loop."""
        future = self._pools[kind].submit(call)
        assert self._tasks is not None  # noqa: S101 - nothing is handed over before the start
        self._tasks.create_task(_deliver(future, done))
        return future

    def close(self) -> None:
        """Wait for what is being done; drop the rest. Blocks."""
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)


async def _deliver(future: Future[T], done: Callable[[T], None] | None) -> None:
    result = await asyncio.wrap_future(future)
    if done is not None:
        done(result)
