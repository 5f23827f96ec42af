"""Rewards from verifiers that may hang or crash without harming the agent.

What always holds: a reward is the verifier's own number within ``MAX_FINITE`` or there is an error
with a stable code, never a 0 in its place (0 is for a response that has no answer in the form that
was asked for); a verifier runs in a process of its own (plain comparison excepted) which is killed,
with all that it started, when it takes longer than the time limit and started anew for the next
request; at most ``workers`` such processes exist, started when first needed. The reward ``code``
has no process for itself: it is the sandboxes' own time limits that bound it.
"""

import asyncio
import contextlib
import importlib.util
import sys
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

import msgspec
import structlog

from edge_agent.code_reward import code_rewards, surely_lower
from edge_agent.program_marks import MARK, ProgramMarks
from edge_agent.reward_worker import (
    MAX_FRAME_BYTES,
    SIZE_BYTES,
    ScoreReply,
    ScoreRequest,
    answer,
)
from edge_agent.sandbox import sandbox_works
from transport.errors import RewardError
from transport.messages import MAX_FINITE, Item, RewardSpec
from transport.runs import CodeReward
from transport.runtime.commands import Talk, start_talk
from transport.runtime.processes import child_environment

WORKERS = 2
_STDERR_LINES = 20
_LAST_MOMENT_S = 1.0
_MODULES = {"reasoning-gym": "reasoning_gym", "math-verify": "math_verify"}
_WORKER = (sys.executable, "-m", "edge_agent.reward_worker")

_log = structlog.get_logger()


class RewardFailed(RewardError):
    """The verifier could not score a response."""

    code: ClassVar[str] = "reward.failed"


class RewardTimeout(RewardError):
    """The verifier took too long and was killed."""

    code: ClassVar[str] = "reward.timeout"


class RewardCrashed(RewardError):
    """The verifier's process ended by itself."""

    code: ClassVar[str] = "reward.crashed"


def available_rewards() -> tuple[str, ...]:
    """Names of the rewards whose libraries are installed here, and of ``code`` where the sandbox
    was found to work (``edge_agent.sandbox.probe_sandbox``)."""
    optional = [name for name, module in _MODULES.items() if importlib.util.find_spec(module)]
    if sandbox_works():
        optional.append("code")
    return ("exact", *optional)


class _Worker:
    """One verifier process."""

    def __init__(self, process: Talk, marks: ProgramMarks, mark: str) -> None:
        self._process = process
        self._marks = marks
        self._mark = mark
        self._last_words: deque[str] = deque(maxlen=_STDERR_LINES)
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, command: Sequence[str], marks: ProgramMarks) -> "_Worker":
        mark = marks.new()
        try:
            process = await start_talk(command, environment=child_environment({MARK: mark}))
        except OSError as error:
            raise RewardCrashed(f"cannot start a verifier process: {error}") from error
        _log.info("reward.worker_started", pid=process.pid)
        return cls(process, marks, mark)

    async def ask(self, request: bytes) -> ScoreReply:
        """Raises RewardCrashed when the process ends or says nonsense."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RewardCrashed("the verifier process has no pipes")
        try:
            stdin.write(len(request).to_bytes(SIZE_BYTES, "little") + request)
            await stdin.drain()
            size = int.from_bytes(await stdout.readexactly(SIZE_BYTES), "little")
            if size > MAX_FRAME_BYTES:
                raise RewardCrashed(f"the verifier process answers with {size} bytes")
            return msgspec.msgpack.decode(await stdout.readexactly(size), type=ScoreReply)
        except (OSError, asyncio.IncompleteReadError) as error:
            await self._end()
            raise RewardCrashed(
                f"the verifier process ended with status {self._process.returncode}: "
                f"{' | '.join(self._last_words)}"
            ) from error
        except msgspec.DecodeError as error:
            raise RewardCrashed(f"the verifier process answers nonsense: {error}") from error

    async def kill(self) -> None:
        await self._process.end()
        await self._marks.end(self._mark)
        await self._listening

    async def _end(self) -> None:
        """Its pipes are closed, so it is about to end by itself; give it a moment to say how."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_MOMENT_S):
                await self._process.wait()
        await self.kill()

    async def _listen(self) -> None:
        """Keep the last lines of standard error, so that the pipe never fills."""
        if self._process.stderr is None:
            return
        pending = b""
        while data := await self._process.stderr.read(1 << 16):
            *lines, pending = (pending + data).split(b"\n")
            self._last_words.extend(line.decode("utf-8", "replace")[:200] for line in lines)
            pending = pending[-1000:]


