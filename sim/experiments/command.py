"""Runs one of the experiments, prints its tables, keeps its results and plot."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

import click

from sim.experiments import decoupling, latency_border, multi_policy
from transport.errors import ConfigError
from transport.runtime.clock import SystemClock

EXPERIMENTS: Final[dict[str, ModuleType]] = {
    "a": multi_policy,
    "b": latency_border,
    "c": decoupling,
}


def run_experiment(letter: str, *, quick: bool, jobs: int, out: Path) -> None:
    """Writes ``<name>.json`` and, with matplotlib, ``<name>.png`` to ``out``.

    Raises:
        ConfigError: ``out`` cannot be written to.
    """
    module = EXPERIMENTS[letter]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; name a folder of yours") from error
    clock = SystemClock()
    began_s = clock.monotonic_s()
    on_terminal = sys.stderr.isatty()

    def progress(done: int, total: int) -> None:
        if on_terminal:
            click.echo(f"\r{done} of {total} cells", nl=False, err=True)

    findings = module.run(quick, jobs, progress)
    took_s = clock.monotonic_s() - began_s
    if on_terminal:
        click.echo("\r\033[K", nl=False, err=True)
    for table in findings.tables:
        click.echo(f"{table}\n")
    saved = findings.save(out)
    if not findings.tables:
        click.echo(f"interrupted; the {len(findings.rows)} cells that were done are in {saved}")
        return
    click.echo(f"digest {findings.digest()}, {len(findings.rows)} cells, {took_s:.0f} s: {saved}")
    if importlib.util.find_spec("matplotlib") is None:
        click.echo("no plot: pip install 'farflow[plots]'")
    else:
        module.plot(findings, saved.with_suffix(".png"))
        click.echo(f"plot {saved.with_suffix('.png')}")
