"""Marks in the environment of programs, by which everything that they started is found and killed.

A process group ends with its leader here (``transport.runtime.commands``), but a child that made a
session of its own is in no group of ours any more. It inherits the environment, though, and Linux
shows that of every process of ours in ``/proc``.

What always holds: a mark is the agent's, by its folder, and one program's, at random; only
processes of this user that carry it are killed, and each is looked at again through a handle that
stands for no other. Looking ends when a look finds none, or after ``LOOKS`` of them.

What wipes or overwrites its environment, or became another user, is not found; nor is anything on
systems without ``/proc`` and ``pidfd_open``, where this does nothing.
"""

import asyncio
import contextlib
import hashlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import structlog

MARK: Final = "FARFLOW_PROGRAM"
LOOKS: Final = 50
LOOK_S: Final = 0.02
"""Between two looks, for those killed to be gone."""
MAX_ENVIRONMENT: Final = 8 * 2**20
"""Above what Linux lets a program have (three quarters of a stack of 8 MiB, with its arguments)."""
_AGENT_CHARACTERS: Final = 16

_log = structlog.get_logger()


class ProgramMarks:
    """The marks of one agent: of its folder, so that a later life knows those of an earlier one."""

    def __init__(self, folder: Path | None = None) -> None:
        """Without a folder the marks are of this object alone."""
        self._agent = secrets.token_hex(_AGENT_CHARACTERS // 2) if folder is None else _name(folder)
        self._ended: set[str] = set()
        self._sweeping = asyncio.Lock()

    def new(self) -> str:
        """A mark for one program, to be in its environment as ``MARK``."""
        return f"{self._agent}-{secrets.token_hex(16)}"

    async def end(self, mark: str) -> None:
        """Kills what still carries a mark. Those that end at the same time share a look; one that
        is cancelled here is taken along by the next, or by ``end_all``."""
        self._ended.add(mark)
        async with self._sweeping:
            if mark in self._ended:
                marks, self._ended = self._ended, set()
                await asyncio.to_thread(kill_marked, marks)

    def end_all(self) -> int:
        """Kills whatever carries a mark of this agent; says how many. Blocks, for a second at most
        unless killed processes stay."""
        return kill_marked((f"{self._agent}-",), whole=False)


def kill_marked(marks: Collection[str], *, whole: bool = True) -> int:
    """Kills every process of this user with one of ``marks``, or with what begins so if not
    ``whole``; returns how many were killed. Blocks."""
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open"):
        return 0
    end = b"\0" if whole else b""
    wanted = [f"\0{MARK}={mark}".encode() + end for mark in marks]
    killed: set[int] = set()
    for _ in range(LOOKS):
        found = [pid for pid in _processes() if _carries(pid, wanted) and _kill(pid, wanted)]
        if not found:
            break
        killed.update(found)
        time.sleep(LOOK_S)
    if killed:
        _log.warning("programs.killed_leftovers", count=len(killed))
    return len(killed)


def _name(folder: Path) -> str:
    found = folder.stat()
    text = f"{os.path.realpath(folder)}:{found.st_dev}:{found.st_ino}"
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:_AGENT_CHARACTERS]


def _processes() -> Iterator[int]:
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                yield int(name)


def _carries(pid: int, wanted: Collection[bytes]) -> bool:
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.getuid():
            return False
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = b"\0" + file.read(MAX_ENVIRONMENT)
    except OSError:  # gone, or not ours to look at
        return False
    return any(mark in environment for mark in wanted)


def _kill(pid: int, wanted: Collection[bytes]) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not _carries(pid, wanted):  # the number may have become another's
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True
