"""Backup of a scheduler's rows while they are written, and what a restored folder begins with."""

import hashlib
import io
import json
import os
import sqlite3
import tarfile
import threading
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from scheduler.backup import TERMS_AHEAD, back_up, read_tables, restore
from scheduler.backup_keys import KEYS
from scheduler.cli import scheduler_group
from scheduler.core.state import Spend, Version
from scheduler.gateway.access import HttpRole, create_token, revoke_token, token_names
from scheduler.store import FILE_NAME, SchedulerStore
from scheduler.tokens import TokenStore, revoke_key
from transport.authorized import read_authorized
from transport.errors import ChecksumMismatch, ConfigError, StoreError
from transport.keys import create_keys
from transport.messages import Role

encode = msgspec.msgpack.encode


def commit(store: SchedulerStore, number: int, blob: bytes = b"") -> None:
    """One state: both spends say ``number``, and a prompt of that many bytes is there."""
    rows = [Spend(run=run, tokens=number) for run in ("a", "b")]
    changes = [(row.table, row.key, encode(row)) for row in rows]
    store.commit([*changes, ("prompt", f"p{number}", blob)], now=float(number))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = SchedulerStore.open(tmp_path / "scheduler")
    version = Version(policy="a/b", version=3, parent=2, step=3, digest="d3", stored=True)
    store.commit([(version.table, version.key, encode(version))], now=1.0)
    commit(store, 7)
    store.close()
    return tmp_path / "scheduler"


def tokens(folder: Path) -> set[int]:
    return {spend.tokens for spend in read_tables(folder / FILE_NAME).spends.values()}


def test_a_backup_under_load_is_one_committed_state(tmp_path: Path) -> None:
    store = SchedulerStore.open(tmp_path / "scheduler", "process-crash")
    commit(store, 1, b"x" * 2**20)
    ended = threading.Event()
    written = [1]

    def write() -> None:
        while not ended.is_set():
            written.append(written[-1] + 1)
            commit(store, written[-1], b"x" * 500)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        before = written[-1]
        for number in range(3):
            back_up(tmp_path / "scheduler", tmp_path / f"backup{number}", wall_s=1.0)
        assert written[-1] > before  # the writer went on
    finally:
        ended.set()
        writer.join()
        store.close()
    seen = []
    for number in range(3):
        restore(tmp_path / f"backup{number}", tmp_path / f"restored{number}")
        (both,) = tokens(tmp_path / f"restored{number}")
        seen.append(both)
        again = SchedulerStore.open(tmp_path / f"restored{number}")
        assert again.now == float(both)
        keys = [f"p{n}" for n in range(1, both + 1)]
        assert set(again.prompts(keys)) == set(keys)
        again.close()
    assert seen == sorted(seen)


def test_a_restored_scheduler_begins_a_term_that_nobody_had(folder: Path, tmp_path: Path) -> None:
    found = back_up(folder, tmp_path / "b", wall_s=5.0)
    assert (found.term, found.made_s, found.versions[0].digest) == (1, 5.0, "d3")
    for _ in range(3):
        SchedulerStore.open(folder).close()
    (folder / "events" / "term-00000009").mkdir(parents=True)
    done = restore(tmp_path / "b", folder, replace=True)
    assert done.term == 9 + TERMS_AHEAD
    store = SchedulerStore.open(folder)
    assert store.term == 10 + TERMS_AHEAD
    store.close()
    assert tokens(folder) == {7}
    moved = SchedulerStore.open(Path(done.moved_to))
    assert moved.term == 5  # what was there is whole
    moved.close()


def test_a_damaged_file_is_replaced_and_its_log_goes_with_it(folder: Path, tmp_path: Path) -> None:
    back_up(folder, tmp_path / "b", wall_s=5.0)
    (folder / FILE_NAME).write_bytes(b"garbage" * 1000)
    (folder / f"{FILE_NAME}-wal").write_bytes(b"more garbage")
    with pytest.raises(ConfigError, match="--replace moves it aside"):
        restore(tmp_path / "b", folder)
    done = restore(tmp_path / "b", folder, replace=True)
    moved = {path.name for path in Path(done.moved_to).iterdir()}
    assert moved >= {FILE_NAME, f"{FILE_NAME}-wal"}
    store = SchedulerStore.open(folder)
    assert store.term == 2 + TERMS_AHEAD
    store.close()


