"""When those come next who come again and again, as collectors of metrics do. Pure."""

from typing import Final

SHORTEST_S: Final = 1.0
LONGEST_S: Final = 300.0
"""Who stays away for longer has no habit that is worth waiting for."""
MOST: Final = 64


class Habits:
    """The last visit of each of at most ``MOST``, and what lay between it and the one before."""

    def __init__(self) -> None:
        self._last_s: dict[str, float] = {}

    def came(self, who: str, now_s: float) -> float | None:
        """In how many seconds ``who``, who came now, is expected again; None where that is not
        known (yet)."""
        before_s = self._last_s.pop(who, None)
        if before_s is None and len(self._last_s) >= MOST:
            del self._last_s[next(iter(self._last_s))]  # who was not seen for the longest
        self._last_s[who] = now_s
        if before_s is None or not SHORTEST_S <= now_s - before_s <= LONGEST_S:
            return None
        return now_s - before_s
