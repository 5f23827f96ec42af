"""``farflow weights``: which versions a weight store has, who holds them, and are they sound.

The commands read the store's folder and change nothing in it, so they may run beside the store.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farflow.options import FILE, config_option, set_option
from farflow.words import counted
from transport.errors import ConfigError, FarflowError, StoreError

if TYPE_CHECKING:
    from scheduler.config import SchedulerConfig
    from scheduler.weight_reading import StoreReader
    from transport.status import SchedulerStatus

_FOLDER = click.Path(file_okay=False, path_type=Path)
_ANSWER_S = 3.0

_store = click.option(
    "--store",
    type=_FOLDER,
    metavar="FOLDER",
    help="The scheduler's folder, or its weight-store; the default is scheduler.folder.",
)
_json = click.option("--json", "as_json", is_flag=True, help="The same as JSON.")


@click.group("weights")
def weights_group() -> None:
    """List, show, compare, verify and export weight versions."""


@weights_group.command("ls")
@click.argument("policy", required=False)
@click.option("--all", "every", is_flag=True, help="Every version there ever was.")
@config_option
@set_option
@_store
@click.option(
    "--key", type=FILE, metavar="FILE", help="Operator key, to ask who holds which version."
)
@_json
def weights_ls(
    policy: str | None,
    every: bool,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    store: Path | None,
    key: Path | None,
    as_json: bool,
) -> None:
    """List the versions of every policy, or of POLICY, and who holds them.

    Of each policy the last 20, the older ones that the store has full weights of, and those that
    an agent holds; --all shows every one, as --json does.

    Smaller: full weights over delta, by size. Also: what the store has of the version beside the
    trainer's delta, "snapshot" for full weights, "from 0" for a delta from version 0. Who holds
    what is asked of the running scheduler, if there is one and the operator key is here.
    """
    from farflow.weights_view import held_by, print_rows, recent_rows, status_rows, store_rows
    from transport.runtime.clock import SystemClock

    config = _load(files, overrides)
    status = _ask(config, key)
    reader = None
    try:
        reader = _reader(config, store)
        shelves = [reader.shelf(policy)] if policy else reader.shelves()
    except StoreError:
        if reader is not None or status is None or store is not None:
            raise
        shelves = []  # the store is on the scheduler's host
    holders, now_s = held_by(status), SystemClock().wall_s()
    rows = [row for shelf in shelves for row in store_rows(shelf, holders, now_s)]
    if not shelves and status is not None:
        rows = [row for row in status_rows(status, holders) if policy in (None, row["policy"])]
    if as_json:
        click.echo(json.dumps(rows))
        return
    shown = rows if every else recent_rows(rows)
    print_rows(shown)
    if len(shown) < len(rows):
        click.echo(f"{counted(len(rows) - len(shown), 'older version')} not shown; see --all")


@weights_group.command("show")
@click.argument("policy")
@click.argument("version", type=click.IntRange(min=0))
@config_option
@set_option
@_store
@_json
def weights_show(
    policy: str,
    version: int,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    store: Path | None,
    as_json: bool,
) -> None:
    """Show one version: its manifest, the trainer's files and the store's, how its delta is
    coded."""
    from farflow.view import human_bytes
    from farflow.weights_view import print_fields
    from scheduler.weight_describe import describe_version

    shelf = _reader(_load(files, overrides), store).shelf(policy)
    found = describe_version(shelf, version)
    if as_json:
        click.echo(json.dumps(found))
        return
    print_fields({k: v for k, v in found.items() if k not in ("files", "made", "coders")})
    for entry in (*found["files"], *found["made"]):
        what = "file" if "base" not in entry else "made"
        base = "" if entry.get("base") is None else f", from {entry['base']}"
        where = "" if entry["kept"] else f", {'missing' if what == 'made' else 'no longer kept'}"
        click.echo(
            f"{what}\t{entry['name']}{base}\t{human_bytes(entry['size_bytes'])}, "
            f"{entry['digest']}{where}"
        )
    for coder, size in found["coders"].items():
        click.echo(f"coded\t{coder}\t{human_bytes(size)}")


@weights_group.command("diff")
@click.argument("policy")
@click.argument("old", type=click.IntRange(min=0))
@click.argument("new", type=click.IntRange(min=0))
@config_option
@set_option
@_store
@_json
def weights_diff(
    policy: str,
    old: int,
    new: int,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    store: Path | None,
    as_json: bool,
) -> None:
    """Compare two versions tensor by tensor, and show the ways from one to the other.

    Needs memory for the model twice.
    """
    from farflow.view import human_bytes
    from scheduler.weight_describe import compare, ways

    shelf = _reader(_load(files, overrides), store).shelf(policy)
    tensors, offered = compare(shelf, old, new), ways(shelf, old, new)
    if as_json:
        click.echo(json.dumps({"tensors": tensors, "ways": offered}))
        return
    for row in tensors:
        if row["changed"]:
            share = 100 * row["changed"] / row["cells"]
            click.echo(f"{row['tensor']}\t{row['changed']} of {row['cells']} ({share:.2f} %)")
    changed, cells = (sum(row[field] for row in tensors) for field in ("changed", "cells"))
    click.echo(f"all\t{changed} of {cells} ({100 * changed / max(1, cells):.2f} %)")
    for way in offered:
        click.echo(f"way\t{way['way']}\t{human_bytes(way['bytes'])}\t{way['over']}")


@weights_group.command("verify")
@click.argument("policy", required=False)
@config_option
@set_option
@_store
@_json
def weights_verify(
    policy: str | None,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    store: Path | None,
    as_json: bool,
) -> None:
    """Check every signature, file and chain of the store, or of POLICY; exit status 1 with the
    list of what is damaged and what to do.

    Needs memory for the model about twice, and reads all there is.
    """
    import msgspec

    from farflow.view import human_bytes
    from scheduler.weight_check import StoreCheck
    from transport.keys import load_signers

    config = _load(files, overrides)
    signers = Path(config.transport.keys) / "signers"
    if not signers.is_dir():
        raise ConfigError(
            f"{signers}: no such folder, and without it no signature can be checked; give the"
            " deployment's file with --config FILE, or name its keys with --set"
            " transport.keys=FOLDER"
        )
    trusted = load_signers(signers)
    reader = _reader(config, store)
    shelves = [reader.shelf(policy)] if policy else reader.shelves()
    verdicts = [StoreCheck(shelf, trusted).run() for shelf in shelves]
    damage = [line for verdict in verdicts for line in verdict.damage]
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(verdicts)))
    else:
        for found in verdicts:
            size = human_bytes(found.file_bytes)
            click.echo(
                f"{found.policy}\t{counted(found.versions, 'version')}, {found.replayed} replayed, "
                f"{found.not_kept} no longer kept; {counted(found.snapshots, 'snapshot')}, "
                f"{counted(found.composites, 'composite')}; {counted(found.files, 'file')}, {size}"
            )
        for line in damage:
            click.echo(f"damaged\t{line}")
        for line in dict.fromkeys(line for found in verdicts for line in found.remedies):
            click.echo(f"do\t{line}")
        if not damage:
            click.echo("sound" if verdicts else "no versions")
    sys.exit(1 if damage else 0)


@weights_group.command("export")
@click.argument("policy")
@click.argument("version", type=click.IntRange(min=0))
@click.argument("folder", type=_FOLDER)
@config_option
@set_option
@_store
@_json
def weights_export(
    policy: str,
    version: int,
    folder: Path,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    store: Path | None,
    as_json: bool,
) -> None:
    """Write a version as a new Hugging Face model FOLDER."""
    shelf = _reader(_load(files, overrides), store).shelf(policy)
    shelf.export(version, folder)
    digest = shelf.version(version).manifest.digest
    if as_json:
        said = {"policy": policy, "version": version, "digest": digest, "folder": str(folder)}
        click.echo(json.dumps(said))
    else:
        click.echo(f"{policy} version {version} in {folder}")


# ---- where things are ---------------------------------------------------------------------------


def _load(files: tuple[Path, ...], overrides: tuple[str, ...]) -> "SchedulerConfig":
    from scheduler.config import SchedulerConfig
    from transport.runtime.config import load_config

    return load_config(SchedulerConfig, files, overrides).value


def _reader(config: "SchedulerConfig", store: Path | None) -> "StoreReader":
    from scheduler.weight_reading import StoreReader

    folder = Path(config.scheduler.folder) if store is None else store
    for below in ("weight-store/versions", "versions"):
        if (folder / below).is_dir():
            return StoreReader(folder / below)
    if store is None or not folder.is_dir():
        raise StoreError(
            f"{folder}: no weight store is there; name the scheduler's folder, or its "
            "weight-store, with --store FOLDER, or the scheduler's settings with --config FILE"
        )
    return StoreReader(folder)


def _ask(config: "SchedulerConfig", key: Path | None) -> "SchedulerStatus | None":
    """The status of the running scheduler, None when it cannot be had."""
    from scheduler.operator import Operator

    path = key or Path(config.transport.keys) / "operator.toml"
    if key is None and not path.is_file():
        return None

    async def ask() -> "SchedulerStatus":
        async with Operator(config.transport, path, answer_s=_ANSWER_S) as operator:
            return await operator.status()

    try:
        return asyncio.run(ask())
    except FarflowError as error:
        click.echo(f"who holds what is not known: {error}", err=True)
        return None