class RewardPool:
    """Scores batches of responses. ``command`` starts a verifier process (tests have their own);
    ``marks`` are the agent's."""

    def __init__(
        self,
        timeout_s: float,
        *,
        workers: int = WORKERS,
        command: Sequence[str] = _WORKER,
        marks: ProgramMarks | None = None,
    ) -> None:
        self._marks = marks or ProgramMarks()
        self._timeout_s = timeout_s
        self._command = tuple(command)
        self._permits = asyncio.Semaphore(workers)
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()

    async def score(self, spec: RewardSpec, pairs: Sequence[tuple[Item, str]]) -> list[float]:
        """The reward of each (item, response), one message for all of them.

        Raises:
            RewardFailed: a response could not be scored; names verifier and item.
            RewardTimeout: the batch took longer than the limit.
            RewardCrashed: the verifier's process ended.
            CodeNotRun: a program could not be tested, through no fault of its own.
        """
        if spec.name == "code":
            return await code_rewards(spec.code or CodeReward(), pairs)
        request = ScoreRequest(spec=spec, pairs=tuple(pairs))
        if spec.name == "exact":
            reply = answer(request)
        else:
            reply = await self._ask(_encoded(request))
        if reply.error:
            raise RewardFailed(reply.error)
        if len(reply.rewards) != len(request.pairs):
            raise RewardCrashed(f"{len(reply.rewards)} rewards for {len(request.pairs)} responses")
        if not all(-MAX_FINITE <= reward <= MAX_FINITE for reward in reply.rewards):
            raise RewardFailed(f"the verifier gave a reward beyond {MAX_FINITE:g}, or no number")
        return list(reply.rewards)

    async def score_again(
        self, spec: RewardSpec, pairs: Sequence[tuple[Item, str]], recorded: Sequence[float]
    ) -> list[float]:
        """The same for responses that another agent has scored: what it ``recorded`` where nothing
        certain is found. Raises as ``score``."""
        if spec.name == "code":
            return await surely_lower(spec.code or CodeReward(), pairs, recorded)
        return await self.score(spec, pairs)

    async def close(self) -> None:
        """Kill every process; what waits for one fails."""
        for worker in (*self._idle, *self._busy):
            await worker.kill()
        self._idle.clear()

    async def _started(self) -> _Worker:
        return await _Worker.start(self._command, self._marks)

    async def _ask(self, request: bytes) -> ScoreReply:
        if len(request) > MAX_FRAME_BYTES:
            raise RewardFailed(f"{len(request)} bytes to score are over {MAX_FRAME_BYTES}")
        async with self._permits:
            worker = self._idle.pop() if self._idle else await self._started()
            self._busy.add(worker)
            reusable = False
            try:
                async with asyncio.timeout(self._timeout_s):
                    reply = await worker.ask(request)
                reusable = True
                return reply
            except TimeoutError as error:
                raise RewardTimeout(f"scoring took longer than {self._timeout_s:g} s") from error
            finally:
                self._busy.discard(worker)
                if reusable:
                    self._idle.append(worker)
                else:
                    # Also when we are cancelled: its late answer would belong to nobody.
                    await asyncio.shield(worker.kill())


def _encoded(request: ScoreRequest) -> bytes:
    try:
        return msgspec.msgpack.encode(request)
    except (TypeError, ValueError) as error:
        raise RewardFailed(f"a response cannot be sent to the verifier: {error}") from error
