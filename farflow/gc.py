"""``farflow gc``: removes what is older or larger than ``[retention]`` allows.

What always holds: without ``--apply`` nothing is changed; a folder is claimed before it is removed,
so that nothing is started in it meanwhile; below the folders that are named no symbolic link is
followed, so that nothing elsewhere is removed; what is no folder of `farflow up` or of a scheduler
is not looked into.
"""

import contextlib
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

import click

from farflow.options import config_option, json_option, set_option
from transport.errors import ConfigError

if TYPE_CHECKING:
    from farflow.gc_plan import Found, Kind
    from scheduler.config import SchedulerTable

_TAIL_BYTES: Final = 4096
_TERM: Final = "term-*"
_STORE: Final = "scheduler.sqlite"
_WEIGHTS: Final = "weight-store/versions"


@click.command()
@config_option
@set_option
@click.option(
    "--runs",
    "runs_folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folders of `farflow up`; the default is local.runs of the file, or runs.",
)
@click.option(
    "--apply", "applies", is_flag=True, help="Remove; without it, only say what would be."
)
@json_option
def gc(
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    runs_folder: Path | None,
    applies: bool,
    as_json: bool,
) -> None:
    """Remove what is older or larger than [retention] allows, or say what that would be.

    Looks at the folders of `farflow up`, and in scheduler.folder at records of finished runs, event
    logs of earlier terms, turns of attempts that never ended, weights of finished runs, and logs.
    What daemons bound by themselves is shown with the setting that bounds it. Exit status 1 when
    something could not be removed.
    """
    from farflow.deployment import DeploymentConfig
    from farflow.gc_plan import plan
    from farflow.up_config import LocalTable
    from transport.runtime.clock import SystemClock
    from transport.runtime.config import collect, convert

    data, origins = collect(files, overrides)
    own = {k: data[k] for k in DeploymentConfig.__struct_fields__ if k in data}
    config = convert(own, DeploymentConfig)
    runs = runs_folder or Path(convert(data.get("local", {}), LocalTable, "local").runs)
    scheduler = _is_schedulers(Path(config.scheduler.folder))
    if not scheduler and "scheduler.folder" in origins:
        raise ConfigError(
            f"scheduler.folder {config.scheduler.folder}: no scheduler has run there (it holds no"
            f" {_STORE}); give the deployment's file with --config FILE"
        )
    if not (runs.is_dir() or scheduler):
        raise ConfigError(
            f"no such folder: {runs}, nor scheduler.folder {config.scheduler.folder};"
            " give the deployment's file with --config FILE, or --runs FOLDER"
        )
    now_s = SystemClock().wall_s()
    things = list(_run_folders(runs, now_s))
    if scheduler:
        things += _scheduler(config.scheduler, now_s)
    verdicts = plan(things, config.retention)
    failures = 0
    freed_bytes = 0
    for verdict in verdicts:
        problem = ""
        if applies and verdict.removes:
            problem = _remove(verdict.found, Path(config.scheduler.folder))
            failures += bool(problem)
        freed_bytes += verdict.found.size_bytes if verdict.removes and not problem else 0
        _say(verdict.found, verdict.removes, problem or verdict.reason, as_json=as_json)
    if not as_json:
        from farflow.view import human_bytes

        said = "removed" if applies else "would be removed (--apply does it)"
        click.echo(f"{human_bytes(freed_bytes)} {said}")
    sys.exit(1 if failures else 0)


def _say(found: "Found", removes: bool, reason: str, *, as_json: bool) -> None:
    from farflow.view import human_bytes
    from farflow.words import human_age

    if as_json:
        facts = {"kind": found.kind, "path": str(found.path), "size_bytes": found.size_bytes}
        facts |= {"idle_s": round(found.idle_s), "removes": removes, "reason": reason}
        click.echo(json.dumps(facts))
        return
    mark = "remove" if removes else "keep"
    size, age = human_bytes(found.size_bytes), human_age(found.idle_s)
    click.echo(f"{mark:<6} {found.kind:<10} {size:>9} {age:>7}  {found.path}  ({reason})")


def _run_folders(runs: Path, now_s: float) -> Iterator["Found"]:
    from farflow.gc_plan import Found
    from farflow.run_folder import is_run_folder

    for path in _children(runs):
        if is_run_folder(path) and (measured := _measure(path, now_s)):
            size_bytes, idle_s = measured
            yield Found("run folder", path, size_bytes, idle_s, _used_by(path))


