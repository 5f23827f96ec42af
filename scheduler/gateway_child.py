"""The gateway's process beside the scheduler: started, and started again for as long as it takes.

What always holds: whatever happens to it (a port that is taken, a certificate that does not load,
a key that was revoked), the scheduler goes on and says in its log what is wrong and what to do. One
that hangs is ended and started again: it says every ``ALIVE_S`` seconds that it is there, and is
looked at ``LOOKS`` times in vain before it counts as hung. Looks are counted and not time, so that
neither a machine nor a scheduler that was stopped costs it its life.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Final, NoReturn

import structlog

from scheduler.children import GRACE_S, READY_S, overrides_of
from scheduler.config import SchedulerConfig
from transport.errors import FarflowError
from transport.keys import GATEWAY, ensure_key
from transport.messages import Role
from transport.runtime.processes import ChildProcess, ChildSpec, RestartPolicy, supervise
from transport.runtime.shutdown import ShutdownSignal

AGAIN: Final = RestartPolicy(first_delay_s=2.0, max_delay_s=60.0)
"""How long one that cannot start waits before it is tried again."""
_RESTARTS: Final = RestartPolicy(first_delay_s=0.2, max_delay_s=10.0, max_restarts=20)
LOOK_S: Final = 10.0
LOOKS: Final = 6
_log = structlog.get_logger()


async def keep_gateway(config: SchedulerConfig) -> None:
    """Keep the gateway running until cancelled, which stops it; never fails."""
    logs = Path(config.scheduler.folder) / "logs"
    spec = ChildSpec(
        name=GATEWAY,
        argv=(
            sys.executable,
            "-m",
            "scheduler.gateway.service",
            *overrides_of(config),
            "--stop-on-eof",
        ),
        log_path=logs / f"{GATEWAY}.log",
        capture_stdout=True,
        grace_s=GRACE_S,
    )
    failed = 0

    async def on_started(child: ChildProcess) -> None:
        nonlocal failed
        line = await child.read_line(READY_S)
        try:
            address = str(json.loads(line)["address"])
        except (ValueError, KeyError, TypeError) as error:
            raise child.failure("said something else than its address") from error
        failed = 0
        _log.info("gateway.ready", address=address)
        await watch(child)

    while True:
        try:
            keys = Path(config.transport.keys)
            await asyncio.to_thread(ensure_key, keys, GATEWAY, Role.OPERATOR)
            # Never asked for: the end of this task is what stops the process.
            await supervise(spec, ShutdownSignal(), policy=_RESTARTS, on_started=on_started)
        except FarflowError as error:
            failed += 1
            again_s = AGAIN.delay_s(failed)
            lines = str(error).strip().splitlines()
            _log.error(
                "gateway.down",
                what=lines[0],
                reason=lines[-1],
                remedy="mend what it says, or switch it off with http.enabled = false",
                again_s=again_s,
            )
        await asyncio.sleep(AGAIN.delay_s(max(1, failed)))


async def watch(child: ChildProcess) -> NoReturn:
    """Read the signs of life of one that said that it is ready.

    Raises:
        ProcessFailed: it ended, or gives none any more.
    """
    silent = 0
    while silent < LOOKS:
        try:
            async with asyncio.timeout(LOOK_S):
                await child.read_line(2 * LOOK_S)
        except TimeoutError:
            silent += 1
        else:
            silent = 0
    _log.error("gateway.silent", pid=child.pid, looks=silent, each_s=LOOK_S)
    raise child.failure("hangs")
