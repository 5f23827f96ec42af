"""Virtual time: what happens when, one thing after another.

What always holds: events run in the order of their time, equal times in the order in which they
were scheduled; time never goes back; nothing is read from the machine, so the same calls give the
same history under any ``PYTHONHASHSEED``; ``run`` ends at a time, a number of events or a request,
and an endless loop within one instant is an error instead of a hang.

An actor is any object that schedules calls and is called. ``Alarm`` is its one deadline
(``next_deadline`` of a core), which mostly moves to later: that costs no heap operation.
"""

import hashlib
import heapq
import struct
from collections.abc import Callable
from typing import Any, Final

from transport.errors import InvariantViolation

MAX_AT_ONCE: Final = 1_000_000
"""Events of one instant after which nothing can be expected to end."""

WALL_START_S: Final = 1.5e9
"""What wall clocks that are right show at time 0."""

Call = Callable[[Any], None]


class Kernel:
    """The clock and what is due. ``now`` is in seconds from 0, ``events`` how many have run."""

    __slots__ = ("_heap", "_scheduled", "_stopping", "events", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Call, Any]] = []
        self._scheduled = 0
        self._stopping = False

    def at(self, at_s: float, call: Call, argument: Any = None) -> None:
        """Call ``call(argument)`` at ``at_s``, or now when that has passed."""
        self._scheduled += 1
        heapq.heappush(
            self._heap, (at_s if at_s > self.now else self.now, self._scheduled, call, argument)
        )

    def after(self, delay_s: float, call: Call, argument: Any = None) -> None:
        self.at(self.now + delay_s, call, argument)

    def stop(self) -> None:
        """Let ``run`` return after the present event."""
        self._stopping = True

    def run(self, until_s: float, max_events: int = 10**12) -> bool:
        """Run what is due up to ``until_s``; true when ``stop`` or the end of all events ended it
        before. ``now`` is then the time of the last event, otherwise ``until_s`` (or, at the bound
        of ``max_events``, wherever it had come).

        Raises:
            InvariantViolation: time does not go on.
        """
        heap, pop = self._heap, heapq.heappop
        self._stopping = False
        left, at_once = max_events, 0
        while heap and not self._stopping:
            if heap[0][0] > until_s:
                self.now = until_s
                return False
            if left <= 0:
                return False
            at_s, _, call, argument = pop(heap)
            left -= 1
            if at_s > self.now:
                self.now, at_once = at_s, 0
            else:
                at_once += 1
                if at_once > MAX_AT_ONCE:
                    raise InvariantViolation(f"{at_once} events at {at_s} s; the last: {call}")
            self.events += 1
            call(argument)
        return True


class Alarm:
    """The next deadline of an actor: ``call`` is called once it has passed."""

    __slots__ = ("_call", "_due_s", "_kernel", "_queued_s")

    def __init__(self, kernel: Kernel, call: Callable[[], None]) -> None:
        self._kernel = kernel
        self._call = call
        self._due_s: float | None = None
        self._queued_s: float | None = None

    def set(self, due_s: float | None) -> None:
        """Move the deadline, or cancel it."""
        self._due_s = due_s
        queued_s = self._queued_s
        if due_s is not None and (queued_s is None or due_s < queued_s):
            self._queued_s = due_s
            self._kernel.at(due_s, self._fire, due_s)

    def _fire(self, queued_s: float) -> None:
        if queued_s != self._queued_s:
            return  # an earlier one was queued since, and has taken over
        self._queued_s = None
        due_s = self._due_s
        if due_s is None:
            return
        if due_s > self._kernel.now:
            self.set(due_s)
            return
        self._due_s = None
        self._call()


class History:
    """A digest over everything that was said: two runs with equal digests were the same run."""

    __slots__ = ("_hash",)

    _TIME = struct.Struct("<d")

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, now_s: float, names: bytes, content: bytes) -> None:
        self._hash.update(self._TIME.pack(now_s) + names + content)

    def digest(self) -> str:
        """32 hexadecimal digits."""
        return self._hash.hexdigest()
