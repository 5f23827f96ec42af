"""Foreign coroutines on our event loop: what they raise does not end it, and they can be ended.

``asyncio`` lets SystemExit and KeyboardInterrupt out of a task end the whole loop, and a task ends
only if its coroutine lets the CancelledError through. A contained coroutine is stepped by one of
ours, so neither is up to it.

What always holds: SystemExit and KeyboardInterrupt become ``WorkflowExit``, and the ``LoopStalled``
that ``edge_agent.watchdog`` raises in what blocks the loop becomes ``WorkflowStalled``; a coroutine
that is given up is closed where it waits, and, if it resists even that, never stepped again. The
same goes for every task that a contained coroutine creates, save inside ``ours``; ``finish`` leaves
none.

A real Ctrl-C or SIGTERM is a callback of the loop (``transport.runtime.shutdown``) and never raised
in a task, so it is not caught here.
"""

import asyncio
import contextlib
import inspect
from collections.abc import Collection, Coroutine, Generator, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from transport.errors import FarflowError
from transport.texts import told

T = TypeVar("T")

_CLOSE_S: Final = 1.0
"""What is given up ends at its next step; waited for so long in case something else holds it."""

_scope: ContextVar["Containment | None"] = ContextVar("containment", default=None)


class WorkflowExit(FarflowError):
    """A workflow asked for the end of the process; only its attempt ends."""

    code = "workflow.exit"


class WorkflowStalled(FarflowError):
    """A workflow kept the agent's event loop to itself."""

    code = "workflow.stalled"

    def __init__(self) -> None:
        super().__init__(
            "it did not await for longer than agent.stall_s, while nothing else of the agent could "
            "run: await, or call what takes long with asyncio.to_thread"
        )


class LoopStalled(BaseException):
    """Raised from another thread in the code that blocks the loop."""


class _Count:
    stalls = 0


def stalls_ended() -> int:
    """How many steps of contained coroutines ended by ``LoopStalled`` in this process."""
    return _Count.stalls


class Containment:
    """The coroutines of one attempt and whatever tasks they create."""

    def __init__(self) -> None:
        self._live: dict[asyncio.Task[Any], _Stepped[Any]] = {}
        self._given_up = False
        self.stuck = False

    def start(self, foreign: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """A task that runs ``foreign`` contained."""
        loop = asyncio.get_running_loop()
        if not isinstance(loop.get_task_factory(), _Factory):
            loop.set_task_factory(_Factory(loop.get_task_factory()))
        token = _scope.set(self)
        try:
            return loop.create_task(foreign)
        finally:
            _scope.reset(token)

    async def end(self, tasks: Sequence["asyncio.Task[Any]"], within_s: float) -> None:
        """Cancels ``tasks`` of this and waits for them, ``within_s`` (and a moment) at most.

        If one has not ended by then, ``stuck`` is set and everything in here is given up; when this
        is itself cancelled, that is done at once.
        """
        for task in tasks:
            task.cancel()
        try:
            late = await _unfinished(tasks, within_s)
            self.stuck = self.stuck or bool(late)
        finally:
            if not all(task.done() for task in tasks):
                self._give_up()
        await _unfinished(late, _CLOSE_S)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()  # looked at, so that asyncio does not tell of it

    async def finish(self, within_s: float) -> None:
        """Ends whatever is still in here, as ``end`` does; what begins in here later never runs."""
        if not self._given_up:
            await self.end(self.tasks(), within_s)
        self._give_up()

    def tasks(self) -> list["asyncio.Task[Any]"]:
        """What still runs, also what contained coroutines started and left behind."""
        return list(self._live)

    def _give_up(self) -> None:
        self._given_up = True
        for task, stepped in list(self._live.items()):
            stepped.given_up = True
            task.cancel()

    def hold(self, task: "asyncio.Task[Any]", stepped: "_Stepped[Any]") -> None:
        """``task`` runs ``stepped``."""
        stepped.given_up = self._given_up
        self._live[task] = stepped
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._live.pop(task).discard()


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Tasks created inside are the agent's own, though a workflow's call led to them."""
    token = _scope.set(None)
    try:
        yield
    finally:
        _scope.reset(token)


class _Factory:
    """Makes the tasks of a loop: contained ones where the creator is, others as before."""

    def __init__(self, before: Any) -> None:
        self._before = before or _plain_task

    def __call__(
        self,
        loop: asyncio.AbstractEventLoop,
        coro: Any,
        **options: Any,
    ) -> Any:
        scope = _scope.get()
        if scope is None or not inspect.iscoroutine(coro):
            return self._before(loop, coro, **options)
        stepped = _Stepped(coro)
        task = self._before(loop, _run(stepped), **options)
        scope.hold(task, stepped)
        return task


def _plain_task(
    loop: asyncio.AbstractEventLoop,
    coro: Coroutine[Any, Any, T],
    **options: Any,
) -> "asyncio.Task[T]":
    return asyncio.Task(coro, loop=loop, **options)


async def _run(stepped: "_Stepped[T]") -> T:
    result: T = await stepped
    return result


async def _unfinished(
    tasks: Collection["asyncio.Task[Any]"], within_s: float
) -> Collection["asyncio.Task[Any]"]:
    return (await asyncio.wait(tasks, timeout=within_s))[1] if tasks else ()


class _Stepped(Generator[Any, Any, T]):
    """Awaited, it steps a coroutine, and stops doing so once that is given up."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self.given_up = False

    def __await__(self) -> "_Stepped[T]":
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        self._stop_if_given_up()
        try:
            return self._coroutine.send(value)
        except (SystemExit, KeyboardInterrupt, LoopStalled) as error:
            raise _as_failure(error) from error

    def throw(self, *thrown: Any) -> Any:
        self._stop_if_given_up()
        try:
            return self._coroutine.throw(*thrown)
        except (SystemExit, KeyboardInterrupt, LoopStalled) as error:
            raise _as_failure(error) from error

    def close(self) -> None:
        """Ends the coroutine where it waits; whatever it says to that is of no interest."""
        with contextlib.suppress(BaseException):
            self._coroutine.close()

    def discard(self) -> None:
        """The task is over; one that was cancelled before it began never stepped this."""
        if inspect.getcoroutinestate(self._coroutine) == inspect.CORO_CREATED:
            self._coroutine.close()

    def _stop_if_given_up(self) -> None:
        if self.given_up:
            self.close()
            raise asyncio.CancelledError


STEPS: Final = frozenset(
    step.__code__ for step in (_Stepped.send, _Stepped.throw, _Stepped.close, _Stepped.discard)
)
"""A frame of one of these on a stack: a contained coroutine runs above it."""


def _as_failure(error: BaseException) -> FarflowError:
    if isinstance(error, LoopStalled):
        _Count.stalls += 1
        return WorkflowStalled()
    return WorkflowExit(
        f"{told(error)}: a workflow cannot end the agent; raise another error to fail the attempt"
    )
