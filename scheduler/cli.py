"""The command line of the scheduler daemon."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from transport.runtime.daemon_cli import Serve, daemon_command, foreseen_errors
from transport.runtime.service_commands import Needs, install_command, uninstall_command

if TYPE_CHECKING:
    from scheduler.config import SchedulerConfig


@click.group("scheduler")
def scheduler_group() -> None:
    """The rollout scheduler daemon."""


def _load() -> "tuple[type[SchedulerConfig], Serve[SchedulerConfig]]":
    from scheduler.config import SchedulerConfig
    from scheduler.daemon import run_daemon

    return SchedulerConfig, run_daemon


scheduler_group.add_command(
    daemon_command(
        "scheduler",
        _load,
        help="""Run the scheduler with its trajectory log and weight store.

        Prints one line of JSON with the three ports once they can be reached; logs go to standard
        error, the dashboard's address among them (gateway.ready). SIGTERM and Ctrl-C stop it in
        order.
        """,
    )
)


def _needs(files: "tuple[Path, ...]") -> Needs:
    from scheduler.config import SchedulerConfig
    from transport.runtime.config import load_config

    config = load_config(SchedulerConfig, files).value
    # Keys: tokens, revocations and gateways' keys are written there.
    return Needs((config.scheduler.folder, config.transport.keys), stop_s=90.0)


scheduler_group.add_command(
    install_command(
        "scheduler",
        _needs,
        help="""Have systemd keep the scheduler running; again, it is an upgrade.

        Relative paths in its files count from the folder in which this is started.
        """,
    )
)
scheduler_group.add_command(uninstall_command("scheduler", 900.0))

_config = click.option(
    "--config",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Deployment file; may repeat, later ones win.",
)
_set = click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="May repeat.")
_json = click.option("--json", "as_json", is_flag=True, help="One JSON object.")


@scheduler_group.command("backup")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@_config
@_set
@click.option("--keys", "with_keys", is_flag=True, help="The folder of keys too: secrets.")
@_json
def backup(
    file: Path, files: tuple[str, ...], overrides: tuple[str, ...], with_keys: bool, as_json: bool
) -> None:
    """Write the scheduler's rows to the new FILE, while it runs.

    Bodies of trajectories and weights are listed in it, not copied.
    """
    from scheduler.backup import back_up
    from scheduler.config import SchedulerConfig
    from transport.runtime.clock import SystemClock
    from transport.runtime.config import load_config

    with foreseen_errors("farflow scheduler backup"):
        config = load_config(SchedulerConfig, files, overrides).value
        keys = Path(config.transport.keys) if with_keys else None
        folder, wall_s = Path(config.scheduler.folder), SystemClock().wall_s()
        found = back_up(folder, file, wall_s=wall_s, keys=keys)
    facts = {"file": str(file), "term": found.term, "runs": found.runs, "keys": found.keys}
    facts |= {"bodies": len(found.bodies), "versions": len(found.versions)}
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(
        f"{file}: term {found.term}, {len(found.runs)} run(s), {found.keys} file(s) of keys;"
        f" speaks of {len(found.bodies)} bodies and {len(found.versions)} versions"
    )


@scheduler_group.command("restore")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_config
@_set
@click.option("--replace", is_flag=True, help="Move aside the scheduler that is there.")
@click.option("--keys", "with_keys", is_flag=True, help="Write the keys that are missing.")
@click.option(
    "--readmit",
    multiple=True,
    metavar="PATH",
    help="With --keys: let in again whom somebody took out, as http/ada.toml; may repeat.",
)
@_json
def restore(
    file: Path,
    files: tuple[str, ...],
    overrides: tuple[str, ...],
    replace: bool,
    with_keys: bool,
    readmit: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make the stopped scheduler that of the backup FILE.

    Then start it, and start its trainers again: agents go on by themselves.
    """
    from scheduler.backup import restore as restore_backup
    from scheduler.config import SchedulerConfig
    from transport.runtime.config import load_config

    if readmit and not with_keys:
        raise click.UsageError("--readmit is of no use without --keys")
    with foreseen_errors("farflow scheduler restore"):
        config = load_config(SchedulerConfig, files, overrides).value
        keys = Path(config.transport.keys) if with_keys else None
        folder = Path(config.scheduler.folder)
        done = restore_backup(file, folder, replace=replace, keys=keys, readmit=readmit)
    facts = {"folder": str(folder), "term": done.term, "moved_to": done.moved_to}
    facts |= {"runs": done.backup.runs, "keys_written": done.keys.written}
    facts |= {"keys_kept_out": done.keys.kept_out, "keys_revoked": done.keys.revoked}
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(f"{folder}: restored; its next start begins term {done.term + 1}")
    if done.moved_to:
        click.echo(f"what was there is in {done.moved_to}")
    for path in done.keys.revoked:
        click.echo(f"stays out: {path}: its key was revoked")
    for path in done.keys.kept_out:
        click.echo(f"stays out: {path}: was taken out since the backup, unless --readmit names it")
    click.echo("next: start the scheduler, then start its trainers again")
