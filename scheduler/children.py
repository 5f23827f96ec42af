"""The two service processes beside the scheduler: started with its settings, watched, restarted.

What always holds: they get every setting of the scheduler as it was resolved, so that no file is
read twice with different results; they listen where they listened before a restart; when the
scheduler ends, in whatever way, they stop.
"""

import asyncio
import json
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from scheduler.config import SchedulerConfig
from scheduler.core.settings import TRAJECTORY_LOG, WEIGHT_STORE
from transport.runtime.files import store_errors
from transport.runtime.processes import ChildProcess, ChildSpec, RestartPolicy, supervise
from transport.runtime.shutdown import ShutdownSignal

READY_S: Final = 60.0
LOOKS: Final = 60
"""How often ``READY_S`` may pass before a service can be reached: it reads all that it keeps first,
and one that is ended for that would begin anew, for ever."""

GRACE_S: Final = 10.0
RESTARTS: Final = RestartPolicy(first_delay_s=0.2, max_delay_s=10.0, max_restarts=20)

_MODULES: Final = {
    TRAJECTORY_LOG: "scheduler.trajectory_log",
    WEIGHT_STORE: "scheduler.weight_store",
}
_log = structlog.get_logger()


def overrides_of(config: SchedulerConfig) -> list[str]:
    """``--set`` options that give a process exactly this configuration."""
    options = []
    for table, values in msgspec.to_builtins(config).items():
        for key, value in values.items():
            options += ["--set", f"{table}.{key}={_toml(value)}"]
    return options


def _toml(value: Any) -> str:
    """Inline TOML. JSON's strings, numbers and booleans are TOML's as well; tables are not."""
    if isinstance(value, dict):
        parts = (f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items())
        return "{" + ", ".join(parts) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(one) for one in value) + "]"
    return json.dumps(value)


class Services:
    """Both processes. ``ports`` is filled as they become ready."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Raises StoreError when the folder for their logs cannot be made."""
        self._config = config
        self._logs = Path(config.scheduler.folder) / "logs"
        with store_errors("create", self._logs):
            self._logs.mkdir(parents=True, exist_ok=True)
        loop = asyncio.get_running_loop()
        self._ports: dict[str, asyncio.Future[int]] = {
            name: loop.create_future() for name in _MODULES
        }

    async def ports(self) -> dict[str, int]:
        """Ports by name of the service, once both can be reached."""
        return {name: await asyncio.shield(port) for name, port in self._ports.items()}

    def parts(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What keeps them running until cancelled, which stops them in order.

        Raises:
            ConfigError: a service refuses its configuration.
            ProcessFailed: it ends again and again.
        """
        return {name: self._keep(name, module) for name, module in _MODULES.items()}

    async def _keep(self, name: str, module: str) -> None:
        spec = ChildSpec(
            name=name,
            argv=(sys.executable, "-m", module, *overrides_of(self._config), "--stop-on-eof"),
            log_path=self._logs / f"{name}.log",
            capture_stdout=True,
            grace_s=GRACE_S,
        )

        async def on_started(child: ChildProcess) -> None:
            line = await _first_line(child)
            try:
                port = int(json.loads(line)["port"])
            except (ValueError, KeyError, TypeError) as error:
                raise child.failure("said something else than its port") from error
            if not self._ports[name].done():
                self._ports[name].set_result(port)

        # Never asked for: the end of this task is what stops the process.
        await supervise(spec, ShutdownSignal(), policy=RESTARTS, on_started=on_started)


async def _first_line(child: ChildProcess) -> bytes:
    """What a service says once it can be reached.

    Raises:
        ProcessFailed: it ended before, or opens for ``LOOKS * READY_S``.
    """
    for look in range(1, LOOKS):
        try:
            async with asyncio.timeout(READY_S):
                return await child.read_line(2 * READY_S)
        except TimeoutError:
            _log.warning("service.opening", name=child.spec.name, for_s=look * READY_S)
    return await child.read_line(READY_S)
