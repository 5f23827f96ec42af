"""The groups that wait for one policy's trainer, earliest deadline first, or first in first out.

A group's deadline is the last head step at which it may still be trained on. What always holds: a
group is in the buffer once or not at all; ``first`` gives groups in the order of (deadline, index,
job), or of (arrival, index, job), and after ``expired`` none whose deadline has passed; a deadline
is looked at again before a group is given up, because a version's place in the tree may have become
known since; ``by_deadline`` counts its groups.
"""

import heapq
from collections.abc import Callable

Entry = tuple[int, int, str]
Arrival = tuple[float, int, str]
Deadline = Callable[[str], int | None]


class Buffer:
    """Earliest deadline first over job ids; ``deadline_of`` is asked for the present deadline. With
    ``fifo`` those that arrived first go first, whatever their deadlines."""

    def __init__(self, deadline_of: Deadline, *, fifo: bool = False) -> None:
        self.deadline_of = deadline_of
        self.fifo = fifo
        self._entries: dict[str, Entry] = {}
        self._heap: list[Entry] = []
        self._arrivals: dict[str, Arrival] = {}
        self._queue: list[Arrival] = []
        self.by_deadline: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, job: str) -> bool:
        return job in self._entries

    def jobs(self) -> list[str]:
        return list(self._entries)

    def entries(self) -> list[Entry]:
        """(deadline, index, job) of every group."""
        return list(self._entries.values())

    def add(self, job: str, index: int, deadline: int, arrived_s: float = 0.0) -> None:
        """Put a group in, or give it another deadline."""
        if self.fifo:
            arrival = (arrived_s, index, job)
            if self._arrivals.get(job) != arrival:
                self._arrivals[job] = arrival
                heapq.heappush(self._queue, arrival)
        self._place(job, index, deadline)

    def _place(self, job: str, index: int, deadline: int) -> None:
        entry = (deadline, index, job)
        if job in self._entries:
            self._uncount(self._entries[job])
        self._entries[job] = entry
        self.by_deadline[deadline] = self.by_deadline.get(deadline, 0) + 1
        heapq.heappush(self._heap, entry)

    def remove(self, job: str) -> None:
        self._uncount(self._entries.pop(job))
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._entries):
            self._heap = sorted(self._entries.values())
        self._arrivals.pop(job, None)
        if len(self._queue) > 64 and len(self._queue) > 4 * len(self._arrivals):
            self._queue = sorted(self._arrivals.values())

    def first(self, count: int) -> list[str]:
        """The next ``count`` groups, or all; they stay in the buffer."""
        if self.fifo:
            return self._first_in(count)
        found: list[Entry] = []
        while len(found) < count and self._settle_top():
            found.append(heapq.heappop(self._heap))
        for entry in found:
            heapq.heappush(self._heap, entry)
        return [job for _, _, job in found]

    def expired(self, head_step: int) -> list[str]:
        """Groups that can no longer be trained on at ``head_step``; they stay until removed."""
        found: list[str] = []
        while self._settle_top() and self._heap[0][0] < head_step:
            _, index, job = heapq.heappop(self._heap)
            deadline = self.deadline_of(job)
            if deadline is None or deadline < head_step:
                found.append(job)
            else:
                self._place(job, index, deadline)
        return found

    def clear(self) -> list[str]:
        """Take everything out (the tree changed, every deadline may be another)."""
        jobs = list(self._entries)
        self._entries.clear()
        self._heap.clear()
        self._arrivals.clear()
        self._queue.clear()
        self.by_deadline.clear()
        return jobs

    def _first_in(self, count: int) -> list[str]:
        found: list[Arrival] = []
        while len(found) < count and self._queue:
            arrival = heapq.heappop(self._queue)
            if self._arrivals.get(arrival[2]) == arrival and arrival not in found[-1:]:
                found.append(arrival)
        for arrival in found:
            heapq.heappush(self._queue, arrival)
        return [job for _, _, job in found]

    def _uncount(self, entry: Entry) -> None:
        deadline = entry[0]
        self.by_deadline[deadline] -= 1
        if not self.by_deadline[deadline]:
            del self.by_deadline[deadline]

    def _settle_top(self) -> bool:
        """Drop what was removed or re-added from the top; false when nothing is left."""
        while self._heap and self._entries.get(self._heap[0][2]) != self._heap[0]:
            heapq.heappop(self._heap)
        return bool(self._heap)
