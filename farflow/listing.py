"""Lists that commands print: columns on a terminal, and for a file or pipe a line each with tabs
between, under the same heading. Programs take ``--json``.

What always holds: every row has a cell for each heading, ``-`` where there is nothing to say; what
would steer a terminal is not printed.
"""

from collections.abc import Iterable, Sequence

import click

from farflow.view import new_table, printable


def print_list(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """``rows`` under ``heads``; nothing at all without rows."""
    from rich.console import Console
    from rich.text import Text

    found = [[_cell(cell) for cell in row] for row in rows]
    console = Console()
    if not console.is_terminal:
        lines = Lines(heads)
        for row in found:
            lines.add(*row)
        return
    if found:
        table = new_table("")
        for head in heads:
            table.add_column(head, overflow="fold")
        for row in found:
            table.add_row(*map(Text, row))
        console.print(table)


class Lines:
    """Rows that come one by one, which no table can wait for: the heading goes before the first."""

    def __init__(self, heads: Sequence[str]) -> None:
        self._heads: Sequence[str] | None = heads

    def add(self, *cells: str) -> None:
        """Print a row."""
        if self._heads is not None:
            click.echo("\t".join(self._heads))
            self._heads = None
        click.echo("\t".join(map(_cell, cells)))


def _cell(text: str) -> str:
    """A tab in a cell would be another cell."""
    return printable(text.replace("\t", " ")) or "-"
