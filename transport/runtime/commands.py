"""Programs that are run for what they answer, and ended with everything that they started.

What always holds:

1. Such a program leads a process group of its own, and has ended once its leader has ended: what is
   left of the group is then killed, and our ends of the pipes are closed ``DRAIN_S`` later, whoever
   else may hold the other ends. So nothing that it started keeps a reader or a waiter here.
2. ``Talk.end`` returns within the time that it is given, and ``run_command`` that long after it is
   cancelled at the latest. What left the group (``setsid``) is not ours to kill, nor waited for.
"""

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, SubprocessStreamProtocol
from collections.abc import Mapping, Sequence
from typing import Final

import structlog

_TURNS: Final = 8
DRAIN_S: Final = 1.0
"""After the leader's exit, last words are read for so long, should a descendant hold the pipe."""
END_S: Final = 5.0
"""How long a killed program may take to be gone; only the kernel can delay it."""
KEPT_BYTES: Final = 64 * 1024
"""How much of the end of a command's output is kept."""
_READ_BYTES: Final = 1 << 16

_log = structlog.get_logger()


def kill_group(leader: int) -> None:
    """SIGKILL to whatever is left of the process group that ``leader`` leads or led."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: a zombie's group
        os.killpg(leader, signal.SIGKILL)


class Talk(SubprocessStreamProtocol):
    """A running program with its pipes as streams (None for those that are not pipes): ``stdin``,
    ``stdout``, ``stderr``. Made by ``start_talk``."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        super().__init__(limit=_READ_BYTES, loop=self._loop)
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._pipes: asyncio.SubprocessTransport
        self.pid = 0

    @property
    def returncode(self) -> int | None:
        """Exit status, negative signal number, or ``None`` while it runs."""
        return self._exited.result() if self._exited.done() else None

    async def wait(self) -> int:
        """The status once the leader has ended; may be called by many and be cancelled."""
        return await asyncio.shield(self._exited)

    async def end(self, within_s: float = END_S) -> int | None:
        """Kills the whole group and waits for the leader, ``within_s`` at most; idempotent.

        Returns the status, None when it is not gone by then (stuck in the kernel: it is given up,
        and its pipes are closed). The kill comes before the first wait, so a cancel finds it done.
        """
        if not self._exited.done():
            kill_group(self.pid)
            try:
                async with asyncio.timeout(within_s):
                    await self.wait()
            except TimeoutError:
                _log.warning("process.given_up", pid=self.pid, within_s=within_s)
        self._close_pipes()
        for _ in range(_TURNS):  # what a closed pipe still has the loop do
            if self._pipes.is_closing():
                break
            await asyncio.sleep(0)
        return self.returncode

    # What the event loop reports.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)  # noqa: S101 - for the type checker
        super().connection_made(transport)
        self._pipes = transport
        self.pid = transport.get_pid()

    def process_exited(self) -> None:
        kill_group(self.pid)
        self._exited.set_result(self._pipes.get_returncode() or 0)
        self._loop.call_later(DRAIN_S, self._close_pipes)
        super().process_exited()

    def _close_pipes(self) -> None:
        # Not the transport's own close: that polls, and the loop's watcher would lose the status.
        for number in (0, 1, 2):
            pipe = self._pipes.get_pipe_transport(number)
            if isinstance(pipe, asyncio.WriteTransport):
                if not pipe.is_closing() or pipe.get_write_buffer_size():
                    pipe.abort()  # close would wait for a reader of what is still buffered
            elif pipe is not None and not pipe.is_closing():
                pipe.close()


async def start_talk(
    argv: Sequence[str],
    *,
    stdin: int = PIPE,
    stdout: int = PIPE,
    stderr: int = PIPE,
    environment: Mapping[str, str] | None = None,
    folder: str | None = None,
) -> Talk:
    """Starts a program, in ``folder`` if given; ``environment`` replaces ours. Raises ``OSError``
    when it cannot be run."""
    _, talk = await asyncio.get_running_loop().subprocess_exec(
        Talk,
        *argv,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )
    return talk


async def run_command(
    argv: Sequence[str],
    *,
    body: bytes = b"",
    stdout: int = STDOUT,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, bytes]:
    """Runs a program on ``body``; returns its status and the last ``KEPT_BYTES`` that it said.

    ``stdout`` is ``DEVNULL`` where only its standard error counts. There is no time limit here: use
    ``asyncio.timeout``. Raises ``OSError`` when it cannot be run.
    """
    talk = await start_talk(
        argv,
        stdin=PIPE if body else DEVNULL,
        stdout=PIPE if stdout == STDOUT else stdout,
        stderr=STDOUT if stdout == STDOUT else PIPE,
        environment=environment,
    )
    try:
        said, _ = await asyncio.gather(_tail(talk.stdout or talk.stderr), _feed(talk.stdin, body))
        return await talk.wait(), said
    finally:
        await talk.end()


async def _tail(stream: asyncio.StreamReader | None) -> bytes:
    """The last ``KEPT_BYTES`` of a stream, read to its end."""
    tail = b""
    while stream is not None and (read := await stream.read(_READ_BYTES)):
        tail = (tail + read)[-KEPT_BYTES:]
    return tail


async def _feed(stream: asyncio.StreamWriter | None, body: bytes) -> None:
    """Write all of it, if the program cares to read."""
    if stream is not None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            stream.write(body)
            await stream.drain()
        stream.close()
