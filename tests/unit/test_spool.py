"""The spool: durable, ordered, bounded, and strict about torn files."""

import os
import threading
from pathlib import Path

import pytest

from edge_agent.spool import Spool
from transport.errors import ChecksumMismatch, StoreError
from transport.messages import GroupSummary
from transport.trajectory import body_digest
from transport.weights.manifest import chunk_digest

LIMIT = 10_000


def entry(number: int, size: int = 100) -> tuple[GroupSummary, bytes]:
    body = f"{number:08d}".encode() * (size // 8)
    summary = GroupSummary(
        attempt=f"run/t-{number:06d}#1",
        fence=(1, number),
        job=f"run/t-{number:06d}",
        digest=body_digest(body),
        size_bytes=len(body),
        rewards=(0.5,),
        lengths=(3,),
        versions={"run/p": (0, 1)},
        prompt_tokens=2,
        queued_s=0.0,
        generating_s=0.1,
    )
    return summary, body


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.group"))


def test_what_was_put_is_there_after_a_restart_in_order(tmp_path: Path) -> None:
    spool = Spool(tmp_path, LIMIT)
    entries = [entry(number) for number in (5, 3, 9)]
    for summary, body in entries:
        spool.put(summary, body)
        assert spool.read(summary.digest) == body
    again = Spool(tmp_path, LIMIT)
    assert again.entries() == [summary for summary, _ in entries]
    assert again.discarded == []
    assert again.size_bytes == spool.size_bytes == sum(len(body) for _, body in entries)
    summary, body = entry(1)
    again.put(summary, body)
    assert [one.attempt for one in Spool(tmp_path, LIMIT).entries()][-1] == summary.attempt


def test_chunks_are_what_was_put_also_after_a_restart_and_damage_is_noticed(tmp_path: Path) -> None:
    summary, body = entry(1, 600_000)
    Spool(tmp_path, 10**6).put(summary, body)
    spool = Spool(tmp_path, 10**6)
    offered = spool.offer(summary)
    assert offered is not None
    size = spool.chunk_bytes(summary.digest)
    assert size == offered.chunk_bytes == 256 << 10
    chunks = [spool.read_chunk(summary.digest, number) for number in range(3)]
    assert b"".join(chunk or b"" for chunk in chunks) == body
    assert [chunk_digest(chunk or b"") for chunk in chunks] == list(offered.chunk_digests)
    assert spool.read_chunk(summary.digest, 3) is None
    assert spool.read_chunk(summary.digest, -1) is None
    [path] = files(tmp_path)
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    assert spool.read_chunk(summary.digest, 0) == chunks[0]
    with pytest.raises(ChecksumMismatch, match="chunk 2 is damaged"):
        spool.read_chunk(summary.digest, 2)
    path.unlink()
    with pytest.raises(StoreError, match="removed by somebody else"):
        spool.read_chunk(summary.digest, 0)
    spool.drop(summary.digest)
    assert spool.read_chunk(summary.digest, 0) is None
    assert spool.offer(summary) is None
    assert spool.chunk_bytes(summary.digest) is None


def test_what_was_dropped_is_gone_and_makes_room(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 250)
    first, second, third = entry(1), entry(2), entry(3)
    spool.put(*first)
    spool.put(*second)
    with pytest.raises(StoreError, match="is full"):
        spool.put(*third)
    spool.drop(first[0].digest)
    spool.drop(first[0].digest)
    with pytest.raises(StoreError, match="has no body"):
        spool.read(first[0].digest)
    spool.put(*third)
    assert [one.digest for one in Spool(tmp_path, 250).entries()] == [
        second[0].digest,
        third[0].digest,
    ]


def test_putting_a_body_again_is_harmless(tmp_path: Path) -> None:
    spool = Spool(tmp_path, LIMIT)
    spool.put(*entry(1))
    spool.put(*entry(1))
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "foreign", "renamed", "summary"])
def test_torn_and_foreign_files_are_discarded_with_a_word(tmp_path: Path, damage: str) -> None:
    spool = Spool(tmp_path, LIMIT)
    spool.put(*entry(1))
    spool.put(*entry(2))
    path = files(tmp_path)[0]
    content = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(content[:-40])
        case "flip":
            path.write_bytes(content[:60] + bytes([content[60] ^ 1]) + content[61:])
        case "empty":
            path.write_bytes(b"")
        case "foreign":
            path.write_bytes(b"not a group at all" * 10)
        case "renamed":
            path.rename(path.with_name("000000000000-" + "0" * 64 + ".group"))
        case _:
            import hashlib

            broken = content[:4] + (3).to_bytes(4, "little") + b"\xc1\xc1\xc1" + content[8:-32]
            path.write_bytes(broken + hashlib.sha256(broken).digest())
    again = Spool(tmp_path, LIMIT)
    assert [one.attempt for one in again.entries()] == [entry(2)[0].attempt]
    assert len(again.discarded) == 1
    assert len(files(tmp_path)) == 1


def test_a_write_that_was_interrupted_leaves_nothing(tmp_path: Path) -> None:
    Spool(tmp_path, LIMIT).put(*entry(1))
    (tmp_path / ".x.group.1.2.farflow-tmp").write_bytes(b"half")
    assert len(Spool(tmp_path, LIMIT).entries()) == 1
    assert [path.name for path in tmp_path.iterdir()] == [files(tmp_path)[0].name]


def test_a_body_damaged_later_is_found_when_it_is_read(tmp_path: Path) -> None:
    spool = Spool(tmp_path, LIMIT)
    spool.put(*entry(1))
    spool.put(*entry(2))
    files(tmp_path)[0].write_bytes(b"x" * 200)
    with pytest.raises(ChecksumMismatch, match="damaged"):
        spool.read(entry(1)[0].digest)
    files(tmp_path)[1].unlink()
    with pytest.raises(StoreError, match="removed"):
        spool.read(entry(2)[0].digest)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match=str(tmp_path)):
        Spool(tmp_path, LIMIT).put(*entry(1))


def test_a_failed_write_gives_its_room_back(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", LIMIT)
    (tmp_path / "spool").rmdir()
    with pytest.raises(StoreError, match="did not take"):
        spool.put(*entry(1))
    assert spool.size_bytes == 0


def test_threads_may_put_at_the_same_time(tmp_path: Path) -> None:
    spool = Spool(tmp_path, LIMIT)
    threads = [threading.Thread(target=spool.put, args=entry(number)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Spool(tmp_path, LIMIT).entries()) == 8
