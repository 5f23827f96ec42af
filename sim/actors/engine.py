"""The service time of an agent's engine: ``slots`` sequences at a time, each at its own speed.

What always holds: sequences get slots in the order in which they came; a sequence of ``n`` tokens
takes ``first_token_s + n x token_s`` from getting its slot, plus the pauses of weight swaps
meanwhile; a group's oldest version is the one in use when its first sequence got a slot.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from edge_agent.core.effects import RunAttempt
from sim.kernel import Kernel
from sim.ledger import Ledger
from transport.ids import Fence

if TYPE_CHECKING:
    from transport.messages import LeaseOffer

Key = tuple[str, Fence]


class Group:
    """One attempt that is being generated. ``oldest`` is by policy id."""

    __slots__ = (
        "lengths",
        "offer",
        "oldest",
        "open",
        "queued_s",
        "running",
        "started_s",
        "stopped",
    )

    def __init__(self, effect: RunAttempt, lengths: list[int], now: float) -> None:
        self.offer: LeaseOffer = effect.offer
        self.queued_s = effect.queued_s
        self.lengths = lengths
        self.started_s = now
        self.open = len(lengths)
        self.running: dict[_Sequence, None] = {}
        self.oldest: dict[str, int] = {}
        self.stopped = False


class _Sequence:
    __slots__ = ("ends_s", "group", "started_s", "tokens")

    def __init__(self, group: Group, tokens: int) -> None:
        self.group = group
        self.tokens = tokens
        self.started_s = 0.0
        self.ends_s = 0.0


class Engine:
    """``generated`` is called with each group whose last token is drawn. Times within are engine
    time: ``kernel.now`` less the pauses so far."""

    def __init__(
        self,
        kernel: Kernel,
        ledger: Ledger,
        *,
        slots: int,
        tokens_per_s: float,
        first_token_s: float,
        generated: Callable[[Group], None],
    ) -> None:
        self.versions: dict[str, int] = {}
        self.tokens_generated = 0
        self.running = 0
        self.busy_s = 0.0
        self._kernel = kernel
        self._ledger = ledger
        self._slots = slots
        self._token_s = 1.0 / tokens_per_s
        self._first_token_s = first_token_s
        self._generated = generated
        self._groups: dict[Key, Group] = {}
        self._waiting: deque[_Sequence] = deque()
        self._paused_s = 0.0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def start(self, effect: RunAttempt, lengths: list[int]) -> None:
        """Generate a group of sequences of these lengths."""
        group = Group(effect, lengths, self._kernel.now)
        self._groups[effect.offer.attempt, effect.offer.fence] = group
        self._waiting.extend(_Sequence(group, tokens) for tokens in lengths)
        self._fill()

    def abort(self, attempt: str, fence: Fence, outcome: str = "stopped") -> None:
        """Stop a group, if it still runs."""
        group = self._groups.pop((attempt, fence), None)
        if group is None:
            return
        group.stopped = True
        if self._ledger.recorder is not None:
            self._ledger.recorder.stopped((attempt, fence), outcome)
        drawn = sum(group.lengths) - sum(s.tokens for s in self._waiting if s.group is group)
        drawn -= sum(sequence.tokens for sequence in group.running)
        for sequence in group.running:
            drawn += self._drawn(sequence)
            self._free(sequence)
        self._ledger.attempt_aborted(drawn)
        self._waiting = deque(s for s in self._waiting if s.group is not group)
        self._fill()

    def stop(self) -> None:
        """The process has died."""
        for attempt, fence in tuple(self._groups):
            self.abort(attempt, fence, "lost")
        self.versions.clear()

    def slot_seconds(self) -> float:
        """``busy_s`` with what the running sequences have had so far."""
        engine_s = self._kernel.now - self._paused_s
        running = (s for group in self._groups.values() for s in group.running)
        return self.busy_s + sum(engine_s - sequence.started_s for sequence in running)

    def pause(self, pause_s: float) -> None:
        """Nothing is drawn for so long."""
        self._paused_s += pause_s

    def _fill(self) -> None:
        now = self._kernel.now
        while self._waiting and self.running < self._slots:
            sequence = self._waiting.popleft()
            group = sequence.group
            if not group.oldest:
                group.oldest = {p: self.versions[p] for p in group.offer.policies.values()}
                if self._ledger.recorder is not None:
                    self._ledger.recorder.began((group.offer.attempt, group.offer.fence))
            self.running += 1
            group.running[sequence] = None
            sequence.started_s = now - self._paused_s
            duration_s = self._first_token_s + sequence.tokens * self._token_s
            sequence.ends_s = sequence.started_s + duration_s
            self._kernel.at(now + duration_s, self._due, sequence)

    def _due(self, sequence: _Sequence) -> None:
        group = sequence.group
        if group.stopped:
            return
        ends_s = sequence.ends_s + self._paused_s
        if ends_s > self._kernel.now + 1e-9:  # the engine paused meanwhile
            self._kernel.at(ends_s, self._due, sequence)
            return
        self._drawn(sequence, whole=True)
        del group.running[sequence]
        self._free(sequence)
        group.open -= 1
        if not group.open:
            del self._groups[group.offer.attempt, group.offer.fence]
            self._generated(group)
        self._fill()

    def _drawn(self, sequence: _Sequence, *, whole: bool = False) -> int:
        """Count a sequence's tokens."""
        tokens = sequence.tokens
        if not whole:
            ran_s = self._kernel.now - self._paused_s - sequence.started_s - self._first_token_s
            tokens = min(tokens, max(0, int(ran_s / self._token_s)))
        self.tokens_generated += tokens
        self._ledger.drawn_tokens += tokens
        return tokens

    def _free(self, sequence: _Sequence) -> None:
        self.running -= 1
        self.busy_s += self._kernel.now - self._paused_s - sequence.started_s
