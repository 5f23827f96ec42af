"""The command line of the scheduler daemon."""

from typing import TYPE_CHECKING

import click

from transport.runtime.daemon_cli import Serve, daemon_command

if TYPE_CHECKING:
    from scheduler.config import SchedulerConfig


@click.group("scheduler")
def scheduler_group() -> None:
    """The rollout scheduler daemon."""


def _load() -> "tuple[type[SchedulerConfig], Serve[SchedulerConfig]]":
    from scheduler.config import SchedulerConfig
    from scheduler.daemon import run_daemon

    return SchedulerConfig, run_daemon


scheduler_group.add_command(
    daemon_command(
        "scheduler",
        _load,
        help="""Run the scheduler with its trajectory log and weight store.

        Prints one line of JSON with the three ports once they can be reached; logs go to standard
        error. SIGTERM and Ctrl-C stop it in order.
        """,
    )
)
