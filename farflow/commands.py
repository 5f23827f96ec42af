"""The commands that belong to no daemon: ``up``, ``status``, ``run``, ``config``, ``wire``,
``doctor``. Each imports what it needs when it runs."""

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from farflow.connect import with_operator
from farflow.lazy import LazyGroup
from farflow.options import FILE, config_option, json_option, key_option, say_done, set_option
from transport.errors import ConfigError

if TYPE_CHECKING:
    from scheduler.operator import Operator
    from transport.runs import RunSpec


@click.command()
@click.argument("file", type=FILE, required=False)
@set_option
@click.option("--plain", is_flag=True, help="Print lines instead of the live view.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Put the run here instead of below local.runs.",
)
@click.option(
    "--resume",
    "resume_folder",
    metavar="FOLDER",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Go on with the run in FOLDER; takes no FILE.",
)
@click.option(
    "--mode",
    type=click.Choice(["async", "sync"]),
    help="Set run.mode; sync makes all wait for each other before every step, to compare with.",
)
@click.option("-v", "--verbose", is_flag=True, help="Log what happens to the processes.")
def up(
    file: Path | None,
    overrides: tuple[str, ...],
    plain: bool,
    folder: Path | None,
    resume_folder: Path | None,
    mode: str | None,
    verbose: bool,
) -> None:
    """Run scheduler, links, agents and trainer of FILE on this machine until it has learnt."""
    from farflow.up import Options, prepare, prepare_resume
    from farflow.up import up as run_up
    from transport.runtime.logs import configure_logging

    configure_logging("info" if verbose else "error", component="up")
    if resume_folder is not None:
        if file is not None or overrides or folder is not None or mode is not None:
            raise click.UsageError("--resume takes no FILE, --set, --folder or --mode")
        prepared = prepare_resume(resume_folder)
    elif file is None:
        raise click.UsageError("name a FILE, for example examples/arithmetic.toml, or --resume")
    else:
        if mode is not None:
            overrides = (*overrides, f"run.mode={mode}")
        prepared = prepare(file, Options(overrides=overrides, folder=folder))
    sys.exit(asyncio.run(run_up(prepared, plain=plain)))


@click.command()
@config_option
@set_option
@key_option
@click.option("--all", "every", is_flag=True, help="Finished runs and gone agents in full, too.")
@click.option("--json", "as_json", is_flag=True, help="The whole status as JSON.")
def status(
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
    every: bool,
    as_json: bool,
) -> None:
    """Show what a scheduler and its agents are doing."""
    import msgspec
    from rich.console import Console

    from farflow.view import PLAIN_WIDTH, overview

    async def ask(operator: "Operator") -> Any:
        return await operator.status()

    found = with_operator(files, overrides, key, ask)
    if as_json:
        click.echo(msgspec.json.encode(found))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    console.print(overview(found, every=every))


@click.group(
    "run",
    cls=LazyGroup,
    lazy={
        "history": ("farflow.runs_commands:history", "List recorded runs, without a scheduler."),
        "compare": ("farflow.runs_commands:compare", "Compare recorded runs."),
    },
)
def run_group() -> None:
    """Submit, list, pause, resume and stop runs; list and compare recorded ones."""


@run_group.command("submit")
@click.argument("file", type=FILE)
@config_option
@set_option
@key_option
@json_option
def run_submit(
    file: Path,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
    as_json: bool,
) -> None:
    """Submit the run in FILE; submitting the same one again is harmless."""
    from farflow.run_checks import check_tasks
    from farflow.run_file import RUN_TABLES, run_spec
    from transport.runtime.config import collect

    data, _ = collect([file], [o for o in overrides if o.split(".")[0] in RUN_TABLES])
    spec = run_spec(data, file.resolve().parent)
    check_tasks(spec)

    async def submit(operator: "Operator") -> str:
        return await operator.submit(spec)

    said = with_operator(files or (file,), overrides, key, submit)
    if as_json:
        say_done(spec.name, "submit", said, as_json=True)
    else:
        click.echo(f"{spec.name}: {said}" if said else f"submitted {spec.name}")


@run_group.command("ls")
@config_option
@set_option
@key_option
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
def run_ls(
    files: tuple[Path, ...], overrides: tuple[str, ...], key: Path | None, as_json: bool
) -> None:
    """List the runs of a scheduler."""

    async def ask(operator: "Operator") -> Any:
        return await operator.status()

    runs = with_operator(files, overrides, key, ask).runs
    if as_json:
        rows = [{"name": r.name, "state": r.state, "reason": r.reason} for r in runs]
        click.echo(json.dumps(rows))
        return
    from farflow.listing import print_list

    shown = [
        (r.name, r.state, ", ".join(f"{p.policy} {p.step}/{p.steps}" for p in r.policies), r.reason)
        for r in runs
    ]
    print_list(("run", "state", "steps", "reason"), shown)
    if not runs:
        click.echo("no runs", err=True)


def _command(verb: Literal["pause", "resume", "stop", "abandon"], text: str) -> None:
    @run_group.command(verb, help=text)
    @click.argument("run")
    @config_option
    @set_option
    @key_option
    @json_option
    def command(
        run: str,
        files: tuple[Path, ...],
        overrides: tuple[str, ...],
        key: Path | None,
        as_json: bool,
    ) -> None:
        async def say(operator: "Operator") -> str:
            return await operator.command(run, verb)

        said = with_operator(files, overrides, key, say, subject=run)
        say_done(run, verb, said, as_json=as_json)


