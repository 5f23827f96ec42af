"""Runs that were submitted and whose task sources are opened before the core hears of them.

    RunSubmit -> opened by a process of its own -> the same event with what was found wrong -> core

What always holds: every submission comes to the core, once, at most ``CHECK_S`` later; the event
loop waits for no source; of those that are looked at side by side there are few, the others come to
the core as they are, and their runs fail when items are wanted.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec
import structlog

from scheduler.core.events import Event, FromOperator
from scheduler.task_runner import TaskRunner
from transport.messages import RunSubmit

CHECK_S: Final = 4.0
"""Less than anybody waits for an answer: a large file is opened while the run begins."""

MAX_OPEN: Final = 4

_log = structlog.get_logger()


class Submissions:
    """``put`` gives the core an event; ``known`` says whether it has a run of that name."""

    def __init__(
        self,
        runner: TaskRunner,
        put: Callable[[Event], None],
        known: Callable[[str], bool],
        *,
        check_s: float = CHECK_S,
    ) -> None:
        self._runner = runner
        self._put = put
        self._known = known
        self._check_s = check_s
        self._open: set[asyncio.Task[None]] = set()

    def put(self, event: Event) -> None:
        """``event`` for the core, perhaps later."""
        match event:
            case FromOperator(message=RunSubmit(run=run)) if len(
                self._open
            ) < MAX_OPEN and not self._known(run.name):
                task = asyncio.create_task(self._check(event), name=f"submission {run.name}")
                self._open.add(task)
                task.add_done_callback(self._open.discard)
            case _:
                self._put(event)

    async def close(self) -> None:
        """What is being looked at is forgotten; whoever submitted it asks again."""
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _check(self, event: FromOperator) -> None:
        assert isinstance(event.message, RunSubmit)  # noqa: S101 - asked for only then
        run = event.message.run
        fault = ""
        try:
            async with asyncio.timeout(self._check_s):
                fault = await self._runner.check(run)
        except TimeoutError:
            _log.info("submission.not_checked", run=run.name, after_s=self._check_s)
        except Exception:  # noqa: BLE001 - the run's own process will say what is wrong
            _log.exception("submission.not_checked", run=run.name)
        self._put(msgspec.structs.replace(event, fault=fault) if fault else event)
