"""Starts the ranks of a trainer on this machine with torchrun's launcher.

    farflow trainer run, trainer.ranks = 4
      -> 4 x  farflow trainer run  (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment)

What always holds: one rank that fails ends the others, and the status is that of a wrong
configuration if a rank found one; when we end, in whatever way, so do the ranks (they run in
sessions of their own, so their standard input is a pipe of ours, and rank 0 stops when it ends);
asked to stop, we pass that on and wait, so that rank 0 can save.

For several hosts start ``torchrun ... -m farflow trainer run ...`` on each: what is in the
environment then is what counts.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

import click

from transport.runtime.model_folder import require_torch
from transport.runtime.origin import EXIT_CONFIG
from transport.runtime.processes import describe_status

STOP_S = 60
"""Ranks that were asked to stop have so long until they are killed."""

_STDIN = 0
_READ_BYTES = 65536


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
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(STOP_S))
    # A rank says itself why it ends; after that the launcher's table of exit codes is noise.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"farflow-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.2,
        start_method="spawn",
    )
    end_input = _input_of_ranks(stop_on_eof)
    command = ("-m", "farflow", *arguments, "--stop-on-eof")
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        statuses = [failure.exitcode for failure in error.failures.values()]
        for rank, failure in error.failures.items():
            # Killed, so it could not say why; SIGTERM is what the others got for that.
            if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
                ended = describe_status(failure.exitcode)
                click.echo(f"trainer: rank {rank} was {ended}", err=True)
        return EXIT_CONFIG if EXIT_CONFIG in statuses else 1
    except SignalException:  # the ranks were asked to stop, and have
        return 0
    finally:
        end_input()
    return 0


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
