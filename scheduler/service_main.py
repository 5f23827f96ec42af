"""Command lines of the service processes: they start, say where they are, and stop with their
parent."""

import asyncio
import json
import random
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import click

from scheduler.config import SchedulerConfig
from transport.errors import ConfigError, FarflowError

EXIT_FAILED = 1


class Serve(Protocol):
    """Runs a program until ``stop``; returns its exit status."""

    def __call__(
        self,
        config: SchedulerConfig,
        *,
        stop: asyncio.Event,
        on_ready: Callable[[dict[str, Any]], None],
    ) -> Coroutine[Any, Any, int]: ...


def run_process(
    name: str,
    serve: Serve,
    files: tuple[str, ...],
    overrides: tuple[str, ...],
    stop_on_eof: bool,
) -> int:
    """Load the settings, run ``serve`` until a signal or the end of standard input, and translate
    errors: 78 for a wrong configuration, 1 for anything else that farflow foresees."""
    from transport.runtime.config import load_config
    from transport.runtime.logs import configure_logging
    from transport.runtime.origin import EXIT_CONFIG, verify_origin

    verify_origin()
    try:
        config = load_config(SchedulerConfig, files, overrides).value
        as_json = {"json": True, "console": False}.get(config.log.format)
        configure_logging(config.log.level, as_json, component=name)
        return asyncio.run(_until_stopped(serve, config, stop_on_eof))
    except FarflowError as error:
        click.echo(f"{name}: {error}", err=True)
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED


async def _until_stopped(serve: Serve, config: SchedulerConfig, stop_on_eof: bool) -> int:
    from transport.runtime.shutdown import ShutdownSignal, stop_on_stdin_eof

    stop = asyncio.Event()
    with ShutdownSignal() as asked:

        async def wait() -> None:
            await asked.wait()
            stop.set()

        tasks = [asyncio.create_task(wait())]
        if stop_on_eof:
            tasks.append(asyncio.create_task(stop_on_stdin_eof(asked)))
        try:
            return await serve(config, stop=stop, on_ready=_say_ready)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _say_ready(facts: dict[str, Any]) -> None:
    click.echo(json.dumps(facts))


def with_system(serve: Callable[..., Coroutine[Any, Any, int]]) -> Serve:
    """``serve`` with real links, the machine's clock and unrepeatable randomness."""

    async def on_this_machine(
        config: SchedulerConfig, *, stop: asyncio.Event, on_ready: Callable[[dict[str, Any]], None]
    ) -> int:
        from transport.runtime.clock import SystemClock
        from transport.zmq_links import ZmqNetwork
        from transport.zmq_socket import raise_file_limit

        raise_file_limit()
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
    """The command line of one service process."""

    @click.command(name)
    @click.option("--config", "files", multiple=True, help="TOML file; later ones win.")
    @click.option("--set", "overrides", multiple=True, help="TABLE.FIELD=VALUE")
    @click.option("--stop-on-eof", is_flag=True, help="Stop when standard input ends.")
    def command(files: tuple[str, ...], overrides: tuple[str, ...], stop_on_eof: bool) -> None:
        raise SystemExit(run_process(name, with_system(serve), files, overrides, stop_on_eof))

    return command
