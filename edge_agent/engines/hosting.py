"""What engines have in common that do not draw themselves: a vLLM in processes of its own does, or
a server.

What always holds: a policy changes for one caller at a time; time counts as busy while at least one
sequence has a place.
"""

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar

from edge_agent.engine import EngineStats
from edge_agent.engines.hosted_texts import Hosted, HostedTexts
from edge_agent.engines.vllm_room import Admission
from transport.errors import GenerationFailed
from transport.runtime.clock import Clock, SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable

H = TypeVar("H", bound=Hosted)


class HostingEngine(HostedTexts, Generic[H]):
    """``cap`` bounds the sequences of all policies that have a place at one time (0: it does
    not)."""

    def __init__(self, cap: int, clock: Clock | None) -> None:
        self.when_freed: Callable[[], None] | None = None
        self.when_lost: Callable[[str], None] | None = None
        self._clock = clock or SystemClock()
        self._admission = Admission(cap, self._freed)
        self._hosted: dict[str, H] = {}
        self._changing: dict[str, asyncio.Lock] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tokens_drawn = 0
        self._busy_s = 0.0
        self._busy_since_s: float | None = None

    def stats(self) -> EngineStats:
        """See ``Engine.stats``."""
        self._busy()
        return EngineStats(
            tokens_generated=self._tokens_drawn,
            busy_s=self._busy_s,
            running=self._admission.running,
            waiting=self._admission.waiting,
        )

    def _busy(self) -> None:
        """Count the time since the last call, if something was being drawn."""
        now_s = self._clock.monotonic_s()
        if self._busy_since_s is not None:
            self._busy_s += now_s - self._busy_since_s
        self._busy_since_s = now_s if self._admission.running else None

    def _freed(self) -> None:
        self._busy()
        if self.when_freed is not None and self._loop is not None:
            self.when_freed()

    def _find(self, policy: str) -> H:
        hosted = self._hosted.get(policy)
        if hosted is None:
            raise GenerationFailed(f"policy {policy!r} is not loaded in this engine")
        return hosted

    def _lock(self, policy: str) -> asyncio.Lock:
        return self._changing.setdefault(policy, asyncio.Lock())
