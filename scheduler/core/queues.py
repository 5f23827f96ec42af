"""Small containers that placement works on: ready queues, pools of names, token buckets.

What always holds: nothing here knows the context; order never depends on hashes; every operation is
O(log n) or better.
"""

import heapq

MAX_LANES = 64
"""Kinds of work of one queue that are told apart; others share a lane."""

Entry = tuple[int, int, str]


class ReadyQueue:
    """Jobs of one run, evaluation or submitters that wait for an agent, higher priority first,
    then lower index. One lane per kind of work (task family, who wants it, submitter, pins,
    constraints), so that what no agent can take now does not hide work of another kind."""

    def __init__(self) -> None:
        self._waiting: dict[str, Entry] = {}
        self._lanes: dict[str, list[Entry]] = {}
        self._turn = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, job: str) -> bool:
        return job in self._waiting

    def add(self, job: str, index: int, priority: int = 0, lane: str = "") -> None:
        if job in self._waiting:
            return
        if lane not in self._lanes and len(self._lanes) >= MAX_LANES:
            lane = ""
        entry = (-priority, index, job)
        self._waiting[job] = entry
        heapq.heappush(self._lanes.setdefault(lane, []), entry)

    def discard(self, job: str) -> None:
        self._waiting.pop(job, None)

    def first(self) -> str | None:
        tops = self._tops()
        return tops[0][2] if tops else None

    def priority(self) -> int:
        """Of the first job; 0 when there is none."""
        tops = self._tops()
        return -tops[0][0] if tops else 0

    def heads(self, most: int) -> list[str]:
        """The first jobs of up to ``most`` lanes, in order. Where there are more lanes, half of the
        places go round among those that come later, so that none waits for others for ever."""
        jobs = [job for _, _, job in self._tops()]
        if len(jobs) <= most:
            return jobs
        first = most - most // 2
        later = jobs[first:]
        self._turn = (self._turn + most // 2) % len(later)
        around = later[self._turn :] + later[: self._turn]
        return jobs[:first] + around[: most // 2]

    def _tops(self) -> list[Entry]:
        tops: list[Entry] = []
        ended: list[str] = []
        waiting = self._waiting
        for name, lane in self._lanes.items():
            while lane and waiting.get(lane[0][2]) != lane[0]:
                heapq.heappop(lane)
            if lane:
                tops.append(lane[0])
            else:
                ended.append(name)
        for name in ended:
            del self._lanes[name]
        if len(tops) > 1:
            tops.sort()
        return tops


class NamedPool:
    """Names in a list that is cut from anywhere in O(1)."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._place: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: str) -> bool:
        return name in self._place

    def put(self, name: str, is_in: bool) -> bool:
        """Add or remove; whether that changed anything."""
        place = self._place.get(name)
        if is_in == (place is not None):
            return False
        if place is None:
            self._place[name] = len(self.names)
            self.names.append(name)
            return True
        last = self.names.pop()
        if last != name:
            self.names[place] = last
            self._place[last] = place
        del self._place[name]
        return True


class TokenBucket:
    """Tokens that a run may still spend: it fills up to one minute's worth, and one that has any is
    let through whatever it takes, so that a group larger than the bucket goes too."""

    __slots__ = ("_at_s", "level")

    def __init__(self) -> None:
        self.level: float | None = None
        self._at_s = 0.0

    def allows(self, per_minute: int, now: float) -> bool:
        self._fill(per_minute, now)
        return self.level is None or self.level > 0.0

    def take(self, tokens: float) -> None:
        """Negative ``tokens`` give back what was expected and not used."""
        if self.level is not None:
            self.level -= tokens

    def allowed_s(self, per_minute: int, now: float) -> float:
        """When the next group may go."""
        missing = 0.0 if self.level is None else -self.level
        return now + max(0.0, missing) * 60.0 / max(1, per_minute)

    def _fill(self, per_minute: int, now: float) -> None:
        if not per_minute:
            self.level = None
            return
        if self.level is None:
            self.level = float(per_minute)
        self.level = min(
            float(per_minute), self.level + max(0.0, now - self._at_s) * per_minute / 60.0
        )
        self._at_s = now
