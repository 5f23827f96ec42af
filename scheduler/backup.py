"""Backup of a scheduler while it runs, and what a restored one begins with.

What always holds:

1. A backup is one state that was committed, however much is committed meanwhile, and the running
   scheduler is not held up: SQLite's online backup copies it in one read transaction.
2. A backup appears under its name whole, readable by its owner alone, or not at all; it replaces
   nothing.
3. Nothing is taken from a backup that was not checked: its list, the digest of the rows, every row.
4. A restored scheduler begins with a term that no life since the backup had: fences of those lives
   are never given again.
5. What a restored file takes the place of is moved aside, not removed.
6. Restoring keys lets nobody in whom the folder of keys does not let in now (``backup_keys``).

The bodies of trajectories and the weights stay where they are; a backup lists those that its rows
speak of. It is a tar file:

    backup.json         ``BackupList``
    scheduler.sqlite    the rows
    keys/...            with ``keys``: the deployment's folder of keys, secrets too
"""

import contextlib
import hashlib
import io
import os
import shutil
import sqlite3
import tarfile
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Annotated, Final

import msgspec
from msgspec import Meta

from scheduler.backup_keys import KEYS, KeysWritten, key_files, write_keys
from scheduler.core.tables import Tables
from scheduler.store import FILE_NAME, MIGRATIONS
from transport.errors import ChecksumMismatch, ConfigError, StoreError
from transport.runtime.build import build_id
from transport.runtime.files import (
    borrowed_folder,
    fsync_dir,
    open_regular,
    private_dir,
    store_errors,
)

FORMAT: Final = 1
LIST_NAME: Final = "backup.json"
TERMS_AHEAD: Final = 1024
"""More lives than a scheduler has between a backup and its restoring."""
_MAX_LIST_BYTES: Final = 256 * 2**20
_SIDE_FILES: Final = ("", "-wal", "-shm")
_COPY_BYTES: Final = 1 << 20


class ListedBody(msgspec.Struct, frozen=True, kw_only=True):
    """A body in the trajectory log that a job waits to be trained on with."""

    job: str
    digest: str
    size_bytes: int


class ListedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version in the weight store."""

    policy: str
    version: int
    digest: str


class BackupList(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup holds and speaks of; ``sha256`` is that of the rows' file."""

    format: Annotated[int, Meta(ge=1)]
    build: str
    made_s: float
    term: Annotated[int, Meta(ge=0)]
    schema: Annotated[int, Meta(ge=1)]
    sha256: str
    runs: dict[str, str]
    bodies: tuple[ListedBody, ...]
    versions: tuple[ListedVersion, ...]
    keys: int = 0


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """What was restored: the term that the next start will raise by one, where what was there is
    now ("" where nothing was), and what became of the keys."""

    backup: BackupList
    term: int
    moved_to: str
    keys: KeysWritten


def back_up(folder: Path, file: Path, *, wall_s: float, keys: Path | None = None) -> BackupList:
    """Write a backup of the scheduler in ``folder``, running or not, to the new ``file``; with the
    folder ``keys`` if given. Blocks, for about as long as it takes to read and write the rows.

    Raises:
        ConfigError: no scheduler there, or ``file`` exists, or its folder does not.
        StoreError: the rows are damaged, or the disk refused.
    """
    source = folder / FILE_NAME
    if not source.is_file():
        raise ConfigError(
            f"{source}: no such file; give the deployment's file with --config FILE, or name"
            " the scheduler's folder with --set scheduler.folder=FOLDER"
        )
    if file.exists():
        raise ConfigError(f"{file}: exists; choose another name")
    if not file.parent.is_dir():
        raise ConfigError(f"{file}: no such folder: {file.parent}; make it, or choose another file")
    with _writing(file), tempfile.TemporaryDirectory(dir=file.parent) as work:
        copy = Path(work) / FILE_NAME
        term, schema = _copy_rows(source, copy)
        tables = read_tables(copy)
        found = BackupList(
            format=FORMAT,
            build=build_id(),
            made_s=wall_s,
            term=term,
            schema=schema,
            sha256=_digest(copy),
            runs={run.name: run.state for run in tables.runs.values()},
            bodies=tuple(
                ListedBody(job=job.id, digest=job.result.digest, size_bytes=job.result.size_bytes)
                for job in tables.jobs.values()
                if job.result is not None
            ),
            versions=tuple(
                ListedVersion(policy=v.policy, version=v.version, digest=v.digest)
                for v in tables.versions.values()
                if v.stored
            ),
            keys=0 if keys is None else sum(1 for _ in key_files(keys)),
        )
        packed = Path(work) / "backup"
        with open(packed, "xb") as raw:
            os.fchmod(raw.fileno(), 0o600)
            # Else a file's second name would be kept as a link, which is no file to restore.
            with tarfile.open(fileobj=raw, mode="w", dereference=True) as tar:
                _add(tar, LIST_NAME, msgspec.json.encode(found))
                tar.add(copy, FILE_NAME, filter=_private)
                for name in () if keys is None else key_files(keys):
                    tar.add((keys or Path()) / name, f"{KEYS}/{name}", filter=_private)
            raw.flush()
            os.fsync(raw.fileno())
        try:
            os.link(packed, file)  # fails where the name was taken meanwhile
        except FileExistsError as error:
            raise ConfigError(f"{file}: exists; choose another name") from error
        except OSError:  # a file system without hard links
            os.rename(packed, file)
        fsync_dir(file.parent)
    return found


