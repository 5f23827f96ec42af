"""The scheduler's store against real SQLite files."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler.store import FILE_NAME, MIGRATIONS, SchedulerStore
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
