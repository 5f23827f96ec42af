"""Keeps one task-source process per run and turns its answers into events.

What always holds: every request is answered by ``ItemsProduced`` or the run by one
``TaskSourceFailed``, however often the process dies meanwhile; requests that are out already are
not sent again; a process that dies again and again without an answer is not restarted for ever.
"""

import asyncio
import contextlib
import random
import sys
from collections import deque
from collections.abc import Callable
from typing import Final, Literal

import msgspec
import structlog

from scheduler.core.events import ItemsProduced, TaskSourceFailed
from scheduler.task_source import (
    FRAME_BYTES,
    MAX_COUNT,
    SIZE,
    SourceAnswer,
    SourceFailed,
    SourceItems,
    SourceRequest,
    frame,
)
from transport.runs import HELD_OUT, RunSpec
from transport.runtime.commands import Talk, start_talk
from transport.runtime.processes import child_environment

MAX_DEATHS: Final = 5
"""Without an answer in between."""

FIRST_RESTART_S: Final = 0.5
MAX_RESTART_S: Final = 10.0
STOP_GRACE_S: Final = 2.0
MAX_OUTSTANDING: Final = 1024
"""Requests per run; the core asks for more only after an answer."""

STDERR_TAIL_BYTES: Final = 2000

Kind = Literal["train", "eval"]
OnEvent = Callable[[ItemsProduced | TaskSourceFailed], None]

_log = structlog.get_logger()
_decoder = msgspec.msgpack.Decoder(SourceAnswer)


