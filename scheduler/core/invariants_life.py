"""What always holds of external jobs, outcomes, dead letters and waiting requests: O(state), for
tests and small simulations.
"""

from collections import Counter

from scheduler.core import dead_letters
from scheduler.core.context import Context
from scheduler.core.submitters import characters
from scheduler.core.waits import MAX_WAITING
from transport.errors import InvariantViolation
from transport.ids import external_job_id


def check_life(ctx: Context) -> None:
    """Raises ``InvariantViolation`` with the story of what is wrong."""
    _check_external(ctx)
    _check_outcomes(ctx)
    _check_dead(ctx)
    _check_waiting(ctx)


def require(ctx: Context, true: bool, subject: str, what: str) -> None:
    """Raises ``InvariantViolation`` with the story of ``subject`` unless ``true``."""
    if not true:
        story = "\n  ".join(ctx.story(subject)[-40:])
        raise InvariantViolation(f"{subject}: {what}\n  {story}")


def _check_external(ctx: Context) -> None:
    """An open external job is in the indexes of its run and submitter, with its deadline set."""
    by_run: dict[str, list[str]] = {name: [] for name in ctx.runs}
    by_submitter: dict[str, list[str]] = {name: [] for name in ctx.submitters}
    pins: dict[str, Counter[tuple[str, int]]] = {name: Counter() for name in ctx.runs}
    for job in ctx.tables.jobs.values():
        external = job.external
        asked = job.kind in ("external", "recheck")
        require(ctx, asked == (external is not None), job.id, "kind")
        if external is None:
            continue
        require(ctx, job.run in by_run, job.id, "external job of a finished run")
        require(ctx, job.result is None and job.state != "done", job.id, "has a result and is open")
        id = external_job_id(job.run, external.submitter, external.id)
        require(ctx, job.id == id, job.id, f"its submitter calls it {id}")
        by_run[job.run].append(job.id)
        by_submitter.setdefault(external.submitter, []).append(job.id)
        pins[job.run].update(external.pinned.items())
        due_s = ctx.timers.due("expire", job.id)
        require(ctx, due_s == (external.due_s or None), job.id, f"deadline {due_s}")
        if external.recheck is not None:
            heard = (external.recheck.agent, external.recheck.second)
            judges = [record.agent for record in job.attempts if record.agent in heard]
            require(ctx, not judges, job.id, f"{judges} would judge their own rewards")
    for run, live in ctx.runs.items():
        require(ctx, sorted(live.external) == sorted(by_run[run]), run, "index of external jobs")
        require(ctx, live.pins == pins[run], run, f"pins {live.pins}, jobs have {pins[run]}")
    open_jobs = [job for job in ctx.tables.jobs.values() if job.external is not None]
    size = sum(map(characters, open_jobs))
    require(ctx, ctx.external_characters == size, "external", f"{size} characters")
    held = sum(live.characters for live in ctx.submitters.values())
    require(ctx, held == size, "external", f"{held} characters of submitters, {size} in all")
    for name, names in by_submitter.items():
        indexed = ctx.submitters[name].open if name in ctx.submitters else {}
        require(ctx, sorted(indexed) == sorted(names), name, "index of open jobs")
    total = sum(map(len, by_submitter.values()))
    require(ctx, ctx.external_open == total, "external", f"{ctx.external_open} open, not {total}")


def _check_outcomes(ctx: Context) -> None:
    """Numbers of a submitter are given once, confirmed in order, and its results are bounded."""
    unconfirmed: dict[str, list[int]] = {name: [] for name in ctx.submitters}
    remembered: dict[str, list[int]] = {name: [] for name in ctx.submitters}
    for outcome in ctx.tables.outcomes.values():
        unconfirmed[outcome.submitter].append(outcome.result.number)
        require(ctx, outcome.job in ctx.concluded, outcome.job, "its outcome is not indexed")
    for memory in ctx.tables.confirmed.values():
        remembered[memory.submitter].append(memory.number)
        require(ctx, memory.job in ctx.concluded, memory.job, "its memory is not indexed")
    rows = {**ctx.tables.outcomes, **ctx.tables.confirmed}
    for job, key in ctx.concluded.items():
        require(ctx, key in rows, job, f"concluded by {key}, which is no row")
    for name, live in ctx.submitters.items():
        row = ctx.tables.submitters.get(name)
        last, confirmed = (0, 0) if row is None else (row.last, row.confirmed)
        require(ctx, list(live.unconfirmed) == sorted(unconfirmed[name]), name, "unconfirmed")
        require(ctx, list(live.remembered) == sorted(remembered[name]), name, "remembered")
        given = list(range(confirmed + 1, last + 1))
        require(ctx, list(live.unconfirmed) == given, name, f"unconfirmed, not {given}")
        most = ctx.settings.remembered_results
        require(ctx, len(live.remembered) <= most, name, "remembers too many")
        held = len(live.open) + len(live.unconfirmed)
        bound = ctx.settings.max_results_per_submitter
        require(ctx, held <= bound, name, f"{held} jobs and results, at most {bound}")
        sequences = sum(ctx.tables.jobs[id].sequences for id in live.open)
        kept = [ctx.tables.outcomes[f"{name}|{number}"] for number in live.unconfirmed]
        sequences += sum(len(outcome.result.lengths) for outcome in kept)
        require(ctx, live.sequences == sequences, name, f"{sequences} sequences held")


def _check_dead(ctx: Context) -> None:
    """Letters are bounded, oldest first."""
    letters = list(ctx.tables.dead.values())
    size_bytes = sum(map(dead_letters.size_bytes, letters))
    require(ctx, ctx.dead_bytes == size_bytes, "dead", f"{ctx.dead_bytes} bytes, not {size_bytes}")
    require(ctx, len(letters) <= ctx.settings.max_dead_letters, "dead", "too many letters")
    died = [dead.letter.died_s for dead in letters]
    require(ctx, died == sorted(died), "dead", "letters are not oldest first")
    for dead in letters:
        still_open = dead.key in ctx.tables.jobs and dead.letter.kind == "train"
        require(ctx, not still_open, dead.key, "open and a dead letter")
        job = dead.job
        require(ctx, not job.attempts and not job.copies, dead.key, "a letter with live parts")
        require(ctx, bool(job.items), dead.key, "a letter that cannot be tried again")


def _check_waiting(ctx: Context) -> None:
    """Every waiting request has a timer and is where it is looked for."""
    require(ctx, len(ctx.waiting) <= MAX_WAITING, "requests", "too many wait")
    for number, waiting in ctx.waiting.items():
        timed = ctx.timers.due("wait", str(number)) is not None
        require(ctx, timed, "requests", f"{number} waits for ever")
        listens = number in ctx.listeners
        require(ctx, listens == (waiting.kind == "events"), "requests", f"{number} listens")
        if waiting.kind == "results":
            of_submitter = ctx.submitters[waiting.peer].waiting
            require(ctx, number in of_submitter, "requests", f"{number} is not looked for")
    for name, live in ctx.submitters.items():
        stale = [number for number in live.waiting if number not in ctx.waiting]
        require(ctx, not stale, name, f"{stale} wait no more")
    gone = [number for number in ctx.listeners if number not in ctx.waiting]
    require(ctx, not gone, "requests", f"{gone} listen no more")
