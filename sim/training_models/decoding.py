"""One GPU that decodes: all running sequences advance together, slower the more there are.

What always holds: at most ``slots`` sequences run, the others wait in the order in which they came;
every sequence gets exactly its tokens; ``drawn`` is the tokens of the sequences that have ended.
The engine of ``sim.actors`` has a constant rate per slot instead: here a batch that drains speeds
up, which is what a synchronous system gains from its own tail.
"""

import heapq
from collections import deque
from collections.abc import Callable

from sim.kernel import Kernel

Done = Callable[[], None]


class Decoder:
    """``token_s(n)`` is the seconds per token of each of ``n`` running sequences."""

    def __init__(self, kernel: Kernel, slots: int, token_s: Callable[[int], float]) -> None:
        self.drawn = 0
        self.busy_s = 0.0
        """Sequence-seconds in which a slot was in use."""
        self._kernel = kernel
        self._slots = slots
        self._times = [0.0, *(token_s(n) for n in range(1, slots + 1))]
        self._running: list[tuple[float, int, int, Done]] = []
        self._waiting: deque[tuple[int, Done, Done]] = deque()
        self._each = 0.0
        self._since_s = kernel.now
        self._number = 0
        self._plan = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def submit(self, tokens: int, done: Done, started: Done = lambda: None) -> None:
        """Decode a sequence; ``started`` is called when it gets a slot, ``done`` after its last
        token. ``done`` may submit and pause, ``started`` neither."""
        self._advance()
        self._waiting.append((tokens, done, started))
        self._fill()

    def pause(self, pause_s: float) -> None:
        """Nothing is decoded for so long (after pauses that are under way)."""
        self._advance()
        self._since_s = max(self._since_s, self._kernel.now) + pause_s
        self._replan()

    def _advance(self) -> None:
        now, running = self._kernel.now, len(self._running)
        elapsed_s = now - self._since_s
        if elapsed_s > 0.0:
            self._since_s = now
            if running:
                self._each += elapsed_s / self._times[running]
                self.busy_s += running * elapsed_s

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            tokens, done, started = self._waiting.popleft()
            self._number += 1
            heapq.heappush(self._running, (self._each + tokens, self._number, tokens, done))
            started()
        self._replan()

    def _replan(self) -> None:
        self._plan += 1
        if self._running:
            left = max(0.0, self._running[0][0] - self._each)
            begin_s = max(self._since_s, self._kernel.now)
            due_s = begin_s + left * self._times[len(self._running)]
            self._kernel.at(due_s, self._due, self._plan)

    def _due(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        ended: list[Done] = []
        # What was planned has ended, whatever rounding says; others that are within a token's
        # millionth have too.
        limit = max(self._running[0][0], self._each + 1e-6)
        while self._running and self._running[0][0] <= limit:
            _, _, tokens, done = heapq.heappop(self._running)
            self.drawn += tokens
            ended.append(done)
        self._fill()
        for done in ended:
            done()
