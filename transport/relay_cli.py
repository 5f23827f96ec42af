"""The command line of the relay daemon."""

from typing import TYPE_CHECKING

import click

from transport.runtime.daemon_cli import Serve, daemon_command

if TYPE_CHECKING:
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
