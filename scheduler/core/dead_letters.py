"""Jobs that were given up, kept so that a person can look at them and try them again.

What always holds: at most ``max_dead_letters`` letters and ``MAX_BYTES`` of their texts are kept,
the oldest goes first and is counted; a letter's job is as it was, without copies and attempts; a
job is open or a letter, never both.
"""

import msgspec

from scheduler.core.context import Context
from scheduler.core.state import Dead, Job
from transport.messages import (
    CommandReply,
    DeadLetter,
    DeadLetters,
    DeadLettersRequest,
    Message,
)

MAX_BYTES = 64 * 2**20
MAX_PROMPT = 200
MAX_REPLY_BYTES = 192 * 1024
"""A reply is one control frame."""


def bury(ctx: Context, job: Job, reason: str) -> None:
    """Keep a job that was just given up and closed."""
    letter = DeadLetter(
        job=job.id,
        run=job.run,
        kind=job.kind,
        reason=reason,
        died_s=ctx.now,
        prompt=job.items[0].prompt[:MAX_PROMPT] if job.items else "",
        attempts=tuple(job.history),
    )
    forget(ctx, job.id)
    kept = msgspec.structs.replace(job, copies={}, attempts=[], history=[], state="queued")
    dead = Dead(letter=letter, job=kept)
    ctx.tables.add(dead)
    ctx.dead_bytes += size_bytes(dead)
    ctx.note(job.id, "dead letter", reason=reason)
    ctx.count("dead_letters.made")
    while len(ctx.tables.dead) > ctx.settings.max_dead_letters or ctx.dead_bytes > MAX_BYTES:
        forget(ctx, next(iter(ctx.tables.dead)))
        ctx.count("dead_letters.dropped")


def forget(ctx: Context, job: str) -> None:
    """Take a letter out, if there is one."""
    dead = ctx.tables.dead.get(job)
    if dead is not None:
        ctx.tables.remove(dead)
        ctx.dead_bytes -= size_bytes(dead)


def load(ctx: Context) -> None:
    """Oldest first again, whatever the order of the rows was."""
    letters = sorted(ctx.tables.dead.values(), key=lambda dead: (dead.letter.died_s, dead.key))
    ctx.tables.dead.clear()
    for dead in letters:
        ctx.tables.dead[dead.key] = dead
    ctx.dead_bytes = sum(map(size_bytes, letters))


def page(ctx: Context, message: DeadLettersRequest) -> Message:
    """Letters by job id, as many as were asked for and one frame holds; refused when the run has
    never been."""
    if message.run and message.run not in ctx.tables.runs:
        text = f"no run {message.run!r}; see `farflow run ls`"
        return CommandReply(ok=False, code="run.unknown", message=text)
    names = sorted(
        job
        for job, dead in ctx.tables.dead.items()
        if job > message.after and message.run in ("", dead.letter.run)
    )
    letters: list[DeadLetter] = []
    left_bytes = MAX_REPLY_BYTES
    for name in names[: message.limit]:
        letter = ctx.tables.dead[name].letter
        left_bytes -= len(msgspec.msgpack.encode(letter))
        if left_bytes < 0 and letters:
            break
        letters.append(letter)
    return DeadLetters(letters=tuple(letters), more=len(letters) < len(names))


def size_bytes(dead: Dead) -> int:
    """About what a letter takes."""
    return 1024 + len(msgspec.msgpack.encode(dead.job))
