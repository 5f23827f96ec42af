"""``farflow sim emulate``: a scenario in real time, on the real daemons."""

from pathlib import Path

import click

from sim.cli import sim_group
from sim.commands.options import load, set_option
from transport.runtime.daemon_cli import foreseen_errors

__all__ = ["emulate_command", "sim_group"]


@sim_group.command("emulate")
@click.argument("scenario")
@click.option(
    "--engine",
    type=click.Choice(["fake", "torch"]),
    default="fake",
    show_default=True,
    help="fake draws the simulator's lengths and times; torch really generates.",
)
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Model folder (BF16); needed with --engine torch. Its size replaces full_bytes.",
)
@click.option("--seed", type=click.IntRange(0, 2**31), default=0, show_default=True)
@click.option("--steps", type=click.IntRange(1, 10**6), help="Instead of the scenario's.")
@set_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="New folder for the run; the default is below runs/.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end.")
def emulate_command(
    scenario: str,
    engine: str,
    model: Path | None,
    seed: int,
    steps: int | None,
    overrides: tuple[str, ...],
    out: Path | None,
    as_json: bool,
) -> None:
    """Run SCENARIO (a file or a shipped name) in real time: scheduler, trainers and one agent per
    agent of the scenario as processes of this machine, each agent behind an emulated link."""
    import asyncio

    import msgspec

    from farflow.emulate import Emulated, emulate
    from transport.errors import ConfigError

    with foreseen_errors("emulate"):
        loaded = load(scenario, overrides)
        if steps is not None:
            loaded = msgspec.structs.replace(loaded, steps=steps)
        if engine == "torch" and model is None:
            raise ConfigError("--model: missing; --engine torch needs a model folder")
        folder = out if out is not None else _free_folder(Path("runs"), f"emulate-{loaded.name}")
        if folder.exists():
            raise ConfigError(f"--out {folder}: exists already; choose another")

        def notice(text: str) -> None:
            click.echo(text, err=True)

        async def run() -> Emulated:
            return await emulate(
                loaded, folder, seed=seed, engine=engine, model=model, notice=notice
            )

        result = asyncio.run(run())
    if as_json:
        click.echo(msgspec.json.encode(result).decode())
        return
    measures = result.measures
    click.echo(f"{'finished' if result.finished else 'NOT finished'} after {result.wall_s:.1f} s")
    click.echo(f"steps {measures.steps}  groups {measures.groups}")
    click.echo(f"steps/hour {measures.steps_hour:.0f}  trainer busy {measures.busy_share:.0%}")
    click.echo(f"policy lag {measures.lag_mean:.2f}  delta {measures.delta_bytes / 1e3:.0f} kB")
    click.echo(
        f"turnaround p50 {measures.turnaround_p50_s:.2f} s  p95 {measures.turnaround_p95_s:.2f} s"
    )
    click.echo(f"run folder: {result.folder}")


def _free_folder(parent: Path, name: str) -> Path:
    number = 1
    while (parent / f"{name}-{number:04d}").exists():
        number += 1
    return parent / f"{name}-{number:04d}"
