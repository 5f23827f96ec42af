"""``farflow gc``: what goes and what stays, and that nothing goes without ``--apply``."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from click.testing import CliRunner
from core_builders import make_run

from farflow import gc as gc_module
from farflow.cli import cli
from farflow.deployment import RetentionTable
from farflow.gc_plan import Found, plan
from scheduler.core.state import Run
from scheduler.store import SchedulerStore
from transport.errors import ConfigError
from transport.runtime.files import lock_folder

DAY_S = 86_400.0
OLD_S = 400 * DAY_S
OWN = ["config.json", "config.toml", "overrides.json"]
RUNS: dict[str, Literal["finished", "running"]] = {"done": "finished", "live": "running"}


def old(path: Path, content: str = "x", *, age_s: float = OLD_S) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    then_s = path.stat().st_mtime - age_s
    for each in (path, path.parent):
        os.utime(each, (then_s, then_s))
    return path


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scheduler's folder and run folders, everything more than a year old but what is ``new``."""
    monkeypatch.chdir(tmp_path)
    state = tmp_path / "scheduler"
    old(state / "runs" / "done" / "metrics.jsonl", '{"type": "step"}\n{"type": "end"}\n')
    old(state / "runs" / "live" / "metrics.jsonl", '{"type": "end"}\n{"type": "step"}\n')
    for term in (1, 2, 3):
        old(state / "events" / f"term-0000000{term}" / "start")
    old(state / "trajectory-log" / "turns" / "a.turns")
    old(state / "trajectory-log" / "bodies" / "segment-00000001.log", "b" * 1000)
    old(state / "weight-store" / "versions" / "a" / "x")
    old(state / "logs" / "weight-store.log")
    old(state / "scheduler.sqlite", "")
    for name in ("first-0001", "used-0001", "odd"):
        old(tmp_path / "runs" / name / "models" / "solver" / "model.safetensors", "m" * 5000)
        for own in OWN if name != "odd" else ["config.json"]:  # a model's, say
            old(tmp_path / "runs" / name / own, "{}")
    for own in OWN:
        old(tmp_path / "runs" / "new-0001" / own, "{}", age_s=1.0)
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "runs" / "first-0001")
    return tmp_path


def run(*argv: str, exit_status: int = 0) -> dict[str, dict[str, object]]:
    result = CliRunner().invoke(cli, ["gc", "--json", *argv], catch_exceptions=False)
    assert result.exit_code == exit_status, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    return {str(row["path"]): row for row in rows}


def test_nothing_is_removed_without_apply(disk: Path) -> None:
    def everything() -> set[Path]:
        return set(disk.rglob("*"))

    before = everything()
    rows = run()
    assert everything() == before
    assert {path for path, row in rows.items() if row["removes"]} == {
        "scheduler/runs/done/metrics.jsonl",
        "scheduler/events/term-00000001",
        "scheduler/events/term-00000002",
        "scheduler/trajectory-log/turns/a.turns",
        "scheduler/logs/weight-store.log",
        "runs/first-0001",
        "runs/used-0001",
    }
    assert rows["scheduler/trajectory-log/bodies"]["reason"] == (
        "bounded by scheduler.trajectory_disk_bytes"
    )
    assert rows["runs/first-0001"]["size_bytes"] == 5006
    plain = CliRunner().invoke(cli, ["gc"]).stdout
    assert "would be removed (--apply does it)" in plain.splitlines()[-1]


def test_apply_removes_what_is_not_in_use(disk: Path) -> None:
    with lock_folder(disk / "runs" / "used-0001"), lock_folder(disk / "scheduler"):
        rows = run("--apply")
    assert not (disk / "runs" / "first-0001").exists()
    assert (disk / "runs" / "used-0001").exists()
    assert f"in use by process {os.getpid()}" in str(rows["runs/used-0001"]["reason"])
    assert not (disk / "scheduler" / "runs" / "done" / "metrics.jsonl").exists()
    assert (disk / "scheduler" / "runs" / "live" / "metrics.jsonl").exists()
    assert len(list((disk / "scheduler" / "events").iterdir())) == 3
    assert (disk / "scheduler" / "trajectory-log" / "turns" / "a.turns").exists()
    for kept in ("scheduler/weight-store/versions/a/x", "runs/odd", "runs/new-0001"):
        assert (disk / kept).exists()
    run("--apply")
    assert [p.name for p in (disk / "scheduler" / "events").iterdir()] == ["term-00000003"]
    assert not (disk / "scheduler" / "trajectory-log" / "turns" / "a.turns").exists()
    assert not any(row["removes"] for row in run().values())


