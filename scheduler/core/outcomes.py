"""Results of external jobs, numbered per submitter, until they are confirmed.

    open job -> Outcome (accepted | failed | cancelled | expired) -> confirmed -> forgotten

What always holds: every external job that ended has exactly one outcome with a number of its own,
and numbers of a submitter rise by one; the body of an accepted one is kept until it is confirmed;
of the confirmed ones the last ``remembered_results`` are known again when they are submitted once
more; open jobs and unconfirmed results of a submitter together are bounded at submission.
"""

from itertools import islice

import msgspec

from scheduler.core import bodies
from scheduler.core.accounting import move, open_copies
from scheduler.core.context import Context
from scheduler.core.state import External, Job
from scheduler.core.state_results import Confirmed, Outcome, Submitter
from scheduler.core.submitters import submitter
from transport.messages import GroupSummary, JobResult, Results
from transport.messages.jobs import ResultState

MAX_REPLY_BYTES = 192 * 1024
CONFIRM_BATCH = 1024
"""Results that one request confirms at most; what is left is confirmed by the next."""
_encode = msgspec.msgpack.Encoder().encode
_ENDS: dict[str, ResultState] = {
    "delivered": "accepted",
    "cancelled": "cancelled",
    "expired": "expired",
}


def deliver(ctx: Context, job: Job, external: External, summary: GroupSummary) -> None:
    """The job's result is there: the caller drops the job now that nobody else wants it."""
    _add(
        ctx,
        job,
        external,
        "accepted",
        digest=summary.digest,
        size_bytes=summary.size_bytes,
        rewards=summary.rewards,
        lengths=summary.lengths,
        versions=summary.versions,
        agent=summary.agent,
    )
    for policy in open_copies(job):
        move(ctx, job, policy, "delivered")


def conclude(ctx: Context, job: Job, external: External) -> None:
    """An external job of a submitter is over; without a result it ends as its copies did."""
    copy = next(iter(job.copies.values()))
    if copy.state != "delivered":
        _add(ctx, job, external, _ENDS.get(copy.state, "failed"), code=copy.reason)


def known(ctx: Context, job: str) -> tuple[ResultState, str] | None:
    """How a job ended whose result is unconfirmed or remembered, and its fingerprint."""
    key = ctx.concluded.get(job)
    if key is None:
        return None
    outcome = ctx.tables.outcomes.get(key)
    if outcome is not None:
        return outcome.result.state, outcome.fingerprint
    confirmed = ctx.tables.confirmed[key]
    return confirmed.state, confirmed.fingerprint


def confirm(ctx: Context, name: str, after: int) -> None:
    """The submitter has its results up to ``after``. A number that was never given says that our
    store is an older one than the submitter knew: then nothing is confirmed."""
    row = ctx.tables.submitters.get(name)
    if row is None or after > row.last:
        return
    live = submitter(ctx, name)
    for number in list(islice(live.unconfirmed, CONFIRM_BATCH)):
        if number > after:
            break
        outcome = ctx.tables.outcomes[f"{name}|{number}"]
        if outcome.result.digest:
            bodies.let_go(ctx, outcome.result.digest)
        ctx.tables.remove(outcome)
        live.sequences -= len(outcome.result.lengths)
        del live.unconfirmed[number]
        memory = Confirmed(
            submitter=name,
            number=number,
            job=outcome.job,
            state=outcome.result.state,
            fingerprint=outcome.fingerprint,
        )
        ctx.tables.add(memory)
        live.remembered.append(number)
        row.confirmed = number
        ctx.tables.touch(row)
    while len(live.remembered) > ctx.settings.remembered_results:
        _forget(ctx, name, live.remembered.popleft())


def page(ctx: Context, name: str, after: int, limit: int) -> Results:
    """Unconfirmed results after a number, as many as one frame holds."""
    live = submitter(ctx, name)
    found: list[JobResult] = []
    left_bytes = MAX_REPLY_BYTES
    for number in live.unconfirmed:
        if number <= after:
            continue
        result = ctx.tables.outcomes[f"{name}|{number}"].result
        left_bytes -= len(_encode(result))
        if len(found) >= limit or (found and left_bytes < 0):
            break
        found.append(result)
    row = ctx.tables.submitters.get(name)
    last = 0 if row is None else row.last
    return Results(results=tuple(found), last=last, open_jobs=len(live.open))


def load(ctx: Context) -> None:
    """The indexes of outcomes and of what is remembered, from their rows."""
    for memory in sorted(ctx.tables.confirmed.values(), key=lambda m: (m.submitter, m.number)):
        submitter(ctx, memory.submitter).remembered.append(memory.number)
        ctx.concluded[memory.job] = memory.key
    ordered = sorted(ctx.tables.outcomes.values(), key=lambda o: (o.submitter, o.result.number))
    for outcome in ordered:
        live = submitter(ctx, outcome.submitter)
        live.unconfirmed[outcome.result.number] = None
        live.sequences += len(outcome.result.lengths)
        ctx.concluded[outcome.job] = outcome.key
        if outcome.result.digest:
            ctx.bodies[outcome.result.digest] = outcome.job


def _add(
    ctx: Context,
    job: Job,
    external: External,
    state: ResultState,
    *,
    code: str = "",
    digest: str = "",
    size_bytes: int = 0,
    rewards: tuple[float, ...] = (),
    lengths: tuple[int, ...] = (),
    versions: dict[str, tuple[int, int]] | None = None,
    agent: str = "",
) -> None:
    row = ctx.tables.submitters.get(external.submitter)
    if row is None:
        row = Submitter(name=external.submitter)
        ctx.tables.add(row)
    row.last += 1
    ctx.tables.touch(row)
    result = JobResult(
        number=row.last,
        run=job.run,
        id=external.id,
        state=state,
        code=code,
        digest=digest,
        size_bytes=size_bytes,
        rewards=rewards,
        lengths=lengths,
        versions=versions or {},
        agent=agent,
        attempts=job.attempts_made,
    )
    outcome = Outcome(submitter=external.submitter, result=result, fingerprint=external.fingerprint)
    ctx.tables.add(outcome)
    live = submitter(ctx, external.submitter)
    live.unconfirmed[row.last] = None
    live.sequences += len(lengths)
    ctx.concluded[job.id] = outcome.key
    ctx.new_results[external.submitter] = None
    ctx.count(f"external.{state}")


def _forget(ctx: Context, name: str, number: int) -> None:
    memory = ctx.tables.confirmed[f"{name}|{number}"]
    ctx.tables.remove(memory)
    if ctx.concluded.get(memory.job) == memory.key:
        del ctx.concluded[memory.job]
