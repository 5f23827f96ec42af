"""Starts the ranks of a trainer on this machine.

    farflow trainer run, trainer.ranks = 4
      -> 4 x  farflow trainer run  (RANK, WORLD_SIZE ... in the environment, as torchrun has them)

torchrun itself is for several hosts (``torchrun ... -m farflow trainer run ...`` on each: what is
in the environment then is what counts). Here it would open a port to everybody, without a key, and
unpickle what it reads there; our ranks meet through a file in a folder of their own and talk over
the loopback interface.

What always holds: one rank that fails ends the others, and the status is that of a wrong
configuration if a rank found one; when we end, in whatever way, so do the ranks (they run in
sessions of their own, so their standard input is a pipe of ours, and rank 0 stops when it ends);
asked to stop, we pass that on and wait at most ``STOP_S``, so that rank 0 can save, and the status
says whether it could.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import click

from cloud_trainer.process_group import STORE
from transport.runtime.clock import Clock, SystemClock
from transport.runtime.model_folder import require_torch
from transport.runtime.origin import EXIT_CONFIG
from transport.runtime.processes import describe_status

STOP_S: Final = 60.0
"""Ranks that were asked to stop have so long until they are killed."""
LOOK_S: Final = 0.2

_STDIN: Final = 0
_READ_BYTES: Final = 65536
_LOOPBACK: Final = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
"""Unless the environment says otherwise."""


def is_rank(environment: Mapping[str, str]) -> bool:
    """Whether this process was already started as one of several ranks."""
    return "WORLD_SIZE" in environment


def run_ranks(arguments: Sequence[str], ranks: int, *, stop_on_eof: bool) -> int:
    """Run ``farflow`` with ``arguments`` as so many ranks; returns the exit status when all have
    ended. With ``stop_on_eof`` the end of our standard input stops them. Main thread only.

    Raises:
        ConfigError: torch is not installed.
    """
    require_torch(f"trainer.ranks = {ranks}")
    stop = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    end_input = _input_of_ranks(stop_on_eof)
    command = (sys.executable, "-m", "farflow", *arguments, "--stop-on-eof")
    children: list[subprocess.Popen[bytes]] = []
    try:
        with tempfile.TemporaryDirectory(prefix="farflow-ranks-") as folder:
            for rank in range(ranks):
                environment = _environment(rank, ranks, Path(folder) / "store")
                children.append(subprocess.Popen(command, env=environment, start_new_session=True))
            return _wait(children, stop, SystemClock())
    finally:
        end_input()
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _environment(rank: int, ranks: int, store: Path) -> dict[str, str]:
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    named = {name: str(number) for name, number in own.items()}
    return {**_LOOPBACK, **os.environ, **named, STORE: str(store)}


def _wait(
    children: Sequence["subprocess.Popen[bytes]"], stop: threading.Event, clock: Clock
) -> int:
    """Until all have ended; the exit status."""
    stop_by: float | None = None
    while any(child.poll() is None for child in children):
        failed = any(child.returncode for child in children)
        if stop_by is None and (failed or stop.is_set()):
            stop_by = clock.monotonic_s() + STOP_S
            for child in children:
                if child.poll() is None:
                    child.terminate()
        if stop_by is not None and clock.monotonic_s() >= stop_by:
            for child in children:
                if child.poll() is None:
                    child.kill()
        # Not for as long as there is something to stop: a signal then waits for nothing.
        stop.wait(LOOK_S) if stop_by is None else time.sleep(LOOK_S)
    statuses = [child.returncode for child in children]
    for rank, status in enumerate(statuses):
        # Killed, so it could not say why; SIGTERM is what the others got for that.
        if status < 0 and status != -signal.SIGTERM:
            click.echo(f"trainer: rank {rank} was {describe_status(status)}", err=True)
    if EXIT_CONFIG in statuses:
        return EXIT_CONFIG
    return 1 if any(statuses) else 0


def _input_of_ranks(stop_on_eof: bool) -> Callable[[], None]:
    """Make our standard input a pipe that only we hold the other end of, for the ranks to inherit;
    returns what closes it."""
    read, write = os.pipe()
    ours = os.dup(_STDIN)
    os.set_inheritable(ours, False)
    os.dup2(read, _STDIN, inheritable=True)
    os.close(read)
    closing = threading.Lock()
    open_ends = [write]

    def close() -> None:
        with closing:
            while open_ends:
                os.close(open_ends.pop())

    def watch() -> None:
        while os.read(ours, _READ_BYTES):
            pass
        close()

    if stop_on_eof:
        threading.Thread(target=watch, name="trainer-input", daemon=True).start()
    return close
