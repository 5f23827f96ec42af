"""The command line of the trainer daemon."""

from typing import TYPE_CHECKING

import click

from transport.runtime.daemon_cli import Serve, daemon_command

if TYPE_CHECKING:
    from cloud_trainer.config import TrainerConfig


@click.group("trainer")
def trainer_group() -> None:
    """The trainer of one policy."""


def _load() -> "tuple[type[TrainerConfig], Serve[TrainerConfig]]":
    from cloud_trainer.config import TrainerConfig
    from cloud_trainer.daemon import run_daemon

    return TrainerConfig, run_daemon


trainer_group.add_command(
    daemon_command(
        "trainer",
        _load,
        help="""Train the policy [trainer].policy until its run is finished.

        Prints one line of JSON once it is on its way to the scheduler; logs go to standard error.
        SIGTERM and Ctrl-C finish the step, save a checkpoint and leave.
        """,
    )
)
