"""``farflow explain`` and ``farflow events``: why things are as they are, and what happens."""

import asyncio
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farflow.connect import with_operator
from farflow.options import as_operator, duration, json_option
from farflow.words import counted, human_age

if TYPE_CHECKING:
    from scheduler.operator import Operator
    from transport.messages import Events, Explanation

WAIT_S = 20.0
SHOWN_HISTORY = 20
SHOWN_EVENTS = 50


@click.command()
@click.argument("subject")
@as_operator
@click.option("--all", "every", is_flag=True, help="All that is remembered, not its last lines.")
@json_option
def explain(
    subject: str,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
    every: bool,
    as_json: bool,
) -> None:
    """Say why a job, attempt, agent, policy or run waits or went where it went."""
    import msgspec

    async def action(operator: "Operator") -> "Explanation":
        return await operator.explain(subject)

    found = with_operator(files, overrides, key, action, subject=subject)
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        _print_explanation(found, None if every else SHOWN_HISTORY)


def history_lines(found: "Explanation", most: int | None) -> list[str]:
    """The last ``most`` remembered transitions (None: all) with their age instead of the
    scheduler's time, after a line that says how many there are before them."""
    lines = list(found.history if most is None else found.history[-most:])
    left_out = len(found.history) - len(lines)
    shown = [f"({counted(left_out, 'earlier line')}; --all shows them)"] if left_out else []
    for line in lines:
        at, _, rest = line.partition(" ")
        try:
            age_s = found.now_s - float(at)
        except ValueError:
            shown.append(line)
            continue
        shown.append(f"{human_age(age_s)} ago: {rest}" if found.now_s else line)
    return shown


def _print_explanation(found: "Explanation", most: int | None) -> None:
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
    for line in history_lines(found, most):
        click.echo(f"  {printable(line)}")


@click.command()
@as_operator
@click.option("--follow", is_flag=True, help="Go on as things happen, until Ctrl-C.")
@click.option(
    "--after",
    type=click.IntRange(min=0),
    help="Begin after this number; with --follow the default is now.",
)
@click.option(
    "--last",
    "most",
    type=click.IntRange(min=1),
    help=f"At most so many, the newest; {SHOWN_EVENTS} without --after and --follow.",
)
@click.option("--kind", default="", metavar="WHAT", help="Only what happened so, as 'leased'.")
@click.option("--subject", default="", help="Only what is about, or names, SUBJECT.")
@click.option("--timeout", type=duration, help="With --follow: end after this long.")
@json_option
def events(
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
    follow: bool,
    after: int | None,
    most: int | None,
    kind: str,
    subject: str,
    timeout: float | None,
    as_json: bool,
) -> None:
    """Show what happens to runs, jobs, attempts and agents."""
    if timeout is not None and not follow:
        raise click.UsageError("--timeout goes with --follow")
    if most is not None and follow:
        raise click.UsageError("--last shows what was, --follow what comes: choose one")
    if most is None and after is None and not follow:
        most = SHOWN_EVENTS

    async def remembered(operator: "Operator") -> None:
        last, seen, kept = after or 0, 0, deque[str](maxlen=most)
        while True:
            page = await operator.events(last, subject=subject)
            lines = event_lines(page, kind, as_json=as_json)
            if most is None:
                _say_events(page, lines)
            seen += len(lines)
            kept += lines
            if not page.transitions:
                break
            last = page.last
        if most is not None:
            if seen > len(kept):
                click.echo(f"{counted(seen - len(kept), 'earlier one')} not shown", err=True)
            for line in kept:
                click.echo(line)

    async def following(operator: "Operator") -> None:
        from transport.asking import Pace, patiently

        last, pace = after, Pace()

        async def ask() -> "Events":
            return await operator.events(last, subject=subject, wait_s=WAIT_S)

        try:
            async with asyncio.timeout(timeout):
                while True:
                    page = await patiently(ask)
                    _say_events(page, event_lines(page, kind, as_json=as_json))
                    last = page.last
                    if not page.transitions:
                        await pace.keep()
        except TimeoutError:
            return

    with_operator(files, overrides, key, following if follow else remembered)


def event_lines(page: "Events", kind: str, *, as_json: bool) -> list[str]:
    """One line for each transition of ``kind`` (all when it is empty): number, time of day here,
    subject, what, facts."""
    import msgspec

    from farflow.view import printable
    from transport.runtime.clock import SystemClock

    now_wall_s, lines = SystemClock().wall_s(), []
    for transition in page.transitions:
        if kind not in ("", transition.what):
            continue
        if as_json:
            lines.append(msgspec.json.encode(transition).decode())
            continue
        facts = " ".join(f"{name}={value}" for name, value in transition.facts.items())
        when = f"{transition.at_s:.3f}"
        if page.now_s:
            at = datetime.fromtimestamp(now_wall_s - (page.now_s - transition.at_s), tz=UTC)
            when = f"{at.astimezone():%H:%M:%S}"
        line = f"{transition.number}\t{when}\t{transition.subject}\t{transition.what}\t{facts}"
        lines.append(printable(line).rstrip())
    return lines


def _say_events(page: "Events", lines: list[str]) -> None:
    if page.missed:
        click.echo(f"{page.missed} transitions were forgotten before", err=True)
    for line in lines:
        click.echo(line)
