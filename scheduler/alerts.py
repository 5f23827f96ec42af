"""Alerts that only the daemon can raise: its loop, its disk, its keys, the clocks of its agents.

What always holds: an alert stands for as long as its condition does and keeps the moment at which
that began; looking at the disk never waits on the event loop.
"""

import asyncio
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from scheduler.decider import LAG_WARNING_S
from scheduler.segment_damage import DAMAGE_FILE, DAMAGE_REMEDY, damage_lines
from transport.errors import StoreError
from transport.runtime.files import store_errors
from transport.status import AgentStatus, Alert

OFFSET_ALERT_S: Final = 1.0
DISK_CHECK_S: Final = 30.0
DISK_FREE_BYTES: Final = 2**30
"""Below this the disk is called nearly full."""
LOG_FULL_SHARE: Final = 0.95
MAX_CLOCKS: Final = 20
"""Agents of one status that are named for their clocks; the others are counted."""

_log = structlog.get_logger()


class Disk(NamedTuple):
    """Bytes: free on the disk, taken by the trajectory log, and what that may take; ``damage`` is
    what the log knows to be damaged, a line for each range."""

    free_bytes: int
    log_bytes: int
    log_limit_bytes: int
    damage: tuple[str, ...] = ()


class Alerts:
    """``folder`` is the scheduler's, ``log_folder`` that of the bodies. ``now`` is the
    core's clock, ``lag_s`` the longest that the loop was held up lately, and ``keys`` what is
    wrong in the folder of keys that are let in."""

    def __init__(
        self,
        folder: Path,
        log_folder: Path,
        log_limit_bytes: int,
        *,
        now: Callable[[], float],
        lag_s: Callable[[], float],
        keys: Callable[[], Sequence[str]],
    ) -> None:
        self._folder = folder
        self._log_folder = log_folder
        self._log_limit_bytes = log_limit_bytes
        self._now = now
        self._lag_s = lag_s
        self._keys = keys
        self._disk: Disk | None = None
        self._since: dict[tuple[str, str], float] = {}

    async def keep_looking(self) -> None:
        """Follow the disk until cancelled."""
        while True:
            try:
                self._disk = await asyncio.to_thread(self._look)
            except StoreError as error:
                _log.warning("disk.not_seen", reason=str(error))
            await asyncio.sleep(DISK_CHECK_S)

    def _look(self) -> Disk:
        """Blocks."""
        with store_errors("look at the disk of", self._folder):
            free_bytes = shutil.disk_usage(self._folder).free
            log_bytes = sum(_size(path) for path in self._log_folder.glob("*"))
        damage = damage_lines(self._log_folder)
        return Disk(free_bytes, log_bytes, self._log_limit_bytes, damage)

    def counters(self) -> dict[str, int]:
        """Gauges for the status, in whole units."""
        found = {"loop.lag_ms": round(1000 * self._lag_s())}
        if self._disk is not None:
            found["disk.free_mib"] = self._disk.free_bytes // 2**20
        return found

    def standing(self, agents: Sequence[AgentStatus]) -> tuple[Alert, ...]:
        """What wants a person now, of the daemon and of these agents."""
        found = {(code, subject): text for code, subject, text in (*self._own(), *_clocks(agents))}
        now = self._now()
        # Of agents that are on another page of the status, when it began is kept.
        names = {agent.name for agent in agents}
        for key in list(self._since):
            if key not in found and (key[0] != "agent.clock" or key[1] in names):
                del self._since[key]
        return tuple(
            Alert(
                code=key[0],
                subject=key[1],
                message=text,
                since_s=self._since.setdefault(key, now),
            )
            for key, text in found.items()
        )

    def _own(self) -> Iterable[tuple[str, str, str]]:
        lag_s = self._lag_s()
        if lag_s >= LAG_WARNING_S:
            text = (
                f"the deciding loop was held up for {lag_s:.1f} s within the last minute: give the "
                "scheduler a processor of its own, or fewer agents"
            )
            yield "loop.lag", "scheduler", text
        keys = self._keys()
        if keys:
            more = f" ({len(keys) - 1} more)" if len(keys) > 1 else ""
            text = f"not every key counts as its file says: {keys[0]}{more}"
            yield "keys.skipped", "scheduler", text
        disk = self._disk
        if disk is None:
            return
        if disk.free_bytes < DISK_FREE_BYTES:
            text = (
                f"{disk.free_bytes // 2**20} MiB are free on the disk of {self._folder}: free "
                "space; the scheduler ends when it cannot write"
            )
            yield "disk.low", "scheduler", text
        if disk.log_bytes >= LOG_FULL_SHARE * disk.log_limit_bytes:
            text = (
                f"the trajectory log takes {disk.log_bytes // 2**20} MiB of the "
                f"{disk.log_limit_bytes // 2**20} that it may: raise "
                "scheduler.trajectory_disk_bytes, or fetch results and train; agents keep what it "
                "refuses"
            )
            yield "trajectories.full", "trajectory-log", text
        if disk.damage:
            text = (
                f"{len(disk.damage)} ranges of stored bodies are damaged, the last is"
                f" {disk.damage[-1]}: {DAMAGE_REMEDY}; all are in {self._log_folder / DAMAGE_FILE},"
                " until nothing of their segments is needed any more"
            )
            yield "trajectories.damaged", "trajectory-log", text


def _clocks(agents: Iterable[AgentStatus]) -> Iterable[tuple[str, str, str]]:
    wrong = [
        (agent.name, agent.clock_offset_s)
        for agent in agents
        if agent.clock_offset_s is not None
        and abs(agent.clock_offset_s) > OFFSET_ALERT_S
        and agent.state != "gone"
    ]
    remedy = "start a time service (chrony, systemd-timesyncd) on the box"
    for name, offset_s in wrong[:MAX_CLOCKS]:
        side = "behind" if offset_s > 0 else "ahead of"
        text = f"its clock is {abs(offset_s):.1f} s {side} the scheduler's: {remedy}"
        yield "agent.clock", name, text
    if len(wrong) > MAX_CLOCKS:
        more = len(wrong) - MAX_CLOCKS
        yield "agent.clock", f"{more} more agents", f"their clocks are off too: {remedy}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
