"""Damage within the trajectory log's segments costs what it touches, and is told."""

import random
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from chaos_disk import entry
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.segment_damage import DAMAGE_FILE, MAX_KEPT, DamageBook
from scheduler.segment_records import Gap, encode_record
from scheduler.segments import BodyStore, Outcome


def opened(folder: Path, segment_bytes: int = 10**6) -> BodyStore:
    return BodyStore(folder, segment_bytes=segment_bytes, disk_bytes=10**8)


def written(folder: Path, numbers: range, segment_bytes: int = 10**6, size: int = 960) -> Path:
    """One batch each; the first segment."""
    store = opened(folder, segment_bytes)
    for number in numbers:
        assert store.append([entry(number, size)]) == [Outcome.STORED]
    store.close()
    return min(folder.glob("*.log"))


def there(store: BodyStore, numbers: range, size: int = 960) -> list[bool]:
    found = []
    for number in numbers:
        summary, body = entry(number, size)
        read = store.read(summary.digest)
        assert read in (None, body)
        found.append(read is not None)
    return found


def record_starts(path: Path) -> list[int]:
    data = path.read_bytes()
    return [at for at in range(len(data)) if data[at : at + 4] == b"fftr"]


def spoil(path: Path, at: int, data: bytes = b"\xff" * 8) -> None:
    with open(path, "rb+") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize("last", [True, False], ids=["last segment", "sealed segment"])
@pytest.mark.parametrize("marks", [True, False], ids=["marks", "no marks"])
@pytest.mark.parametrize("hit", [0, 2])
def test_a_damaged_head_costs_its_own_record_only(tmp_path, last, marks, hit):
    path = written(tmp_path, range(6), segment_bytes=10**6 if last else 5000)
    inside = len(record_starts(path))
    assert inside >= 4
    start, following = record_starts(path)[hit : hit + 2]
    spoil(path, start)
    if not marks:
        path.with_suffix(".marks").unlink()
    store = opened(tmp_path)
    assert there(store, range(6)) == [number != hit for number in range(6)]
    assert store.torn_bytes == 0
    assert store.damage.ranges() == [(1, Gap(start, following, "no head of a record"))]
    assert f"bytes {start} to {following}" in (tmp_path / DAMAGE_FILE).read_text()
    assert store.append([entry(77, 960)]) == [Outcome.STORED]
    store.close()
    store = opened(tmp_path)
    assert there(store, range(77, 78)) == [True]
    assert [len(store.damage), store.damage.size_bytes] == [1, following - start]
    store.close()


def test_the_last_stored_record_is_damage_and_no_torn_end(tmp_path):
    """It was acknowledged: its loss is told, and nothing is written over what is left of it."""
    path = written(tmp_path, range(3))
    start, size_bytes = record_starts(path)[2], path.stat().st_size
    spoil(path, start)
    store = opened(tmp_path)
    assert (store.torn_bytes, path.stat().st_size) == (0, size_bytes)
    assert store.damage.ranges() == [(1, Gap(start, size_bytes, "no head of a record"))]
    assert store.append([entry(9, 960)]) == [Outcome.STORED]
    store.close()
    store = opened(tmp_path)
    assert there(store, range(3)) == [True, True, False]
    assert there(store, range(9, 10)) == [True]
    store.close()


def test_what_looks_like_a_record_in_a_body_is_none(tmp_path):
    """An agent writes bodies; damage to the head of one does not make records of what is in it."""
    forged, body = entry(50, 320)
    inner = encode_record(forged, body) + body
    outer = inner * 2
    summary = msgspec.structs.replace(entry(1)[0], size_bytes=len(outer))
    summary = msgspec.structs.replace(summary, digest=sha256(outer).hexdigest())
    store = opened(tmp_path)
    store.append([entry(0), (summary, outer), entry(2)])
    store.close()
    path = min(tmp_path.glob("*.log"))
    start = path.read_bytes().index(b"fftr", 10)
    spoil(path, start)
    store = opened(tmp_path)
    assert not store.settled(forged.digest)
    assert len(store) == 2
    store.close()


