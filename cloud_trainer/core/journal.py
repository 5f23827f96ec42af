"""What a core remembers for people: how often things happened, and the latest of them as text."""

from collections import deque

_MOST_ENTRIES = 512


class Journal:
    """Counters by name, and the last ``_MOST_ENTRIES`` notes."""

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self._notes: deque[tuple[float, str]] = deque(maxlen=_MOST_ENTRIES)

    def count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1

    def note(self, now: float, text: str) -> None:
        self._notes.append((now, text))

    def story(self, word: str) -> list[str]:
        """The notes with ``word`` in them, oldest first; all for the empty word."""
        return [f"{at:.3f} {text}" for at, text in self._notes if word in text]
