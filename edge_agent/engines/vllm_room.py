"""How many sequences may be in vLLM at once.

What always holds: whoever waited first comes first, except where its policy's cache is full and
another's is not; a place that was given is given back; the room of a policy follows the lengths
that its sequences had, so that what is in vLLM fits into its KV cache: more would not be drawn
faster, vLLM would only throw out what it began, and begin it again.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from transport.errors import EngineError, StoreError
from transport.runtime.files import atomic_write

_WEIGHT: Final = 0.02
"""Of the newest length in the running mean: it forgets what was 50 sequences ago."""
_MARGIN: Final = 1.25
"""Long sequences stay longer, so those that are in at one time are longer than the mean."""


class PolicyRoom:
    """Of one policy: ``kv_tokens`` fit into its cache, vLLM takes ``most`` sequences."""

    def __init__(self, kv_tokens: int, most: int) -> None:
        self._kv_tokens = kv_tokens
        self._most = most
        self._mean_tokens = 0.0
        self.running = 0

    @property
    def sequences(self) -> int:
        """How many fit; vLLM's own limit until a length is known."""
        if not self._mean_tokens:
            return self._most
        return max(1, min(self._most, int(self._kv_tokens / (_MARGIN * self._mean_tokens))))

    @property
    def known(self) -> bool:
        """Whether a length is known."""
        return bool(self._mean_tokens)

    def ended(self, tokens: int) -> None:
        """A sequence had so many tokens, its prompt included."""
        mean = self._mean_tokens
        self._mean_tokens = mean + _WEIGHT * (tokens - mean) if mean else float(tokens)


class _Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine writes down at its end."""

    sequences: int


def remember(path: Path, rooms: Iterable[PolicyRoom]) -> None:
    """Write down how many sequences fit, where that is known."""
    known = [room.sequences for room in rooms if room.known]
    if known:
        with contextlib.suppress(StoreError):  # the next start guesses again
            atomic_write(path, msgspec.json.encode(_Memory(sequences=sum(known))))


def remembered(path: Path | None) -> int:
    """What ``remember`` wrote; 0 when nothing (sound) is there."""
    try:
        return 0 if path is None else msgspec.json.decode(path.read_bytes(), type=_Memory).sequences
    except (OSError, msgspec.DecodeError):
        return 0


class Admission:
    """Places of all policies; ``cap`` bounds them together (0: it does not)."""

    def __init__(self, cap: int, freed: Callable[[], None]) -> None:
        self._cap = cap
        self._freed = freed
        self._waiting: deque[tuple[PolicyRoom, asyncio.Future[None]]] = deque()
        self.running = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def place(self, room: PolicyRoom) -> AsyncIterator[None]:
        """Wait for a place, and have it."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((room, turn))
        self._admit()
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave(room)
            raise
        finally:
            if not turn.done() or turn.cancelled():
                self._waiting = deque(one for one in self._waiting if one[1] is not turn)
        try:
            yield
        finally:
            self._leave(room)

    def refuse(self, error: EngineError, room: PolicyRoom | None = None) -> None:
        """Nobody who waits (for ``room``, if one is named) gets a place any more."""
        waiting, self._waiting = self._waiting, deque()
        for of, turn in waiting:
            if room is not None and of is not room:
                self._waiting.append((of, turn))
            elif not turn.done():
                turn.set_exception(error)

    def _leave(self, room: PolicyRoom) -> None:
        room.running -= 1
        self.running -= 1
        self._admit()
        self._freed()

    def _admit(self) -> None:
        later: deque[tuple[PolicyRoom, asyncio.Future[None]]] = deque()
        while self._waiting and not (self._cap and self.running >= self._cap):
            room, turn = self._waiting.popleft()
            if turn.done():
                continue
            if room.running >= room.sequences:
                later.append((room, turn))
                continue
            room.running += 1
            self.running += 1
            turn.set_result(None)
        later.extend(self._waiting)
        self._waiting = later
