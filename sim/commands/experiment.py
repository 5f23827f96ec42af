"""``farflow sim experiment``."""

import os
from pathlib import Path

import click

from transport.runtime.daemon_cli import foreseen_errors


@click.command("experiment")
@click.argument("letter", metavar="a|b|c", type=click.Choice(["a", "b", "c"]))
@click.option("--quick", is_flag=True, help="A few cells, within seconds.")
@click.option(
    "--out",
    default=Path("experiments"),
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for results and plot.",
)
@click.option("--jobs", type=click.IntRange(1), help="Processes; default: one per processor.")
def experiment_command(letter: str, quick: bool, out: Path, jobs: int | None) -> None:
    """Answers a question: a multi-policy gain, b border of latency, c cost of decoupling."""
    from sim.experiments.command import run_experiment

    with foreseen_errors("sim"):
        run_experiment(letter, quick=quick, jobs=jobs or os.cpu_count() or 1, out=out)