class TaskRunner:
    """The task sources of all live runs. ``on_event`` is called on the event loop; ``argv`` is
    what makes items, and ``modules`` are those of users' own sources that it may import."""

    def __init__(
        self,
        on_event: OnEvent,
        rng: random.Random,
        *,
        argv: tuple[str, ...] = (sys.executable, "-m", "scheduler.task_source"),
        modules: tuple[str, ...] = (),
        max_deaths: int = MAX_DEATHS,
        first_restart_s: float = FIRST_RESTART_S,
    ) -> None:
        self._on_event = on_event
        self._rng = rng
        self._argv = (*argv, *modules)
        self._max_deaths = max_deaths
        self._first_restart_s = first_restart_s
        self._runs: dict[str, _RunSource] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def start(self, run: RunSpec) -> None:
        """Starting a running one is harmless."""
        if run.name not in self._runs:
            self._runs[run.name] = _RunSource(
                run,
                self._on_event,
                self._rng,
                argv=self._argv,
                max_deaths=self._max_deaths,
                first_restart_s=self._first_restart_s,
            )

    async def check(self, run: RunSpec) -> str:
        """What is wrong with a run's task sources, as a process of its own finds that opens them
        and draws nothing; nothing if it cannot say. Cancelling it ends the process."""
        try:
            talk = await _started(self._argv)
        except OSError:
            return ""  # the run's own process will say so
        stdin, stdout, stderr = talk.stdin, talk.stdout, talk.stderr
        assert stdin is not None  # noqa: S101 - asked for as a pipe
        assert stdout is not None  # noqa: S101 - likewise
        assert stderr is not None  # noqa: S101 - likewise
        emptied = asyncio.create_task(_emptied(stderr))
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                stdin.write(frame(run) + frame(SourceRequest(kind="train", start=0, count=0)))
            data = await _read_frame(stdout)
            answer = None if data is None else _decoder.decode(data)
        except msgspec.DecodeError:
            answer = None
        finally:
            emptied.cancel()
            await talk.end()
        return answer.message if isinstance(answer, SourceFailed) else ""

    def produce(
        self, run: str, kind: Kind, start: int, count: int, evaluation: str = HELD_OUT
    ) -> None:
        """Ask for items; the answer may come in parts. Unknown runs are ignored: the core has
        stopped them since."""
        source = self._runs.get(run)
        if source is not None:
            for first in range(start, start + count, MAX_COUNT):
                part = min(MAX_COUNT, start + count - first)
                source.ask(SourceRequest(kind=kind, start=first, count=part, evaluation=evaluation))

    def stop(self, run: str) -> None:
        """End the run's process in the background; nothing more is heard of it."""
        source = self._runs.pop(run, None)
        if source is not None:
            closing = asyncio.create_task(source.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Stop all of them."""
        for run in list(self._runs):
            self.stop(run)
        await asyncio.gather(*self._closing)


class _RunSource:
    """One run's process, over all its lives."""

    def __init__(
        self,
        run: RunSpec,
        on_event: OnEvent,
        rng: random.Random,
        *,
        argv: tuple[str, ...],
        max_deaths: int,
        first_restart_s: float,
    ) -> None:
        self._run = run
        self._on_event = on_event
        self._rng = rng
        self._argv = argv
        self._max_deaths = max_deaths
        self._first_restart_s = first_restart_s
        self._outstanding: deque[SourceRequest] = deque()
        self._talk: Talk | None = None
        self._deaths = 0
        self._tail = b""
        self._task = asyncio.get_running_loop().create_task(
            self._keep_running(), name=f"task-source {run.name}"
        )

    def ask(self, request: SourceRequest) -> None:
        if request in self._outstanding or len(self._outstanding) >= MAX_OUTSTANDING:
            return
        self._outstanding.append(request)
        if self._talk is not None:
            self._write(frame(request))

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _keep_running(self) -> None:
        while True:
            try:
                talk = await _started(self._argv)
            except OSError as error:
                self._fail("task.process", f"cannot start {self._argv[0]}: {error}")
                return
            try:
                failed = await self._converse(talk)
            finally:
                await _ended(talk)
            if failed:
                return
            self._deaths += 1
            status = talk.returncode
            if self._deaths >= self._max_deaths:
                tail = self._tail.decode("utf-8", "replace").strip()
                self._fail("task.process", f"ended {self._deaths} times (status {status}): {tail}")
                return
            _log.warning("task_source.ended", run=self._run.name, status=status)
            delay_s = min(MAX_RESTART_S, self._first_restart_s * 2 ** (self._deaths - 1))
            await asyncio.sleep(delay_s * self._rng.uniform(0.5, 1.0))

    async def _converse(self, talk: Talk) -> bool:
        """Until the process ends; returns whether the source has failed for good."""
        stdout, stderr = talk.stdout, talk.stderr
        assert stdout is not None  # noqa: S101 - asked for as a pipe
        assert stderr is not None  # noqa: S101 - likewise
        self._talk, self._tail = talk, b""
        tail = asyncio.create_task(self._keep_tail(stderr))
        try:
            self._write(frame(self._run))
            for request in self._outstanding:
                self._write(frame(request))
            while (data := await _read_frame(stdout)) is not None:
                try:
                    answer = _decoder.decode(data)
                except msgspec.DecodeError:
                    return False
                if isinstance(answer, SourceFailed):
                    self._fail(answer.code, answer.message)
                    return True
                self._answered(answer)
            await asyncio.wait([tail], timeout=STOP_GRACE_S)
            return False
        finally:
            self._talk = None
            tail.cancel()

    def _answered(self, answer: SourceItems) -> None:
        self._deaths = 0
        if self._outstanding:  # answers come in the order of requests
            request = self._outstanding.popleft()
            if answer.kind == "eval" and not answer.items and answer.end is None:
                # Still searching; what was asked for meanwhile goes first. To the core an empty
                # answer would be the end.
                self.ask(request)
                return
        if answer.end is not None and not answer.items:
            _log.info(
                "task_source.held_out_end",
                run=self._run.name,
                evaluation=answer.evaluation,
                items=answer.end,
            )
        self._on_event(
            ItemsProduced(
                run=self._run.name,
                kind=answer.kind,
                start=answer.start,
                items=answer.items,
                evaluation=answer.evaluation,
            )
        )

    def _fail(self, code: str, message: str) -> None:
        self._outstanding.clear()
        self._on_event(TaskSourceFailed(run=self._run.name, code=code, message=message))

    def _write(self, data: bytes) -> None:
        # The pipe may be gone; the reader sees the end of the process.
        if self._talk is not None and self._talk.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._talk.stdin.write(data)

    async def _keep_tail(self, stderr: asyncio.StreamReader) -> None:
        while data := await stderr.read(4096):
            self._tail = (self._tail + data)[-STDERR_TAIL_BYTES:]


async def _ended(talk: Talk) -> None:
    """The end of its input ends it; what lingers is killed with its group."""
    if talk.stdin is not None:
        talk.stdin.close()
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S):
                await talk.wait()
    finally:
        await talk.end()


async def _started(argv: tuple[str, ...]) -> Talk:
    """Raises OSError when there is no such program."""
    # Some generators iterate over sets: else items would differ per process.
    fixed = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    return await start_talk(argv, environment=child_environment(fixed))


async def _emptied(stream: asyncio.StreamReader) -> None:
    """Read a pipe to its end, so that nobody waits for room in it."""
    while await stream.read(4096):
        pass


async def _read_frame(stream: asyncio.StreamReader) -> bytes | None:
    """The next frame, None when the process has ended or talks nonsense."""
    try:
        (size,) = SIZE.unpack(await stream.readexactly(SIZE.size))
        if size > FRAME_BYTES:
            return None
        return await stream.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return None
