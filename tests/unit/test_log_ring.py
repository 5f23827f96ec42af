"""The last lines of a process's log, kept in memory."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from transport.runtime.log_ring import LINE_BYTES, LogRing
from transport.runtime.logs import configure_logging


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    configure_logging("info", stream=io.StringIO(), json=False, component="agent")
    yield
    logging.captureWarnings(False)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def events(lines: tuple[str, ...]) -> list[str]:
    return [json.loads(line)["event"] for line in lines]


def test_lines_are_json_whatever_the_log_looks_like_and_of_the_levels_that_pass() -> None:
    with LogRing() as ring:
        log = structlog.get_logger("edge")
        log.info("one", attempt="sums/t-1#1")
        log.debug("hidden")
        logging.getLogger("library").warning("two")
        (first, second) = ring.recent(10, max_bytes=10_000)
    assert json.loads(first)["attempt"] == "sums/t-1#1"
    assert json.loads(first)["component"] == "agent"
    assert json.loads(second)["event"] == "two"
    structlog.get_logger().info("after")
    assert len(ring.recent(10, max_bytes=10_000)) == 2


def test_a_run_is_found_by_attempt_job_policy_and_what_its_workflow_logs() -> None:
    with LogRing() as ring:
        log = structlog.get_logger()
        log.info("a", attempt="sums/t-1#1")
        log.info("b", attempt="sumsy/t-1#1")
        log.info("c", policy="sums/solver")
        log.info("d", run="sums")
        log.info("e")
        with structlog.contextvars.bound_contextvars(attempt="sums/t-2#1"):
            logging.getLogger("workflow").warning("f")
            log.info("g")
        found = ring.recent(100, run="sums", max_bytes=100_000)
        assert events(found) == ["a", "c", "d", "f", "g"]
        assert events(ring.recent(2, run="sums", max_bytes=100_000)) == ["f", "g"]
        assert events(ring.recent(100, max_bytes=100_000)) == list("abcdefg")


def test_lines_bytes_and_one_line_are_bounded() -> None:
    with LogRing(max_lines=5) as ring:
        log = structlog.get_logger()
        names = [f"n{number}" for number in range(8)]
        for number in range(8):
            log.info(names[number])
        assert events(ring.recent(100, max_bytes=100_000)) == ["n3", "n4", "n5", "n6", "n7"]
        size_bytes = sum(map(len, ring.recent(2, max_bytes=100_000)))
        assert events(ring.recent(100, max_bytes=size_bytes)) == ["n6", "n7"]
    with LogRing(max_bytes=3 * LINE_BYTES) as ring:
        for _ in range(10):
            structlog.get_logger().info("é" * LINE_BYTES)
        lines = ring.recent(100, max_bytes=10**9)
        assert len(lines) == 3
        assert all(len(line.encode()) <= LINE_BYTES for line in lines)


def test_an_event_that_cannot_be_shown_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __repr__(self) -> str:
            raise ValueError("no")

    monkeypatch.setattr(logging, "raiseExceptions", False)
    with LogRing() as ring:
        structlog.get_logger().info("bad", thing=Broken())
        structlog.get_logger().info("good")
        assert events(ring.recent(10, max_bytes=10_000)) == ["bad", "good"]
