"""The command line of the scheduler daemon."""

from typing import TYPE_CHECKING

import click

from transport.runtime.daemon_cli import Serve, daemon_command
from transport.runtime.service_commands import Needs, install_command, uninstall_command

if TYPE_CHECKING:
    from pathlib import Path

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
        error, the dashboard's address among them (gateway.ready). SIGTERM and Ctrl-C stop it in
        order.
        """,
    )
)


def _needs(files: "tuple[Path, ...]") -> Needs:
    from scheduler.config import SchedulerConfig
    from transport.runtime.config import load_config

    config = load_config(SchedulerConfig, files).value
    # Keys: tokens, revocations and gateways' keys are written there.
    return Needs((config.scheduler.folder, config.transport.keys), stop_s=90.0)


scheduler_group.add_command(
    install_command(
        "scheduler",
        _needs,
        help="""Have systemd keep the scheduler running; again, it is an upgrade.

        Relative paths in its files count from the folder in which this is started.
        """,
    )
)
scheduler_group.add_command(uninstall_command("scheduler", 900.0))
