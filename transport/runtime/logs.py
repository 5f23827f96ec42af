"""Logging: structlog events through the standard library's handlers.

What always holds:

1. One line per event, also for the libraries' own loggers and for warnings: JSON objects when the
   output is not a terminal, aligned text when it is.
2. A log file is bounded: ``file_bytes`` and ``LOG_FILE_GENERATIONS`` older ones of that size.
3. Calling ``configure_logging`` again replaces what it did before and nothing else.
4. No text or value of an event makes rendering fail (``transport.texts``).
"""

import logging
import logging.handlers
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from transport.errors import ConfigError, StoreError
from transport.runtime.files import store_errors
from transport.texts import all_encodable, encodable, shown

LEVELS: Final[dict[str, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
LOG_FILE_BYTES: Final = 16 * 1024 * 1024
LOG_FILE_GENERATIONS: Final = 3
_HANDLER_NAME: Final = "farflow"

_encoder = msgspec.json.Encoder(enc_hook=shown, order=None)


class Formatter(structlog.stdlib.ProcessorFormatter):
    """Structlog's, whose lines any handler can write."""

    def format(self, record: logging.LogRecord) -> str:
        return encodable(super().format(record))


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever ``sys.stderr`` is at that moment, not what it was when configured."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure_logging(
    level: str = "info",
    json: bool | None = None,
    *,
    stream: TextIO | None = None,
    file: Path | None = None,
    file_bytes: int = LOG_FILE_BYTES,
    component: str = "",
) -> None:
    """Sends all events of ``level`` and above to ``file``, else ``stream``, else standard error.

    ``json`` None means: unless the output is a terminal. ``component`` (the daemon's name) becomes
    a field of every event. Raises ``ConfigError`` for an unknown level, ``StoreError`` for a file
    that cannot be opened.
    """
    if level not in LEVELS:
        raise ConfigError(f"log level {level!r} is unknown; use one of {', '.join(LEVELS)}")
    handler = _handler(stream, file, file_bytes)
    output = None if file is not None else stream or sys.stderr
    is_terminal = output is not None and output.isatty()
    as_json = not is_terminal if json is None else json
    shared = shared_processors(component)
    renderer: list[Processor] = (
        [structlog.processors.format_exc_info, json_line]
        if as_json
        else [structlog.dev.ConsoleRenderer(colors=is_terminal)]
    )
    handler.setFormatter(
        Formatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    for old in [old for old in root.handlers if old.get_name() == _HANDLER_NAME]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(LEVELS[level])
    logging.captureWarnings(True)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.stdlib.LoggerFactory(),
        # Not cached: a second call, or a test that captures events, must reach every logger.
        cache_logger_on_first_use=False,
    )


def _handler(stream: TextIO | None, file: Path | None, file_bytes: int) -> logging.Handler:
    handler: logging.Handler
    if file is not None:
        with store_errors("open the log file", file):
            try:
                handler = logging.handlers.RotatingFileHandler(
                    file, maxBytes=file_bytes, backupCount=LOG_FILE_GENERATIONS, encoding="utf-8"
                )
            except FileNotFoundError as error:
                raise StoreError(f"no folder {file.parent} for the log: create it") from error
    elif stream is not None:
        handler = logging.StreamHandler(stream)
    else:
        handler = _StderrHandler()
    handler.set_name(_HANDLER_NAME)
    return handler


def shared_processors(component: str) -> list[Processor]:
    """What every event goes through before it is rendered."""

    def add_component(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        if component:
            event.setdefault("component", component)
        return event

    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        add_component,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]


def _to_json(event: EventDict, default: Callable[[Any], Any], **_: object) -> str:
    """``default`` (structlog's fallback) is not needed: what JSON lacks is written as its repr."""
    ordered = {"timestamp": event.pop("timestamp", None), "event": event.pop("event", None)}
    line = {**ordered, **event}
    try:
        return _encoder.encode(line).decode()
    except Exception:  # noqa: BLE001 - an event that is shown otherwise is better than none
        return _encoder.encode(_as_far_as_possible(line)).decode()


def _as_far_as_possible(line: dict[str, Any]) -> dict[str, Any]:
    """Values that JSON takes as they are, all others as text."""
    found: dict[str, Any] = {}
    for key, value in line.items():
        clean = all_encodable(value)
        try:
            _encoder.encode(clean)
        except Exception:  # noqa: BLE001 - as above
            clean = shown(value)
        found[encodable(key)] = clean
    return found


json_line: Final = structlog.processors.JSONRenderer(_to_json)
"""The last step of a line of JSON."""
