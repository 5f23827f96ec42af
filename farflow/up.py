"""``farflow up``: one file, one machine, from nothing to a trained model and a summary.

The first Ctrl-C stops everything in order within ``local.stop_s`` and exits with status 0; what was
done is durable and ``--resume FOLDER`` goes on with it. A second one kills the children and leaves
at once; whatever they had started sees its standard input close and stops.
"""

import asyncio
import contextlib
import json
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
import structlog
from rich.console import Console
from rich.live import Live

from farflow import view
from farflow.local import LocalDeployment
from farflow.plots import draw, plots_available, read_metrics
from farflow.run_file import run_spec
from farflow.run_folder import RunFolder, new_run_folder, open_run_folder
from farflow.summary import Lineage, RunSummary, render, summarise
from farflow.up_config import check_workflow, up_config
from farflow.watch import Watch
from transport.errors import ConfigError, FarflowError, LinkError
from transport.ids import policy_id
from transport.runs import RunSpec
from transport.runtime.clock import SystemClock
from transport.runtime.config import collect
from transport.runtime.files import atomic_write
from transport.runtime.shutdown import ShutdownSignal
from transport.status import RunStatus, SchedulerStatus

POLL_S = 0.5
AGENTS_LINE_S = 10.0
"""How often plain output says what the agents do."""

_log = structlog.get_logger()


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line adds to the file."""

    overrides: tuple[str, ...] = ()
    folder: Path | None = None


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A run that has been checked and has its folder; ``data`` are the merged tables."""

    path: Path
    overrides: tuple[str, ...]
    data: dict[str, Any]
    spec: RunSpec


class _Resolved(msgspec.Struct):
    """What ``config.json`` is read back for."""

    run: RunSpec


def prepare(file: Path, options: Options) -> Prepared:
    """A new run from ``file``.

    Raises:
        ConfigError: the file is wrong; nothing was started.
    """
    data, _ = collect([file], options.overrides)
    spec = run_spec(data, file.resolve().parent)
    check_workflow(spec, *up_config(data))
    folder = _make_folder(data, spec, options)
    folder.config.write_bytes(file.read_bytes())
    folder.overrides.write_text(json.dumps(list(options.overrides)), encoding="utf-8")
    resolved = msgspec.json.encode({"run": spec, "file": data})
    atomic_write(folder.resolved, msgspec.json.format(resolved, indent=2))
    return Prepared(path=folder.path, overrides=options.overrides, data=data, spec=spec)


def prepare_resume(path: Path) -> Prepared:
    """The run in the folder ``path`` of an earlier ``up``, to go on with.

    Raises:
        ConfigError: it is not such a folder.
    """
    folder = open_run_folder(path)
    try:
        overrides = msgspec.json.decode(folder.overrides.read_bytes(), type=tuple[str, ...])
        spec = msgspec.json.decode(folder.resolved.read_bytes(), type=_Resolved).run
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"--resume {path}: what is there does not load: {error}") from error
    data, _ = collect([folder.config], overrides)
    return Prepared(path=folder.path, overrides=overrides, data=data, spec=spec)


def _make_folder(data: Mapping[str, Any], spec: RunSpec, options: Options) -> RunFolder:
    if options.folder is None:
        config, _ = up_config(dict(data))
        return new_run_folder(Path(config.local.runs), spec.name)
    if options.folder.is_dir() and any(options.folder.iterdir()):
        raise ConfigError(f"--folder {options.folder}: not empty; use --resume to go on with a run")
    folder = RunFolder(options.folder)
    try:
        for part in (folder.logs, folder.state, folder.models):
            part.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--folder {options.folder}: {error.strerror}; choose another") from error
    return folder


async def up(run: Prepared, *, plain: bool) -> int:
    """Run it to its end; returns the exit status (0, or 1 when something failed)."""
    config, agents = up_config(run.data)
    folder = RunFolder(run.path)
    console = Console()
    if not console.is_terminal:
        console = Console(width=view.PLAIN_WIDTH)
    clock = SystemClock()
    started, began_s = clock.monotonic_s(), clock.wall_s()
    plain = plain or not console.is_terminal
    with folder.lock(), ShutdownSignal() as stop:
        # As text: a notice quotes a log, whose brackets are not markup.
        notice = partial(console.print, markup=False, highlight=False)
        deployment = LocalDeployment(
            folder, run.overrides, config, agents, run.spec, on_notice=notice
        )
        click.echo(f"run folder: {folder.path}")

        def leave() -> None:
            deployment.kill()
            click.echo(f"left at once; go on with: farflow up --resume {folder.path}")

        stop.before_leaving = leave
        status: SchedulerStatus | None = None
        try:
            watched = asyncio.ensure_future(_watch(deployment, console, clock, plain=plain))
            stopped = asyncio.ensure_future(stop.wait())
            first: set[asyncio.Future[Any]] = {watched, stopped, deployment.failure}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if deployment.failure.done() and not watched.done():
                click.echo(f"error: {deployment.failure.result()}", err=True)
                await _cancel(watched)
                click.echo(f"once that is mended: farflow up --resume {folder.path}", err=True)
                return 1
            if watched.done():
                status = watched.result()
            else:
                click.echo("stopping: agents hand back, the trainer saves; again to leave at once")
                await _cancel(watched)
            stopped.cancel()
        finally:
            await deployment.stop(config.local.stop_s)
        if status is None:
            click.echo(f"stopped; go on with: farflow up --resume {folder.path}")
            return 0
        summary = finish(deployment, status, clock.monotonic_s() - started, began_s)
        console.print(render(summary))
        click.echo(f"results: {folder.path}")
        return 1 if summary.problems else 0


