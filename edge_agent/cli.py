"""The command line of the agent daemon."""

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from edge_agent.config import AgentConfig

EXIT_CONFIG = 78
EXIT_FAILED = 1


@click.group("agent")
def agent_group() -> None:
    """The agent on a remote machine: generates rollouts."""


@agent_group.command("run")
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
def run(files: tuple[str, ...], overrides: tuple[str, ...], stop_on_eof: bool) -> None:
    """Generate rollouts for the scheduler until told to stop.

    Prints one line of JSON once it is on its way to the scheduler; logs go to standard error.
    SIGTERM and Ctrl-C finish what runs, or hand it back within [agent].drain_s, and leave.
    """
    import asyncio

    from edge_agent.config import AgentConfig
    from transport.errors import ConfigError, FarflowError
    from transport.runtime.config import load_config
    from transport.runtime.logs import configure_logging
    from transport.runtime.origin import verify_origin

    verify_origin()
    try:
        config = load_config(AgentConfig, files, overrides).value
        as_json = {"json": True, "console": False}.get(config.log.format)
        configure_logging(config.log.level, as_json, component="agent")
        status = asyncio.run(_until_stopped(config, stop_on_eof))
    except FarflowError as error:
        click.echo(f"agent: {error}", err=True)
        status = EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
    raise SystemExit(status)


async def _until_stopped(config: "AgentConfig", stop_on_eof: bool) -> int:
    import asyncio

    from edge_agent.daemon import run_daemon
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
            return await run_daemon(config, stop=stop, on_ready=_say_ready)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _say_ready(facts: dict[str, Any]) -> None:
    import json

    click.echo(json.dumps(facts))
