"""The command line of the trainer daemon.

With ``trainer.ranks`` above 1 the command is that of the launcher, which runs itself once for each
rank (``cloud_trainer.launch``).
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from transport.runtime.daemon_cli import Serve, daemon_command
from transport.runtime.service_commands import Needs, install_command, uninstall_command

if TYPE_CHECKING:
    from cloud_trainer.config import TrainerConfig


@click.group("trainer")
def trainer_group() -> None:
    """The trainer of one policy."""


def _load() -> "tuple[type[TrainerConfig], Serve[TrainerConfig]]":
    from cloud_trainer.config import TrainerConfig
    from cloud_trainer.daemon import run_daemon

    return TrainerConfig, run_daemon


@trainer_group.command("numpy-model")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--parameters", type=click.IntRange(1, 10_000_000), default=4160, show_default=True)
def numpy_model(folder: Path, seed: int, parameters: int) -> None:
    """Write a new model FOLDER for trainer = "numpy": a bigram model of 64 tokens, for trials
    without torch."""
    from cloud_trainer.numpy_trainer import make_numpy_model

    make_numpy_model(folder, seed=seed, parameters=parameters)
    click.echo(folder)


def _launch(files: tuple[str, ...], overrides: tuple[str, ...], stop_on_eof: bool) -> int | None:
    """The status of the ranks; None where this process is the trainer or one of its ranks."""
    from cloud_trainer.config import TrainerConfig
    from cloud_trainer.launch import is_rank, run_ranks
    from transport.runtime.config import load_config

    if is_rank(os.environ):
        return None
    ranks = load_config(TrainerConfig, files, overrides).value.trainer.ranks
    if ranks == 1:
        return None
    given = [("--config", file) for file in files] + [("--set", text) for text in overrides]
    arguments = ["trainer", "run", *(word for option in given for word in option)]
    return run_ranks(arguments, ranks, stop_on_eof=stop_on_eof)


trainer_group.add_command(
    daemon_command(
        "trainer",
        _load,
        launch=_launch,
        help="""Train the policy [trainer].policy until its run is finished.

        Prints one line of JSON once it is on its way to the scheduler; logs go to standard error.
        SIGTERM and Ctrl-C finish the step, save a checkpoint and leave.
        """,
    )
)


def _needs(files: "tuple[Path, ...]") -> Needs:
    from cloud_trainer.config import TrainerConfig
    from transport.runtime.config import load_config

    table = load_config(TrainerConfig, files).value.trainer
    # A step in hand is finished and saved; of a large model that takes minutes.
    return Needs((table.folder,), stop_s=900.0, devices=True)


trainer_group.add_command(
    install_command(
        "trainer",
        _needs,
        help="""Have systemd keep the trainer running; again, it is an upgrade. It stays away once
        its run is over.

        Relative paths in its files count from the folder in which this is started.
        """,
    )
)
trainer_group.add_command(uninstall_command("trainer", 900.0))