def test_a_summary_that_is_still_to_be_announced_is_checked_in_every_segment(tmp_path):
    """A flipped bit of a reward would be told to the scheduler otherwise."""
    path = written(tmp_path, range(12), segment_bytes=5000)
    data = bytearray(path.read_bytes())
    at = data.index(b"rewards") + 10
    data[at] ^= 1
    path.write_bytes(data)
    store = opened(tmp_path)
    assert [s.digest for s in store.unaccepted()] == [entry(n, 960)[0].digest for n in range(1, 12)]
    assert len(store.damage) == 1
    store.close()


def test_marks_of_a_removed_segment_do_not_count_for_the_next_of_that_number(tmp_path):
    """Death between the removal of the two files."""
    path = written(tmp_path, range(2))
    store = opened(tmp_path)
    store.release([entry(n, 960)[0].digest for n in range(2)])
    store.close()
    path.unlink()
    assert path.with_suffix(".marks").exists()
    written(tmp_path, range(2))
    store = opened(tmp_path)
    assert there(store, range(2)) == [True, True]
    store.close()


def test_a_body_that_rots_while_the_log_runs_is_told_once(tmp_path):
    path = written(tmp_path, range(3))
    store = opened(tmp_path)
    start, end = record_starts(path)[1:3]
    spoil(path, end - 50)
    for _ in range(3):
        assert there(store, range(3)) == [True, False, True]
    assert store.damage.take_new() == [(1, Gap(start, end, "a body with another digest"))]
    assert store.damage.take_new() == []
    store.close()


def test_the_book_forgets_segments_that_are_gone_and_has_a_bound(tmp_path):
    book = DamageBook(tmp_path)
    for number in range(MAX_KEPT + 5):
        book.note(1, Gap(number, number + 1, "x"))
    book.note(1, Gap(0, 1, "x"))
    book.write()
    assert (len(book), book.left_out) == (MAX_KEPT, 5)
    assert len((tmp_path / DAMAGE_FILE).read_text().splitlines()) == MAX_KEPT
    book.removed(1)
    assert (len(book), (tmp_path / DAMAGE_FILE).exists()) == (0, False)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), hits=st.integers(1, 4), with_marks=st.booleans())
def test_whatever_is_damaged_every_untouched_record_is_found(
    tmp_path_factory, seed, hits, with_marks
):
    """And every lost byte is in a range that is told, and the log goes on."""
    folder = tmp_path_factory.mktemp("bodies")
    rng = random.Random(seed)
    segment_bytes = rng.choice((3000, 10**6))
    written(folder, range(10), segment_bytes, size=320)
    touched: set[int] = set()
    records: list[tuple[Path, int, int, int]] = []
    for path in sorted(folder.glob("*.log")):
        starts = [*record_starts(path), path.stat().st_size]
        records += [(path, a, b, len(records) + i) for i, (a, b) in enumerate(pairwise(starts))]
    for _ in range(hits):
        path, start, end, number = rng.choice(records)
        at = rng.randrange(start, end)
        before = path.read_bytes()[at]
        spoil(path, at, bytes([before ^ rng.randrange(1, 256)]))
        touched.add(number)
        if not with_marks:
            path.with_suffix(".marks").unlink(missing_ok=True)
    store = opened(folder, segment_bytes)
    found = there(store, range(10), 320)
    assert all(found[number] or number in touched for number in range(10))
    told = [(f"segment-{number:08d}.log", gap) for number, gap in store.damage.ranges()]
    for path, start, end, number in records:
        if not found[number]:
            covered = any(
                name == path.name and gap.start <= start and end <= gap.end for name, gap in told
            )
            assert covered or (store.torn_bytes and path == max(folder.glob("*.log")))
    assert store.append([entry(70, 320), entry(71, 320)]) == [Outcome.STORED] * 2
    store.close()
    store = opened(folder, segment_bytes)
    assert there(store, range(70, 72), 320) == [True, True]
    store.close()
