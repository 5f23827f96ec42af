"""Runs one of the experiments, prints its tables, keeps its results and plot."""

import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Final

import click

from sim.experiments import decoupling, latency_border, multi_policy

EXPERIMENTS: Final[dict[str, ModuleType]] = {
    "a": multi_policy,
    "b": latency_border,
    "c": decoupling,
}


def run_experiment(letter: str, *, quick: bool, jobs: int, out: Path) -> None:
    """Writes ``<name>.json`` and, with matplotlib, ``<name>.png`` to ``out``."""
    module = EXPERIMENTS[letter]
    out.mkdir(parents=True, exist_ok=True)
    began_s = time.perf_counter()
    on_terminal = sys.stderr.isatty()

    def progress(done: int, total: int) -> None:
        if on_terminal:
            click.echo(f"\r{done} of {total} cells", nl=False, err=True)

    findings = module.run(quick, jobs, progress)
    took_s = time.perf_counter() - began_s
    if on_terminal:
        click.echo("\r\033[K", nl=False, err=True)
    for table in findings.tables:
        click.echo(f"{table}\n")
    saved = findings.save(out)
    click.echo(f"digest {findings.digest()}, {len(findings.rows)} cells, {took_s:.0f} s: {saved}")
    try:
        module.plot(findings, saved.with_suffix(".png"))
    except ModuleNotFoundError:
        click.echo("no plot: install matplotlib with pip install 'farflow[plots]'")
    else:
        click.echo(f"plot {saved.with_suffix('.png')}")