def _scheduler(table: "SchedulerTable", now_s: float) -> Iterator["Found"]:
    from farflow.gc_files import LINKED, link_below
    from farflow.gc_plan import Found

    folder = Path(table.folder)
    used = _used_by(folder)
    states, unknown = _states(folder)
    inner: tuple[tuple[str, Kind], ...] = (
        ("runs", "record"),
        ("events", "event log"),
        ("trajectory-log", "partial"),
        (_WEIGHTS, "weights"),
        ("logs", "log"),
    )
    for name, kind in inner:
        if (folder / name).is_symlink():
            yield Found(kind, folder / name, 0, 0.0, LINKED)
            continue
        found = sorted(_things(folder / name, kind))
        for path in found:
            measured = _measure(path, now_s)
            if measured is None:
                continue
            size_bytes, idle_s = measured
            holds = used
            if link_below(folder, path):
                holds = LINKED
            elif kind == "record":
                holds = "" if _has_ended(path) else "the run has not ended"
            elif kind == "event log" and path == found[-1]:
                holds = "the newest term"
            elif kind == "weights":
                holds = used or unknown or _wanted(unquote(path.name), states)
            yield Found(kind, path, size_bytes, idle_s, holds)
    for name, setting in (
        ("trajectory-log/bodies", "scheduler.trajectory_disk_bytes"),
        ("weight-store", "scheduler.keep_versions_max of live runs"),
        (_STORE, "what live runs and remembered results need"),
    ):
        if measured := _measure(folder / name, now_s):
            size_bytes, idle_s = measured
            yield Found("bounded", folder / name, size_bytes, idle_s, f"bounded by {setting}")


def _things(folder: Path, kind: "Kind") -> Iterator[Path]:
    """What there is of a kind in one of a scheduler's folders."""
    if kind == "record":
        for run in _children(folder):
            if (run / "metrics.jsonl").is_file():
                yield run / "metrics.jsonl"
    elif kind == "event log":
        yield from (path for path in _children(folder) if path.match(_TERM))
    elif kind == "weights":
        yield from _children(folder)
    elif kind == "log":
        yield from (path for path in folder.glob("*.log") if path.is_file())
    else:
        for where, _, names in os.walk(folder):  # ``glob`` fails where a folder goes meanwhile
            yield from (Path(where, name) for name in names if name.endswith(".turns"))


def _children(folder: Path) -> list[Path]:
    try:
        found = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(path for path in found if path.is_dir() and not path.is_symlink())


def _is_schedulers(folder: Path) -> bool:
    return (folder / _STORE).is_file()


def _measure(path: Path, now_s: float) -> tuple[int, float] | None:
    """Bytes of files at and below ``path``, and seconds since the last change of any of them; None
    where it is gone."""
    try:
        top = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    size_bytes, newest_s = top.st_size if stat.S_ISREG(top.st_mode) else 0, top.st_mtime
    for where, _, names in os.walk(path):
        for name in names:
            try:
                status = os.lstat(os.path.join(where, name))
            except OSError:  # gone meanwhile
                continue
            size_bytes += status.st_size
            newest_s = max(newest_s, status.st_mtime)
    return size_bytes, max(0.0, now_s - newest_s)


def _used_by(folder: Path) -> str:
    from transport.errors import StoreError
    from transport.runtime.files import folder_holder

    try:
        holder = folder_holder(folder)
    except StoreError as error:
        return str(error)
    return "" if holder is None else f"in use by process {holder}"


def _has_ended(record: Path) -> bool:
    """Whether the last line of a record says that its run has ended; one that cannot be read says
    nothing."""
    try:
        with record.open("rb") as file:
            file.seek(max(0, record.stat().st_size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).splitlines()
        last = json.loads(lines[-1]) if lines else None
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(last, dict) and last.get("type") == "end"


def _states(folder: Path) -> tuple[dict[str, str], str]:
    """Of all runs, and why they are not known, "" where they are."""
    from scheduler.run_states import run_states
    from transport.errors import StoreError

    try:
        return run_states(folder), ""
    except StoreError as error:
        return {}, str(error)


def _wanted(policy: str, states: dict[str, str]) -> str:
    """Why the weights of a policy have to stay; "" if they need not."""
    state = states.get(policy.partition("/")[0])
    if state == "finished":
        return ""
    return "the run has not ended" if state else "of no run in scheduler.sqlite"


def _remove(found: "Found", scheduler: Path) -> str:
    """Why it could not be removed, "" when it is gone. What a running daemon may have open goes
    while the folder ``scheduler`` is ours: one may have started since we looked."""
    from farflow.gc_files import remove_below
    from transport.errors import StoreError
    from transport.runtime.files import borrowed_folder

    run = found.kind == "run folder"
    try:
        claimed = found.path if run else scheduler
        # The record of a finished run is closed, whoever runs.
        with contextlib.nullcontext() if found.kind == "record" else borrowed_folder(claimed):
            remove_below(found.path.parent if run else scheduler, found.path)
    except (OSError, StoreError) as error:
        return f"not removed: {error}"
    return ""
