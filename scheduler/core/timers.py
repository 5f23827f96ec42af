"""Deadlines by kind and id.

What always holds: at most one deadline per (kind, id); moving one to a later time costs no heap
operation (leases are renewed with every heartbeat); equal times fire in the order of kind and id.
"""

import heapq


class Timers:
    """A heap with lazily moved entries; the valid heap entry of a key is the one in ``_queued``."""

    def __init__(self) -> None:
        self._due: dict[tuple[str, str], float] = {}
        self._queued: dict[tuple[str, str], float] = {}
        self._heap: list[tuple[float, str, str]] = []

    def set(self, kind: str, id: str, at: float) -> None:
        """Fire at ``at``, wherever the deadline stood before."""
        key = (kind, id)
        self._due[key] = at
        queued = self._queued.get(key)
        if queued is None or at < queued:
            self._queued[key] = at
            heapq.heappush(self._heap, (at, kind, id))

    def set_earlier(self, kind: str, id: str, at: float) -> None:
        """Fire at ``at`` or when already due before."""
        due = self._due.get((kind, id))
        if due is None or at < due:
            self.set(kind, id, at)

    def cancel(self, kind: str, id: str) -> None:
        self._due.pop((kind, id), None)

    def due(self, kind: str, id: str) -> float | None:
        return self._due.get((kind, id))

    def next_due(self) -> float | None:
        """The earliest deadline."""
        return self._heap[0][0] if self._settle_top() else None

    def pop(self, now: float) -> tuple[str, str] | None:
        """The next deadline that has passed, taken out; None when there is none."""
        if not self._settle_top() or self._heap[0][0] > now:
            return None
        _, kind, id = heapq.heappop(self._heap)
        del self._queued[kind, id]
        del self._due[kind, id]
        return kind, id

    def _settle_top(self) -> bool:
        """Bring the true earliest deadline to the top; false when there is none."""
        while self._heap:
            at, kind, id = self._heap[0]
            key = (kind, id)
            if self._queued.get(key) != at:
                heapq.heappop(self._heap)
                continue
            due = self._due.get(key)
            if due == at:
                return True
            heapq.heappop(self._heap)
            if due is None:
                del self._queued[key]
            else:
                self._queued[key] = due
                heapq.heappush(self._heap, (due, kind, id))
        return False
