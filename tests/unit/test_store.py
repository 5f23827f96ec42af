"""The scheduler's store against real SQLite files."""

import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler.store import (
    FILE_NAME,
    MIGRATIONS,
    STATEMENT_ROWS,
    STATEMENTS,
    SchedulerStore,
    _places,
)
from transport.errors import StoreError


def reopen(folder: Path) -> tuple[int, float, list[tuple[str, str, bytes]]]:
    store = SchedulerStore.open(folder)
    try:
        return store.term, store.now, list(store.rows())
    finally:
        store.close()


def test_a_new_store_has_term_one_and_no_rows(tmp_path):
    assert reopen(tmp_path / "new" / "folder") == (1, 0.0, [])


def test_rows_and_the_clock_come_back_and_the_term_grows_with_every_opening(tmp_path):
    store = SchedulerStore.open(tmp_path)
    store.commit([("jobs", "b", b"2"), ("jobs", "a", b"1"), ("agents", "z", b"")], 12.5)
    store.commit([("jobs", "a", b"one")], 14.0)
    store.close()
    rows = [("agents", "z", b""), ("jobs", "a", b"one"), ("jobs", "b", b"2")]
    assert reopen(tmp_path) == (2, 14.0, rows)
    assert reopen(tmp_path)[0] == 3


def test_a_change_without_value_deletes_its_row(tmp_path):
    store = SchedulerStore.open(tmp_path)
    store.commit([("jobs", "a", b"1"), ("jobs", "b", b"2")], 1.0)
    store.commit([("jobs", "a", None), ("jobs", "never-there", None)], 2.0)
    assert list(store.rows()) == [("jobs", "b", b"2")]
    store.close()


def test_a_failed_commit_changes_nothing_and_ends_the_store(tmp_path):
    store = SchedulerStore.open(tmp_path)
    store.commit([("jobs", "a", b"1")], 1.0)
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(StoreError, match=r"scheduler\.sqlite: database or disk is full; free"):
        store.commit([("jobs", "b", b"2"), ("jobs", "c", bytes(1 << 20))], 2.0)
    with pytest.raises(StoreError, match="an earlier commit failed"):
        store.commit([("jobs", "d", b"4")], 3.0)
    store.close()
    assert reopen(tmp_path) == (2, 1.0, [("jobs", "a", b"1")])


def test_a_second_process_is_refused_and_told_who_holds_the_folder(tmp_path):
    store = SchedulerStore.open(tmp_path)
    with pytest.raises(StoreError, match=f"already used by process {os.getpid()}"):
        SchedulerStore.open(tmp_path)
    store.close()
    assert reopen(tmp_path)[0] == 2


@pytest.mark.parametrize("damage", ["other-file", "overwritten-pages"])
def test_a_damaged_file_is_refused_with_a_remedy(tmp_path, damage):
    store = SchedulerStore.open(tmp_path)
    store.commit([("jobs", f"{i:04d}", bytes(500)) for i in range(200)], 1.0)
    store.close()
    path = tmp_path / FILE_NAME
    if damage == "other-file":
        path.write_bytes(b"this is a diary, not a database" * 400)
    else:
        with open(path, "r+b") as file:
            file.seek(3 * 4096)
            file.write(b"\xa5" * 8 * 4096)
    with pytest.raises(StoreError, match=r"scheduler\.sqlite: .*backup"):
        reopen(tmp_path)


def test_a_file_of_a_newer_farflow_is_refused(tmp_path):
    SchedulerStore.open(tmp_path).close()
    connection = sqlite3.connect(tmp_path / FILE_NAME)
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    connection.close()
    with pytest.raises(StoreError, match="newer farflow"):
        SchedulerStore.open(tmp_path)


def test_the_folder_is_free_again_after_a_failed_opening(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError):
        SchedulerStore.open(tmp_path)
    (tmp_path / FILE_NAME).unlink()
    assert reopen(tmp_path)[0] == 1


@pytest.mark.parametrize(("durability", "level"), [("power-loss", 2), ("process-crash", 1)])
def test_durability_chooses_how_commits_are_synced(tmp_path, durability, level):
    store = SchedulerStore.open(tmp_path, durability)
    assert store._connection.execute("PRAGMA synchronous").fetchone()[0] == level
    assert store._connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    store.close()


