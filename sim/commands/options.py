"""Options and output that the simulator's commands share."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from transport.errors import ConfigError

if TYPE_CHECKING:
    from sim.kernel import Kernel
    from sim.scenario import Scenario

F = TypeVar("F", bound=Callable[..., Any])

OUT = click.Path(file_okay=False, path_type=Path)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object.")
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key of the scenario, e.g. workload.train_s=5; may repeat.",
)
out_option = click.option("--out", type=OUT, help="Write results and pictures into this folder.")
report_option = click.option(
    "--report", is_flag=True, help="Also write report.html, one file with everything."
)
seeds_option = click.option(
    "--seeds", type=click.IntRange(1, 1000), default=8, show_default=True, help="How many."
)
first_seed_option = click.option("--seed", default=0, show_default=True, help="The first one.")
jobs_option = click.option(
    "--jobs",
    type=click.IntRange(1, 1024),
    help="Simulations at a time; the default is one per core.",
)


def placement_option(help: str, default: str = "finish-time") -> Callable[[F], F]:
    return click.option("--placement", default=default, show_default=True, help=help)


def load(source: str, overrides: Sequence[str]) -> "Scenario":
    """Raises ConfigError."""
    from sim.overrides import override
    from sim.scenario import load_scenario

    return override(load_scenario(source), overrides)


def check_out(out: Path | None, report: bool) -> None:
    """Before hours of work: can the result be kept? Raises ConfigError."""
    if report and out is None:
        raise ConfigError("--report: where to? say --out DIR")
    if out is not None:
        from sim.picture_style import require_matplotlib

        if report:
            require_matplotlib()
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {out}: {error.strerror}") from error


def pictures_possible(out: Path) -> bool:
    """Whether matplotlib is there; says so where it is not."""
    from sim.picture_style import require_matplotlib

    try:
        require_matplotlib()
    except ConfigError as error:
        click.echo(f"no pictures in {out}: {error}", err=True)
        return False
    return True


@contextlib.contextmanager
def progress(what: str, unit: str) -> Iterator[Callable[[float, float], None]]:
    """A bar on a terminal's standard error; elsewhere nothing. Gives ``show(done, all)``."""
    if not sys.stderr.isatty():
        yield lambda done, whole: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f} " + unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(what, total=1.0)
        yield lambda done, whole: bars.update(bar, completed=done, total=whole)


@contextlib.contextmanager
def ending_early(kernel: "Kernel") -> Iterator[list[bool]]:
    """The first Ctrl-C ends the simulation at the present event, a second one the command. Gives a
    list that is not empty once that has happened."""
    asked: list[bool] = []

    def stop(_signal: int, _frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(True)
        kernel.stop()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def print_json(value: Any) -> None:
    import msgspec

    click.echo(msgspec.json.encode(value).decode())


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Left column to the left, the others to the right."""
    columns = list(zip(heads, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    for line in (heads, *rows):
        cells = [
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())


def print_problems(problems: Sequence[str]) -> None:
    for problem in problems:
        click.echo(f"the books do not balance: {problem}", err=True)


def source_text(scenario: "Scenario") -> str:
    """The scenario as it was run, for a report."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(scenario)).decode()
