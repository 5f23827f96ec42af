"""The scheduler daemon as the lease bench runs it: the real one in a process of its own.

``--real-log`` starts both service processes as ever; without it they are left out, and the bench
connects with the trajectory log's key. ``--profile FILE`` writes a profile of the loop's thread.
"""

import asyncio
import cProfile
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from scheduler import daemon
from scheduler.config import SchedulerConfig
from scheduler.core.settings import TRAJECTORY_LOG, WEIGHT_STORE
from transport.runtime.daemon_cli import daemon_command


class NoServices:
    """Stands where ``scheduler.children.Services`` stands, and starts nothing."""

    def __init__(self, _config: object) -> None:
        pass

    async def ports(self) -> dict[str, int]:
        return {TRAJECTORY_LOG: 0, WEIGHT_STORE: 0}

    def parts(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {"no-services": _for_ever()}


async def _for_ever() -> None:
    await asyncio.Event().wait()


def _option(name: str) -> bool:
    if name not in sys.argv:
        return False
    sys.argv.remove(name)
    return True


def main() -> None:
    if not _option("--real-log"):
        setattr(daemon, "Services", NoServices)  # noqa: B010 - not for anybody else to do
    run = daemon_command(
        "scheduler", lambda: (SchedulerConfig, daemon.run_daemon), help="The scheduler."
    )
    if not _option("--profile"):
        run()
        return
    target = Path(sys.argv.pop(1))
    profile = cProfile.Profile()
    profile.enable()
    try:
        run()
    finally:
        profile.disable()
        profile.dump_stats(target)


if __name__ == "__main__":
    main()
