"""What a log line looks like, where it goes and what bounds it."""

import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from transport.errors import ConfigError, StoreError
from transport.runtime.logs import configure_logging


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    logging.captureWarnings(False)
    structlog.reset_defaults()
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_json_object_with_its_facts() -> None:
    stream = io.StringIO()
    configure_logging("info", stream=stream, component="agent")
    structlog.get_logger("edge").info("lease.renewed", lease=7, path=Path("/x"))
    (line,) = lines(stream)
    assert {k: line[k] for k in ("event", "level", "logger", "component", "lease")} == {
        "event": "lease.renewed",
        "level": "info",
        "logger": "edge",
        "component": "agent",
        "lease": 7,
    }
    assert "/x" in str(line["path"])
    assert str(line["timestamp"]).endswith("Z")
    assert list(line)[:2] == ["timestamp", "event"]


def test_a_terminal_gets_text_unless_json_is_asked_for() -> None:
    terminal = Terminal()
    configure_logging("info", stream=terminal)
    structlog.get_logger().info("lease.renewed", lease=7)
    assert "lease.renewed" in terminal.getvalue()
    assert not terminal.getvalue().startswith("{")
    terminal = Terminal()
    configure_logging("info", True, stream=terminal)
    structlog.get_logger().info("lease.renewed", lease=7)
    assert lines(terminal)[0]["lease"] == 7


def test_events_below_the_level_cost_nothing_and_say_nothing() -> None:
    stream = io.StringIO()
    configure_logging("warning", stream=stream)
    structlog.get_logger().info("chatter")
    logging.getLogger("zmq").info("chatter")
    structlog.get_logger().warning("trouble")
    assert [line["event"] for line in lines(stream)] == ["trouble"]


def test_libraries_warnings_and_tracebacks_become_single_json_lines_too() -> None:
    stream = io.StringIO()
    configure_logging("info", stream=stream, component="x")
    logging.getLogger("asyncio").warning("slow %s", "callback")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old thing", DeprecationWarning, stacklevel=1)
        logging.captureWarnings(False)
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger().exception("store.failed")
    slow, old, failed = lines(stream)
    assert (slow["event"], slow["logger"], slow["component"]) == ("slow callback", "asyncio", "x")
    assert "old thing" in str(old["event"])
    assert "ValueError: broken" in str(failed["exception"])
    assert failed["level"] == "error"


def test_configuring_again_replaces_the_former_output_and_reaches_every_logger() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging("warning", stream=first)
    log = structlog.get_logger()
    log.warning("one")
    configure_logging("debug", stream=second)
    log.debug("two")
    assert [line["event"] for line in lines(first)] == ["one"]
    assert [line["event"] for line in lines(second)] == ["two"]


def test_standard_error_is_whatever_it_is_at_that_moment(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("info")
    structlog.get_logger().info("lease.renewed")
    assert json.loads(capsys.readouterr().err)["event"] == "lease.renewed"


def test_a_log_file_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "agent.log"
    configure_logging("info", file=path, file_bytes=10_000)
    log = structlog.get_logger()
    for number in range(100):
        log.info("filler", number=number, text="x" * 1_000)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["agent.log", *(f"agent.log.{n}" for n in (1, 2, 3))]
    assert all(file.stat().st_size <= 10_000 for file in files)
    assert json.loads(path.read_text().splitlines()[-1])["number"] == 99


def test_what_cannot_be_configured_is_a_clear_refusal(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'loud' is unknown; use one of debug, info"):
        configure_logging("loud")
    with pytest.raises(StoreError, match="cannot open the log file"):
        configure_logging("info", file=tmp_path)
    with pytest.raises(StoreError, match="no folder"):
        configure_logging("info", file=tmp_path / "no" / "x.log")
