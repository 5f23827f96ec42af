"""Rows of changed entities in SQLite: the scheduler's truth.

What always holds:

1. ``commit`` is one transaction; when it returns, every row of it survives what ``durability``
   names: a power cut (``synchronous=FULL``) or the end of the process (``NORMAL``). Rows of the
   table ``prompt`` are kept apart: they are read one by one when somebody needs them
   (``prompts``) and are not among ``rows``, so that they cost no memory.
2. Every opening raises the term by one, durably and before the term is known to anybody.
3. ``now`` is the core's clock at the last commit, so that the next life continues from there.
4. Whatever SQLite refuses becomes a ``StoreError`` with a remedy. After one nothing more is
   committed: a daemon that cannot remember must stop, not go on from memory.
5. One folder belongs to one process, and its connection to one thread at a time.

All functions block; the daemon calls them in its single writer thread.
"""

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

from transport.errors import StoreError
from transport.runtime.files import lock_folder, private_dir

Row = tuple[str, str, bytes]
Change = tuple[str, str, bytes | None]
"""(table, key, value); a value of None deletes the row."""

Durability = Literal["power-loss", "process-crash"]

FILE_NAME: Final = "scheduler.sqlite"
PROMPT_TABLE: Final = "prompt"
BUSY_TIMEOUT_S: Final = 5.0
CHECKPOINT_PAGES: Final = 8192
"""The write-ahead log goes back into the file when it is so long: 32 MiB, a fraction of a second
to read again after a crash."""

CACHE_KIB: Final = 65_536
RECENT_PROMPTS_BYTES: Final = 8 * 2**20

MIGRATIONS: Final[tuple[str, ...]] = (
    """
    CREATE TABLE rows (
        table_name TEXT NOT NULL,
        key TEXT NOT NULL,
        value BLOB NOT NULL,
        PRIMARY KEY (table_name, key)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE meta (
        id INTEGER PRIMARY KEY CHECK (id = 1),
        term INTEGER NOT NULL,
        now REAL NOT NULL
    ) STRICT;
    INSERT INTO meta (id, term, now) VALUES (1, 0, 0.0);
    """,
    """
    CREATE TABLE prompts (
        key TEXT PRIMARY KEY,
        value BLOB NOT NULL
    ) STRICT;
    """,
)
"""Number N brings a file from ``user_version`` N to N + 1. Never edited, only added to."""

STATEMENT_ROWS: Final = 1024
"""Rows per statement; SQLite takes 32 766 values."""

STATEMENTS: Final = 256
"""Statements that are kept ready: four kinds in the sizes of ``_places``, and a few more."""

_GET_PROMPT: Final = "SELECT value FROM prompts WHERE key = ?"

_SYNCHRONOUS: Final[dict[Durability, str]] = {"power-loss": "FULL", "process-crash": "NORMAL"}

_REMEDIES: Final[dict[str, str]] = {
    "SQLITE_FULL": "free space on its disk, then start the scheduler again",
    "SQLITE_READONLY": "make the folder writable, or choose another one",
    "SQLITE_CANTOPEN": "check that the folder exists and who owns it",
    "SQLITE_PERM": "check who owns the file and its permissions",
    "SQLITE_IOERR": "the disk reports errors or is full: look at the kernel's log",
    "SQLITE_CORRUPT": "restore the folder from a backup; no row of a damaged file is trusted",
    "SQLITE_NOTADB": "the file is something else: restore it from a backup, or move it away",
    "SQLITE_BUSY": "another program holds the file: close it",
    "SQLITE_LOCKED": "another program holds the file: close it",
    "SQLITE_TOOBIG": "a row is larger than SQLite takes",
}


