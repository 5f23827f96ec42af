"""``farflow sim sweep``."""

from pathlib import Path
from typing import Any

import click

from sim.commands.options import (
    check_out,
    first_seed_option,
    jobs_option,
    json_option,
    load,
    out_option,
    pictures_possible,
    placement_option,
    print_json,
    print_problems,
    print_table,
    progress,
    report_option,
    source_text,
)
from transport.errors import ConfigError
from transport.runtime.daemon_cli import foreseen_errors


@click.command("sweep")
@click.argument("scenario")
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=V1,V2,V3",
    help="Values of a key; one value fixes it. May repeat.",
)
@click.option(
    "--range",
    "ranges",
    multiple=True,
    metavar="KEY=FROM:TO:COUNT",
    help="Evenly spaced values, or by a constant factor with FROM:TO:COUNTlog. May repeat.",
)
@placement_option("The rule that chooses an agent.")
@click.option(
    "--seeds", type=click.IntRange(1, 1000), default=3, show_default=True, help="Per point."
)
@first_seed_option
@jobs_option
@out_option
@report_option
@json_option
def sweep_command(
    scenario: str,
    sets: tuple[str, ...],
    ranges: tuple[str, ...],
    placement: str,
    seeds: int,
    seed: int,
    jobs: int | None,
    out: Path | None,
    report: bool,
    as_json: bool,
) -> None:
    """Simulates SCENARIO for every combination of some keys' values.

    Ctrl-C ends it early and keeps what is done.
    """
    from sim import export
    from sim.compare import parse_rules
    from sim.overrides import parse_range, parse_values, with_value
    from sim.parallel import cores
    from sim.report import measure_table, sweep_report
    from sim.sweep import sweep

    with foreseen_errors("sim"):
        check_out(out, report)
        rules = parse_rules(placement)
        if len(rules) != 1:
            raise ConfigError("--placement: `sweep` takes one rule; `compare` takes several")
        found = load(scenario, ())
        axes: dict[str, list[Any]] = {}
        for key, values in [*map(parse_values, sets), *map(parse_range, ranges)]:
            if key in axes:
                raise ConfigError(f"sweep: {key} is given twice; say all its values at once")
            if len(values) == 1:
                found = with_value(found, key, values[0])
            else:
                axes[key] = list(values)
        with progress(found.name, "runs") as show:
            swept = sweep(
                found,
                axes,
                placement=rules[0],
                seeds=range(seed, seed + seeds),
                processes=jobs or cores(),
                on_done=show,
            )
        measures = [point.measure for point in swept.points if point.measure is not None]
        if out is not None:
            export.write(out, export.SCENARIO, found)
            export.write(out, export.SWEEP, swept)
            if measures and pictures_possible(out):
                from sim.plots_compare import draw_sweep

                pictures = draw_sweep(swept, out)
                if report:
                    page = sweep_report(swept, pictures, source_text(found))
                    (out / "report.html").write_text(page, encoding="utf-8")
    if as_json:
        print_json(swept)
    elif measures:
        print_table(*measure_table(measures, "point"))
    print_problems(swept.problems)
    if sum(len(measure.seeds) for measure in measures) < len(swept.points) * seeds:
        click.echo("interrupted: this is what was done until then", err=True)
        raise SystemExit(130)
    if swept.problems:
        raise SystemExit(1)
