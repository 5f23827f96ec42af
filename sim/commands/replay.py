"""``farflow sim replay``."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sim.commands.options import json_option, print_json, print_problems, print_table
from transport.errors import ConfigError
from transport.runtime.daemon_cli import foreseen_errors

if TYPE_CHECKING:
    from sim.replay import Replay


@click.command("replay")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--term", type=click.IntRange(min=0), help="Which life; the default is the newest.")
@click.option("--placement", help="Simulate the same arrivals under this rule instead.")
@click.option(
    "--seeds",
    type=click.IntRange(1, 1000),
    default=3,
    show_default=True,
    help="How many simulations per rule, with --placement.",
)
@click.option("--steps", type=click.IntRange(1), help="Fewer steps than were recorded.")
@json_option
def replay_command(
    folder: Path,
    term: int | None,
    placement: str | None,
    seeds: int,
    steps: int | None,
    as_json: bool,
) -> None:
    """Tells a scheduler's event log in FOLDER to the core again.

    FOLDER is a run's, the scheduler's, its `events`, or a `term-*` in there. Ends with status 1
    when the same build decides otherwise than what was recorded. With --placement, the log's
    agents, jobs and lengths are simulated under another rule, beside the recorded one.
    """
    from sim.replay import replay, term_folder

    with foreseen_errors("sim"):
        where = term_folder(folder, term)
        if placement is not None:
            _simulate(where, placement, seeds, steps, as_json)
            return
        found = replay(where)
    if as_json:
        print_json(found)
    else:
        _print(found)
    if not found.equal and found.build == found.recorded_build:
        raise SystemExit(1)


def _simulate(folder: Path, placement: str, seeds: int, steps: int | None, as_json: bool) -> None:
    from sim.compare import parse_rules
    from sim.counterfactual import counterfactual
    from sim.trace import read_trace

    rules = parse_rules(placement)
    if len(rules) != 1:
        raise ConfigError("--placement: `replay` takes one rule; call it once for each")
    found = counterfactual(read_trace(folder), rules[0], range(seeds), steps)
    if as_json:
        print_json(found)
    else:
        click.echo(
            f"{found.scenario}: {found.agents} agents, {found.jobs} jobs, of which"
            f" {found.unknown_jobs} have no recorded result"
        )
        heads = ("", "steps/h", "wasted")
        rows = [
            (f"recorded, {found.recorded_placement}", f"{found.recorded_steps_hour:.3g}", ""),
            (
                f"simulated, {found.recorded_placement}",
                str(found.simulated_steps_hour),
                f"{found.recorded_wasted_share.mean:.1%}",
            ),
            (
                f"simulated, {found.placement}",
                str(found.steps_hour),
                f"{found.wasted_share.mean:.1%}",
            ),
        ]
        print_table(heads, rows)
        click.echo(f"{found.placement} over {found.recorded_placement}: {found.ratio} x")
    print_problems(found.problems)
    if found.problems:
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
