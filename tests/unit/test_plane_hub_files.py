"""A hub says when its process may not open as many files as there are keys."""

import resource

import pytest
import structlog

from transport import plane_hub
from transport.keys import create_keys
from transport.memory_links import MemoryNetwork
from transport.messages import Plane
from transport.plane_hub import FILES_BESIDE, PlaneHub
from transport.runtime.clock import ManualClock
from transport.runtime.settings import TransportConfig


def warnings_of(tmp_path, monkeypatch, limit: int) -> list[dict]:
    create_keys(tmp_path / "keys", agents=[f"a{n}" for n in range(20)])
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    with structlog.testing.capture_logs() as logs:
        hub = PlaneHub(
            MemoryNetwork(),
            Plane.CONTROL,
            TransportConfig(keys=str(tmp_path / "keys")),
            port=0,
            port_file=tmp_path / "port",
            clock=ManualClock(),
        )
        hub._warn_of_few_files()  # nothing new: says nothing again
    return [entry for entry in logs if entry["event"] == "plane.few_files"]


@pytest.mark.parametrize("missing", [0, 1])
def test_too_few_open_files_are_a_warning_with_a_remedy_said_once(tmp_path, monkeypatch, missing):
    keys = 20 + 4  # two services, an operator and the gateway beside the agents
    found = warnings_of(tmp_path, monkeypatch, keys + FILES_BESIDE - missing)
    assert len(found) == missing
    if missing:
        [warning] = found
        assert warning["needed"] == keys + FILES_BESIDE
        assert f"LimitNOFILE={keys + FILES_BESIDE}" in warning["remedy"]
    assert plane_hub.resource is resource