class SchedulerStore:
    """Rows, term and clock of one scheduler folder; made by ``open``."""

    def __init__(self, folder: Path, durability: Durability) -> None:
        self.path = folder / FILE_NAME
        self.term = 0
        self.now = 0.0
        self._failed: StoreError | None = None
        self._recent: dict[str, bytes] = {}
        self._recent_bytes = 0
        self._lock = lock_folder(private_dir(folder))
        try:
            with self._translated("open"):
                self._connection = sqlite3.connect(
                    self.path,
                    timeout=BUSY_TIMEOUT_S,
                    isolation_level=None,  # transactions are written out below
                    cached_statements=STATEMENTS,
                    check_same_thread=False,  # used by one thread at a time, not by one thread
                )
        except BaseException:
            self._lock.release()
            raise
        try:
            with self._translated("open"):
                self._prepare(durability)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, folder: Path, durability: Durability = "power-loss") -> "SchedulerStore":
        """Claim ``folder`` (made if need be), bring its file up to date and begin a new term.

        Raises:
            StoreError: used by another process, damaged, written by a newer farflow, or the disk
                refused; names the file and a remedy.
        """
        return cls(folder, durability)

    def rows(self) -> Iterator[Row]:
        """Every row, ordered by table and key.

        Raises:
            StoreError: the file is damaged.
        """
        with self._translated("read"):
            yield from self._connection.execute(
                "SELECT table_name, key, value FROM rows ORDER BY table_name, key"
            )

    def commit(self, changes: Sequence[Change], now: float) -> None:
        """Make ``changes`` and the core's clock durable, all or nothing.

        Raises:
            StoreError: disk full, read-only, damaged; also on every later call.
        """
        if self._failed is not None:
            raise StoreError(f"{self.path}: an earlier commit failed") from self._failed
        latest = {(table, key): value for table, key, value in changes}
        rows: list[object] = []
        gone: dict[str, list[object]] = {}
        prompts: list[object] = []
        for (table, key), value in latest.items():
            if value is None:
                gone.setdefault(table, []).append(key)
            elif table == PROMPT_TABLE:
                prompts += (key, value)
            else:
                rows += (table, key, value)
        gone_prompts = gone.pop(PROMPT_TABLE, [])
        with self._translated("commit to"), self._transaction():
            self._together("INSERT OR REPLACE INTO rows VALUES {}", "(?, ?, ?)", 3, rows)
            for table, keys in gone.items():
                self._together(
                    "DELETE FROM rows WHERE table_name = ? AND key IN ({})", "?", 1, keys, table
                )
            self._together("INSERT OR REPLACE INTO prompts VALUES {}", "(?, ?)", 2, prompts)
            self._together("DELETE FROM prompts WHERE key IN ({})", "?", 1, gone_prompts)
            self._connection.execute("UPDATE meta SET now = ?", (now,))
        self.now = now
        for (table, key), value in latest.items():
            if table == PROMPT_TABLE:
                self._remember(key, value)

    def _together(
        self, statement: str, place: str, width: int, values: Sequence[object], *first: object
    ) -> None:
        """Run ``statement`` for values of ``width`` each, many at once, for some of them twice.
        SQLite's module gives the interpreter's lock away in each call, and beside a busy loop it
        takes milliseconds to get it back: what counts is the number of calls, not of rows."""
        for start in range(0, len(values), STATEMENT_ROWS * width):
            some = values[start : start + STATEMENT_ROWS * width]
            rows = len(some) // width
            places = _places(rows)
            again = [*some[-width:]] * (places - rows)
            text = statement.format(", ".join([place] * places))
            self._connection.execute(text, (*first, *some, *again))

    def prompts(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Committed prompts by key; without those that are not there.

        Raises:
            StoreError: the file is damaged.
        """
        found: dict[str, bytes] = {}
        for key in keys:
            prompt = self._recent.get(key)
            if prompt is None:
                with self._translated("read"):
                    row = self._connection.execute(_GET_PROMPT, (key,)).fetchone()
                if row is None:
                    continue
                prompt = row[0]
            found[key] = prompt
        return found

    def _remember(self, key: str, prompt: bytes | None) -> None:
        """A job is usually placed soon after it came: keep what was committed last."""
        before = self._recent.pop(key, b"")
        self._recent_bytes -= len(before)
        if prompt is None:
            return
        self._recent[key] = prompt
        self._recent_bytes += len(prompt)
        while self._recent_bytes > RECENT_PROMPTS_BYTES:
            oldest = next(iter(self._recent))
            self._recent_bytes -= len(self._recent.pop(oldest))

    def close(self) -> None:
        """Give up file and folder; idempotent."""
        with contextlib.suppress(sqlite3.Error):  # everything that counts is committed
            self._connection.close()
        self._lock.release()

    def _prepare(self, durability: Durability) -> None:
        connection = self._connection
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise StoreError(
                f"{self.path}: this file system has no write-ahead log (mode {mode});"
                " choose a folder on a local disk"
            )
        # Migrations and the term are always synced: a term must never be handed out twice.
        connection.execute("PRAGMA synchronous = FULL")
        self._migrate()
        with self._transaction():
            found = connection.execute(
                "UPDATE meta SET term = term + 1 RETURNING term, now"
            ).fetchone()
            if found is None:
                raise StoreError(
                    f"{self.path}: says no term: restore it from a backup, as which lives it had"
                    " cannot be known"
                )
            self.term, self.now = found
        connection.execute(f"PRAGMA synchronous = {_SYNCHRONOUS[durability]}")
        connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")

    def _migrate(self) -> None:
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if version > len(MIGRATIONS):
            raise StoreError(
                f"{self.path}: written by a newer farflow (schema {version}, this one knows"
                f" {len(MIGRATIONS)}); install that version, or choose another folder"
            )
        for number in range(version, len(MIGRATIONS)):
            self._connection.executescript(
                f"BEGIN IMMEDIATE; {MIGRATIONS[number]} PRAGMA user_version = {number + 1}; COMMIT;"
            )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
            self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled back itself
                self._connection.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "") or ""
            remedy = next((text for code, text in _REMEDIES.items() if name.startswith(code)), "")
            problem = StoreError(
                f"cannot {doing} {self.path}: {error}" + (f"; {remedy}" if remedy else "")
            )
            self._failed = problem
            raise problem from error


def _places(rows: int) -> int:
    """For how many rows to write a statement: the next of a few sizes, at most a fourth more, so
    that it was parsed before (which costs half as much as writing the rows)."""
    step = 1 << max(0, rows.bit_length() - 3)
    return -(-rows // step) * step
