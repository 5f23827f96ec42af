"""Command lines of daemons: load the settings, run until told to stop, say how it ended.

What always holds: what farflow foresees ends a command with one line on standard error and an exit
status, never with a traceback; a daemon prints one line of JSON on standard output, when it is
ready, and logs to standard error; it is asked to stop by SIGTERM, SIGINT or, as a child, the end of
its standard input. Asking for help imports nothing of the daemon.

Exit status: 0 done, 1 failed, 78 wrong configuration.
"""

import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import click

from transport.errors import ConfigError, FarflowError, ModelError
from transport.runtime.origin import EXIT_CONFIG, verify_origin

if TYPE_CHECKING:
    import asyncio

    from transport.runtime.settings import DaemonConfig

EXIT_FAILED: Final = 1


C = TypeVar("C", bound="DaemonConfig")
C_contra = TypeVar("C_contra", bound="DaemonConfig", contravariant=True)


class Serve(Protocol[C_contra]):
    """Runs a daemon until ``stop``; returns its exit status. ``on_ready`` takes the facts that the
    ready line shows."""

    def __call__(
        self,
        config: C_contra,
        *,
        stop: "asyncio.Event",
        on_ready: Callable[[dict[str, Any]], None],
    ) -> Coroutine[Any, Any, int]: ...


Launch = Callable[[tuple[str, ...], tuple[str, ...], bool], int | None]
"""Given the files, the overrides and whether to stop at the end of input: the exit status of the
processes that were the daemon instead of this one, None when this one is to be it."""


@contextlib.contextmanager
def foreseen_errors(program: str) -> Iterator[None]:
    """Ends the process with what ``program`` has to say about an error that farflow foresees."""
    try:
        yield
    except (ConfigError, ModelError) as error:  # a model that does not load will not load later
        click.echo(f"{program}: {error}", err=True)
        raise SystemExit(EXIT_CONFIG) from error
    except FarflowError as error:
        click.echo(f"{program}: {error} ({error.code})", err=True)
        raise SystemExit(EXIT_FAILED) from error


def daemon_command(
    component: str,
    load: Callable[[], tuple[type[C], Serve[C]]],
    *,
    help: str,
    name: str = "run",
    launch: Launch | None = None,
) -> click.Command:
    """The command that runs a daemon. ``load`` imports its settings' type and what runs it;
    ``component`` names it in logs and errors; ``launch`` may run it in other processes."""

    @click.command(name, help=help)
    @click.option(
        "--config",
        "files",
        multiple=True,
        type=click.Path(exists=True, dir_okay=False),
        metavar="FILE",
        help="Deployment file; may repeat, later ones win.",
    )
    @click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Override table.field; may repeat.",
    )
    @click.option("--stop-on-eof", is_flag=True, help="Stop when standard input ends.")
    def command(files: tuple[str, ...], overrides: tuple[str, ...], stop_on_eof: bool) -> None:
        verify_origin()
        with foreseen_errors(component):
            status = None if launch is None else launch(files, overrides, stop_on_eof)
            if status is None:
                status = _run(component, load, files, overrides, stop_on_eof)
        raise SystemExit(status)

    return command


def _run(
    component: str,
    load: Callable[[], tuple[type[C], Serve[C]]],
    files: tuple[str, ...],
    overrides: tuple[str, ...],
    stop_on_eof: bool,
) -> int:
    import asyncio

    from transport.runtime.config import load_config
    from transport.runtime.logs import configure_logging

    config_type, serve = load()
    config = load_config(config_type, files, overrides).value
    as_json = {"json": True, "console": False}.get(config.log.format)
    configure_logging(config.log.level, as_json, component=component)
    return asyncio.run(_until_stopped(serve, config, stop_on_eof))


async def _until_stopped(serve: Serve[C], config: C, stop_on_eof: bool) -> int:
    import asyncio

    from transport.runtime.shutdown import ShutdownSignal, Stop, stop_on_stdin_eof

    stop = Stop()
    with ShutdownSignal() as asked:
        asked.on_again = stop.again.set

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
    import json

    click.echo(json.dumps(facts))
