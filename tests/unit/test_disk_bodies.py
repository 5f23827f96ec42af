"""The trajectory log's bodies on a disk that makes trouble: what was called stored is there, what
does not fit is refused, and it goes on when there is room again.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from chaos_disk import SmallDisk, entry, small_disk  # noqa: F401

from scheduler.segments import BodyStore, Outcome
from transport.errors import StoreError

SEGMENT_BYTES = 60_000


def opened(folder: Path) -> BodyStore:
    return BodyStore(folder, segment_bytes=SEGMENT_BYTES, disk_bytes=2**30)


def check(store: BodyStore, numbers: list[int]) -> None:
    """These and no others are there, each with its own bytes."""
    assert len(store) == len(numbers)
    for number in numbers:
        summary, body = entry(number)
        assert store.read(summary.digest) == body


def fill_up(store: BodyStore) -> list[int]:
    """Bodies that were stored before the disk had no more room."""
    stored = []
    for number in range(100):
        [outcome] = store.append([entry(number)])
        if outcome is Outcome.FULL:
            return stored
        stored.append(number)
    raise AssertionError("never full")


def test_a_full_disk_refuses_bodies_and_loses_none_that_it_took(
    small_disk: SmallDisk,  # noqa: F811
) -> None:
    folder = small_disk.folder / "bodies"
    store = opened(folder)
    stored = fill_up(store)
    assert len(stored) > 5
    # Part of a batch may fit: what is said of each is true of each.
    small = [entry(number, 320) for number in range(500, 600)]
    outcomes = store.append([entry(99), *small])
    assert outcomes[0] is Outcome.FULL
    kept = [
        one for one, outcome in zip(small, outcomes[1:], strict=True) if outcome.value != "full"
    ]
    store.close()
    again = opened(folder)
    assert again.torn_bytes == len(again.damage) == 0
    assert all(again.read(summary.digest) == body for summary, body in kept)
    assert len(again) == len(stored) + len(kept)
    again.close()
    small_disk.set("size=4096k")
    store = opened(folder)
    assert store.append([entry(99)]) == [Outcome.STORED]
    check_some = [*stored, 99]
    assert all(store.read(entry(n)[0].digest) == entry(n)[1] for n in check_some)
    store.close()


def test_a_full_disk_gets_room_from_bodies_that_nobody_needs(
    small_disk: SmallDisk,  # noqa: F811
) -> None:
    """Also where not even the mark that one is released can be written: its segment goes."""
    folder = small_disk.folder / "bodies"
    store = opened(folder)
    stored = fill_up(store)
    small_disk.fill()
    digests = [entry(number)[0].digest for number in stored]
    gone = store.release(digests)
    assert gone
    assert [digest for digest in digests if digest not in gone] == [
        digest for digest in digests if store.read(digest) is not None
    ]
    assert store.append([entry(200)]) == [Outcome.STORED]
    left = [number for number in stored if entry(number)[0].digest not in gone]
    store.close()
    store = opened(folder)
    check(store, [*left, 200])
    store.close()


def test_a_read_only_disk_is_named_when_the_log_starts_and_nothing_is_changed(
    small_disk: SmallDisk,  # noqa: F811
) -> None:
    folder = small_disk.folder / "bodies"
    store = opened(folder)
    store.append([entry(0), entry(1)])
    store.close()
    small_disk.set("ro")
    with pytest.raises(StoreError, match=r"(?i)read-only"):
        opened(folder)
    small_disk.set("rw")
    store = opened(folder)
    check(store, [0, 1])
    store.close()


def test_a_file_that_may_not_grow_is_a_full_disk(tmp_path: Path) -> None:
    """A quota or a limit of the process instead of the disk's end."""
    program = """
import pathlib, resource, signal, sys
sys.path[:0] = sys.argv[2:]
from chaos_disk import entry
from scheduler.segments import BodyStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = BodyStore(pathlib.Path(sys.argv[1]), segment_bytes=10**6, disk_bytes=2**30)
resource.setrlimit(resource.RLIMIT_FSIZE, (70_000, 70_000))
print([store.append([entry(n)])[0].value for n in range(5)])
"""
    here = Path(__file__).resolve().parent
    paths = [str(here.parent / "support"), str(here.parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "bodies"), *paths],
        check=True,
        timeout=20,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(["stored"] * 3 + ["full"] * 2)
    store = opened(tmp_path / "bodies")
    check(store, [0, 1, 2])
    assert store.torn_bytes == 0
    store.close()


def test_however_the_marks_are_torn_no_body_is_lost_that_is_needed(tmp_path: Path) -> None:
    """What is not known to be released comes back, and is released again; what is needed stays."""
    store = opened(tmp_path)
    store.append([entry(number) for number in range(4)])
    digests = [entry(number)[0].digest for number in range(4)]
    store.accept(digests[:2])
    store.release(digests[:1])
    store.release(digests[1:2])
    store.close()
    marks = min(tmp_path.glob("*.marks"))
    content = marks.read_bytes()
    for cut in range(len(content) + 1):
        for tail in (b"", b"\0" * 40, b"\xff" * 7):
            marks.write_bytes(content[:cut] + tail)
            store = opened(tmp_path)
            for number in (2, 3):
                assert store.read(digests[number]) == entry(number)[1]
            for number in (0, 1):
                if store.settled(digests[number]) and store.read(digests[number]):
                    assert store.read(digests[number]) == entry(number)[1]
            # Marks can still be written, and are understood by the next life.
            assert store.release(digests[:2]) == digests[:2]
            store.close()
            store = opened(tmp_path)
            assert [store.read(d) is not None for d in digests] == [False, False, True, True]
            store.close()