def test_commits_of_a_killed_process_are_all_there(tmp_path):
    program = """
import os, pathlib, signal, sys
from scheduler.store import SchedulerStore
store = SchedulerStore.open(pathlib.Path(sys.argv[1]))
for number in range(20):
    store.commit([("jobs", f"{number:02d}", b"x"), ("cursor", "run", b"%d" % number)], number)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=20)
    assert done.returncode == -9
    term, now, rows = reopen(tmp_path)
    assert (term, now, len(rows)) == (2, 19.0, 21)
    assert ("cursor", "run", b"19") in rows


def test_the_last_of_several_changes_of_one_row_counts(tmp_path):
    store = SchedulerStore.open(tmp_path)
    store.commit([("jobs", "a", b"1"), ("jobs", "b", b"1")], 1.0)
    store.commit(
        [("jobs", "a", None), ("jobs", "a", b"2"), ("jobs", "b", b"3"), ("jobs", "b", None)], 2.0
    )
    assert list(store.rows()) == [("jobs", "a", b"2")]
    store.close()


def test_more_rows_than_one_statement_takes(tmp_path):
    store = SchedulerStore.open(tmp_path)
    count = 2 * STATEMENT_ROWS + 7
    rows = [("jobs", f"{number:06d}", b"%d" % number) for number in range(count)]
    store.commit(rows, 1.0)
    assert list(store.rows()) == rows
    gone = [(table, key, None) for table, key, _ in rows[3:]]
    store.commit([*gone, ("prompt", "p", b"x")], 2.0)
    assert list(store.rows()) == rows[:3]
    store.close()


def test_every_number_of_rows_comes_back_and_goes(tmp_path):
    store = SchedulerStore.open(tmp_path)
    for count in (*range(1, 34), 63, 64, 65, STATEMENT_ROWS - 1, STATEMENT_ROWS + 1):
        rows = [("jobs", f"{number:06d}", b"%d" % number) for number in range(count)]
        prompts = [("prompt", key, value) for _, key, value in rows]
        store.commit([*rows, *prompts], 1.0)
        assert list(store.rows()) == rows
        store.commit([(table, key, None) for table, key, _ in [*rows[1:], *prompts[1:]]], 2.0)
        assert list(store.rows()) == rows[:1]
        assert store.prompts([key for _, key, _ in rows]) == {"000000": b"0"}
    store.close()


def test_statements_have_few_sizes_and_little_in_vain():
    sizes = {_places(rows) for rows in range(1, STATEMENT_ROWS + 1)}
    assert 4 * len(sizes) < STATEMENTS
    assert all(_places(size) == size for size in sizes)
    assert all(rows <= _places(rows) <= 1.25 * rows for rows in range(1, STATEMENT_ROWS + 1))


# ---- prompts ---------------------------------------------------------------------------------


def test_prompts_are_kept_apart_and_read_by_key(tmp_path):
    store = SchedulerStore.open(tmp_path)
    store.commit([("job", "a", b"row"), ("prompt", "a", b"long"), ("prompt", "b", b"other")], 1.0)
    assert list(store.rows()) == [("job", "a", b"row")]
    assert store.prompts(["b", "a", "c"]) == {"a": b"long", "b": b"other"}
    store.close()
    again = SchedulerStore.open(tmp_path)
    assert again.prompts(["a"]) == {"a": b"long"}
    again.commit([("prompt", "a", None)], 2.0)
    assert again.prompts(["a", "b"]) == {"b": b"other"}
    again.close()


def test_recent_prompts_cost_bounded_memory_and_are_never_stale(tmp_path, monkeypatch):
    monkeypatch.setattr("scheduler.store.RECENT_PROMPTS_BYTES", 1000)
    store = SchedulerStore.open(tmp_path)
    for number in range(50):
        store.commit([("prompt", f"{number}", bytes([number]) * 100)], 1.0)
    assert sum(map(len, store._recent.values())) == store._recent_bytes <= 1000
    store.commit([("prompt", "49", b"new"), ("prompt", "0", b"first")], 2.0)
    assert store.prompts(["49", "0", "7"]) == {"49": b"new", "0": b"first", "7": b"\x07" * 100}
    store.commit([("prompt", "49", None)], 3.0)
    assert store.prompts(["49"]) == {}
    store.close()


def test_a_prompt_of_a_commit_that_failed_is_not_there(tmp_path):
    store = SchedulerStore.open(tmp_path)
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages + 1}")
    with pytest.raises(StoreError, match="full"):
        store.commit([("prompt", "a", bytes(1 << 20))], 1.0)
    assert store.prompts(["a"]) == {}
    store.close()


def test_a_store_of_the_first_schema_gets_room_for_prompts(tmp_path):
    path = tmp_path / FILE_NAME
    connection = sqlite3.connect(path)
    connection.executescript(f"{MIGRATIONS[0]} PRAGMA user_version = 1;")
    connection.execute("INSERT INTO rows VALUES ('jobs', 'a', x'31')")
    connection.commit()
    connection.close()
    store = SchedulerStore.open(tmp_path)
    store.commit([("prompt", "a", b"p")], 1.0)
    assert (list(store.rows()), store.prompts(["a"])) == ([("jobs", "a", b"1")], {"a": b"p"})
    store.close()


# ---- disk trouble ----------------------------------------------------------------------------


def in_child(program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a program that does harm to its own process."""
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        check=False,
        timeout=20,
        capture_output=True,
        text=True,
    )


