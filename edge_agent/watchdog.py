"""A thread that watches the event loop: a workflow that blocks it ends its attempt, or the process.

Everything of an agent runs on one loop, so a workflow that never awaits (``while True: pass``, a
``time.sleep``) would silence the agent for good. When the loop has not ticked for ``stall_s``, the
loop's stack is logged. If a workflow is on it, ``LoopStalled`` is raised where it is, with
``PyThreadState_SetAsyncExc`` (Python/C API, "Initialization, Finalization, and Threads"): a loop in
Python ends there and its attempt fails with ``workflow.stalled``. A call into C does not look for
exceptions, so after ``TRIES`` of them, ``TRY_S`` apart, the process ends with ``EXIT_STALLED``, and
whoever keeps it starts it again. A call that even keeps other threads from running (a regular
expression that does not come to an end) is seen by ``faulthandler``, which needs none of Python's
locks: it ends the process with status 1 after ``LOCKED_STALLS`` times ``stall_s``. It cannot tell
that from a process that was stopped for as long (SIGSTOP, a suspended machine), which ends when it
goes on, and is started again.

What always holds: nothing is raised, and the process is not ended in order, unless a workflow is on
the loop's stack at that moment; a shorter stop of the whole process counts as one look. The stack
is looked at in the same turn of this thread as the exception is set. Should the workflow return in
between all the same, the exception ends another task: the agent's, with status 1, which is answered
by a restart as well.
"""

import asyncio
import ctypes
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Final

import structlog

from edge_agent.containment import STEPS, LoopStalled, stalls_ended

EXIT_STALLED: Final = 75
"""Exit status of a process whose loop a workflow blocked in a way that nothing can end."""
TRIES: Final = 3
TRY_S: Final = 5.0
"""A workflow may catch the exception, so it is raised this often, so many seconds apart (or
``stall_s``, if that is less)."""
LOCKED_STALLS: Final = 4
_LOOKS: Final = 10
_LOOK_S: Final = 1.0
_STDERR: Final = 2
_FRAMES: Final = 40

_log = structlog.get_logger()


class Watchdog:
    """Watches the loop that runs when it is entered, until it is left.

    ``modules`` are those of the owner's workflows; ``before_exit`` is called in the watching thread
    before the process ends, and must not take long.
    """

    def __init__(
        self,
        stall_s: float,
        *,
        modules: Collection[str] = (),
        before_exit: Callable[[], object] = lambda: None,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._stall_s = stall_s
        self._look_s = min(_LOOK_S, stall_s / _LOOKS)
        self._try_s = min(TRY_S, stall_s)
        self._modules = frozenset(modules)
        self._before_exit = before_exit
        self._leave = leave
        self._ticks = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        self._tick()
        self._arm()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._timer.cancel()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _tick(self) -> None:
        self._ticks += 1
        self._timer = self._loop.call_later(self._look_s, self._tick)

    def _arm(self) -> None:
        """From now on, for a thread that is not Python's."""
        faulthandler.dump_traceback_later(LOCKED_STALLS * self._stall_s, exit=True, file=_STDERR)

    # ---- in the watching thread --------------------------------------------------------------

    def _watch(self) -> None:
        seen, quiet_s, tries, told = self._progress(), 0.0, 0, False
        while not self._over.wait(self._look_s):
            self._arm()
            progress = self._progress()
            if progress != seen:
                if told:
                    _log.warning("agent.stall_over", raised=tries)
                seen, quiet_s, tries, told = progress, 0.0, 0, False
                continue
            quiet_s += self._look_s  # not by a clock: a process that was stopped did not stall
            if quiet_s < self._stall_s + tries * self._try_s:
                continue
            if not told:
                told = True
                self._tell(quiet_s)
            if tries < TRIES:
                tries += self._interrupt()
            elif self._foreign():
                self._end(quiet_s)
                return

    def _progress(self) -> tuple[int, int]:
        return self._ticks, stalls_ended()

    def _tell(self, quiet_s: float) -> None:
        frame = sys._current_frames().get(self._watched)
        _log.error(
            "agent.stalled",
            quiet_s=round(quiet_s, 1),
            workflow=self._foreign(),
            stack="".join(traceback.format_stack(frame)[-_FRAMES:]),
            remedy="a workflow must not block: await, or asyncio.to_thread(...)",
        )

    def _interrupt(self) -> bool:
        """Raises in the loop's thread if a workflow runs there; says if it did."""
        time.sleep(0)  # we have the lock anew, for a whole switch interval: more than is needed
        if not self._foreign():
            return False
        ident, kind = ctypes.c_ulong(self._watched), ctypes.py_object(LoopStalled)
        return bool(ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, kind))

    def _foreign(self) -> bool:
        """Whether a workflow is on the stack of the loop's thread."""
        return any(
            frame.f_code in STEPS or frame.f_globals.get("__name__") in self._modules
            for frame in _frames(sys._current_frames().get(self._watched))
        )

    def _end(self, quiet_s: float) -> None:
        _log.error("agent.stalled_for_good", quiet_s=round(quiet_s, 1), status=EXIT_STALLED)
        with suppress(Exception):
            self._before_exit()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        self._leave(EXIT_STALLED)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
