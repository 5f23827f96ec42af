"""Many small simulations on the machine's cores, and what an experiment hands back.

What always holds: results come in the order of the cells, whatever finished first; numbers are
rounded to six digits before anything is made of them, so tables, plots and digest agree.
"""

import hashlib
import json
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

Cell = TypeVar("Cell")
Row = dict[str, Any]
Progress = Callable[[int, int], None]


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
    """``name`` is the stem of the files; ``rows`` are all cells with their results."""

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


def run_cells(
    compute: Callable[[Cell], Row],
    cells: Sequence[Cell],
    jobs: int,
    progress: Progress = lambda done, total: None,
) -> tuple[Row, ...]:
    """``compute`` of every cell, in order; a module's function, so that processes find it."""
    rows: list[Row] = []
    if jobs <= 1 or len(cells) <= 1:
        for cell in cells:
            rows.append(rounded(compute(cell)))
            progress(len(rows), len(cells))
        return tuple(rows)
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(cells))) as pool:
        for row in pool.imap(compute, cells, chunksize=1):
            rows.append(rounded(row))
            progress(len(rows), len(cells))
    return tuple(rows)


def rounded(row: Row) -> Row:
    """The same with numbers of six digits."""
    return {
        key: float(f"{value:.6g}") if isinstance(value, float) else value
        for key, value in row.items()
    }


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(texts) + " |"