def restore(
    file: Path,
    folder: Path,
    *,
    replace: bool = False,
    keys: Path | None = None,
    readmit: Collection[str] = (),
) -> Restored:
    """Make ``folder`` the scheduler of the backup ``file``; what is there is moved aside with
    ``replace``. Keys of the backup that the folder ``keys`` lacks are written there, as far as
    ``write_keys`` allows; it has ``readmit``.

    Raises:
        ConfigError: no backup, of a newer farflow, something is in ``folder``, or ``readmit`` names
            no key of the backup.
        ChecksumMismatch: the backup is damaged.
        StoreError: a scheduler runs there, a row does not decode, or the disk refused.
    """
    with _opened(file) as (tar, found), _taken(folder):
        taken = any((folder / f"{FILE_NAME}{side}").exists() for side in _SIDE_FILES)
        if taken and not replace:
            raise ConfigError(f"{folder}: holds a scheduler; --replace moves it aside")
        with (
            store_errors("restore to", folder),
            tempfile.TemporaryDirectory(dir=folder, prefix=".restore-") as work,
        ):
            copy = Path(work) / FILE_NAME
            with copy.open("xb") as out:
                shutil.copyfileobj(_member(tar, FILE_NAME), out, _COPY_BYTES)
            if _digest(copy) != found.sha256:
                raise ChecksumMismatch(f"{file}: the rows are not those that were backed up")
            _check_rows(copy, found)
            read_tables(copy)
            done = KeysWritten() if keys is None else write_keys(tar, keys, readmit)
            term = max(found.term, _terms_here(folder)) + TERMS_AHEAD
            _set_term(copy, term)
            moved_to = _move_aside(folder) if taken else ""
            os.replace(copy, folder / FILE_NAME)
            fsync_dir(folder)
    return Restored(backup=found, term=term, moved_to=moved_to, keys=done)


@contextlib.contextmanager
def _writing(file: Path) -> Iterator[None]:
    try:
        with store_errors("write", file):
            yield
    except FileNotFoundError as error:  # a file system that makes no files, as /proc
        raise StoreError(f"cannot write {file}; choose another folder") from error


