"""Command line options that several commands of ``farflow`` share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from transport.errors import ConfigError
from transport.runtime.units import parse_duration_s

F = TypeVar("F", bound=Callable[..., Any])

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
submitter_key_option = click.option(
    "--key",
    type=FILE,
    metavar="FILE",
    help="Submitter key; the default is submitter.toml in transport.keys.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")


def say_done(subject: str, verb: str, said: str, *, as_json: bool) -> None:
    """One line about a command that the scheduler took; ``said`` is what it adds, if anything."""
    if as_json:
        click.echo(json.dumps({"command": verb, "subject": subject, "message": said}))
    else:
        click.echo(f"{verb} {subject}: {said or 'accepted'}")


def duration(value: str | float) -> float:
    """Seconds, or a text such as ``10min``; the type of an option."""
    try:
        return parse_duration_s(value, "the duration")
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


def as_operator(command: F) -> F:
    """The options of a command that asks a scheduler with an operator's key."""
    return config_option(set_option(key_option(command)))


def as_submitter(command: F) -> F:
    """The same with a submitter's key."""
    return config_option(set_option(submitter_key_option(command)))
