"""Sequences that keep an engine busy, for ``bench.vllm``: each that ends is followed by another."""

import asyncio
import contextlib
import itertools
import time
from types import TracebackType
from typing import Self

from edge_agent.engine import GenerationRequest, SamplingParams
from edge_agent.engines.vllm_engine import VllmEngine
from transport.errors import EngineError

PROMPT = tuple(range(20, 60))
"""No question: the example's model goes on for the most part until it is cut off."""
NEW_TOKENS = 64
STALLED_S = 300.0


class Load:
    """``sequences`` at once of one policy, between ``async with``."""

    def __init__(self, engine: VllmEngine, policy: str, sequences: int) -> None:
        self._engine = engine
        self._policy = policy
        self._names = itertools.count()
        self._sequences = sequences
        self._tasks: list[asyncio.Task[None]] = []
        self.done = 0
        self.lost = 0
        """Failed, or not ended within ``STALLED_S``, or without a version for each token."""

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._keep_on()) for _ in range(self._sequences)]
        before = self.tokens
        async with asyncio.timeout(STALLED_S):
            while self.tokens < before + 8 * self._sequences:  # noqa: ASYNC110 - a thread counts
                await asyncio.sleep(0.02)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def tokens(self) -> int:
        """Drawn by the engine so far."""
        return self._engine.stats().tokens_generated

    async def rate(self, over_s: float) -> float:
        """Tokens per second in the next ``over_s``."""
        began_s, before = time.monotonic(), self.tokens
        await asyncio.sleep(over_s)
        return (self.tokens - before) / (time.monotonic() - began_s)

    async def _keep_on(self) -> None:
        while True:
            number = next(self._names)
            request = GenerationRequest(
                request_id=f"load {number}",
                policy=self._policy,
                prompt_tokens=PROMPT,
                n=1,
                sampling=SamplingParams(max_new_tokens=NEW_TOKENS, seed=number),
            )
            whole = False
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(STALLED_S):
                    (completion,) = await self._engine.generate(request)
                whole = len(completion.tokens) == len(completion.versions) > 0
            self.done += 1
            self.lost += not whole
