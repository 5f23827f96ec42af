"""``farflow drain``, ``cordon``, ``uncordon``, ``quarantine``, ``release`` and ``logs``: what an
operator wants of an agent, from anywhere. On the box itself it is ``farflow agent drain``."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from farflow.connect import with_operator
from farflow.options import as_operator, duration, json_option, say_done

if TYPE_CHECKING:
    from scheduler.operator import Operator, Order
    from transport.messages import AgentLogs

_reason = click.option("--reason", default="", metavar="TEXT", help="Shown with the agent.")


@click.command()
@click.argument("agent")
@click.option(
    "--deadline", type=duration, default=0.0, help="Time to finish, as 10min; its own by default."
)
@_reason
@as_operator
@json_option
def drain(
    agent: str,
    deadline: float,
    reason: str,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
    as_json: bool,
) -> None:
    """Let AGENT finish or hand back what it holds, and leave."""
    _order(agent, "drain", files, overrides, key, as_json, deadline_s=deadline, reason=reason)


@click.command()
@click.argument("agent")
@_reason
@as_operator
@json_option
def cordon(
    agent: str,
    reason: str,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
    as_json: bool,
) -> None:
    """Give AGENT no more work; it keeps what it has and stays."""
    _order(agent, "cordon", files, overrides, key, as_json, reason=reason)


@click.command()
@click.argument("agent")
@as_operator
@json_option
def uncordon(
    agent: str,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
    as_json: bool,
) -> None:
    """Give a cordoned AGENT work again."""
    _order(agent, "uncordon", files, overrides, key, as_json)


@click.command()
@click.argument("agent")
@_reason
@as_operator
@json_option
def quarantine(
    agent: str,
    reason: str,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
    as_json: bool,
) -> None:
    """Exclude AGENT: no more work, until it is released."""
    _order(agent, "quarantine", files, overrides, key, as_json, reason=reason)


@click.command()
@click.argument("agent")
@_reason
@as_operator
@json_option
def release(
    agent: str,
    reason: str,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
    as_json: bool,
) -> None:
    """Take AGENT out of quarantine; the evidence against it is forgotten."""
    _order(agent, "release", files, overrides, key, as_json, reason=reason)


@click.command()
@click.argument("agent")
@click.option("--run", default="", metavar="RUN", help="Only lines that name RUN.")
@click.option("--lines", type=click.IntRange(1, 2000), default=200, show_default=True)
@as_operator
@json_option
def logs(
    agent: str,
    run: str,
    lines: int,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
    as_json: bool,
) -> None:
    """Show the last lines of AGENT's log, which are JSON objects.

    What would steer a terminal is shown as a dot; --json prints the lines as they are.
    """

    async def action(operator: "Operator") -> "AgentLogs":
        return await operator.agent_logs(agent, run=run, lines=lines)

    from farflow.view import printable

    for line in with_operator(files, overrides, key, action, subject=agent).lines:
        click.echo(line if as_json else printable(line))


def _order(
    agent: str,
    order: "Order",
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
    as_json: bool,
    *,
    deadline_s: float = 0.0,
    reason: str = "",
) -> None:
    async def action(operator: "Operator") -> str:
        return await operator.order(agent, order, deadline_s=deadline_s, reason=reason)

    said = with_operator(files, overrides, key, action, subject=agent)
    say_done(agent, order, said, as_json=as_json)
