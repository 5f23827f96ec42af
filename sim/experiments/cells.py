"""What an experiment computes, cell by cell, and hands back.

What always holds: results come in the order of the cells, whatever finished first; numbers are
rounded to six digits before anything is made of them, so tables, plots and digest agree; an
experiment that was interrupted has the rows that were done, and no tables.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sim.parallel import OnDone, map_some

Cell = TypeVar("Cell")
Row = dict[str, Any]


@dataclass(slots=True)
class Table:
    """Text cells; ``str`` is Markdown."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"**{self.title}**", "", _line(self.head), _line(("---",) * len(self.head))]
        return "\n".join([*lines, *(_line(row) for row in self.rows)])


@dataclass(frozen=True, slots=True)
class Findings:
    """``name`` is the stem of the files; ``rows`` are the cells with their results. No tables: it
    was interrupted."""

    name: str
    quick: bool
    rows: tuple[Row, ...]
    tables: tuple[Table, ...]

    def digest(self) -> str:
        """32 hexadecimal digits over all results."""
        text = json.dumps(self.rows, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def save(self, folder: Path) -> Path:
        """Write the rows as JSON, one a line; returns the path."""
        path = folder / f"{self.name}{'-quick' if self.quick else ''}.json"
        rows = ",\n".join(json.dumps(row, sort_keys=True) for row in self.rows)
        head = json.dumps({"experiment": self.name, "quick": self.quick, "digest": self.digest()})
        path.write_text(f'{head[:-1]}, "rows": [\n{rows}\n]}}\n', encoding="utf-8")
        return path


def find(
    name: str,
    quick: bool,
    compute: Callable[[Cell], Row],
    cells: Sequence[Cell],
    report: Callable[[tuple[Row, ...]], Sequence[Table]],
    jobs: int,
    on_done: OnDone | None = None,
) -> Findings:
    """``compute`` of every cell (a module's function, so that processes find it), and what
    ``report`` makes of all rows."""
    found = map_some(compute, cells, jobs, on_done)
    rows = tuple(rounded(row) for row in found if row is not None)
    complete = len(rows) == len(cells)
    return Findings(name, quick, rows, tuple(report(rows)) if complete else ())


def rounded(row: Row) -> Row:
    """The same with numbers of six digits."""
    return {
        key: float(f"{value:.6g}") if isinstance(value, float) else value
        for key, value in row.items()
    }


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(texts) + " |"
