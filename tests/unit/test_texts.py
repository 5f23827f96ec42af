"""Texts of foreign code: sent and logged, whatever is in them."""

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from transport.envelope import LIMITS, decode, encode
from transport.messages import AgentLog, AttemptFailed, Goodbye, Plane
from transport.runtime.logs import configure_logging
from transport.texts import all_encodable, cut, encodable, said, shown, told

LONE = "a\ud800b"
WRITTEN = "a\\ud800b"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


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


def test_what_utf8_cannot_have_is_written_out() -> None:
    assert encodable("plain \U0001f600 \x00") == "plain \U0001f600 \x00"
    assert encodable(LONE) == WRITTEN
    assert cut(LONE * 1000, 10).encode() == b"a\\ud800ba\\"
    assert cut("x" * 11, 10) == "xxxxxxx..."
    assert told(ValueError(LONE)) == f"ValueError: {WRITTEN}"
    assert told(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert said(Mute()) == "a Mute without a text"
    assert shown(Mute()) == "a Mute that cannot be shown"
    nested: list[Any] = []
    nested.append(nested)
    assert json.dumps(all_encodable({LONE: [nested, (LONE, 1)]}))


def test_any_text_goes_into_a_message() -> None:
    limits = LIMITS[Plane.CONTROL]
    failed = AttemptFailed(attempt=LONE, fence=(1, 2), code="workflow.error", detail=LONE)
    found, _ = decode(encode(failed), limits)
    assert found == msgspec.structs.replace(failed, attempt=WRITTEN, detail=WRITTEN)
    log = AgentLog(request=1, lines=(LONE, "b"))
    assert decode(encode(log), limits)[0] == AgentLog(request=1, lines=(WRITTEN, "b"))
    assert decode(encode(Goodbye(reason="x")), limits)[0] == Goodbye(reason="x")


@pytest.mark.parametrize("as_json", [True, False])
def test_any_value_goes_into_the_log(
    as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest's own handlers would put the text into a report that pytest-xdist cannot send.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    file, stream = tmp_path / "log", io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    nested: list[Any] = []
    nested.append(nested)
    for where in ({"file": file}, {"stream": stream}):
        configure_logging("info", as_json, **where)  # type: ignore[arg-type]
        log = structlog.get_logger()
        log.info("plain", text=LONE)
        log.info(LONE, facts={LONE: [LONE]}, number=10**30)
        log.info("odd", thing=nested)
        try:
            raise ValueError(LONE)
        except ValueError:
            log.exception("raised")
        logging.getLogger("library").warning("said %s", LONE)
    stream.flush()
    for text in (file.read_text(), stream.buffer.getvalue().decode()):
        assert WRITTEN.replace("\\", "\\\\" if as_json else "\\") in text
        if as_json:
            lines = [json.loads(line) for line in text.splitlines()]
            assert len(lines) == 5
            assert lines[0]["text"] == WRITTEN
            assert f"ValueError: {WRITTEN}" in lines[3]["exception"]


def test_what_cannot_be_shown_leaves_the_rest_of_its_line() -> None:
    stream = io.StringIO()
    configure_logging("info", True, stream=stream)
    root = logging.getLogger()
    root.handlers[:] = [one for one in root.handlers if one.get_name() == "farflow"]
    structlog.get_logger().info("odd", thing=Mute(), other=1)
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["other"] == 1
