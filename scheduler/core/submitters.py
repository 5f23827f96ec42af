"""Indexes of external jobs: by submitter, by run, by the versions that they are pinned to.

What always holds: an open external job is in all of them, one that is over in none.
"""

from scheduler.core.asking import SubmitterLive
from scheduler.core.context import Context
from scheduler.core.state import External, Job


def submitter(ctx: Context, name: str) -> SubmitterLive:
    """The indexes of a submitter, made when first asked for."""
    found = ctx.submitters.get(name)
    if found is None:
        found = ctx.submitters[name] = SubmitterLive()
    return found


def index(ctx: Context, job: Job, external: External) -> None:
    """Mirror an open job (new, or read from a row)."""
    live = ctx.runs[job.run]
    live.external[job.id] = None
    for pin in external.pinned.items():
        live.pins[pin] = live.pins.get(pin, 0) + 1
    owner = submitter(ctx, external.submitter)
    owner.open[job.id] = None
    owner.sequences += job.sequences
    size = characters(job)
    owner.characters += size
    ctx.external_open += 1
    ctx.external_characters += size
    if external.due_s:
        ctx.timers.set("expire", job.id, external.due_s)


def unindex(ctx: Context, job: Job, external: External) -> None:
    """The job is over."""
    live = ctx.runs[job.run]
    del live.external[job.id]
    for pin in external.pinned.items():
        live.pins[pin] -= 1
        if not live.pins[pin]:
            del live.pins[pin]
    owner = submitter(ctx, external.submitter)
    del owner.open[job.id]
    owner.sequences -= job.sequences
    size = characters(job)
    owner.characters -= size
    ctx.external_open -= 1
    ctx.external_characters -= size
    if external.due_s:
        ctx.timers.cancel("expire", job.id)


def characters(job: Job) -> int:
    """Of all texts of an open job's items."""
    found = 0
    for item in job.items:
        found += len(item.prompt) + len(item.answer) + len(item.meta)
    return found
