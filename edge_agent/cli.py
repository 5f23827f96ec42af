"""The command line of the agent daemon."""

from typing import TYPE_CHECKING

import click

from transport.runtime.daemon_cli import Serve, daemon_command

if TYPE_CHECKING:
    from edge_agent.config import AgentConfig


@click.group("agent")
def agent_group() -> None:
    """The agent on a remote machine: generates rollouts."""


def _load() -> "tuple[type[AgentConfig], Serve[AgentConfig]]":
    from edge_agent.config import AgentConfig
    from edge_agent.daemon import run_daemon

    return AgentConfig, run_daemon


agent_group.add_command(
    daemon_command(
        "agent",
        _load,
        help="""Generate rollouts for the scheduler until told to stop.

        Prints one line of JSON once it is on its way to the scheduler; logs go to standard error.
        SIGTERM and Ctrl-C finish what runs, or hand it back within [agent].drain_s, and leave.
        """,
    )
)
