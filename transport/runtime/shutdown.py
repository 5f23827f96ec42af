"""How a daemon is told to stop, and how its parts stop together.

What always holds:

1. SIGTERM, SIGINT and (for a child) the end of standard input all set one event, with a reason.
   A second SIGINT ends the process at once with status 130: the user insists. A second SIGTERM
   sets ``again``: whoever still finishes work gives that up and leaves in order.
2. Parts that run together stop together: one that returns or fails asks the others to stop; each
   may finish within the grace period, the rest is cancelled, and then the error is raised.
3. Waiting for standard input neither blocks the loop nor changes how the descriptor behaves for
   other processes (a terminal is shared: made non-blocking, it would break the shell's output).
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Final, Self

import structlog

STDIN: Final = 0
EXIT_INTERRUPTED: Final = 130
"""128 + SIGINT, as shells report it."""
DEFAULT_GRACE_S: Final = 10.0
_READ_BYTES: Final = 64 * 1024

_log = structlog.get_logger()


class Stop(asyncio.Event):
    """What a daemon waits for: set once a stop is asked for. ``again`` is set when it is asked for
    anew; who heeds that clears it."""

    def __init__(self) -> None:
        super().__init__()
        self.again = asyncio.Event()


class ShutdownSignal:
    """One event for every way of being asked to stop; a context manager around a daemon's life.

    ``reason`` says who asked first. Enter it inside the running event loop, in the main thread.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._event = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._interrupted = False
        self._terminated = False
        self.on_again: Callable[[], None] = lambda: None
        """Called at every SIGTERM after the first; must not wait."""
        self.before_leaving: Callable[[], None] | None = None
        """Called when a second interrupt ends the process at once; must not wait."""

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGTERM, self._on_terminate)
        self._loop.add_signal_handler(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._loop is not None:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.remove_signal_handler(number)
            self._loop = None

    def request(self, reason: str) -> None:
        """Asks for a stop; only the first reason is kept."""
        if not self._event.is_set():
            self.reason = reason
            self._event.set()

    def requested(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> str:
        """Returns the reason once a stop is asked for."""
        await self._event.wait()
        return self.reason

    def _on_terminate(self) -> None:
        if self._terminated:
            self.on_again()
        self._terminated = True
        self.request("SIGTERM")

    def _on_interrupt(self) -> None:
        if self._interrupted:
            # Not sys.exit: what hangs is exactly what an orderly exit would wait for.
            if self.before_leaving is not None:
                self.before_leaving()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_INTERRUPTED)
        self._interrupted = True
        self.request("SIGINT")


async def read_until_eof(
    on_bytes: Callable[[bytes], None] | None = None, descriptor: int = STDIN
) -> None:
    """Hands over what arrives on ``descriptor`` and returns when it ends.

    Works for pipes, sockets, terminals, files and a closed descriptor (which has ended).
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        try:
            data = os.read(descriptor, _READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # the terminal is gone, or the descriptor was never open
            data = b""
        if data and on_bytes is not None:
            on_bytes(data)
        if not data and not ended.done():
            ended.set_result(None)

    try:
        loop.add_reader(descriptor, readable)
    except PermissionError:
        # epoll takes neither regular files nor /dev/null; reading those does not wait.
        while not ended.done():
            readable()
            await asyncio.sleep(0)
        return
    except OSError:  # not open at all
        return
    try:
        await ended
    finally:
        loop.remove_reader(descriptor)


async def stop_on_stdin_eof(stop: ShutdownSignal, descriptor: int = STDIN) -> None:
    """Asks for a stop when standard input ends; returns at the stop, whoever asked for it.

    A parent that dies, in whatever way, closes its end of the pipe: no child is left behind.
    """
    eof = asyncio.ensure_future(read_until_eof(None, descriptor))
    asked = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({eof, asked}, return_when=asyncio.FIRST_COMPLETED)
        if eof.done():
            eof.result()
            stop.request("standard input closed")
    finally:
        for task in (eof, asked):
            task.cancel()


async def run_together(
    stop: ShutdownSignal,
    parts: Mapping[str, Callable[[], Coroutine[Any, Any, None]]],
    *,
    grace_s: float = DEFAULT_GRACE_S,
) -> None:
    """Runs the named parts until a stop is asked for; returns when all of them have ended.

    Each part watches ``stop`` and finishes by itself; what still runs ``grace_s`` after the stop is
    cancelled. A part that fails asks for the stop too, so that the others end in order before its
    error is raised (an ``ExceptionGroup`` when several failed).
    """
    loop = asyncio.get_running_loop()
    tasks = [
        loop.create_task(_run_part(stop, name, part), name=name) for name, part in parts.items()
    ]
    try:
        reason = await stop.wait()
        _log.info("shutdown.begun", reason=reason)
        late = (await asyncio.wait(tasks, timeout=grace_s))[1] if tasks else set()
        if late:
            names = sorted(task.get_name() for task in late)
            _log.warning("shutdown.grace_exceeded", grace_s=grace_s, parts=names)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    errors = [error for task in tasks if not task.cancelled() and (error := task.exception())]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise BaseExceptionGroup("several parts failed", errors)


async def _run_part(
    stop: ShutdownSignal, name: str, part: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    outcome = "failed"
    try:
        await part()
        outcome = "ended"
    finally:
        stop.request(f"{name} {outcome}")