async def _cancel(task: "asyncio.Future[Any]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, FarflowError):
        await task


async def _watch(
    deployment: LocalDeployment,
    console: Console,
    clock: SystemClock,
    *,
    plain: bool,
) -> SchedulerStatus:
    """Start, submit and show the run; returns the status once it has ended and settled."""
    from scheduler.operator import Operator

    await deployment.start()
    watch = Watch(deployment.folder.scheduler_metrics(deployment.spec.name))
    settled_by: float | None = None
    said_agents = clock.monotonic_s()
    said_dashboard = False
    live = Live(console=console, refresh_per_second=4, transient=True) if not plain else None
    async with Operator(deployment.transport(), deployment.operator_key) as operator:
        await operator.submit(deployment.spec)
        with live if live is not None else contextlib.nullcontext():
            while True:
                try:
                    status = await operator.status()
                except LinkError as error:
                    # The scheduler is being restarted; it will be back, or the deployment fails.
                    _log.info("up.no_status", reason=str(error))
                    await asyncio.sleep(POLL_S)
                    continue
                now = clock.monotonic_s()
                if not said_dashboard and (address := deployment.dashboard()):
                    said_dashboard = True
                    console.print(
                        dashboard_line(deployment.folder, address, secret=console.is_terminal),
                        markup=False,
                        highlight=False,
                        soft_wrap=True,
                    )
                lines = watch.update(status, now)
                if live is not None:
                    live.update(
                        view.screen(
                            status,
                            watch.rewards(),
                            watch.rates,
                            f"{deployment.folder.path} · Ctrl-C stops in order",
                        )
                    )
                else:
                    for line in lines:
                        click.echo(line)
                    if now - said_agents >= AGENTS_LINE_S:
                        said_agents = now
                        click.echo(view.agents_line(status.agents, watch.rates))
                run = next(r for r in status.runs if r.name == deployment.spec.name)
                deployment.tend(run.state)
                if run.state == "finished":
                    settled_by = settled_by or now + deployment.up.local.settle_s
                    if now >= settled_by or settled(status, run, deployment):
                        return status
                await asyncio.sleep(POLL_S)


def dashboard_line(folder: RunFolder, address: str, *, secret: bool) -> str:
    """Where the dashboard is; with the token in it only where a person reads it, since what else
    reads our output may keep it."""
    file = folder.gateway / "local-token"
    if secret:
        with contextlib.suppress(OSError):
            return f"dashboard: {address}#token={file.read_text(encoding='ascii').strip()}"
    return f"dashboard: {address} (token: {file})"


def settled(status: SchedulerStatus, run: RunStatus, deployment: LocalDeployment) -> bool:
    """Every agent that runs here has joined and serves the head version, and the trainers have
    exported their models."""
    if run.reason.startswith("failed"):
        return True
    present = {agent.name: agent for agent in status.agents if agent.state not in ("gone", "lost")}
    return (
        deployment.trainers_left() == deployment.trained
        and present.keys() >= set(deployment.agents_here())
        and all(
            agent.digests.get(policy.policy) == policy.head_digest
            for agent in present.values()
            for policy in run.policies
        )
    )


def finish(
    deployment: LocalDeployment, status: SchedulerStatus, wall_s: float, began_s: float = 0.0
) -> RunSummary:
    """Collect results in the run folder; the lineage is read from the trainers' checkpoints. We
    run since ``began_s`` (wall clock), for ``wall_s``; what was recorded before is of an earlier
    life."""
    from cloud_trainer.checkpoints import lineage_ids

    folder, spec = deployment.folder, deployment.spec
    lineages: dict[str, Lineage | None] = {}
    for name in deployment.trained:
        home = folder.trainer(name)
        policy = policy_id(spec.name, name)
        lineages[policy] = None
        with contextlib.suppress(FarflowError, OSError):  # the summary says that it is missing
            lineages[policy] = lineage_ids(home)
        model = home / "model"
        if model.is_dir():
            shutil.copytree(model, folder.models / name, dirs_exist_ok=True)
    metrics = folder.scheduler_metrics(spec.name)
    records: list[dict[str, Any]] = []
    if metrics.is_file():
        shutil.copyfile(metrics, folder.metrics)
        records = read_metrics(folder.metrics)
    steps = [r for r in records if r.get("type") == "step"]
    timed, resumed = training_time(records, began_s)
    summary = summarise(
        status,
        spec.name,
        wall_s=wall_s,
        training_s=timed,
        resumed=resumed,
        lineages=lineages,
    )
    folder.summary.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2))
    if plots_available() and steps:
        draw(records, folder.path)
    elif steps:
        click.echo("no plots: pip install 'farflow[plots]'", err=True)
    return summary


def training_time(
    records: Sequence[Mapping[str, Any]], began_s: float
) -> tuple[float | None, bool]:
    """Seconds from the first to the last step of those ``records`` that are not older than
    ``began_s`` (wall clock), None with less than two; and whether any record is older."""
    here = [r for r in records if r.get("wall_s", began_s) >= began_s]
    steps = [r["wall_s"] for r in here if r.get("type") == "step" and "wall_s" in r]
    return (steps[-1] - steps[0] if len(steps) > 1 else None), len(here) < len(records)
