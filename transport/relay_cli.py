"""The command line of the relay daemon."""

from typing import TYPE_CHECKING

import click

from transport.runtime.daemon_cli import Serve, daemon_command
from transport.runtime.service_commands import Needs, install_command, uninstall_command

if TYPE_CHECKING:
    from pathlib import Path

    from transport.relay_config import RelayConfig


@click.group("relay")
def relay_group() -> None:
    """The relay of a region: agents near it get weights from it, it gets them once."""


def _load() -> "tuple[type[RelayConfig], Serve[RelayConfig]]":
    from transport.relay_config import RelayConfig
    from transport.relay_daemon import run_daemon

    return RelayConfig, run_daemon


relay_group.add_command(
    daemon_command(
        "relay",
        _load,
        help="""Give chunks of weights to the agents of a region until told to stop.

        Prints one line of JSON with its port once it can be reached; logs go to standard error.
        SIGTERM and Ctrl-C stop it; agents then ask the weight store.
        """,
    )
)


def _needs(files: "tuple[Path, ...]") -> Needs:
    from transport.relay_config import RelayConfig
    from transport.runtime.config import load_config

    return Needs((load_config(RelayConfig, files).value.relay.folder,), stop_s=60.0)


relay_group.add_command(
    install_command(
        "relay",
        _needs,
        help="""Have systemd keep the relay running; again, it is an upgrade.

        Relative paths in its files count from the folder in which this is started.
        """,
    )
)
relay_group.add_command(uninstall_command("relay", 900.0))
