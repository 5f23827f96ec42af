"""What a core remembers about itself: counters, and a bounded story per attempt and policy."""

from collections import Counter, deque

_MAX_STORY = 2048


class Journal:
    """Counters by dotted name; the last ``_MAX_STORY`` transitions of all subjects together."""

    def __init__(self) -> None:
        self._counters: Counter[str] = Counter()
        self._story: deque[tuple[str, str]] = deque(maxlen=_MAX_STORY)

    def count(self, name: str) -> None:
        self._counters[name] += 1

    def note(self, subject: str, text: str) -> None:
        self._story.append((subject, text))

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    def story(self, subject: str) -> list[str]:
        return [text for about, text in self._story if about == subject]
