"""``farflow submit``, ``results``, ``cancel`` and ``dead``: jobs of one's own, and jobs that were
given up. Each imports what it needs when it runs.

Exit status: 0 done, 1 the scheduler refused a part or a job ended without a result, or no answer,
2 wrong usage, 78 wrong configuration.
"""

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from farflow.connect import with_client, with_operator
from farflow.options import FILE, as_operator, as_submitter, duration, json_option, say_done
from farflow.words import counted
from transport.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farflow.client import Client, JobReceipt, JobResult, Results
    from farflow.listing import Lines
    from scheduler.operator import Operator
    from transport.messages import DeadLetter

_FOLDER = click.Path(file_okay=False, path_type=Path)
_bodies = click.option(
    "--bodies",
    type=_FOLDER,
    metavar="FOLDER",
    help="Keep the packed trajectory of every result as FOLDER/RUN/ID.fftg.",
)


@click.command()
@click.argument("run")
@click.argument("file", type=FILE)
@as_submitter
@click.option("--group-size", type=click.IntRange(1, 1024), help="Sequences for each item.")
@click.option("--max-new-tokens", type=click.IntRange(1, 1_000_000), help="Of one sequence.")
@click.option("--priority", type=click.IntRange(-100, 100), help="Higher goes first.")
@click.option("--deadline", type=duration, help="Give a job up after this long, as 30min.")
@click.option("--wait", is_flag=True, help="Show results until every job of FILE has one.")
@click.option(
    "--timeout", type=duration, default="1h", show_default=True, help="How long --wait waits."
)
@_bodies
@json_option
def submit(
    run: str,
    file: Path,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
    group_size: int | None,
    max_new_tokens: int | None,
    priority: int | None,
    deadline: float | None,
    wait: bool,
    timeout: float,
    bodies: Path | None,
    as_json: bool,
) -> None:
    """Submit the jobs in FILE to the live run RUN; submitting them again is harmless.

    FILE has one JSON object a line: id, prompt, answer, meta (or items, a list of such), and
    perhaps group_size, priority, deadline_s, max_new_tokens, temperature, pinned, require. The
    options count where a line says nothing. With --wait, results of other jobs of the same key are
    shown, and confirmed, too.
    """
    from farflow.job_file import read_jobs
    from farflow.listing import Lines

    if bodies is not None and not wait:
        raise click.UsageError("--bodies goes with --wait, or with `farflow results`")
    given: dict[str, Any] = {
        "group_size": group_size,
        "max_new_tokens": max_new_tokens,
        "priority": priority,
        "deadline_s": deadline,
    }
    jobs = read_jobs(file, {name: value for name, value in given.items() if value is not None})

    async def action(client: "Client") -> bool:
        receipts = await client.submit(run, jobs)
        refused = _say_receipts(receipts, as_json=as_json, quiet=wait)
        wanted = {receipt.id for receipt in receipts if receipt.state != "refused"}
        if not wait:
            return not refused
        good, last = True, 0
        lines = None if as_json else Lines(_RESULT)
        try:
            async with asyncio.timeout(timeout):
                async for result in client.results(until="done"):
                    await _keep_body(client, result, bodies)
                    _say_result(result, lines)
                    last = result.number
                    if result.run == run and result.id in wanted:
                        wanted.discard(result.id)
                        good &= result.state == "accepted"
                        if not wanted:
                            break
                await client.page(last, limit=1)  # confirms what was shown
        except TimeoutError:
            without = counted(len(wanted), "job")
            click.echo(f"{without} without a result after {timeout:g} s", err=True)
            return False
        if wanted:
            click.echo(f"{len(wanted)} jobs had ended before, and were confirmed", err=True)
        return good and not refused

    sys.exit(0 if with_client(files, overrides, key, action) else 1)


@click.command()
@as_submitter
@click.option(
    "--after",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Confirm the results up to this number, for good, and show what follows.",
)
@click.option("--limit", type=click.IntRange(1, 256), default=256, show_default=True)
@click.option("--follow", is_flag=True, help="Go on, confirming what was shown, until Ctrl-C.")
@click.option(
    "--cursor",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="With --follow: keep the last number there and go on from it.",
)
@click.option("--timeout", type=duration, help="With --follow: end after this long.")
@_bodies
@json_option
def results(
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
    after: int,
    limit: int,
    follow: bool,
    cursor: Path | None,
    timeout: float | None,
    bodies: Path | None,
    as_json: bool,
) -> None:
    """Show how jobs of this key ended, oldest first.

    Showing alone confirms nothing. A confirmed result is not shown again and its body is let go.
    """
    if not follow and (cursor is not None or timeout is not None):
        raise click.UsageError("--cursor and --timeout go with --follow")

    from farflow.listing import Lines, print_list

    async def once(client: "Client") -> None:
        page: Results = await client.page(after, limit=limit)
        for result in page.results:
            await _keep_body(client, result, bodies)
            if as_json:
                _say_result(result, None)
        if not as_json:
            print_list(_RESULT, map(_cells, page.results))
        shown = page.results[-1].number if page.results else after
        more = ", more with --after" if shown < page.last else ""
        click.echo(
            f"{counted(len(page.results), 'result')}{more}, "
            f"{counted(page.open_jobs, 'job')} open; "
            f"--after {shown} confirms these",
            err=True,
        )

    async def forever(client: "Client") -> None:
        lines = None if as_json else Lines(_RESULT)
        async for result in client.results(after, cursor=cursor):
            await _keep_body(client, result, bodies)
            _say_result(result, lines)

    async def follow_on(client: "Client") -> None:
        try:
            async with asyncio.timeout(timeout):
                await forever(client)
        except TimeoutError:
            return

    with_client(files, overrides, key, follow_on if follow else once)


