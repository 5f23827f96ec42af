"""Where metrics go, and that a run does not depend on their getting there."""

import json
import sys
from pathlib import Path

import pytest
import structlog

from cloud_trainer.config import TrainerTable
from cloud_trainer.tracking import Tracking, check_tracking
from cloud_trainer.tracking_sinks import TensorBoardSink
from transport.errors import ConfigError


def events_of(folder: Path):
    """Tag, step and value of every scalar, in order, as TensorBoard reads the newest file."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    (path,) = folder.glob("events.out.tfevents.*")
    events = [Event.FromString(raw) for raw in RawEventFileLoader(str(path)).Load()]
    return events, [(v.tag, e.step, v.simple_value) for e in events for v in e.summary.value]


def test_numbers_become_events_that_tensorboard_reads(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.event_pb2 import SessionLog

    tracking = Tracking(tmp_path, policy="run/solver")
    tracking.write("step", 12.5, {"step": 7, "loss": 0.5, "bad": float("nan"), "text": "no"})
    tracking.write("version", 13.0, {"step": 7, "version": 3})
    # What was written is there at once, also when nobody closes.
    events, scalars = events_of(tmp_path / "tensorboard")
    assert scalars == [("step/loss", 7, 0.5), ("version/version", 7, 3.0)]
    # So that TensorBoard drops what an earlier start plotted from this step on.
    starts = [e.step for e in events if e.session_log.status == SessionLog.START]
    assert starts == [7]
    tracking.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["step", "version"]


def test_events_are_bounded(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    sink = TensorBoardSink(tmp_path, limit_bytes=1000)
    for step in range(200):
        sink.write("step", float(step), step, {"loss": 0.0})
    sink.close()
    assert 10 < len(events_of(tmp_path)[1]) < 100


def test_what_fails_is_dropped_and_the_rest_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("a file where a folder belongs")
    (tmp_path / "metrics.jsonl").mkdir()
    tracking = Tracking(tmp_path, policy="run/solver")
    tracking.write("step", 1.0, {"step": 1})
    (tmp_path / "metrics.jsonl").rmdir()
    tracking.write("step", 2.0, {"step": 2})
    tracking.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 2


def test_a_tracker_that_is_not_installed_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (tmp_path / "wandb").mkdir()  # what it leaves behind is not the library
    check_tracking(TrainerTable())
    with pytest.raises(ConfigError, match=r"trainer\.wandb: wandb is not installed"):
        check_tracking(TrainerTable(wandb="project"))


def test_wandb_gets_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with structlog.testing.capture_logs() as logs:
        tracking = Tracking(tmp_path, policy="run/solver", project="farflow-test")
        tracking.write("step", 1.0, {"step": 1, "loss": 0.5})
        tracking.close()
    assert [entry for entry in logs if entry["event"] == "tracking.dropped"] == []
    assert len(list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))) == 1