def test_who_runs_is_not_restored_over(folder: Path, tmp_path: Path) -> None:
    back_up(folder, tmp_path / "b", wall_s=5.0)
    store = SchedulerStore.open(folder)
    with pytest.raises(StoreError, match="already used by process"):
        restore(tmp_path / "b", folder, replace=True)
    store.close()


def test_a_backup_replaces_nothing_and_is_private(folder: Path, tmp_path: Path) -> None:
    back_up(folder, tmp_path / "b", wall_s=5.0)
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="exists"):
        back_up(folder, tmp_path / "b", wall_s=5.0)
    with pytest.raises(ConfigError, match="no such file"):
        back_up(tmp_path / "elsewhere", tmp_path / "c", wall_s=5.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "scheduler"]


def test_keys_come_back_where_they_are_missing(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    create_keys(keys, trainers=["a/b"])
    root = (keys / "signing" / "root.toml").read_bytes()
    found = back_up(folder, tmp_path / "b", wall_s=5.0, keys=keys)
    (keys / "signing" / "root.toml").unlink()
    (keys / "operator.toml").write_text("mine")
    done = restore(tmp_path / "b", tmp_path / "new", keys=keys)
    assert done.keys.written == 1
    assert (keys / "signing" / "root.toml").read_bytes() == root
    assert (keys / "signing" / "root.toml").stat().st_mode & 0o777 == 0o600
    assert (keys / "operator.toml").read_text() == "mine"
    done = restore(tmp_path / "b", tmp_path / "newer", keys=tmp_path / "other")
    assert done.keys.written == found.keys


def test_a_key_file_with_two_names_comes_back_under_both(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    create_keys(keys)
    (keys / "again.toml").hardlink_to(keys / "operator.toml")
    found = back_up(folder, tmp_path / "b", wall_s=5.0, keys=keys)
    done = restore(tmp_path / "b", tmp_path / "new", keys=tmp_path / "other")
    assert done.keys.written == found.keys
    for name in ("again.toml", "operator.toml"):
        assert (tmp_path / "other" / name).read_bytes() == (keys / "operator.toml").read_bytes()


def test_restoring_lets_nobody_in_who_was_taken_out_since(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    create_keys(keys, agents=["box1", "box2"], trainers=["a/b"])
    for name, role in (("ada", HttpRole.OPERATOR), ("jobs", HttpRole.SUBMITTER)):
        create_token(keys, name, role)
    made = TokenStore(keys)
    token, _ = made.create(role=Role.AGENT, max_uses=1, lifetime_s=9e9, wall_s=1.0)
    (keys / "server.next.public.toml").write_text("x")  # a change of the key, abandoned later
    back_up(folder, tmp_path / "b", wall_s=5.0, keys=keys)
    revoke_key(keys, "box1")
    (keys / "authorized" / "box2.toml").unlink()
    revoke_token(keys, "ada")
    revoke_token(keys, "jobs")
    for gone in (
        f"tokens/{token.id}.json",
        "signers/trainer-a-b.toml",
        "certificates/trainer-a-b.toml",
        "server.next.public.toml",
        "operator.toml",
    ):
        (keys / gone).unlink()
    before = {path for path in keys.rglob("*") if path.is_file()}
    done = restore(tmp_path / "b", tmp_path / "new", keys=keys)
    assert {path for path in keys.rglob("*") if path.is_file()} - before == {keys / "operator.toml"}
    assert set(done.keys.revoked) == {
        "authorized/box1.toml", "authorized/http-jobs.toml", "http-jobs.toml"
    }  # fmt: skip
    assert set(done.keys.kept_out) == {
        "authorized/box2.toml",
        "http/ada.toml",
        "http/jobs.toml",
        f"tokens/{token.id}.json",
        "signers/trainer-a-b.toml",
        "certificates/trainer-a-b.toml",
        "server.next.public.toml",
    }
    wanted = ["http/ada.toml", "authorized/box1.toml"]
    done = restore(tmp_path / "b", tmp_path / "newer", keys=keys, readmit=wanted)
    assert done.keys.written == 1
    assert token_names(keys) == ["ada"]
    assert not (keys / "authorized" / "box1.toml").exists()  # a revoked key never comes back
    with pytest.raises(ConfigError, match=r"--readmit http/bob.toml: the backup has no such key"):
        restore(tmp_path / "b", tmp_path / "newest", keys=keys, readmit=["http/bob.toml"])
    assert not (tmp_path / "newest" / FILE_NAME).exists()


def test_revocations_of_both_sides_count_under_whatever_name(folder: Path, tmp_path: Path) -> None:
    keys, other = tmp_path / "keys", tmp_path / "other"
    create_keys(keys, agents=["box1"])
    revoke_key(keys, "box1")
    back_up(folder, tmp_path / "b", wall_s=5.0, keys=keys)
    create_keys(other, agents=["box1"])
    revoke_key(other, "box1")  # another key of the same name
    for new in ("one", "two"):
        restore(tmp_path / "b", tmp_path / new, keys=other)
        revoked, _ = read_authorized(other / "revoked", any_file_name=True)
        assert len({one.public_key for one in revoked}) == len(revoked) == 2
    # A backup that was made while a key was being revoked has it in both folders.
    public = (keys / "revoked" / "box1.toml").read_bytes()
    both = rewritten(tmp_path / "b", tmp_path / "both", **{f"{KEYS}/authorized/box1.toml": public})
    done = restore(both, tmp_path / "three", keys=tmp_path / "empty")
    assert set(done.keys.revoked) == {"box1.toml", "authorized/box1.toml"}


def rewritten(source: Path, target: Path, **changes: bytes | None) -> Path:
    """``source`` with other content for some members, and whatever else is asked for."""
    with tarfile.open(source) as before, tarfile.open(target, "w") as after:
        names = [member.name for member in before.getmembers()]
        for name in [*names, *(name for name in changes if name not in names)]:
            data = changes[name] if name in changes else before.extractfile(name).read()
            if data is not None:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                after.addfile(info, io.BytesIO(data))
    return target


def test_what_is_no_backup_or_damaged_is_refused(folder: Path, tmp_path: Path) -> None:
    back_up(folder, tmp_path / "b", wall_s=5.0)
    with tarfile.open(tmp_path / "b") as tar:
        rows = tar.extractfile(FILE_NAME).read()
        listed = json.loads(tar.extractfile("backup.json").read())
    flipped = bytearray(rows)
    flipped[len(rows) // 2] ^= 1
    cases = [
        ({FILE_NAME: bytes(flipped)}, ChecksumMismatch, "not those that were backed up"),
        ({FILE_NAME: None}, ConfigError, "no scheduler.sqlite in it"),
        ({"backup.json": None}, ConfigError, "no backup.json in it"),
        ({"backup.json": b"{"}, ConfigError, "no backup of a scheduler, or damaged"),
        (
            {"backup.json": json.dumps({**listed, "schema": 99}).encode()},
            ConfigError,
            "newer farflow",
        ),
    ]
    for number, (changes, kind, said) in enumerate(cases):
        bad = rewritten(tmp_path / "b", tmp_path / f"bad{number}", **changes)
        with pytest.raises(kind, match=said):
            restore(bad, tmp_path / "new")
        assert not (tmp_path / "new" / FILE_NAME).exists()
    (tmp_path / "text").write_text("no tar")
    with pytest.raises(ConfigError, match="no backup of a scheduler"):
        restore(tmp_path / "text", tmp_path / "new")
    torn = tmp_path / "torn"
    torn.write_bytes((tmp_path / "b").read_bytes()[: len(rows) // 2])
    with pytest.raises((ConfigError, ChecksumMismatch)):
        restore(torn, tmp_path / "new")


def test_no_member_of_a_backup_leaves_the_folder_of_keys(folder: Path, tmp_path: Path) -> None:
    back_up(folder, tmp_path / "b", wall_s=5.0)
    bad = rewritten(
        tmp_path / "b",
        tmp_path / "bad",
        **{"keys/../../out.toml": b"x", "/keys/abs.toml": b"x", "other/k.toml": b"x", "keys": b"x"},
    )
    done = restore(bad, tmp_path / "deep" / "new", keys=tmp_path / "deep" / "keys")
    assert done.keys.written == 0
    assert not list(tmp_path.rglob("*out.toml"))


def test_a_row_that_does_not_decode_is_not_backed_up(folder: Path, tmp_path: Path) -> None:
    with sqlite3.connect(folder / FILE_NAME) as connection:
        connection.execute("UPDATE rows SET value = x'c1' WHERE table_name = 'spend'")
    connection.close()
    with pytest.raises(StoreError, match="does not decode"):
        back_up(folder, tmp_path / "b", wall_s=5.0)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("DELETE FROM meta", "says no term"),
        ("UPDATE meta SET term = 77", "its list says term 1"),
        ("PRAGMA user_version = 1", "schema 1, and its list says"),
        ("PRAGMA user_version = 0", "says no term"),
        ("PRAGMA user_version = 99", "schema 99, and its list says"),
        ("DROP TABLE meta", "no such table"),
    ],
)
def test_rows_that_are_not_what_the_list_says_replace_nothing(
    folder: Path, tmp_path: Path, sql: str, said: str
) -> None:
    back_up(folder, tmp_path / "b", wall_s=5.0)
    with tarfile.open(tmp_path / "b") as tar:
        listed = json.loads(tar.extractfile("backup.json").read())
        (tmp_path / "rows").write_bytes(tar.extractfile(FILE_NAME).read())
    with sqlite3.connect(tmp_path / "rows") as connection:
        connection.execute(sql)
    connection.close()
    rows = (tmp_path / "rows").read_bytes()
    listed["sha256"] = hashlib.sha256(rows).hexdigest()
    bad = rewritten(
        tmp_path / "b",
        tmp_path / "bad",
        **{FILE_NAME: rows, "backup.json": json.dumps(listed).encode()},
    )
    with pytest.raises(StoreError, match=said):
        restore(bad, folder, replace=True)
    assert tokens(folder) == {7}
    assert not list(folder.glob("before-restore-*"))
    # Nor is such a file backed up, or started with.
    (tmp_path / "sick").mkdir(mode=0o700)
    (tmp_path / "sick" / FILE_NAME).write_bytes(rows)
    if "term = 77" not in sql and "= 1" not in sql:
        with pytest.raises(StoreError):
            back_up(tmp_path / "sick", tmp_path / "c", wall_s=5.0)
    if sql == "DELETE FROM meta":
        with pytest.raises(StoreError, match="says no term"):
            SchedulerStore.open(tmp_path / "sick")
        restore(tmp_path / "b", tmp_path / "sick", replace=True)  # a sick file may be replaced


def test_the_commands(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    create_keys(tmp_path / "keys")

    def run(*argv: str) -> str:
        result = CliRunner().invoke(scheduler_group, argv)
        assert result.exit_code == 0, result.output
        return result.stdout

    facts = json.loads(run("backup", "b", "--keys", "--json"))
    assert (facts["term"], facts["versions"], facts["keys"] > 3) == (1, 1, True)
    assert "2 run(s)" not in run("backup", "c")
    assert "start its trainers again" in run("restore", "b", "--replace")
    told = json.loads(run("restore", "b", "--set", "scheduler.folder=n", "--keys", "--json"))
    assert (told["term"], told["moved_to"], told["keys_written"]) == (1 + TERMS_AHEAD, "", 0)
    refused = CliRunner().invoke(scheduler_group, ["restore", "b"])
    assert (refused.exit_code, "--replace" in refused.stderr) == (78, True)


def test_a_backup_to_a_folder_that_is_none_names_it(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no such folder: {tmp_path}/none"):
        back_up(folder, tmp_path / "none" / "a.tar", wall_s=0.0)
    with pytest.raises(StoreError, match=r"cannot write /proc/a.tar"):
        back_up(folder, Path("/proc/a.tar"), wall_s=0.0)


@pytest.mark.timeout(10)
def test_a_refused_restore_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    os.mkfifo(tmp_path / "pipe")
    back_up(folder, tmp_path / "b", wall_s=5.0)
    bad = rewritten(tmp_path / "b", tmp_path / "bad", **{FILE_NAME: b"x" * 4096})
    for file in (tmp_path / "none", tmp_path / "pipe", bad):
        for target in (tmp_path / "new" / "deeper", tmp_path / "there"):
            with pytest.raises((ConfigError, ChecksumMismatch)):
                restore(file, target)
    assert not (tmp_path / "new").exists()
    assert not any((tmp_path / "there").iterdir())
