"""Durable, private and locked files."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from transport.errors import SizeLimitExceeded, StoreError
from transport.runtime import files
from transport.runtime.files import (
    atomic_write,
    borrowed_folder,
    fsync_dir,
    lock_folder,
    next_incarnation,
    private_dir,
    read_limited,
    remove_temporaries,
    store_errors,
)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_written_file_holds_the_new_content_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state"
    atomic_write(path, b"old")
    atomic_write(path, memoryview(bytearray(b"new")))
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["state"]


def test_the_old_content_stays_when_the_new_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    atomic_write(path, b"old")

    def full_disk(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full_disk)
    with pytest.raises(StoreError, match=r"cannot write .*state: No space left.*; free space"):
        atomic_write(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state"]


def test_a_disk_that_takes_part_of_the_data_gets_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data[:3])))
    atomic_write(tmp_path / "state", b"0123456789")
    assert (tmp_path / "state").read_bytes() == b"0123456789"


def test_content_is_synced_before_the_name_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        steps.append("fsync folder" if folder else "fsync file")
        fsync(descriptor)

    def note_replace(old: Path, new: Path) -> None:
        steps.append("replace")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    atomic_write(tmp_path / "state", b"x")
    assert steps == ["fsync file", "replace", "fsync folder"]


def test_leftovers_of_interrupted_writes_are_removed_and_only_those(tmp_path: Path) -> None:
    (tmp_path / f".state.123.0{files.TEMPORARY_SUFFIX}").write_bytes(b"half")
    (tmp_path / "state").write_bytes(b"whole")
    assert remove_temporaries(tmp_path) == 1
    assert os.listdir(tmp_path) == ["state"]


def test_reading_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_limited(path, 5) == b"12345"
    with pytest.raises(SizeLimitExceeded, match="limit of 4 bytes"):
        read_limited(path, 4)


def test_what_is_not_a_file_is_not_read_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match="not a regular file"):
        read_limited(tmp_path / "pipe", 10)
    with pytest.raises(StoreError):
        read_limited(tmp_path, 10)
    with pytest.raises(FileNotFoundError):
        read_limited(tmp_path / "nothing", 10)


@pytest.mark.parametrize(
    ("code", "remedy"),
    [(errno.EROFS, "remount"), (errno.EMFILE, "ulimit -n"), (errno.EDQUOT, "quota")],
)
def test_refusals_of_the_system_come_with_a_remedy(code: int, remedy: str) -> None:
    with (
        pytest.raises(StoreError, match=f"cannot write /data/x: .*{remedy}"),
        store_errors("write", Path("/data/x")),
    ):
        raise OSError(code, os.strerror(code))


def test_a_missing_folder_is_left_for_the_caller_to_judge(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        atomic_write(tmp_path / "no" / "state", b"x")
    with pytest.raises(FileNotFoundError):
        fsync_dir(tmp_path / "no")


def test_private_folders_are_closed_to_others(tmp_path: Path) -> None:
    folder = private_dir(tmp_path / "a" / "keys")
    assert mode_of(folder) == 0o700
    folder.chmod(0o755)
    assert mode_of(private_dir(folder)) == 0o700


def test_a_locked_folder_names_the_process_that_uses_it(tmp_path: Path) -> None:
    with (
        lock_folder(tmp_path),
        pytest.raises(StoreError, match=f"already used by process {os.getpid()}"),
    ):
        lock_folder(tmp_path)
    lock = lock_folder(tmp_path)
    lock.release()
    lock.release()


def test_a_borrowed_folder_is_claimed_and_keeps_the_lock_file_that_it_had(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    with borrowed_folder(tmp_path), pytest.raises(StoreError, match="already used"):
        lock_folder(tmp_path)
    assert not lock.exists()
    lock_folder(tmp_path).release()
    with borrowed_folder(tmp_path):
        pass
    assert lock.exists()


def test_a_lock_file_that_went_while_it_was_claimed_is_no_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lock = files.fcntl.flock, tmp_path / ".lock"
    looks = iter([True, False])

    def removed_first(descriptor: int, how: int) -> None:
        real(descriptor, how)
        if next(looks):
            lock.unlink()

    monkeypatch.setattr(files.fcntl, "flock", removed_first)
    with lock_folder(tmp_path) as held:
        assert lock.read_text() == f"{os.getpid()}\n"
        assert held._descriptor is not None
        assert os.path.samestat(os.fstat(held._descriptor), lock.stat())


def test_a_lock_ends_with_the_process_however_it_ends(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; from transport.runtime.files import lock_folder\n"
        "lock = lock_folder(pathlib.Path(sys.argv[1])); print('held', flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(StoreError, match=f"already used by process {child.pid}"):
            lock_folder(tmp_path)
        child.kill()
        child.wait()
    lock_folder(tmp_path).release()


def test_life_numbers_grow_with_every_start_and_also_when_the_folder_was_lost(
    tmp_path: Path,
) -> None:
    numbers = [next_incarnation(tmp_path, 1000.0) for _ in range(3)]
    assert numbers == [1_000_000, 1_000_001, 1_000_002]
    (tmp_path / "incarnation").unlink()
    assert next_incarnation(tmp_path, 1000.1) == 1_000_100  # a box that was wiped, the same second
    (tmp_path / "incarnation").write_text("1764566700\n")  # seconds, of an older build
    assert next_incarnation(tmp_path, 1764566700.5) == 1764566700500
    (tmp_path / "incarnation").write_text("many\n")
    with pytest.raises(StoreError, match="remove it"):
        next_incarnation(tmp_path, 1004.0)
