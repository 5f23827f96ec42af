"""Command line options that several commands of ``farflow`` share."""

from pathlib import Path

import click

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override table.field; may repeat.",
)
config_option = click.option(
    "--config",
    "files",
    multiple=True,
    type=FILE,
    metavar="FILE",
    help="Deployment file; may repeat, later ones win.",
)
key_option = click.option(
    "--key",
    type=FILE,
    metavar="FILE",
    help="Operator key; the default is operator.toml in transport.keys.",
)
