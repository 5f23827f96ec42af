"""``farflow sim export``."""

from pathlib import Path

import click

from sim.commands.options import OUT, print_json
from transport.errors import ConfigError
from transport.runtime.daemon_cli import foreseen_errors


@click.command("export")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["csv", "json"]),
    default="csv",
    show_default=True,
    help="A CSV file per table, or everything as one JSON document.",
)
@click.option("--table", help="Print just this table.")
@click.option("--out", type=OUT, help="Where to write; the default is FOLDER.")
@click.option("--json", "as_json", is_flag=True, help="The JSON document on standard output.")
def export_command(
    folder: Path, form: str, table: str | None, out: Path | None, as_json: bool
) -> None:
    """Gives what `run`, `compare` or `sweep` left in FOLDER to other programs."""
    import msgspec

    from sim import export
    from transport.runtime.files import atomic_write

    with foreseen_errors("sim"):
        tables = export.tables(folder)
        if table is not None and table not in tables:
            raise ConfigError(f"--table: there is no {table!r}; there are {', '.join(tables)}")
        if as_json:
            print_json(export.document(folder))
            return
        if table is not None and form == "csv":
            click.echo(export.to_csv(tables[table]), nl=False)
            return
        if table is not None:
            heads, rows = tables[table]
            print_json([dict(zip(heads, row, strict=True)) for row in rows])
            return
        target = folder if out is None else out
        files = {f"{name}.csv": export.to_csv(rows).encode() for name, rows in tables.items()}
        if form == "json":
            files = {"export.json": msgspec.json.encode(export.document(folder)) + b"\n"}
        try:
            target.mkdir(parents=True, exist_ok=True)
            for name, data in files.items():
                atomic_write(target / name, data)
        except OSError as error:
            raise ConfigError(f"--out {target}: {error.strerror}") from error
    for name in files:
        click.echo(str(target / name))
