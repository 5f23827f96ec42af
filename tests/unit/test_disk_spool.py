"""The agent's spool on a disk that makes trouble: a body is durable, or its attempt fails with a
clear error; nothing that was put is lost because the disk was full, read-only or torn meanwhile.
"""

import errno
from pathlib import Path

import pytest
from chaos_disk import SmallDisk, entry, files_in, small_disk  # noqa: F401

from edge_agent import spool as spool_module
from edge_agent.spool import Spool
from transport.errors import ChecksumMismatch, StoreError
from transport.runtime.files import read_limited

LIMIT = 2**30


def sound(folder: Path) -> list[int]:
    """Numbers of the groups that a new life finds, each with its own bytes."""
    again = Spool(folder, LIMIT)
    found = []
    for summary in again.entries():
        number = summary.fence[1]
        assert again.read(summary.digest) == entry(number)[1]
        found.append(number)
    return found


def test_a_full_disk_takes_no_group_keeps_the_others_and_goes_on_when_there_is_room(
    small_disk: SmallDisk,  # noqa: F811
) -> None:
    spool = Spool(small_disk.folder, LIMIT)
    spool.put(*entry(0))
    small_disk.fill()
    for _ in range(3):
        with pytest.raises(StoreError, match=r"did not take a group.*[Nn]o space"):
            spool.put(*entry(1))
    assert not spool.has(entry(1)[0].digest)
    assert spool.size_bytes == entry(0)[0].size_bytes
    assert files_in(small_disk.folder) == 1
    assert sound(small_disk.folder) == [0]
    small_disk.make_room()
    spool.put(*entry(1))
    assert sound(small_disk.folder) == [0, 1]


def test_a_spool_without_any_room_gives_out_and_drops_what_it_has(
    small_disk: SmallDisk,  # noqa: F811
) -> None:
    spool = Spool(small_disk.folder, LIMIT)
    spool.put(*entry(0))
    spool.put(*entry(1))
    small_disk.fill()
    again = Spool(small_disk.folder, LIMIT)
    assert again.read(entry(0)[0].digest) == entry(0)[1]
    again.drop(entry(0)[0].digest)
    again.put(*entry(2))  # the room of the one that is gone
    assert sound(small_disk.folder) == [1, 2]


def test_a_read_only_disk_gives_what_it_has_and_says_why_it_takes_nothing(
    small_disk: SmallDisk,  # noqa: F811
) -> None:
    Spool(small_disk.folder, LIMIT).put(*entry(0))
    small_disk.set("ro")
    spool = Spool(small_disk.folder, LIMIT)
    assert spool.read(entry(0)[0].digest) == entry(0)[1]
    with pytest.raises(StoreError, match=r"(?i)read-only"):
        spool.put(*entry(1))
    with pytest.raises(StoreError, match=r"(?i)read-only"):
        spool.drop(entry(0)[0].digest)
    small_disk.set("rw")
    assert sound(small_disk.folder) == [0]


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_a_file_that_the_disk_does_not_give_today_is_kept_for_another_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    spool = Spool(tmp_path, LIMIT)
    for number in (0, 1):
        spool.put(*entry(number))
    victim = min(tmp_path.glob("*.group"))

    def refuses(path: Path, most: int) -> bytes:
        if path == victim:
            raise StoreError(f"cannot read {path}") from OSError(code, "trouble")
        return read_limited(path, most)

    monkeypatch.setattr(spool_module, "read_limited", refuses)
    today = Spool(tmp_path, LIMIT)
    assert [summary.fence[1] for summary in today.entries()] == [1]
    assert len(today.discarded) == 1
    assert "stays there" in today.discarded[0]
    today.put(*entry(2))
    monkeypatch.undo()
    assert sound(tmp_path) == [0, 1, 2]


def test_however_a_file_is_torn_no_wrong_body_comes_out_of_it(tmp_path: Path) -> None:
    spool = Spool(tmp_path, LIMIT)
    for number in (0, 1):
        spool.put(*entry(number, 3200))
    victim, _ = sorted(tmp_path.glob("*.group"))
    content = victim.read_bytes()
    for cut in range(0, len(content), 97):
        victim.write_bytes(content[:cut])
        torn = Spool(tmp_path, LIMIT)
        assert [summary.fence[1] for summary in torn.entries()] == [1]
        assert len(torn.discarded) == 1
        victim.write_bytes(content)
    # Torn under a spool that is open: found when it is read.
    open_one = Spool(tmp_path, LIMIT)
    victim.write_bytes(content[:-40])
    with pytest.raises(ChecksumMismatch):
        open_one.read(entry(0, 3200)[0].digest)
    assert open_one.read(entry(1, 3200)[0].digest) == entry(1, 3200)[1]
