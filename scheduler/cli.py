"""The command line of the scheduler daemon."""

import click


@click.group("scheduler")
def scheduler_group() -> None:
    """The rollout scheduler daemon."""


@scheduler_group.command("run")
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
    """Run the scheduler with its trajectory log and weight store.

    Prints one line of JSON with the three ports once they can be reached; logs go to standard
    error. SIGTERM and Ctrl-C stop it in order.
    """
    from scheduler.daemon import run_daemon
    from scheduler.service_main import run_process

    raise SystemExit(run_process("scheduler", run_daemon, files, overrides, stop_on_eof))
