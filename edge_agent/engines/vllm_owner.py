"""Which agent the processes of a vLLM belong to, and their end when that agent is no more.

What always holds: an agent that is killed (SIGKILL, out of memory) leaves no process of its vLLMs
behind for longer than ``LOOK_S`` after vLLM could look; a process that belongs to no agent (a
server that the user started) watches nobody; a number that another process has got meanwhile is
not taken for the agent. It needs ``/proc``: elsewhere nothing is watched.
"""

import contextlib
import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Final

OWNER: Final = "FARFLOW_VLLM_OWNER"
LOOK_S: Final = 1.0
_DEAD: Final = "ZX"
"""States of a process that has ended: zombie, and being removed."""


def own_processes() -> None:
    """Processes that this one starts from now on belong to it."""
    os.environ[OWNER] = f"{os.getpid()}/{_born(os.getpid())}"


def watch_owner() -> None:
    """End this process, and those above it that belong to the same agent, when that agent has
    ended. Returns at once, unless it already has."""
    owner = os.environ.get(OWNER, "")
    pid, _, born = owner.partition("/")
    if not (pid.isdigit() and born) or int(pid) == os.getpid():
        return
    above = _above(int(pid), owner)
    if _born(int(pid)) != born:  # while we started
        _end(above)
    watch = threading.Thread(
        target=_watch, args=(int(pid), born, above), name="farflow-owner", daemon=True
    )
    watch.start()


def _above(pid: int, owner: str) -> list[int]:
    """Processes above this one that were started for the same agent: all up to it, or, when it has
    ended and they have been given to others, those that still show that they are its."""
    found: list[int] = []
    parent = os.getppid()
    while parent > 1 and parent != pid:
        found.append(parent)
        parent = _parent(parent)
    if parent == pid:
        return found
    return list(itertools.takewhile(lambda one: _environment(one).get(OWNER) == owner, found))


def end_children(thread: int) -> int:
    """Kill what a thread of this process (by its native id) has started, and what that has;
    returns how many processes that were."""
    from multiprocessing import resource_tracker

    shared = getattr(resource_tracker._resource_tracker, "_pid", None)
    left = [child for child in _children(os.getpid(), thread) if child != shared]
    found: list[int] = []
    while left:
        one = left.pop()
        found.append(one)
        left += _descendants(one)
    for one in found:  # whoever starts others comes before them
        with contextlib.suppress(OSError):
            os.kill(one, signal.SIGKILL)
    return len(found)


def _watch(pid: int, born: str, above: list[int]) -> None:
    while _born(pid) == born:
        time.sleep(LOOK_S)
    _end(above)


def _end(above: list[int]) -> None:
    for one in (*above, os.getpid()):
        with contextlib.suppress(OSError):
            os.kill(one, signal.SIGKILL)


def _born(pid: int) -> str:
    """When a process that lives was started, in ticks since the system's; "" when it is none."""
    fields = _stat(pid)
    return "" if not fields or fields[0] in _DEAD else fields[19]


def _parent(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _environment(pid: int) -> dict[str, str]:
    """What a process was started with, as far as it has not written its title over that."""
    try:
        read = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:
        return {}
    return dict(each.split("=", 1) for each in read.split("\0") if "=" in each)


def _stat(pid: int) -> list[str]:
    """Fields of a process from its state on (``man 5 proc``)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += _children(pid, int(task.name))
    return found


def _children(pid: int, task: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    except OSError:
        return []
