"""``farflow sim compare``."""

from pathlib import Path

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
    seeds_option,
    set_option,
    source_text,
)
from transport.runtime.daemon_cli import foreseen_errors


@click.command("compare")
@click.argument("scenario")
@placement_option("Rules, separated by commas, or all; ratios are over the first.", "all")
@seeds_option
@first_seed_option
@set_option
@jobs_option
@out_option
@report_option
@json_option
def compare_command(
    scenario: str,
    placement: str,
    seeds: int,
    seed: int,
    overrides: tuple[str, ...],
    jobs: int | None,
    out: Path | None,
    report: bool,
    as_json: bool,
) -> None:
    """Simulates SCENARIO under several placement rules and seeds, on all cores.

    Ctrl-C ends it early and keeps what is done.
    """
    from sim import export
    from sim.compare import compare, parse_rules
    from sim.parallel import cores
    from sim.report import comparison_report, measure_table

    with foreseen_errors("sim"):
        check_out(out, report)
        rules = parse_rules(placement)
        found = load(scenario, overrides)
        with progress(found.name, "runs") as show:
            comparison = compare(
                found,
                rules,
                range(seed, seed + seeds),
                processes=jobs or cores(),
                on_done=show,
            )
        if out is not None:
            export.write(out, export.SCENARIO, found)
            export.write(out, export.COMPARISON, comparison)
            if comparison.measures and pictures_possible(out):
                from sim.plots_compare import draw_comparison

                pictures = draw_comparison(comparison, out)
                if report:
                    page = comparison_report(comparison, pictures, source_text(found))
                    (out / "report.html").write_text(page, encoding="utf-8")
    if as_json:
        print_json(comparison)
    elif comparison.measures:
        print_table(*measure_table(comparison.measures))
    print_problems(comparison.problems)
    if len(comparison.results) < comparison.asked:
        done = f"{len(comparison.results)} of {comparison.asked}"
        click.echo(f"interrupted: {done} runs were done", err=True)
        raise SystemExit(130)
    if comparison.problems:
        raise SystemExit(1)