@contextlib.contextmanager
def _taken(folder: Path) -> Iterator[None]:
    """The folder, made where it is not there, is ours for the block; one that fails leaves none
    behind."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        private_dir(folder)
        with borrowed_folder(folder):
            yield
    except BaseException:
        for each in made:
            with contextlib.suppress(OSError):  # not empty: somebody else uses it by now
                each.rmdir()
        raise


def read_tables(file: Path) -> Tables:
    """Every row of a file that nobody writes to.

    Raises:
        StoreError: the file or a row is damaged.
    """
    tables = Tables()
    with connected(file) as connection:
        if connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise StoreError(f"{file}: SQLite finds it damaged")
        for table, key, value in connection.execute("SELECT table_name, key, value FROM rows"):
            tables.load(table, key, value)
    return tables


# ---- rows ----------------------------------------------------------------------------------------


def _copy_rows(source: Path, copy: Path) -> tuple[int, int]:
    """The committed state as one file without a log; returns its term and schema."""
    with connected(source, read_only=True) as before, connected(copy) as after:
        before.backup(after)  # all pages in one transaction: writers go on beside it
        after.execute("PRAGMA journal_mode = DELETE")
        term, schema = _term_and_schema(after, source)
        if schema > len(MIGRATIONS):
            raise StoreError(f"{source}: written by a newer farflow (schema {schema}); use that")
        return term, schema


def _check_rows(copy: Path, found: BackupList) -> None:
    """Whether the rows of a backup are what its list says; raises StoreError."""
    with connected(copy, read_only=True) as connection:
        term, schema = _term_and_schema(connection, copy)
    if (term, schema) != (found.term, found.schema):
        raise StoreError(
            f"its rows are of term {term} and schema {schema}, and its list says term {found.term}"
            f" and schema {found.schema}: it was not made by `farflow scheduler backup`, or was"
            " changed since; nothing was restored"
        )


def _term_and_schema(connection: sqlite3.Connection, file: Path) -> tuple[int, int]:
    """Raises StoreError for a file in which no scheduler has begun a term."""
    schema = connection.execute("PRAGMA user_version").fetchone()[0]
    found = connection.execute("SELECT term FROM meta").fetchall() if schema else []
    if len(found) != 1 or not isinstance(found[0][0], int):
        raise StoreError(
            f"{file}: says no term (schema {schema}), so it is no scheduler's; use another backup"
        )
    return found[0][0], schema


def _set_term(file: Path, term: int) -> None:
    with connected(file) as connection:
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("UPDATE meta SET term = ?", (term,))


def _terms_here(folder: Path) -> int:
    """The highest term that is known to have been here; 0 where none is."""
    terms = [0]
    terms += [
        int(digits)
        for path in (folder / "events").glob("term-*")
        if (digits := path.name.removeprefix("term-")).isdecimal()
    ]
    if (folder / FILE_NAME).is_file():
        # A damaged file is what backups are restored for: what it knows is known no more.
        with (
            contextlib.suppress(StoreError),
            connected(folder / FILE_NAME, read_only=True) as connection,
        ):
            terms.append(_term_and_schema(connection, folder / FILE_NAME)[0])
    return max(terms)


@contextlib.contextmanager
def connected(file: Path, *, read_only: bool = False) -> Iterator[sqlite3.Connection]:
    """SQLite's errors become ``StoreError``."""
    try:
        mode = "ro" if read_only else "rwc"
        uri = f"{file.absolute().as_uri()}?mode={mode}"
        connection = sqlite3.connect(uri, uri=True, isolation_level=None)
        try:
            yield connection
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise StoreError(f"{file}: {error}; look at its disk") from error


def _move_aside(folder: Path) -> str:
    number = 1
    while (aside := folder / f"before-restore-{number:04d}").exists():
        number += 1
    aside.mkdir(mode=0o700)
    for side in _SIDE_FILES:
        if (folder / f"{FILE_NAME}{side}").exists():
            os.replace(folder / f"{FILE_NAME}{side}", aside / f"{FILE_NAME}{side}")
    fsync_dir(aside)
    return str(aside)


# ---- the tar file --------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[tuple[tarfile.TarFile, BackupList]]:
    try:
        with open_regular(file) as opened, tarfile.open(file, "r:", fileobj=opened) as tar:
            raw = _member(tar, LIST_NAME).read(_MAX_LIST_BYTES)
            found = msgspec.json.decode(raw, type=BackupList)
            if found.format > FORMAT or found.schema > len(MIGRATIONS):
                raise ConfigError(f"{file}: made by a newer farflow ({found.build}); use that")
            yield tar, found
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error
    except (tarfile.TarError, msgspec.MsgspecError, RecursionError, EOFError) as error:
        raise ConfigError(f"{file}: is no backup of a scheduler, or damaged: {error}") from error


def _member(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    try:
        member = tar.extractfile(name)
    except KeyError:
        member = None
    if member is None:
        raise ConfigError(f"{tar.name!r}: is no backup of a scheduler: no {name} in it")
    return member


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o600
    tar.addfile(info, io.BytesIO(data))


def _private(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
