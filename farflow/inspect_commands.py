"""``farflow explain`` and ``farflow events``: why things are as they are, and what happens."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farflow.connect import with_operator
from farflow.options import as_operator, duration, json_option

if TYPE_CHECKING:
    from scheduler.operator import Operator
    from transport.messages import Events, Explanation

WAIT_S = 20.0


@click.command()
@click.argument("subject")
@as_operator
@json_option
def explain(
    subject: str,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
    as_json: bool,
) -> None:
    """Say why a job, attempt, agent, policy or run waits or went where it went."""
    import msgspec

    async def action(operator: "Operator") -> "Explanation":
        return await operator.explain(subject)

    found = with_operator(files, overrides, key, action)
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        _print_explanation(found)


def _print_explanation(found: "Explanation") -> None:
    from rich.console import Console
    from rich.text import Text

    from farflow.view import PLAIN_WIDTH, new_table, printable

    click.echo(f"{found.kind} {found.subject}: {found.state}")
    for reason in found.reasons:
        click.echo(f"  {printable(reason)}")
    if found.candidates:
        names = sorted({name for candidate in found.candidates for name in candidate.parts})
        table = new_table("candidates (seconds)")
        for column in ("agent", "verdict", "finish", *names):
            table.add_column(column)
        for candidate in found.candidates:
            parts = candidate.parts
            table.add_row(
                candidate.agent,
                Text(candidate.verdict),
                "-" if candidate.cost_s is None else f"{candidate.cost_s:.2f}",
                *(f"{parts[name]:.2f}" if name in parts else "-" for name in names),
            )
        console = Console()
        if not console.is_terminal:
            console = Console(width=PLAIN_WIDTH)
        console.print(table)
    for line in found.history:
        click.echo(f"  {printable(line)}")


@click.command()
@as_operator
@click.option("--follow", is_flag=True, help="Go on as things happen, until Ctrl-C.")
@click.option(
    "--after",
    type=click.IntRange(min=0),
    help="Begin after this number; by default at what is remembered, with --follow at now.",
)
@click.option("--subject", default="", help="Only what is about, or names, SUBJECT.")
@click.option("--timeout", type=duration, help="With --follow: end after this long.")
@json_option
def events(
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
    follow: bool,
    after: int | None,
    subject: str,
    timeout: float | None,
    as_json: bool,
) -> None:
    """Show what happens to runs, jobs, attempts and agents."""
    if timeout is not None and not follow:
        raise click.UsageError("--timeout goes with --follow")

    async def remembered(operator: "Operator") -> None:
        last = after or 0
        while True:
            page = await operator.events(last, subject=subject)
            _say_events(page, as_json=as_json)
            if not page.transitions:
                return
            last = page.last

    async def following(operator: "Operator") -> None:
        from transport.asking import Pace, patiently

        last, pace = after, Pace()

        async def ask() -> "Events":
            return await operator.events(last, subject=subject, wait_s=WAIT_S)

        try:
            async with asyncio.timeout(timeout):
                while True:
                    page = await patiently(ask)
                    _say_events(page, as_json=as_json)
                    last = page.last
                    if not page.transitions:
                        await pace.keep()
        except TimeoutError:
            return

    with_operator(files, overrides, key, following if follow else remembered)


def _say_events(page: "Events", *, as_json: bool) -> None:
    import msgspec

    from farflow.view import printable

    if page.missed:
        click.echo(f"{page.missed} transitions were forgotten before", err=True)
    for transition in page.transitions:
        if as_json:
            click.echo(msgspec.json.encode(transition))
        else:
            facts = " ".join(f"{name}={value}" for name, value in transition.facts.items())
            line = f"{transition.number}\t{transition.at_s:.3f}\t{transition.subject}\t"
            click.echo(printable(f"{line}{transition.what}\t{facts}").rstrip())