@click.command()
@click.argument("run")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@as_submitter
@json_option
def cancel(
    run: str,
    ids: tuple[str, ...],
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
    as_json: bool,
) -> None:
    """Cancel jobs of RUN by the ids that they were submitted under."""

    async def action(client: "Client") -> bool:
        receipts = await client.cancel(run, ids)
        return not _say_receipts(receipts, as_json=as_json, verb="cancelled or over")

    sys.exit(0 if with_client(files, overrides, key, action) else 1)


def _say_receipts(
    receipts: "Sequence[JobReceipt]", *, as_json: bool, quiet: bool = False, verb: str = ""
) -> int:
    """How many were refused; those are always said."""
    import msgspec

    refused = [receipt for receipt in receipts if receipt.state == "refused"]
    if as_json and not quiet:
        for receipt in receipts:
            click.echo(msgspec.json.encode(receipt))
    for receipt in refused:
        click.echo(f"{receipt.id}: {receipt.code}: {receipt.message}", err=True)
    if not as_json and not quiet:
        known = sum(receipt.state == "known" for receipt in receipts)
        queued = len(receipts) - known - len(refused)
        said = f"{known + queued} {verb}" if verb else f"{queued} queued, {known} known before"
        click.echo(f"{said}, {len(refused)} refused")
    return len(refused)


_RESULT: Final = ("number", "run", "id", "state", "reward", "tokens", "attempts", "agent")


def _say_result(result: "JobResult", lines: "Lines | None") -> None:
    """A row of ``lines``, or JSON without them."""
    import msgspec

    if lines is None:
        click.echo(msgspec.json.encode(result))
    else:
        lines.add(*_cells(result))


def _cells(result: "JobResult") -> "Sequence[str]":
    """By ``_RESULT``; the code of what failed instead of a reward."""
    rewards = result.rewards
    return (
        *(str(result.number), result.run, result.id, result.state),
        f"{sum(rewards) / len(rewards):.3f}" if rewards else result.code,
        *(str(sum(result.lengths)), str(result.attempts), result.agent),
    )


async def _keep_body(client: "Client", result: "JobResult", bodies: Path | None) -> None:
    if bodies is not None and result.digest:
        packed = await client.packed(result)
        await asyncio.to_thread(_keep, bodies / result.run / f"{result.id}.fftg", packed)


def _keep(path: Path, data: bytes) -> None:
    from transport.runtime.files import atomic_write, store_errors

    with store_errors("create", path.parent):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError as error:
            raise StoreError(f"cannot create {path.parent}: choose another folder") from error
    atomic_write(path, data)


@click.group("dead")
def dead_group() -> None:
    """List, show and replay jobs that were given up."""


@dead_group.command("ls")
@click.argument("run", default="")
@as_operator
@click.option("--most", type=click.IntRange(1, 100_000), default=1000, show_default=True)
@json_option
def dead_ls(
    run: str,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
    most: int,
    as_json: bool,
) -> None:
    """List the dead letters of RUN, or of all runs."""
    import msgspec

    from farflow.listing import print_list

    async def action(operator: "Operator") -> "list[DeadLetter]":
        return await operator.dead_letters(run, most=most)

    letters = with_operator(files, overrides, key, action)
    if as_json:
        for letter in letters:
            click.echo(msgspec.json.encode(letter))
    else:
        rows = [
            (one.job, str(len(one.attempts)), one.reason, " ".join(one.prompt.split())[:60])
            for one in letters
        ]
        print_list(("job", "attempts", "reason", "prompt"), rows)
    if not letters:
        click.echo("no dead letters", err=True)


@dead_group.command("show")
@click.argument("job")
@as_operator
@json_option
def dead_show(
    job: str,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
    as_json: bool,
) -> None:
    """Show the dead letter JOB with its attempts."""
    import msgspec

    from farflow.view import printable

    async def action(operator: "Operator") -> "DeadLetter | None":
        return await operator.dead_letter(job)

    letter = with_operator(files, overrides, key, action)
    if letter is None:
        click.echo(f"farflow: {job}: no such dead letter; see `farflow dead ls`", err=True)
        sys.exit(1)
    if as_json:
        click.echo(msgspec.json.encode(letter))
        return
    click.echo(f"job\t{letter.job}\nrun\t{letter.run}\nkind\t{letter.kind}")
    click.echo(f"reason\t{printable(letter.reason)}\nprompt\t{printable(letter.prompt)}")
    for attempt in letter.attempts:
        seconds = attempt.ended_s - attempt.offered_s
        click.echo(
            f"{attempt.attempt}\t{attempt.agent}\t{attempt.outcome}\tafter {seconds:.1f} s\t"
            f"{printable(attempt.detail)}"
        )


@dead_group.command("replay")
@click.argument("jobs", metavar="[JOB]...", nargs=-1)
@click.option("--run", default="", metavar="RUN", help="All dead letters of RUN.")
@as_operator
@json_option
def dead_replay(
    jobs: tuple[str, ...],
    run: str,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
    as_json: bool,
) -> None:
    """Queue dead letters again: these JOBs, or all of a run."""
    if bool(jobs) == bool(run):
        raise click.UsageError("name the jobs, or --run RUN for all of it")

    async def action(operator: "Operator") -> str:
        return await operator.replay(jobs, run=run)

    said = with_operator(files, overrides, key, action, subject=run)
    if as_json:
        say_done(run or " ".join(jobs), "replay", said, as_json=True)
    else:
        click.echo(said or "queued again")
