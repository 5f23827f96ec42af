"""How a command reaches its scheduler: settings, the key, one event loop around one action.

What always holds: no command waits for a scheduler without a bound; Ctrl-C closes the connection.
"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from transport.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from farflow.client import Client
    from scheduler.operator import Operator
    from transport.runtime.settings import TransportConfig

T = TypeVar("T")


def with_operator(
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
    action: "Callable[[Operator], Awaitable[T]]",
) -> T:
    """What ``action`` returns, given a connection with an operator's key.

    Raises:
        ConfigError: settings or key are wrong.
        RequestRefused, PeerUnreachable: as ``Operator``.
    """
    from scheduler.operator import Operator

    transport = _transport(files, overrides)
    path = _key_path(transport, key, "operator")

    async def run() -> T:
        async with Operator(transport, path) as operator:
            return await action(operator)

    return asyncio.run(run())


def with_client(
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
    action: "Callable[[Client], Awaitable[T]]",
) -> T:
    """The same with a submitter's key."""
    from farflow.client import Client

    transport = _transport(files, overrides)
    path = _key_path(transport, key, "submitter")

    async def run() -> T:
        async with Client(transport, key=path) as client:
            return await action(client)

    return asyncio.run(run())


def _transport(files: tuple[Path, ...], overrides: tuple[str, ...]) -> "TransportConfig":
    from scheduler.config import SchedulerConfig
    from transport.runtime.config import load_config

    return load_config(SchedulerConfig, files, overrides).value.transport


def _key_path(transport: "TransportConfig", key: Path | None, role: str) -> Path:
    path = key or Path(transport.keys) / f"{role}.toml"
    if not path.is_file():
        raise ConfigError(
            f"{role} key {path}: no such file; name it with --key, or the folder "
            "with --set transport.keys=FOLDER"
        )
    return path
