"""``install`` and ``uninstall`` of every daemon: the options that they share.

Exit status: 0 done, 1 systemd refused or the disk did, 78 wrong configuration.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from transport.runtime.daemon_cli import foreseen_errors

F = TypeVar("F", bound=Callable[..., Any])
_json = click.option("--json", "as_json", is_flag=True, help="One JSON object.")


class Needs(NamedTuple):
    """What a daemon's unit is made from: ``writable`` folders may be relative to the current one;
    the rest as in ``Service``."""

    writable: tuple[str, ...]
    stop_s: float
    devices: bool = False
    sandboxes: bool = False


def say_lines(lines: Sequence[str], *, as_json: bool, **facts: object) -> None:
    """What was done, for people, or with ``facts`` as an object."""
    if as_json:
        click.echo(json.dumps({**facts, "lines": list(lines)}))
        return
    for line in lines:
        click.echo(line)


def place_options(component: str) -> Callable[[F], F]:
    """Options that say where a unit goes and what it is called."""
    options = (
        click.option("--user", "user_units", is_flag=True, help="Your own systemd runs it."),
        click.option("--run-as", default="", metavar="USER", help="Whom the machine runs it as."),
        click.option(
            "--service",
            default=f"farflow-{component}",
            show_default=True,
            metavar="NAME",
            help="The unit's name, for several on one machine.",
        ),
        click.option(
            "--unit-folder",
            type=click.Path(file_okay=False, path_type=Path),
            help="Write the unit there and start nothing, as for an image.",
        ),
    )

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def install_command(
    component: str, needs: Callable[[tuple[Path, ...]], Needs], *, help: str
) -> click.Command:
    """``farflow COMPONENT install``. ``needs`` reads the daemon's files."""

    @click.command("install", help=help)
    @click.option(
        "--config",
        "files",
        multiple=True,
        required=True,
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="What it is started with; may repeat, later ones win.",
    )
    @place_options(component)
    @_json
    def command(
        files: tuple[Path, ...],
        user_units: bool,
        run_as: str,
        service: str,
        unit_folder: Path | None,
        as_json: bool,
    ) -> None:
        from transport.runtime.service_install import (
            farflow_argv,
            find_place,
            install,
            service_name,
        )
        from transport.runtime.service_unit import Service

        with foreseen_errors(f"farflow {component} install"):
            needed = needs(files)
            place = find_place(user_units=user_units, run_as=run_as, unit_folder=unit_folder)
            given = [word for file in files for word in ("--config", str(file.absolute()))]
            lines = install(
                Service(
                    name=service_name(service),
                    description=f"farflow {component}",
                    argv=farflow_argv(component, "run", *given),
                    folder=Path.cwd(),  # relative paths of the files count from here
                    writable=tuple(Path(path).absolute() for path in needed.writable),
                    stop_s=needed.stop_s,
                    user=place.run_as,
                    devices=needed.devices,
                    sandboxes=needed.sandboxes,
                ),
                place,
                named_by=files,
            )
        say_lines(lines, as_json=as_json)

    return command


def uninstall_command(component: str, stop_s: float) -> click.Command:
    """``farflow COMPONENT uninstall``; the daemon has ``stop_s`` to end."""

    @click.command("uninstall", help="Stop the service and remove its unit; its folders stay.")
    @place_options(component)
    @_json
    def command(
        user_units: bool, run_as: str, service: str, unit_folder: Path | None, as_json: bool
    ) -> None:
        from transport.runtime.service_install import find_place, service_name, uninstall

        with foreseen_errors(f"farflow {component} uninstall"):
            place = find_place(user_units=user_units, run_as=run_as, unit_folder=unit_folder)
            lines = uninstall(service_name(service), place, stop_s, component=component)
        say_lines(lines, as_json=as_json)

    return command
