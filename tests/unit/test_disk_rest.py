"""A full disk under everything that has no tests of its own for it: a trainer's checkpoints, a
run's records, finished turns, backups, files of settings."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from chaos_disk import SmallDisk, files_in, small_disk  # noqa: F401
from status_views import step

from cloud_trainer.checkpoints import CheckpointFolder, CheckpointMeta
from cloud_trainer.core.effects import LineageStep
from scheduler.backup import back_up, restore
from scheduler.core.effects import RecordStep
from scheduler.core.state import Spend
from scheduler.metrics_file import MetricsFiles
from scheduler.partial_files import PartialFiles
from scheduler.store import SchedulerStore
from transport.errors import StoreError
from transport.messages import PartialSummary
from transport.runtime.clock import ManualClock
from transport.trajectory import body_digest


def write(folder: CheckpointFolder, number: int, before: CheckpointMeta | None) -> CheckpointMeta:
    meta = folder.write(
        {"w": np.full(10_000, number, np.float32)},
        {},
        run="run",
        policy="run/solver",
        step=number,
        version=number,
        spec_digest="s",
        build="0",
        trained=(LineageStep(number, (f"run/t-{number:06d}",)),),
        previous=before,
    )
    folder.commit(number)
    return meta


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(
    small_disk: SmallDisk,  # noqa: F811
) -> None:
    home = small_disk.folder
    folder = CheckpointFolder(home, keep=2)
    first = write(folder, 1, None)
    small_disk.fill()
    for _ in range(2):
        with pytest.raises(StoreError, match=r"(?i)no space"):
            write(folder, 2, first)
    again = CheckpointFolder(home, keep=2)
    assert again.latest() == first
    assert np.array_equal(again.load_arrays(first)["w"], np.full(10_000, 1, np.float32))
    small_disk.make_room()
    second = write(again, 2, first)
    assert CheckpointFolder(home, keep=2).latest() == second
    assert len(again.lineage(second)) == 2


def test_records_are_missing_while_the_disk_is_full_and_whole_after_it(
    small_disk: SmallDisk,  # noqa: F811
) -> None:
    files = MetricsFiles(small_disk.folder, ManualClock())
    files.record(RecordStep("first", step(1, 0.1), {}))
    small_disk.fill()
    for number in range(2, 30):  # what fits into the file's last block still goes there
        files.record(RecordStep("first", step(number, 0.1), {"a": 0.5}))
    small_disk.make_room()
    MetricsFiles(small_disk.folder, ManualClock()).record(RecordStep("first", step(30, 0.1), {}))
    lines = (small_disk.folder / "runs" / "first" / "metrics.jsonl").read_text().splitlines()
    whole = []
    for line in lines:
        try:
            whole.append(json.loads(line)["step"])
        except json.JSONDecodeError:
            continue
    assert whole[0] == 1
    assert whole[-1] == 30
    assert len(whole) < 30
    assert len(lines) - len(whole) <= 1, "one torn line at most"


def test_finished_turns_that_do_not_fit_leave_those_before(
    small_disk: SmallDisk,  # noqa: F811
) -> None:
    files = PartialFiles(small_disk.folder / "turns")

    def summary(data: bytes) -> PartialSummary:
        return PartialSummary(
            attempt="r/t-000001#1",
            fence=(1, 1),
            job="r/t-000001",
            agent="box",
            digest=body_digest(data),
            size_bytes=len(data),
            turns=1,
            oldest={"r/p": 0},
        )

    before, after = b"a" * 1000, b"b" * 100_000
    assert files.write(summary(before), before)
    small_disk.fill()
    with pytest.raises(StoreError, match=r"(?i)no space"):
        files.write(summary(after), after)
    assert files.read(summary(before)) == before
    assert files_in(small_disk.folder) == 1
    small_disk.make_room()
    assert files.write(summary(after), after)


def test_a_backup_that_does_not_fit_leaves_nothing_and_a_restore_neither(
    small_disk: SmallDisk,  # noqa: F811
    tmp_path: Path,
) -> None:
    store = SchedulerStore.open(tmp_path / "scheduler")
    spend = Spend(run="r", tokens=1)
    row = (spend.table, spend.key, msgspec.msgpack.encode(spend))
    store.commit([row, ("prompt", "p", b"x" * 100_000)], now=1.0)
    store.close()
    back_up(tmp_path / "scheduler", tmp_path / "backup", wall_s=1.0)
    small_disk.fill()
    with pytest.raises(StoreError):
        back_up(tmp_path / "scheduler", small_disk.folder / "backup", wall_s=1.0)
    with pytest.raises(StoreError):
        restore(tmp_path / "backup", small_disk.folder / "scheduler")
    small_disk.make_room()
    assert [path.name for path in small_disk.folder.rglob("*") if path.suffix == ".sqlite"] == []
    restore(tmp_path / "backup", small_disk.folder / "scheduler")
    SchedulerStore.open(small_disk.folder / "scheduler").close()
