"""Child processes: started, watched, restarted and ended with everything that they started.

What always holds:

1. A child's standard input is a pipe from us. When we end, in whatever way, it reads the end of its
   input and stops (``stop_on_stdin_eof``); nothing is left behind.
2. A child leads a process group of its own: Ctrl-C in a terminal reaches us alone, and when the
   leader has ended, whatever remains of its group is killed.
3. Its standard error goes straight into a log file, which outlives us as evidence and stays near
   ``log_limit_bytes`` (and one older file of that size). Its standard output goes there too, or is
   kept for us as lines: at most ``MAX_PENDING_LINES`` of ``MAX_LINE_BYTES``, the oldest is dropped.
4. Restarts are delayed, twice as long each time, and bounded per window. Status 78 (a wrong
   configuration) is never answered by a restart.
"""

import asyncio
import contextlib
import os
import shutil
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec
import structlog

from transport.errors import ProcessFailed, StoreError
from transport.runtime.commands import DRAIN_S, kill_group
from transport.runtime.files import store_errors
from transport.runtime.origin import EXIT_CONFIG
from transport.runtime.shutdown import ShutdownSignal

MAX_LINE_BYTES: Final = 64 * 1024
MAX_PENDING_LINES: Final = 256
LOG_CHECK_S: Final = 5.0
"""How often a log is measured; it may pass its limit by what the child writes in that time."""
LOG_TAIL_BYTES: Final = 2_000
"""How much of the log an error message quotes."""

_log = structlog.get_logger()


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to start. ``environment`` is added to ours; ``folder`` is where the child starts.

    ``grace_s`` is the time between the polite request to stop and SIGKILL.
    """

    name: str
    argv: tuple[str, ...]
    log_path: Path
    capture_stdout: bool = False
    environment: dict[str, str] = {}
    folder: Path | None = None
    log_limit_bytes: int = 16 * 1024 * 1024
    grace_s: float = 10.0


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The k-th restart in a row waits ``min(max_delay_s, first_delay_s * 2**(k-1))``.

    A child that ran for ``settled_after_s`` starts the count anew; more than ``max_restarts``
    within ``window_s`` end the attempts.
    """

    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    settled_after_s: float = 60.0
    max_restarts: int = 10
    window_s: float = 600.0

    def delay_s(self, in_a_row: int) -> float:
        """How long the restart number ``in_a_row`` (from 1) waits."""
        return min(self.max_delay_s, self.first_delay_s * 2.0 ** min(in_a_row - 1, 60))


class ChildProcess(asyncio.SubprocessProtocol):
    """One run of one child; made by ``start_child``, which the event loop then reports to."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.pid = 0
        self.dropped_lines = 0
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._lines: deque[bytes] = deque(maxlen=MAX_PENDING_LINES)
        self._partial = b""
        self._skipping = False  # inside a line that is too long
        self._output_ended = not spec.capture_stdout
        self._output_changed = asyncio.Event()
        self._log_check: asyncio.Task[None] | None = None
        self._transport: asyncio.SubprocessTransport

    @property
    def returncode(self) -> int | None:
        """Exit status, negative signal number, or ``None`` while it runs."""
        return self._exited.result() if self._exited.done() else None

    async def wait(self) -> int:
        """Returns the status once the child has ended; may be called by many and be cancelled."""
        return await asyncio.shield(self._exited)

    async def read_line(self, timeout_s: float) -> bytes:
        """The next line of a captured standard output, without its end.

        Raises ``ProcessFailed``, quoting the log, when the child ends or stays silent.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self._lines and not self._output_ended:
                    self._output_changed.clear()
                    await self._output_changed.wait()
        except TimeoutError as error:
            raise self.failure(f"said nothing within {timeout_s:g} s") from error
        if not self._lines:
            raise self.failure("ended before it said what was expected")
        return self._lines.popleft()

    def write_line(self, line: bytes) -> None:
        """Sends a line to the child's standard input; raises ``ProcessFailed`` when it is gone."""
        pipe = self._stdin()
        if pipe is None or pipe.is_closing():
            raise self.failure("takes no input any more")
        if pipe.get_write_buffer_size() > MAX_LINE_BYTES:
            raise self.failure("does not read its input")
        pipe.write(line + b"\n")

    def close_input(self) -> None:
        """Lets the child read the end of its input: the polite request to stop; idempotent."""
        pipe = self._stdin()
        if pipe is not None:
            pipe.close()

    async def terminate(self, grace_s: float | None = None) -> int:
        """Closes the child's input and sends SIGTERM, and SIGKILL to its group when it lingers.

        Returns the status; idempotent. When cancelled, it kills at once.
        """
        if self._exited.done():
            return self._exited.result()
        self.close_input()
        with contextlib.suppress(ProcessLookupError):
            self._transport.send_signal(signal.SIGTERM)
        grace_s = self.spec.grace_s if grace_s is None else grace_s
        try:
            async with asyncio.timeout(grace_s):
                return await self.wait()
        except TimeoutError:
            _log.warning("process.killed", name=self.spec.name, pid=self.pid, grace_s=grace_s)
            self.kill()
        except asyncio.CancelledError:
            self.kill()
            raise
        return await self.wait()

    def kill(self) -> None:
        """SIGKILL to the child's whole group."""
        kill_group(self.pid)

    def failure(self, what: str) -> ProcessFailed:
        """An error about this child that shows how it ended and the end of its log."""
        status = "" if self.returncode is None else f" ({describe_status(self.returncode)})"
        tail = _tail(self.spec.log_path)
        quoted = f"; its log {self.spec.log_path} ends with:\n{tail}" if tail else ""
        return ProcessFailed(f"{self.spec.name} (process {self.pid}) {what}{status}{quoted}")

    # What the event loop reports.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)  # noqa: S101 - for the type checker
        self._transport = transport
        self.pid = transport.get_pid()
        self._log_check = self._loop.create_task(_bound_log(self.spec))

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        assert isinstance(data, bytes)  # noqa: S101 - for the type checker
        *whole, self._partial = (self._partial + data).split(b"\n")
        for line in whole:
            if self._skipping or len(line) > MAX_LINE_BYTES:
                self._skipping = False
                self.dropped_lines += 1
                continue
            self.dropped_lines += len(self._lines) == MAX_PENDING_LINES
            self._lines.append(line)
        if len(self._partial) > MAX_LINE_BYTES:
            self._partial = b""
            self._skipping = True
        self._output_changed.set()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self._output_ended = True
            self._output_changed.set()
            if self._exited.done():
                self._transport.close()

    def process_exited(self) -> None:
        self.kill()  # stragglers of the group
        if self._log_check is not None:
            self._log_check.cancel()
        self._exited.set_result(self._transport.get_returncode() or 0)
        if self._output_ended:
            self._transport.close()
        else:
            self._loop.call_later(DRAIN_S, self._transport.close)

    def _stdin(self) -> asyncio.WriteTransport | None:
        pipe = self._transport.get_pipe_transport(0)
        return pipe if isinstance(pipe, asyncio.WriteTransport) else None


