"""Dead letters that are queued again.

What always holds: a replayed job is the same job (its id, seed, index, attempts counted on and its
history kept) with new copies, which its policies' quotas must have room for; the books count the
new copies as submitted and as ``requeued``; what can not be replayed now stays a letter.
"""

from collections import Counter

import msgspec

from scheduler.core import dead_letters, external, intake
from scheduler.core.accounting import account
from scheduler.core.admission import room, trained_policies, wants_groups
from scheduler.core.context import Context
from scheduler.core.state import Dead, Job, Run
from transport.messages import CommandReply, JobReplay

_WHY = {
    "job.unknown": "there is no such dead letter; list them first",
    "run.finished": "the run is over",
    "quota.policy": "no policy of the run has room for it; try again later",
    "quota.queued": "too many external jobs are open; try again later",
    "quota.share": "its submitter holds most of the external jobs that may be open; try later",
    "quota.results": "the submitter has too many unconfirmed results",
    "job.open": "its submitter has submitted another job under the same id",
}


def replay(ctx: Context, message: JobReplay, *, by: str = "") -> CommandReply:
    """Queue letters again, as many as possible; the reply says how many and why not the others.
    ``by`` is who wants it."""
    if not message.jobs and not message.run:
        text = "name the run whose dead letters are to be queued again, or the jobs"
        return CommandReply(ok=False, code="replay.which", message=text)
    if message.run and message.run not in ctx.tables.runs:
        text = f"no run {message.run!r}; see `farflow run ls`"
        return CommandReply(ok=False, code="run.unknown", message=text)
    names = message.jobs or tuple(
        sorted(job for job, dead in ctx.tables.dead.items() if dead.letter.run == message.run)
    )
    queued = 0
    refused: Counter[str] = Counter()
    for name in dict.fromkeys(names):
        dead = ctx.tables.dead.get(name)
        if dead is None or message.run not in ("", dead.letter.run):
            code = "job.unknown"
        else:
            code = _requeue(ctx, dead, by)
        if code:
            refused[code] += 1
        else:
            queued += 1
    text = f"{queued} queued again"
    for code in sorted(refused):
        text += f"; {refused[code]} not ({code}): {_WHY[code]}"
    first = min(refused, default="")
    return CommandReply(ok=not refused, code=first, message=text)


def _requeue(ctx: Context, dead: Dead, by: str) -> str:
    """The code of what is in the way, or nothing when the job is queued."""
    run = ctx.tables.runs.get(dead.letter.run)
    if run is None or not run.live or run.finishing:
        return "run.finished"
    asked = dead.job.external
    if asked is not None:
        if dead.key in ctx.tables.jobs:
            return "job.open"
        full = external.room(ctx, asked.submitter, dead.job.sequences)
        if full:
            return full
        if 0.0 < asked.due_s <= ctx.now:
            asked = msgspec.structs.replace(asked, due_s=0.0)
    elif not any(
        wants_groups(ctx, policy) and room(ctx, policy) > 0 for policy in trained_policies(ctx, run)
    ):
        return "quota.policy"
    dead_letters.forget(ctx, dead.key)
    job = msgspec.structs.replace(
        dead.job,
        external=asked,
        history=list(dead.letter.attempts),
        failures=0,
        losses=0,
        replays=dead.job.replays + 1,
        created_s=ctx.now,
    )
    job.copies, job.attempts, job.avoid = {}, [], list(job.avoid)
    ctx.note(job.id, "replayed", replays=job.replays, by=by)
    ctx.count("dead_letters.replayed")
    if asked is None:
        intake.enter(ctx, run, job)
    else:
        external.enter(ctx, job, asked)
    _count_requeued(ctx, run, job)
    return ""


def _count_requeued(ctx: Context, run: Run, job: Job) -> None:
    for policy in job.copies:
        books = account(ctx, policy, job.kind)
        books.row.requeued += 1
        ctx.tables.touch(books)
    ctx.due_runs[run.name] = None
