"""``farflow sim list`` and ``farflow sim run``."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sim.commands.options import (
    check_out,
    ending_early,
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
    set_option,
    source_text,
)
from transport.runtime.daemon_cli import foreseen_errors

if TYPE_CHECKING:
    from sim.run import Result, Simulation


@click.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """Lists shipped scenarios and placement rules."""
    from sim.compare import RULES
    from sim.scenario import load_scenario, shipped_scenarios

    with foreseen_errors("sim"):
        scenarios = [load_scenario(name) for name in shipped_scenarios()]
    if as_json:
        found = {scenario.name: scenario.about for scenario in scenarios}
        print_json({"scenarios": found, "placement": RULES})
        return
    for scenario in scenarios:
        click.echo(f"{scenario.name}\n    {scenario.about}")
    click.echo(f"placement rules: {', '.join(RULES)}")


@click.command("run")
@click.argument("scenario")
@click.option("--seed", default=0, show_default=True, help="Of fleet, work and faults.")
@placement_option("The rule that chooses an agent.")
@set_option
@out_option
@report_option
@json_option
def run_command(
    scenario: str,
    seed: int,
    placement: str,
    overrides: tuple[str, ...],
    out: Path | None,
    report: bool,
    as_json: bool,
) -> None:
    """Simulates SCENARIO (a shipped one's name, or a TOML file) once.

    With --out it draws what happened. Ctrl-C ends it early and keeps what is done.
    """
    from sim.compare import parse_rules
    from sim.run import Simulation
    from transport.errors import ConfigError

    with foreseen_errors("sim"):
        check_out(out, report)
        rules = parse_rules(placement)
        if len(rules) != 1:
            raise ConfigError("--placement: `run` takes one rule; `compare` takes several")
        found = load(scenario, overrides)
        simulation = Simulation(found, placement=rules[0], seed=seed, record=out is not None)
        with (
            progress(found.name, "steps") as show,
            ending_early(simulation.kernel) as ended_early,
        ):
            simulation.on_second = lambda: show(float(simulation.steps_made), float(found.steps))
            result = simulation.run()
        if out is not None:
            _keep(simulation, result, out, report)
    if as_json:
        print_json(result)
    else:
        _print(result)
        if out is not None:
            click.echo(f"written to {out}")
    print_problems(result.problems)
    if ended_early:
        click.echo("interrupted: this is what was done until then", err=True)
        raise SystemExit(130)
    if result.problems:
        raise SystemExit(1)


def _keep(simulation: "Simulation", result: "Result", out: Path, report: bool) -> None:
    from sim import export

    recording = simulation.recording
    export.write(out, export.SCENARIO, simulation.scenario)
    export.write(out, export.RESULT, result)
    export.write(out, export.RECORDING, recording)
    if recording is None or not pictures_possible(out):
        return
    from sim.plots import draw_run
    from sim.report import run_report

    pictures = draw_run(recording, out)
    if report:
        scenario = simulation.scenario
        page = run_report(result, pictures, about=scenario.about, source=source_text(scenario))
        (out / "report.html").write_text(page, encoding="utf-8")


def _print(result: "Result") -> None:
    from sim.report import run_facts

    state = "" if result.finished else ", not finished"
    click.echo(f"{result.scenario}, {result.placement}, seed {result.seed}{state}")
    print_table(("", ""), [(what, value) for value, what in run_facts(result)])
