"""How long to wait before something is tried again: longer each time, up to a bound."""


class Backoff:
    """Waits of ``first_s``, twice that and so on, never more than ``most_s``."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._next_s = first_s

    def next_s(self) -> float:
        wait_s = min(self._next_s, self._most_s)
        self._next_s = 2 * wait_s
        return wait_s

    def reset(self) -> None:
        """It worked; the next wait is the first again."""
        self._next_s = self._first_s
