"""How an agent's life ends: in order, by an error, or because its own tasks were cancelled.

What always holds: an error that is told here, from a callback of the event loop or from a task,
ends the agent with that error, never in silence; so do tasks that are watched and are cancelled
though nobody asked for it. Workflows share the agent's event loop, so one that cancels
``asyncio.all_tasks()`` cancels the agent: what was cancelled cannot be had back, and a new life
finds everything durable again.
"""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, Final

import structlog

from edge_agent.core.effects import Exit
from edge_agent.core.events import DrainRequested
from edge_agent.draining import take_note
from transport.errors import FarflowError
from transport.runtime.shutdown import Stop

_REMEDY: Final = (
    "a workflow shares the agent's event loop: let it cancel only tasks that it made, not all of "
    "asyncio.all_tasks()"
)
_SHOWN: Final = 8

_log = structlog.get_logger()


class OwnTasksCancelled(FarflowError):
    """Something in this process cancelled the agent's own tasks."""

    code: ClassVar[str] = "agent.own_tasks_cancelled"


class Life:
    """Made on the event loop; ``running`` names the attempts under way."""

    def __init__(self, running: Callable[[], tuple[str, ...]]) -> None:
        self._running = running
        self._outcome: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._watched: list[asyncio.Task[Any]] = []
        self._ending = False
        self._attempts: tuple[str, ...] = ()
        self._cancelled = False

    @property
    def over(self) -> bool:
        return self._outcome.done()

    def end(self, reason: Exit) -> None:
        """In order; the first word counts."""
        if not self._outcome.done():
            self._outcome.set_result(reason)

    def fail(self, error: Exception) -> None:
        """With an error, which ``ended`` returns."""
        _log.error("agent.failed", attempts=self._running()[:_SHOWN], exc_info=error)
        if not self._outcome.done():
            self._outcome.set_exception(error)

    def watch(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        """These run until ``ended`` has returned."""
        for task in tasks:
            self._watched.append(task)
            task.add_done_callback(self._task_ended)

    async def ended(self) -> Exit | Exception:
        """Waits for the end, and ends what is watched; the error, where one ended it."""
        try:
            return await self._outcome
        except asyncio.CancelledError:
            if any(task.cancelling() for task in self._watched):
                self._cancelled = True
                self._attempts = self._attempts or self._running()
            raise
        except Exception as error:  # noqa: BLE001 - its caller raises it, when all has ended
            return error
        finally:
            self._ending = True
            for task in self._watched:
                task.cancel()

    def why_cancelled(self) -> OwnTasksCancelled | None:
        """What a CancelledError out of ``ended`` means; None when somebody cancelled the agent as a
        whole, as its caller may."""
        return self._told() if self._cancelled else None

    def _told(self) -> OwnTasksCancelled:
        attempts = self._attempts[:_SHOWN]
        _log.error(OwnTasksCancelled.code, attempts=attempts, remedy=_REMEDY)
        return OwnTasksCancelled(
            f"the agent's own tasks were cancelled while {', '.join(attempts) or 'no attempt'} ran;"
            f" {_REMEDY}"
        )

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() and not self._ending and not self._outcome.done():
            self._attempts = self._running()
            self._outcome.set_exception(self._told())


async def drain_when_asked(
    stop: asyncio.Event, folder: Path, feed: Callable[[DrainRequested], None]
) -> None:
    """Tells ``feed`` of each request to stop. ``farflow agent drain`` leaves a note before its
    signal: a second one only brings the end forward, while a second plain SIGTERM is the end."""
    await stop.wait()
    note = await asyncio.to_thread(take_note, folder)
    deadline_s = None if note is None else note.deadline_s
    _log.info("agent.draining", deadline_s=deadline_s)
    feed(DrainRequested(reason="stop requested", deadline_s=deadline_s))
    while isinstance(stop, Stop):
        await stop.again.wait()
        stop.again.clear()
        note = await asyncio.to_thread(take_note, folder)
        deadline_s = 0.0 if note is None else note.deadline_s
        _log.info("agent.asked_again", deadline_s=deadline_s)
        feed(DrainRequested(reason="asked again", deadline_s=deadline_s))
