"""Jobs as they lie in the scheduler's store, page by page.

The file is read beside the scheduler, which never waits for it: SQLite's write-ahead log lets a
reader see the last commit. What always holds: nothing is written; a page looks at no more than
``MAX_LOOKED_AT`` rows and says whether there are more. Blocks.
"""

import sqlite3
from pathlib import Path
from typing import Final

import msgspec

from scheduler.core.state import Job
from scheduler.store import BUSY_TIMEOUT_S, FILE_NAME
from transport.errors import StoreError

MAX_LIMIT: Final = 500
MAX_LOOKED_AT: Final = 20_000
HIGHEST: Final = "\U0010ffff"
"""A character behind every one that an id has."""

_decode = msgspec.msgpack.Decoder(Job).decode


class JobLine(msgspec.Struct, frozen=True, kw_only=True):
    """One job; ``agents`` have it now, ``age_s`` is since its creation on the scheduler's clock."""

    id: str
    run: str
    kind: str
    state: str
    sequences: int
    attempts_made: int
    agents: tuple[str, ...]
    age_s: float
    priority: int = 0


class JobPage(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs by id. With ``more`` ask again ``after`` this place."""

    jobs: tuple[JobLine, ...]
    more: bool
    after: str


def job_page(
    folder: Path, *, prefix: str = "", run: str = "", state: str = "", after: str = "", limit: int
) -> JobPage:
    """The jobs behind ``after`` whose id begins with ``prefix``, of a run and in a state if given.

    Raises:
        StoreError: the store cannot be read (now); names the remedy.
    """
    if run and not prefix:
        prefix = f"{run}/"  # ids begin with it
    low, high = max(prefix, after), prefix + HIGHEST
    found: list[JobLine] = []
    looked_at, last = 0, after
    try:
        connection = sqlite3.connect(
            f"{(folder / FILE_NAME).absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S
        )
        try:
            now = connection.execute("SELECT now FROM meta").fetchone()[0]
            rows = connection.execute(
                "SELECT key, value FROM rows WHERE table_name = 'job' AND key >= ? AND key > ?"
                " AND key < ? ORDER BY key LIMIT ?",
                (low, after, high, MAX_LOOKED_AT + 1),
            )
            for key, value in rows:
                if looked_at == MAX_LOOKED_AT or len(found) == limit:
                    return JobPage(jobs=tuple(found), more=True, after=last)
                looked_at, last = looked_at + 1, key
                job = _decode(value)
                if (run and job.run != run) or (state and job.state != state):
                    continue
                found.append(_line(job, now))
        finally:
            connection.close()
    except (sqlite3.Error, msgspec.DecodeError) as error:
        raise StoreError(
            f"{folder / FILE_NAME} cannot be read now: {error}; ask again, and look at its disk"
        ) from error
    return JobPage(jobs=tuple(found), more=False, after=last)


def _line(job: Job, now: float) -> JobLine:
    return JobLine(
        id=job.id,
        run=job.run,
        kind=job.kind,
        state=job.state,
        sequences=job.sequences,
        attempts_made=job.attempts_made,
        agents=tuple(attempt.agent for attempt in job.attempts),
        age_s=max(0.0, now - job.created_s),
        priority=job.priority,
    )