_command("pause", "Place no new jobs of RUN; what runs goes on.")
_command("resume", "Go on with a paused RUN.")
_command("stop", "Finish the step in hand, save and export, and end RUN.")
_command("abandon", "End RUN now, without waiting for a trainer to save and export.")


@click.group("config")
def config_group() -> None:
    """Check a file, or show it resolved."""


@config_group.command("check")
@click.argument("file", type=FILE)
@set_option
@json_option
def config_check(file: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check every table of FILE without starting anything.

    Modules of your own that it names are imported, as a daemon would here, and what they hold is
    checked like what ships; those that cannot be imported here are named and refused by nobody.
    Task sources are opened, and model folders looked at, without reading weights.
    """
    values, _, unchecked = _resolve(file, overrides, own_code=True)
    facts = {"file": str(file), "valid": True, "settings": len(values), "not_checked": unchecked}
    if as_json:
        click.echo(json.dumps(facts))
        return
    for text in unchecked:
        click.echo(f"warning: not checked here: {text}", err=True)
    click.echo(f"{file}: ok" + (", but for what was not checked here" if unchecked else ""))


@config_group.command("show")
@click.argument("file", type=FILE)
@set_option
@json_option
def config_show(file: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print every value of FILE, defaults included, and where it comes from."""
    values, origins, _ = _resolve(file, overrides)
    for key, value in values:
        origin = origins.get(key, "default")
        if as_json:
            click.echo(json.dumps({"key": key, "value": value, "origin": origin}))
        else:
            click.echo(f"{key} = {json.dumps(value)}  # {origin}")


@config_group.command("reference")
def config_reference() -> None:
    """Print the reference of every table and key (docs/configuration.md)."""
    from farflow.reference import reference

    click.echo(reference(), nl=False)


@config_group.command("metrics")
def config_metrics() -> None:
    """Print the table of every metric and alert (docs/metrics.md)."""
    from transport.telemetry import markdown

    click.echo(markdown(), nl=False)


@config_group.command("alerts")
def config_alerts() -> None:
    """Print every alert of the metrics as a rule of Prometheus (examples/alerts.yml)."""
    from transport.telemetry import alert_rules

    click.echo(alert_rules(), nl=False)


def _resolve(
    file: Path, overrides: tuple[str, ...], *, own_code: bool = False
) -> tuple[list[tuple[str, Any]], dict[str, str], list[str]]:
    """Every dotted key and value of a file that passes all checks, the origins, and with
    ``own_code`` what of it could not be checked here."""
    from transport.runtime.config import collect

    data, origins = collect([file], overrides)
    try:
        values, spec = _checked(file, data)
        if not own_code:
            return values, origins, []
        from farflow.own_code import check_own_code
        from farflow.run_checks import check_models, check_tasks

        unchecked = check_own_code(data, spec)
        if spec is not None:
            check_models(spec)
            unchecked += check_tasks(spec)
        return values, origins, unchecked
    except ConfigError as error:
        raise ConfigError(f"{file}{' with --set' if overrides else ''}: {error}") from error


def _checked(file: Path, data: dict[str, Any]) -> "tuple[list[tuple[str, Any]], RunSpec | None]":
    """Every dotted key and value, and the run if the file has one. Raises ConfigError for the
    first key that is wrong."""
    import msgspec

    from cloud_trainer.config import TrainerConfig
    from edge_agent.config import AgentConfig
    from farflow.deployment import DeploymentConfig
    from farflow.run_file import RUN_TABLES, RunTables, run_spec
    from farflow.up_config import UpConfig, check_workflow, up_config
    from transport.relay_config import RelayConfig
    from transport.runtime.config import convert

    kinds: list[type[msgspec.Struct]] = [DeploymentConfig, AgentConfig, TrainerConfig, RelayConfig]
    spec = None
    if any(name in data for name in RUN_TABLES):
        spec = run_spec(data, file.resolve().parent)
        kinds.append(RunTables)
    if "local" in data:
        config, agents = up_config(data)
        if spec is not None:
            check_workflow(spec, config, agents)
        kinds.append(UpConfig)
    merged: dict[str, Any] = {}
    for kind in kinds:
        own = {name: data[name] for name in kind.__struct_fields__ if name in data}
        merged.update(msgspec.to_builtins(convert(own, kind)))
    return _leaves(merged), spec


def _leaves(data: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for key, value in sorted(data.items()):
        if isinstance(value, dict) and value:
            leaves.extend(_leaves(value, f"{prefix}{key}."))
        else:
            leaves.append((f"{prefix}{key}", value))
    return leaves


@click.group("wire")
def wire_group() -> None:
    """Look at recorded messages."""


@wire_group.command("decode")
@click.argument("file", type=FILE)
def wire_decode(file: Path) -> None:
    """Print the message in FILE (length-prefixed frames, as in tests/golden)."""
    from farflow.wire import decode_file

    click.echo(decode_file(file))


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Check this installation: packages, their origin, optional parts."""
    from farflow.doctor import report

    lines, healthy = report()
    if as_json:
        about, *found = lines
        states = [
            dict(zip(("state", "text"), line.split(maxsplit=1), strict=True)) for line in found
        ]
        click.echo(json.dumps({"healthy": healthy, "about": about, "findings": states}))
    else:
        for line in lines:
            click.echo(line)
    sys.exit(0 if healthy else 1)