def test_a_file_that_may_not_grow_ends_the_store_and_loses_nothing_committed(tmp_path):
    program = """
import pathlib, resource, signal, sys
from scheduler.store import SchedulerStore
from transport.errors import StoreError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = SchedulerStore.open(pathlib.Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
done = 0
try:
    while done < 1000:
        store.commit([("jobs", f"{done:04d}", bytes(5000))], done)
        done += 1
except StoreError as error:
    print(done, str(error).replace(sys.argv[1], ""))
try:
    store.commit([("jobs", "after", b"")], 1.0)
except StoreError as error:
    print(error)
store.close()
"""
    done = in_child(program, str(tmp_path))
    first, second = done.stdout.splitlines()
    count = int(first.split()[0])
    assert 0 < count < 1000
    assert "cannot commit to" in first
    assert "disk" in first
    assert "an earlier commit failed" in second
    assert [key for _, key, _ in reopen(tmp_path)[2]] == [f"{n:04d}" for n in range(count)]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 512 KiB, where we may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "farflow-test", str(folder)]
    try:
        mounted = subprocess.run(command, check=False, capture_output=True, timeout=10)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if mounted.returncode != 0:
        pytest.skip("mounting takes root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)


def fill(store: SchedulerStore) -> str:
    """Commit until the store refuses; what it says then."""
    for number in range(200):
        try:
            store.commit([("jobs", f"big-{number:03d}", bytes(20_000))], 2.0 + number)
        except StoreError as error:
            return str(error)
    return ""


def test_a_full_file_system_is_named_and_what_was_committed_is_there_afterwards(small_disk):
    store = SchedulerStore.open(small_disk)
    store.commit([("jobs", "a", b"1")], 1.0)
    said = fill(store)
    store.close()
    assert re.search(r"cannot commit to .*scheduler\.sqlite: .*(free space|disk)", said)
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True, timeout=10)
    _, now, rows = reopen(small_disk)
    kept = [key for _, key, _ in rows]
    assert kept[0] == "a"
    assert kept[1:] == [f"big-{n:03d}" for n in range(len(kept) - 1)]
    assert now == 1.0 + len(kept) - 1 or len(kept) == 1


def test_a_read_only_file_system_is_named(small_disk):
    store = SchedulerStore.open(small_disk)
    store.commit([("jobs", "a", b"1")], 1.0)
    store.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True, timeout=10)
    with pytest.raises(StoreError, match=r"(?i)read-only"):
        SchedulerStore.open(small_disk)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True, timeout=10)
    assert reopen(small_disk) == (2, 1.0, [("jobs", "a", b"1")])


@pytest.mark.parametrize("damage", ["cut", "overwritten", "garbage-behind"])
def test_a_torn_end_of_the_write_ahead_log_costs_what_it_held_and_nothing_before(tmp_path, damage):
    program = """
import os, pathlib, signal, sys
from scheduler.store import SchedulerStore
store = SchedulerStore.open(pathlib.Path(sys.argv[1]))
for number in range(20):
    store.commit([("jobs", f"{number:02d}", bytes(2000))], number)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert in_child(program, str(tmp_path)).returncode == -9
    log = tmp_path / f"{FILE_NAME}-wal"
    size = log.stat().st_size
    with open(log, "r+b") as file:
        if damage == "cut":
            file.truncate(size - 1500)
        elif damage == "overwritten":
            file.seek(size - 3000)
            file.write(b"\xa5" * 3000)
        else:
            file.seek(size)
            file.write(os.urandom(9000))
    _, now, rows = reopen(tmp_path)
    kept = [key for _, key, _ in rows]
    assert kept == [f"{number:02d}" for number in range(len(kept))]
    assert len(kept) == (20 if damage == "garbage-behind" else 19)
    assert now == len(kept) - 1
