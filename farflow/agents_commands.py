"""``farflow drain``, ``cordon``, ``uncordon``, ``quarantine``, ``release`` and ``logs``: what an
operator wants of an agent, from anywhere. On the box itself it is ``farflow agent drain``."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from farflow.connect import with_operator
from farflow.options import as_operator, duration

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
def drain(
    agent: str,
    deadline: float,
    reason: str,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
) -> None:
    """Let AGENT finish or hand back what it holds, and leave."""
    _order(agent, "drain", files, overrides, key, deadline_s=deadline, reason=reason)


@click.command()
@click.argument("agent")
@_reason
@as_operator
def cordon(
    agent: str,
    reason: str,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
) -> None:
    """Give AGENT no more work; it keeps what it has and stays."""
    _order(agent, "cordon", files, overrides, key, reason=reason)


@click.command()
@click.argument("agent")
@as_operator
def uncordon(
    agent: str, files: tuple[Path, ...], overrides: tuple[str, ...], key: Path | None
) -> None:
    """Give a cordoned AGENT work again."""
    _order(agent, "uncordon", files, overrides, key)


@click.command()
@click.argument("agent")
@_reason
@as_operator
def quarantine(
    agent: str,
    reason: str,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
) -> None:
    """Exclude AGENT: no more work, until it is released."""
    _order(agent, "quarantine", files, overrides, key, reason=reason)


@click.command()
@click.argument("agent")
@_reason
@as_operator
def release(
    agent: str,
    reason: str,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
) -> None:
    """Take AGENT out of quarantine; the evidence against it is forgotten."""
    _order(agent, "release", files, overrides, key, reason=reason)


@click.command()
@click.argument("agent")
@click.option("--run", default="", metavar="RUN", help="Only lines about attempts of RUN.")
@click.option("--lines", type=click.IntRange(1, 2000), default=200, show_default=True)
@as_operator
def logs(
    agent: str,
    run: str,
    lines: int,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
) -> None:
    """Show the last lines of AGENT's log, as JSON lines."""

    async def action(operator: "Operator") -> "AgentLogs":
        return await operator.agent_logs(agent, run=run, lines=lines)

    from farflow.view import printable

    for line in with_operator(files, overrides, key, action).lines:
        click.echo(printable(line))


def _order(
    agent: str,
    order: "Order",
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
    *,
    deadline_s: float = 0.0,
    reason: str = "",
) -> None:
    async def action(operator: "Operator") -> str:
        return await operator.order(agent, order, deadline_s=deadline_s, reason=reason)

    said = with_operator(files, overrides, key, action)
    click.echo(f"{order} {agent}: {said or 'accepted'}")
