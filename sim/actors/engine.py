"""The service time of an agent's engine: ``slots`` sequences at a time, each at its own speed.

What always holds: turns get slots in the order in which they came; a turn of ``n`` tokens takes
``first_token_s + n x token_s`` from getting its slot, plus the pauses of weight swaps meanwhile,
longer while the machine is slow; a group's oldest version is the one in use when its first sequence
got a slot. While a tool works between two turns the slot is free, unless slots are held.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from edge_agent.core.effects import RunAttempt
from sim.kernel import Kernel
from sim.ledger import Ledger
from sim.workload import Turns
from transport.ids import Fence

if TYPE_CHECKING:
    from transport.messages import LeaseOffer

Key = tuple[str, Fence]


class Group:
    """One attempt that is being generated. ``oldest`` is by policy id."""

    __slots__ = (
        "drawn",
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
        self.drawn = 0
        self.started_s = now
        self.open = len(lengths)
        self.running: dict[_Sequence, None] = {}
        self.oldest: dict[str, int] = {}
        self.stopped = False


class _Sequence:
    """``tokens`` are those of the turn that it is in, ``due`` its latest wake-up that counts."""

    __slots__ = (
        "at_tool",
        "began_s",
        "due",
        "ends_s",
        "group",
        "started_s",
        "tokens",
        "turn",
        "turns",
    )

    def __init__(self, group: Group, turns: Turns) -> None:
        self.group = group
        self.turns = turns
        self.turn = 0
        self.tokens = turns.tokens[0]
        self.at_tool = False
        self.started_s = 0.0
        self.began_s = 0.0
        self.ends_s = 0.0
        self.due = 0


class Engine:
    """``generated`` is called with each group whose last token is drawn. Slots are paid for in time
    less the pauses so far; turns begin and end in engine time, which also passes more slowly while
    the machine does (``slow_down``)."""

    def __init__(
        self,
        kernel: Kernel,
        ledger: Ledger,
        *,
        slots: int,
        tokens_per_s: float,
        first_token_s: float,
        generated: Callable[[Group], None],
        freed: Callable[[], None] = lambda: None,
        holds_slots: bool = False,
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
        self._freed = freed
        self._holds_slots = holds_slots
        self._groups: dict[Key, Group] = {}
        self._waiting: deque[_Sequence] = deque()
        self._paused_s = 0.0
        self._pause_ends_s = 0.0
        self._speed = 1.0
        self._slow_since_s = 0.0
        self._behind_s = 0.0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def start(
        self, effect: RunAttempt, lengths: list[int], turns: list[Turns] | None = None
    ) -> None:
        """Generate a group of sequences of these lengths, in ``turns`` that have as many tokens."""
        group = Group(effect, lengths, self._kernel.now)
        self._groups[effect.offer.attempt, effect.offer.fence] = group
        found = turns or [Turns((tokens,), ()) for tokens in lengths]
        self._waiting.extend(_Sequence(group, one) for one in found)
        self._fill()

    def abort(self, attempt: str, fence: Fence, outcome: str = "stopped") -> None:
        """Stop a group, if it still runs."""
        group = self._groups.pop((attempt, fence), None)
        if group is None:
            return
        group.stopped = True
        if self._ledger.recorder is not None:
            self._ledger.recorder.stopped((attempt, fence), outcome)
        for sequence in group.running:
            self._drawn(sequence)
            self._free(sequence)
        self._ledger.attempt_aborted(group.drawn)
        self._waiting = deque(s for s in self._waiting if s.group is not group)
        self._fill()
        self._freed()

    def stop(self) -> None:
        """The process has died."""
        for attempt, fence in tuple(self._groups):
            self.abort(attempt, fence, "lost")
        self.versions.clear()

    def slot_seconds(self) -> float:
        """``busy_s`` with what the running sequences have had so far."""
        paid_s = self._paid_s()
        running = (s for group in self._groups.values() for s in group.running)
        return self.busy_s + sum(paid_s - sequence.started_s for sequence in running)

    def pause(self, pause_s: float) -> None:
        """Nothing is drawn for so long."""
        self._paused_s += pause_s
        self._pause_ends_s = max(self._pause_ends_s, self._kernel.now) + pause_s
        # Of this time a slow machine would only have used its share.
        self._behind_s -= (1.0 - self._speed) * pause_s

    def slow_down(self, speed: float) -> None:
        """Draw ``speed`` times as many tokens per second as usual from now on; above 0."""
        now = self._kernel.now
        self._behind_s += (1.0 - self._speed) * (now - self._slow_since_s)
        self._slow_since_s, self._speed = now, speed
        for group in self._groups.values():
            for sequence in group.running:
                if not sequence.at_tool:
                    self._wake(sequence)

    def _paid_s(self) -> float:
        """Time without pauses; it stands still in one and never goes back."""
        return self._kernel.now - self._paused_s + self._pause_left_s()

    def _pause_left_s(self) -> float:
        """What of a pause is still to come: ``_paused_s`` has all of it from its beginning."""
        return max(0.0, self._pause_ends_s - self._kernel.now)

    def _engine_s(self) -> float:
        """Time in which tokens are drawn at full speed."""
        return self._kernel.now - self._stood_s() + self._speed * self._pause_left_s()

    def _stood_s(self) -> float:
        """By how much engine time will be behind once the pause that is under way has ended."""
        slow_s = (1.0 - self._speed) * (self._kernel.now - self._slow_since_s)
        return self._paused_s + self._behind_s + slow_s

    def _fill(self) -> None:
        while self._waiting and self.running < self._slots:
            sequence = self._waiting.popleft()
            group = sequence.group
            if not group.oldest:
                group.oldest = {p: self.versions[p] for p in group.offer.policies.values()}
                if self._ledger.recorder is not None:
                    self._ledger.recorder.began((group.offer.attempt, group.offer.fence))
            self.running += 1
            group.running[sequence] = None
            sequence.started_s = self._paid_s()
            self._begin(sequence)

    def _begin(self, sequence: _Sequence) -> None:
        """The next turn, in the slot that it has."""
        sequence.began_s = self._engine_s()
        sequence.ends_s = sequence.began_s + self._first_token_s + sequence.tokens * self._token_s
        self._wake(sequence)

    def _wake(self, sequence: _Sequence) -> None:
        """Look at it when its turn ends as things are now."""
        now = self._kernel.now
        left_s = sequence.ends_s + self._stood_s() - now
        sequence.due += 1
        self._kernel.at(now + max(0.0, left_s) / self._speed, self._due, (sequence, sequence.due))

    def _due(self, wake_up: tuple[_Sequence, int]) -> None:
        sequence, due = wake_up
        group = sequence.group
        if group.stopped or due != sequence.due:
            return
        if sequence.ends_s + self._stood_s() > self._kernel.now + 1e-9:  # a pause meanwhile
            self._wake(sequence)
            return
        self._drawn(sequence, whole=True)
        if sequence.turn + 1 < len(sequence.turns.tokens):
            self._use_tool(sequence)
            return
        del group.running[sequence]
        self._free(sequence)
        group.open -= 1
        if not group.open:
            del self._groups[group.offer.attempt, group.offer.fence]
            self._generated(group)
        self._fill()
        self._freed()

    def _use_tool(self, sequence: _Sequence) -> None:
        """A tool works until the next turn."""
        group, tool_s = sequence.group, sequence.turns.tool_s[sequence.turn]
        sequence.turn += 1
        sequence.tokens = sequence.turns.tokens[sequence.turn]
        sequence.at_tool = True

        def used(_: object) -> None:
            if group.stopped:
                return
            sequence.at_tool = False
            if self._holds_slots:
                self._begin(sequence)
            else:
                self._waiting.append(sequence)
                self._fill()

        if not self._holds_slots:
            del group.running[sequence]
            self._free(sequence)
        self._kernel.after(tool_s, used)
        self._fill()
        if not self._holds_slots:
            self._freed()

    def _drawn(self, sequence: _Sequence, *, whole: bool = False) -> None:
        """Count the tokens of a sequence's turn."""
        tokens = sequence.tokens
        if sequence.at_tool:
            return
        if not whole:
            ran_s = self._engine_s() - sequence.began_s - self._first_token_s
            tokens = min(tokens, max(0, int(ran_s / self._token_s)))
        sequence.group.drawn += tokens
        self.tokens_generated += tokens
        self._ledger.drawn_tokens += tokens

    def _free(self, sequence: _Sequence) -> None:
        self.running -= 1
        self.busy_s += self._paid_s() - sequence.started_s
