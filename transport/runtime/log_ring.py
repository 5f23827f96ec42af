"""The last lines of this process's log, in memory, to be asked for from elsewhere.

What always holds: what is kept is bounded in lines and in bytes, and one line in its length; a line
is the JSON object that a log file would have; only what the configured level lets pass is there.
"""

import logging
from collections import deque
from typing import Final

import structlog

from transport.runtime.logs import json_line, shared_processors

RING_LINES: Final = 4096
RING_BYTES: Final = 2 * 2**20
LINE_BYTES: Final = 4096
_SUBJECTS: Final = ("run", "attempt", "job", "policy")
"""Fields of an event that name a run, alone or before the first slash."""


class LogRing(logging.Handler):
    """A handler of the root logger for as long as it is entered; a context manager."""

    def __init__(self, max_lines: int = RING_LINES, max_bytes: int = RING_BYTES) -> None:
        super().__init__()
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._lines: deque[tuple[frozenset[str], str, int]] = deque()
        self._bytes = 0
        self.setFormatter(
            structlog.stdlib.ProcessorFormatter(
                foreign_pre_chain=shared_processors(""),
                processors=[
                    structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                    structlog.processors.format_exc_info,
                    json_line,
                ],
            )
        )

    def __enter__(self) -> "LogRing":
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)
        self.close()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one event; called under the handler's lock."""
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - a line that cannot be shown must not end the daemon
            self.handleError(record)
            return
        data = line.encode("utf-8", "replace")
        if len(data) > LINE_BYTES:
            data = data[: LINE_BYTES - 3] + b"..."
            line = data.decode("utf-8", "ignore")
        self._lines.append((_runs_of(record), line, len(data)))
        self._bytes += len(data)
        while len(self._lines) > self._max_lines or self._bytes > self._max_bytes:
            self._bytes -= self._lines.popleft()[2]

    def recent(self, lines: int, *, run: str = "", max_bytes: int) -> tuple[str, ...]:
        """The last ``lines`` lines, oldest first; of ``run`` only unless it is empty. What is above
        ``max_bytes`` is left out at the front."""
        found: list[str] = []
        self.acquire()
        try:
            for runs, line, size_bytes in reversed(self._lines):
                if run and run not in runs:
                    continue
                max_bytes -= size_bytes
                if len(found) == lines or max_bytes < 0:
                    break
                found.append(line)
        finally:
            self.release()
        found.reverse()
        return tuple(found)


def _runs_of(record: logging.LogRecord) -> frozenset[str]:
    if not isinstance(record.msg, dict):  # a library's own logger
        return frozenset(
            str(value).partition("/")[0]
            for name, value in structlog.contextvars.get_contextvars().items()
            if name in _SUBJECTS
        )
    named = (record.msg.get(name) for name in _SUBJECTS)
    return frozenset(value.partition("/")[0] for value in named if isinstance(value, str))