def child_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment for a child, with ``more``; a folder called ``scheduler`` in the current
    folder (our default for its state, or another program's) is not to be imported for ours."""
    return {**os.environ, "PYTHONSAFEPATH": "1", **(more or {})}


async def start_child(spec: ChildSpec) -> ChildProcess:
    """Starts a child; returns when it runs, which says nothing about how far it got.

    Raises ``ProcessFailed`` when the program cannot be run, ``StoreError`` for its log.
    """
    with store_errors("open the log", spec.log_path):
        try:
            log = os.open(
                spec.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640
            )
        except FileNotFoundError as error:
            raise StoreError(f"no folder {spec.log_path.parent} for the log: create it") from error
    try:
        _, child = await asyncio.get_running_loop().subprocess_exec(
            lambda: ChildProcess(spec),
            *spec.argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE if spec.capture_stdout else log,
            stderr=log,
            cwd=spec.folder,
            env=child_environment(spec.environment),
            start_new_session=True,
        )
    except OSError as error:
        raise ProcessFailed(
            f"cannot start {spec.name}: {spec.argv[0]}: {error.strerror or error}"
        ) from error
    finally:
        os.close(log)
    _log.info("process.started", name=spec.name, pid=child.pid)
    return child


async def supervise(
    spec: ChildSpec,
    stop: ShutdownSignal,
    *,
    policy: RestartPolicy | None = None,
    on_started: Callable[[ChildProcess], Awaitable[None]] | None = None,
) -> None:
    """Keeps a child running until a stop is asked for, then ends it; a part of ``run_together``.

    ``on_started`` is awaited after every start (to read what the child says when it is ready, say);
    a ``ProcessFailed`` from it counts as an end of the child. Raises ``ProcessFailed`` when the
    child refuses its configuration (status 78) or ends too often.
    """
    policy = policy or RestartPolicy()
    loop = asyncio.get_running_loop()
    restarts: deque[float] = deque()
    in_a_row = 0
    while not stop.requested():
        started_at = loop.time()
        child = await start_child(spec)
        failure: ProcessFailed | None = None
        try:
            if on_started is not None:
                await _first(on_started(child), stop.wait())
            await _first(child.wait(), stop.wait())
        except ProcessFailed as error:
            failure = error
        finally:
            status = await child.terminate()
        if stop.requested():
            return
        _log.warning("process.ended", name=spec.name, pid=child.pid, status=describe_status(status))
        now = loop.time()
        while restarts and restarts[0] <= now - policy.window_s:
            restarts.popleft()
        if status == EXIT_CONFIG:
            raise child.failure("refuses its configuration") from failure
        if len(restarts) >= policy.max_restarts:
            raise child.failure(
                f"ended {len(restarts) + 1} times within {policy.window_s:g} s"
            ) from failure
        restarts.append(now)
        in_a_row = 1 if now - started_at >= policy.settled_after_s else in_a_row + 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(policy.delay_s(in_a_row)):
                await stop.wait()


def describe_status(status: int) -> str:
    """An exit status for people: ``status 1``, ``killed by SIGKILL``."""
    if status >= 0:
        return f"status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


async def _first(*awaitables: Awaitable[object]) -> None:
    """Waits for the first to end, raises its error if it failed, and cancels the others."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _bound_log(spec: ChildSpec) -> None:
    """Moves a log that grew too long aside, for as long as the child runs."""
    while True:
        await asyncio.sleep(LOG_CHECK_S)
        try:
            await asyncio.to_thread(rotate_log, spec.log_path, spec.log_limit_bytes)
        except (StoreError, FileNotFoundError) as error:
            _log.warning("process.log_not_rotated", name=spec.name, reason=str(error))


def rotate_log(path: Path, limit_bytes: int) -> bool:
    """Copies a log longer than ``limit_bytes`` to ``PATH.1`` and empties it; says if it did.

    The child keeps its descriptor, so the file cannot be renamed under it; what it writes between
    the two steps is lost.
    """
    with store_errors("rotate", path):
        if path.stat().st_size <= limit_bytes:
            return False
        shutil.copyfile(path, path.with_name(f"{path.name}.1"))
        os.truncate(path, 0)
    return True


def _tail(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES))
            return file.read(LOG_TAIL_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return ""
