"""``farflow sim replay``."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sim.commands.options import json_option, print_json
from transport.runtime.daemon_cli import foreseen_errors

if TYPE_CHECKING:
    from sim.replay import Replay


@click.command("replay")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--term", type=click.IntRange(min=0), help="Which life; the default is the newest.")
@json_option
def replay_command(folder: Path, term: int | None, as_json: bool) -> None:
    """Tells a scheduler's event log in FOLDER to the core again.

    FOLDER is the scheduler's, its `events`, or a `term-*` in there. Ends with status 1 when the
    same build decides otherwise than what was recorded.
    """
    from sim.replay import replay, term_folder

    with foreseen_errors("sim"):
        found = replay(term_folder(folder, term))
    if as_json:
        print_json(found)
    else:
        _print(found)
    if not found.equal and found.build == found.recorded_build:
        raise SystemExit(1)


def _print(found: "Replay") -> None:
    click.echo(
        f"{found.folder}: term {found.term}, {found.batches} batches with {found.events} events"
        f" and {found.effects} effects over {found.seconds:.1f} s"
    )
    if not found.complete:
        click.echo("the log's end is missing or torn; what came later is unknown")
    if found.build != found.recorded_build:
        click.echo(f"recorded by build {found.recorded_build}, replayed by {found.build}")
    if found.divergence is None:
        click.echo("equal: every batch gave the effects that were recorded")
        return
    first = found.divergence
    click.echo(f"first difference: batch {first.batch}, at {first.at_s:.3f} s")
    for event in first.events:
        click.echo(f"    told: {event}")
    for effect in first.effects:
        click.echo(f"    now decides: {effect}")
    if first.error:
        click.echo(f"    and fails: {first.error}")
