"""Checkpoints on disk: whole or not there, and lineages that share their past."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import structlog
from safetensors.numpy import load_file

from cloud_trainer.checkpoints import CheckpointFolder, CheckpointMeta, lineage_ids
from cloud_trainer.core.effects import LineageStep
from cloud_trainer.trainer import Arrays
from transport.errors import ChecksumMismatch, IntegrityError

ARRAYS: Arrays = {
    "master.w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "scalar": np.array(7, np.int64),
    "empty": np.zeros((0, 3), np.float16),
    "flags": np.array([True, False]),
    "strided": np.arange(10, dtype=np.uint16)[::2],
}


def steps(first: int, last: int, tag: str = "t") -> tuple[LineageStep, ...]:
    return tuple(LineageStep(step, (f"run/{tag}-{step:06d}",)) for step in range(first, last + 1))


def write(
    folder: CheckpointFolder,
    step: int,
    trained: tuple[LineageStep, ...],
    previous: CheckpointMeta | None = None,
    *,
    commit: bool = True,
    arrays: Arrays = ARRAYS,
) -> CheckpointMeta:
    meta = folder.write(
        arrays,
        {"step_count": step, "rng": "abc"},
        run="run",
        policy="run/solver",
        step=step,
        version=step + 1,
        spec_digest="s",
        build="0",
        trained=trained,
        previous=previous,
    )
    if commit:
        folder.commit(step)
    return meta


def test_what_was_written_comes_back_bit_for_bit(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    written = write(folder, 4, steps(1, 4))
    found = CheckpointFolder(tmp_path, keep=2).latest()
    assert found == written
    assert found is not None
    assert (found.step, found.version, found.trainer) == (4, 5, {"step_count": 4, "rng": "abc"})
    arrays = folder.load_arrays(found)
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        assert arrays[name].shape == array.shape
        assert np.array_equal(arrays[name], array)
        assert arrays[name].flags.writeable


def test_the_arrays_are_a_file_that_the_stock_library_opens(tmp_path: Path) -> None:
    write(CheckpointFolder(tmp_path, keep=1), 4, steps(1, 4))
    loaded = load_file(tmp_path / "checkpoints" / "step-00000004" / "state.safetensors")
    assert np.array_equal(loaded["master.w"], ARRAYS["master.w"])


def test_a_checkpoint_that_was_not_committed_does_not_count(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    first = write(folder, 2, steps(1, 2))
    write(folder, 4, steps(3, 4), first, commit=False)
    assert CheckpointFolder(tmp_path, keep=2).latest() == first
    assert lineage_ids(tmp_path) == [(1, ("run/t-000001",)), (2, ("run/t-000002",))]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000002"]
    assert len(list((tmp_path / "lineage").iterdir())) == 1, "the orphaned segment is swept"


def test_only_the_newest_checkpoints_are_kept_but_the_whole_lineage(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    meta = None
    for step in range(2, 12, 2):
        meta = write(folder, step, steps(step - 1, step), meta)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000008", "step-00000010"]
    assert [step for step, _ in lineage_ids(tmp_path)] == list(range(1, 11))


def test_a_checkpoints_cost_does_not_grow_with_the_run(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    meta = None
    sizes = []
    for step in range(1, 61):
        meta = write(folder, step, steps(step, step), meta)
        at = tmp_path / "checkpoints" / f"step-{step:08d}" / "checkpoint.msgpack"
        segment = tmp_path / "lineage" / f"{meta.lineage}.msgpack"
        sizes.append(at.stat().st_size + segment.stat().st_size)
    assert max(sizes[1:]) - min(sizes[1:]) <= 2
    assert len(lineage_ids(tmp_path)) == 60


@pytest.mark.parametrize("name", ["state.safetensors", "checkpoint.msgpack"])
@pytest.mark.parametrize("damage", ["torn", "changed", "missing"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(
    tmp_path: Path, name: str, damage: str
) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    first = write(folder, 2, steps(1, 2))
    write(folder, 4, steps(3, 4), first)
    path = tmp_path / "checkpoints" / "step-00000004" / name
    data = path.read_bytes()
    if damage == "torn":
        path.write_bytes(data[:-1])
    elif damage == "changed":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    else:
        path.unlink()
    with structlog.testing.capture_logs() as logs:
        assert CheckpointFolder(tmp_path, keep=2).latest() == first
    assert [(log["event"], log["step"]) for log in logs] == [("checkpoint.damaged", 4)]
    assert (tmp_path / "checkpoints" / "step-00000004.damaged").is_dir()
    assert [step for step, _ in lineage_ids(tmp_path)] == [1, 2]


def test_a_checkpoint_with_a_damaged_lineage_is_not_used(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    first = write(folder, 2, steps(1, 2))
    second = write(folder, 4, steps(3, 4), first)
    path = tmp_path / "lineage" / f"{second.lineage}.msgpack"
    path.write_bytes(path.read_bytes().replace(b"run/t-000003", b"run/t-000009"))
    with pytest.raises(ChecksumMismatch, match="not those of its name"):
        lineage_ids(tmp_path)
    assert CheckpointFolder(tmp_path, keep=2).latest() == first


def test_lineages_fork_after_a_rollback_and_the_lost_one_is_swept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    first = write(folder, 2, steps(1, 2))
    lost = write(folder, 4, steps(3, 4, "lost"), first, commit=False)
    folder = CheckpointFolder(tmp_path, keep=1)
    assert folder.latest() == first
    assert not (tmp_path / "lineage" / f"{lost.lineage}.msgpack").exists()
    write(folder, 4, steps(3, 4, "other"), first)
    assert [jobs for _, jobs in lineage_ids(tmp_path)] == [
        ("run/t-000001",), ("run/t-000002",), ("run/other-000003",), ("run/other-000004",),
    ]  # fmt: skip


def test_a_step_that_is_checkpointed_again_replaces_the_lost_one(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    write(folder, 2, steps(1, 2, "a"))
    again = write(folder, 2, steps(1, 2, "b"), arrays={"x": np.ones(3, np.float32)})
    assert folder.latest() == again
    assert [jobs for _, jobs in lineage_ids(tmp_path)] == [("run/b-000001",), ("run/b-000002",)]


def test_a_folder_without_checkpoints_has_no_lineage(tmp_path: Path) -> None:
    assert lineage_ids(tmp_path / "nowhere") == []
    assert not (tmp_path / "nowhere").exists()
    assert CheckpointFolder(tmp_path, keep=1).latest() is None
    assert lineage_ids(tmp_path) == []


def test_a_hostile_segment_name_does_not_leave_the_folder(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    meta = write(folder, 2, steps(1, 2))
    bent = msgspec.structs.replace(meta, lineage="../../secret")
    with pytest.raises(IntegrityError, match="no name of a lineage segment"):
        folder.lineage(bent)


def test_arrays_that_a_checkpoint_cannot_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="complex128"):
        write(CheckpointFolder(tmp_path, keep=1), 1, (), arrays={"z": np.zeros(2, complex)})
