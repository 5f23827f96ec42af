"""Entry points of the scheduler's processes: real links, the machine's clock, a command line."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import click

from scheduler.config import SchedulerConfig
from scheduler.interpreter import tune
from transport.runtime.daemon_cli import Serve, daemon_command


def with_system(serve: Callable[..., Coroutine[Any, Any, int]]) -> Serve[SchedulerConfig]:
    """``serve`` with real links, the machine's clock and unrepeatable randomness."""

    async def on_this_machine(
        config: SchedulerConfig, *, stop: asyncio.Event, on_ready: Callable[[dict[str, Any]], None]
    ) -> int:
        from transport.runtime.clock import SystemClock
        from transport.zmq_links import ZmqNetwork
        from transport.zmq_socket import raise_file_limit

        raise_file_limit()
        tune()
        network = ZmqNetwork()
        try:
            return await serve(
                config,
                network=network,
                clock=SystemClock(),
                rng=random.Random(),  # noqa: S311 - jitter, no secret
                stop=stop,
                on_ready=on_ready,
            )
        finally:
            await network.close()

    return on_this_machine


def service_command(name: str, serve: Callable[..., Coroutine[Any, Any, int]]) -> click.Command:
    """The command line of one service process; it stops with its parent."""
    return daemon_command(
        name,
        lambda: (SchedulerConfig, with_system(serve)),
        name=name,
        help="A service of the rollout scheduler, which starts it.",
    )
