"""``farflow run history`` and ``farflow run compare``: recorded runs, without a scheduler."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from farflow.options import json_option
from transport.errors import ConfigError

if TYPE_CHECKING:
    from farflow.run_records import PolicyRecord

_PATHS = click.argument(
    "paths",
    nargs=-1,
    required=True,
    metavar="PATH...",
    type=click.Path(exists=True, path_type=Path),
)
_POINTS: Final = 6
"""How many steps a comparison shows rewards at."""


@click.command("history")
@_PATHS
@json_option
def history(paths: tuple[Path, ...], as_json: bool) -> None:
    """List the runs that are recorded at each PATH, a line for each policy.

    PATH is a run's folder, a folder of such folders (local.runs of `farflow up`), or a scheduler's
    folder, whose runs/RUN/metrics.jsonl are read.
    """
    from farflow.run_records import facts

    records = _records(paths)
    if as_json:
        for record in records:
            click.echo(json.dumps(facts(record)))
        return
    if not records:
        return
    rows = [[record.label, *(text for _, text in _shown(record))] for record in records]
    heads = [name for name, _ in _shown(records[0])]
    _print(["run", *heads], rows)
    _say_not_evaluated(records)


@click.command("compare")
@_PATHS
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw rewards and accuracies to FILE, a PNG (needs farflow[plots]).",
)
@json_option
def compare(paths: tuple[Path, ...], plot: Path | None, as_json: bool) -> None:
    """Put recorded runs side by side: what they came to, and their rewards at the same steps.

    PATH is as for `farflow run history`.
    """
    from farflow.run_records import facts, reward_until

    records = _records(paths)
    last = min((record.steps for record in records), default=0)
    window = max(1, last // 10)
    points = sorted({max(1, last * n // (_POINTS - 1)) for n in range(1, _POINTS)}) if last else []
    if plot is not None:
        _draw(records, plot)
    if as_json:
        for record in records:
            rewards = {step: reward_until(record, step, window) for step in points}
            click.echo(json.dumps({**facts(record), "rewards_at": rewards}))
        return
    if not records:
        return
    columns = [_shown(record) for record in records]
    rows = [[name, *(column[n][1] for column in columns)] for n, (name, _) in enumerate(columns[0])]
    for step in points:
        found = (reward_until(record, step, window) for record in records)
        rows.append([f"reward at step {step}", *("-" if r is None else f"{r:.3f}" for r in found)])
    _print(["", *(record.label for record in records)], rows)
    _say_not_evaluated(records)
    if points:
        click.echo(f"rewards are means of the last {window} step(s); steps are those that all have")
    if plot is not None:
        click.echo(f"drew {plot}")


def _say_not_evaluated(records: "list[PolicyRecord]") -> None:
    from farflow.view import printable

    for record in records:
        for text in record.not_evaluated:
            click.echo(printable(f"{record.label}: evaluation {text}"))


def _records(paths: tuple[Path, ...]) -> "list[PolicyRecord]":
    from farflow.run_records import find_records, read_record

    files = find_records(paths)
    records = [record for file in files for record in read_record(file)]
    if not records:
        click.echo(f"nothing is recorded yet in {', '.join(map(str, files))}", err=True)
    return records


def _shown(record: "PolicyRecord") -> list[tuple[str, str]]:
    """What people see of a record, by the heading that it goes under."""

    def share(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f} %"

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    return [
        ("state", record.state),
        ("steps", str(record.steps)),
        ("hours", f"{record.hours:.2f}"),
        ("accuracy before", share(record.accuracy_before)),
        ("after", share(record.accuracy_after)),
        ("reward", number(record.reward, 3)),
        ("lag", number(record.policy_lag_mean, 1)),
        ("max", "-" if record.policy_lag_max is None else str(record.policy_lag_max)),
        ("busy", share(record.busy_share)),
        ("trained tokens", str(record.trained_tokens)),
        ("generated", "-" if record.tokens is None else str(record.tokens)),
        ("USD", number(record.cost_usd, 2)),
    ]


def _print(heads: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.text import Text

    from farflow.view import PLAIN_WIDTH, new_table, printable

    table = new_table("")
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    console.print(table)


def _draw(records: "list[PolicyRecord]", file: Path) -> None:
    from farflow.plots import draw_comparison, plots_available

    if not plots_available():
        raise ConfigError("--plot needs matplotlib: pip install 'farflow[plots]'")
    curves = {record.label: (record.rewards, record.accuracies) for record in records}
    draw_comparison(curves, file)