def test_weights_go_with_runs_that_ended_while_nobody_uses_them(disk: Path) -> None:
    (disk / "scheduler" / "scheduler.sqlite").unlink()
    store = SchedulerStore.open(disk / "scheduler")
    runs = [Run(name=name, spec=make_run(name), state=state) for name, state in RUNS.items()]
    encode = msgspec.msgpack.encode
    store.commit([(Run.table, each.name, encode(each)) for each in runs], now=1.0)
    versions = disk / "scheduler" / "weight-store" / "versions"
    for run_name in ("done", "live", "lost"):
        weights = versions / f"{run_name}%2Fsolver%2E1"
        then_s = old(weights / "blobs" / "b", "w" * 10).stat().st_mtime
        os.utime(weights, (then_s, then_s))
    old(versions / "done%2Fyoung" / "manifests" / "m", age_s=DAY_S)
    row = "scheduler/weight-store/versions/{}%2Fsolver%2E1".format
    in_use = run()[row("done")]
    store.close()
    assert "in use by process" in str(in_use["reason"])
    rows = run("--apply")
    assert rows[row("done")]["removes"]
    assert rows[row("live")]["reason"] == "the run has not ended"
    assert rows[row("lost")]["reason"] == "of no run in scheduler.sqlite"
    left = {path.name for path in versions.iterdir()}
    assert left == {"a", "done%2Fyoung", "live%2Fsolver%2E1", "lost%2Fsolver%2E1"}


def test_weights_stay_where_the_runs_cannot_be_read(disk: Path) -> None:
    reason = str(run()["scheduler/weight-store/versions/a"]["reason"])
    assert "scheduler.sqlite: no such table" in reason


