"""``farflow sim plan``."""

from typing import TYPE_CHECKING

import click

from sim.commands.options import (
    first_seed_option,
    jobs_option,
    json_option,
    load,
    placement_option,
    print_json,
    print_problems,
    print_table,
    progress,
    set_option,
)
from transport.errors import ConfigError
from transport.runtime.daemon_cli import foreseen_errors

if TYPE_CHECKING:
    from sim.plan import Plan


@click.command("plan")
@click.argument("scenario")
@placement_option("The rule that chooses an agent.")
@click.option(
    "--seeds", type=click.IntRange(1, 1000), default=4, show_default=True, help="How many."
)
@first_seed_option
@set_option
@jobs_option
@json_option
def plan_command(
    scenario: str,
    placement: str,
    seeds: int,
    seed: int,
    overrides: tuple[str, ...],
    jobs: int | None,
    as_json: bool,
) -> None:
    """Says whether the trainer of SCENARIO stays busy, what binds, and what would help.

    Both by the scheduler's formulas and by simulating the additions with the same seeds.
    """
    from sim.compare import parse_rules
    from sim.parallel import cores
    from sim.plan import make_plan

    with foreseen_errors("sim"):
        rules = parse_rules(placement)
        if len(rules) != 1:
            raise ConfigError("--placement: `plan` takes one rule; `compare` takes several")
        found = load(scenario, overrides)
        with progress(found.name, "runs") as show:
            plan = make_plan(
                found,
                placement=rules[0],
                seeds=range(seed, seed + seeds),
                processes=jobs or cores(),
                on_done=show,
            )
    if as_json:
        print_json(plan)
    else:
        _print(plan)
    print_problems(plan.problems)
    if plan.interrupted:
        click.echo("interrupted: this is what was done until then", err=True)
        raise SystemExit(130)
    if plan.problems:
        raise SystemExit(1)


def _print(plan: "Plan") -> None:
    stays = "stays busy" if plan.stays_busy else "does not stay busy"
    click.echo(f"{plan.scenario}, {plan.placement}, {len(plan.seeds)} seeds")
    click.echo(
        f"the trainer {stays}: it waits for {plan.waiting_share.mean:.0%} of the time;"
        f" {plan.steps_hour} steps/h, {plan.wasted_share.mean:.0%} of attempts wasted,"
        f" policy lag {plan.lag_mean.mean:.2f}"
    )
    click.echo(
        f"a step costs ${plan.cost_step_usd.mean:.4g},"
        f" ${plan.egress_step_usd.mean:.4g} of it for bytes that leave a cloud"
    )
    click.echo(f"what binds, by formula: {plan.binds_by_formula}")
    if plan.formula is not None:
        click.echo(f"    {plan.formula.reason}")
        if plan.formula.more_slots:
            click.echo(
                f"    {plan.formula.more_slots} more slots of {plan.formula.hardware} would give"
                f" {plan.formula.steps_hour_with:.3g} steps/h"
            )
    click.echo(f"what binds, by experiment: {plan.binds_by_experiment}")
    rows = []
    for one in sorted(plan.additions, key=lambda addition: -addition.ratio.mean):
        price = "?" if one.usd_hour is None else f"{one.usd_hour:g}"
        by_formula = "" if one.formula_steps_hour is None else f"{one.formula_steps_hour:.3g}"
        helps = "yes" if one.helps else "no"
        rows.append((one.what, str(one.ratio), str(one.steps_hour), by_formula, price, helps))
    if rows:
        click.echo("")
        heads = ("with", "x steps/h", "steps/h simulated", "by formula", "$/h", "helps")
        print_table(heads, rows)
    click.echo("")
    click.echo(f"cheapest addition that helps: {plan.best or 'none of these, alone'}")
