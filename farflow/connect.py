"""How a command reaches its scheduler: settings, the key, one event loop around one action.

What always holds: no command waits for a scheduler without a bound; Ctrl-C closes the connection.
"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from farflow.lazy import did_you_mean
from transport.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from farflow.client import Client
    from scheduler.operator import Operator
    from transport.runtime.settings import TransportConfig
    from transport.status import SchedulerStatus

T = TypeVar("T")


def with_operator(
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
    action: "Callable[[Operator], Awaitable[T]]",
    *,
    subject: str = "",
) -> T:
    """What ``action`` returns, given a connection with an operator's key. ``subject`` is what it
    asks about: a scheduler that does not know it is asked what there is that is spelt like it.

    Raises:
        ConfigError: settings or key are wrong.
        RequestRefused, PeerUnreachable: as ``Operator``.
    """
    from scheduler.operator import Operator, RequestRefused

    transport = _transport(files, overrides)
    path = _key_path(transport, key, "operator")

    async def run() -> T:
        async with Operator(transport, path) as operator:
            try:
                return await action(operator)
            except RequestRefused as error:
                if not subject or not str(error).partition(":")[0].endswith(".unknown"):
                    raise
                near = did_you_mean(subject, names_of(await operator.status()))
                raise RequestRefused(f"{error};{near}" if near else str(error)) from error

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


def names_of(status: "SchedulerStatus") -> list[str]:
    """Everything that a scheduler's status names: runs, policies, agents."""
    names = [agent.name for agent in status.agents]
    for run in status.runs:
        names += [run.name, *(policy.policy for policy in run.policies)]
    return names


def keys_folder(files: tuple[Path, ...], overrides: tuple[str, ...]) -> Path:
    """The folder of keys of a deployment that is there.

    Raises:
        ConfigError: there is none.
    """
    folder = Path(_transport(files, overrides).keys)
    if not (folder / "server.toml").exists():
        raise ConfigError(
            f"{folder}: no server.toml there, so this is no deployment's folder of keys; give the"
            " deployment's file with --config FILE, name the folder with --set"
            " transport.keys=FOLDER, or make one with `farflow keys create FOLDER`"
        )
    return folder


def _transport(files: tuple[Path, ...], overrides: tuple[str, ...]) -> "TransportConfig":
    from scheduler.config import SchedulerConfig
    from transport.runtime.config import load_config

    return load_config(SchedulerConfig, files, overrides).value.transport


def _key_path(transport: "TransportConfig", key: Path | None, role: str) -> Path:
    path = key or Path(transport.keys) / f"{role}.toml"
    if not path.is_file():
        raise ConfigError(
            f"{role} key {path}: no such file; give the deployment's file with --config FILE, name"
            " the key with --key or its folder with --set transport.keys=FOLDER, or make one where"
            f" the deployment's keys are: farflow keys add {role} --role {role}"
        )
    return path