def test_what_cannot_be_removed_is_said(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(13, "not yours", str(path))

    monkeypatch.setattr("shutil.rmtree", refuse)
    rows = run("--apply", exit_status=1)
    assert "not removed" in str(rows["runs/first-0001"]["reason"])


def test_nothing_outside_of_the_folders_is_removed(disk: Path) -> None:
    state, away = disk / "scheduler", disk / "away"
    away.mkdir()
    for name in ("runs", "events", "trajectory-log", "logs"):
        (state / name).rename(away / name)
        (state / name).symlink_to(away / name)
    before = set(away.rglob("*"))
    rows = run("--apply")
    assert set(away.rglob("*")) == before
    assert rows["scheduler/logs"]["reason"] == "a symbolic link, which is not followed"
    for name in ("runs", "events", "trajectory-log", "logs"):
        (state / name).unlink()
        (away / name).rename(state / name)
    old(away / "elsewhere.log")
    old(away / "run" / "metrics.jsonl", '{"type": "end"}\n')
    (state / "logs" / "linked.log").symlink_to(away / "elsewhere.log")
    (state / "runs" / "linked").symlink_to(away / "run")
    (state / "trajectory-log" / "turns").rename(away / "turns")
    (state / "trajectory-log" / "turns").symlink_to(away / "turns")
    before = set(away.rglob("*"))
    run("--apply")
    assert set(away.rglob("*")) == before
    assert (state / "logs" / "linked.log").is_symlink()


def test_a_folder_that_becomes_a_link_after_we_looked_is_not_followed(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, away = disk / "scheduler", disk / "away"
    away.mkdir()
    old(away / "weight-store.log")

    @contextlib.contextmanager
    def swapped(_: Path) -> Iterator[None]:
        if not (state / "logs").is_symlink():
            (state / "logs").rename(disk / "aside")
            (state / "logs").symlink_to(away)
        yield

    monkeypatch.setattr("transport.runtime.files.lock_folder", swapped)
    rows = run("--apply", exit_status=1)
    assert (away / "weight-store.log").exists()
    assert "not removed" in str(rows["scheduler/logs/weight-store.log"]["reason"])


def test_the_file_says_how_long(disk: Path) -> None:
    (disk / "d.toml").write_text('[retention]\nrun_s = "1000d"\n[local]\nruns = "elsewhere"\n')
    assert not any(path.startswith("runs") for path in run("--config", "d.toml"))
    rows = run("--config", "d.toml", "--runs", "runs")
    assert rows["runs/first-0001"]["reason"] == "within bounds"
    bad = CliRunner().invoke(cli, ["gc", "--set", "retention.run_z=1"])
    assert "retention.run_z: unknown key" in str(bad.exception)


def test_of_too_many_bytes_the_longest_untouched_go_and_the_newest_stays() -> None:
    limits = RetentionTable(run_bytes=250)
    things = [Found("run folder", Path(f"r{n}"), 100, 10.0 * n) for n in range(5)]
    removed = {v.found.path.name for v in plan(things, limits) if v.removes}
    assert removed == {"r4", "r3", "r2"}
    held = [thing._replace(holds="in use") for thing in things]
    assert not any(v.removes for v in plan(held, limits))
    alone = plan([Found("run folder", Path("r"), 10**12, 1.0)], limits)
    assert not alone[0].removes


@pytest.mark.parametrize(
    "last", [b'{"a": "' + b"\xc3\xa9" * 3000 + b'"}', b"\xff\xfe\xfd", b"[" * 4000]
)
def test_a_record_whose_end_cannot_be_read_stays_and_stops_nothing(disk: Path, last: bytes) -> None:
    record = disk / "scheduler" / "runs" / "done" / "metrics.jsonl"
    record.write_bytes(b'{"type": "end"}\n' + last + b"\n")
    row = run()["scheduler/runs/done/metrics.jsonl"]
    assert (row["removes"], row["reason"]) == (False, "the run has not ended")


def test_a_scheduler_that_starts_after_we_looked_loses_nothing(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farflow.gc._used_by", lambda _: "")
    state = disk / "scheduler"
    with lock_folder(state):
        rows = run("--apply", exit_status=1)
    kept = ("events/term-00000001/start", "trajectory-log/turns/a.turns", "logs/weight-store.log")
    assert all((state / name).exists() for name in kept)
    assert "already used" in str(rows["scheduler/logs/weight-store.log"]["reason"])
    assert not (state / "runs" / "done" / "metrics.jsonl").exists()
    run("--apply")
    assert not any((state / name).exists() for name in kept)


def test_the_logs_of_a_folder_that_is_no_schedulers_stay(disk: Path) -> None:
    theirs = [
        old(disk / "var" / "logs" / "access.log"),
        old(disk / "var" / "runs" / "a" / "metrics.jsonl", '{"type": "end"}\n'),
    ]
    argv = ["gc", "--apply", "--set", f"scheduler.folder={disk}/var"]
    done = CliRunner().invoke(cli, argv)
    assert "no scheduler has run there" in str(done.exception)
    assert "--config FILE" in str(done.exception)
    (disk / "scheduler" / "scheduler.sqlite").unlink()
    rows = run("--apply", "--runs", "runs")  # the default folder is not looked into either
    assert not any(path.startswith("scheduler") for path in rows)
    assert (disk / "scheduler" / "logs" / "weight-store.log").exists()
    assert all(path.exists() for path in theirs)


def test_removing_leaves_no_lock_in_a_folder_that_had_none(disk: Path) -> None:
    run("--apply")
    assert not (disk / "scheduler" / ".lock").exists()


def test_what_goes_before_it_is_measured_stops_nothing(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, gone = gc_module._things, disk / "scheduler" / "trajectory-log" / "gone.turns"
    monkeypatch.setattr(
        gc_module,
        "_things",
        lambda where, kind: iter([gone]) if kind == "partial" else real(where, kind),
    )
    rows = run("--set", f"scheduler.folder={disk}/scheduler")
    assert rows
    assert str(gone) not in rows


@pytest.mark.parametrize(("value", "key"), [("local=5", "local: "), ("local.runs=5", "local.runs")])
def test_a_wrong_local_table_is_named(disk: Path, value: str, key: str) -> None:
    done = CliRunner().invoke(cli, ["gc", "--set", value])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith(key)
