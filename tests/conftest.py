"""What every test leaves as it found it: a command under test may have set logging up for its own
process, and that process is ours."""

import importlib.util
import logging
import os
from collections.abc import Iterator

import pytest
import structlog

# Daemons that tests start have no dashboard unless they ask for one: it costs a process each, and
# they would all want one port.
os.environ.setdefault("FARFLOW_HTTP__ENABLED", "false")

if importlib.util.find_spec("vllm") is None:
    collect_ignore = ["vllm"]  # `make test-vllm` has a venv with it


@pytest.fixture(autouse=True)
def logging_is_left_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    if structlog.is_configured():
        logging.captureWarnings(False)
        structlog.reset_defaults()
        for handler in root.handlers:
            if handler not in handlers and not type(handler).__module__.startswith("_pytest"):
                handler.close()
                root.removeHandler(handler)
        root.setLevel(level)
