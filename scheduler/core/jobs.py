"""A job from its item to the end of its last copy.

    queued <-> in_flight -> done -> (row deleted when no policy needs the body any more)

What always holds: a job without open copies is deleted at once, its attempts revoked and its body
handed to the release list; a body is released exactly when its job is deleted, or when it never
became a job's result; the accounting rows remember what the deleted rows were.
"""

from scheduler.core import attempts
from scheduler.core.accounting import move, open_copies
from scheduler.core.context import Context, Lease
from scheduler.core.state import WAITING_STATES, Job, Release
from transport.status import CopyState

LOSSES_PER_ATTEMPT = 8
"""Losing agents is nobody's fault, but a job that takes every agent with it must end: it may be
lost this many times as often as it may fail."""
FAILURE_STREAK = 3
AVOID_LIMIT = 8
NOT_THE_JOBS_FAULT = ("agent.", "weights")


def close(ctx: Context, job: Job, state: CopyState, reason: str) -> None:
    """Move every copy that is still open to ``state``."""
    for policy in open_copies(job):
        move(ctx, job, policy, state, reason)
    drop_if_over(ctx, job)


def close_copy(ctx: Context, job: Job, policy: str, state: CopyState, reason: str) -> None:
    """Move one policy's copy to a state that ends it."""
    move(ctx, job, policy, state, reason)
    drop_if_over(ctx, job)


def close_waiting(ctx: Context, job: Job, state: CopyState, reason: str) -> None:
    """Move every copy that no batch has taken to ``state``."""
    for policy, copy in job.copies.items():
        if copy.state in WAITING_STATES:
            move(ctx, job, policy, state, reason)
    drop_if_over(ctx, job)


def drop_if_over(ctx: Context, job: Job) -> None:
    """Delete the job if no policy wants it or its body any more."""
    if open_copies(job):
        return
    if job.state != "done":
        attempts.revoke_all(ctx, job, "job_over")
        attempts.leave_queue(ctx, job)
    if job.result is not None:
        del ctx.bodies[job.result.digest]
        release(ctx, job.result.digest)
    ctx.tables.remove(job)
    if job.evaluation:
        ctx.evaluations[job.evaluation].jobs.pop(job.id, None)
        evaluation = ctx.tables.evaluations[job.evaluation]
        evaluation.open_jobs -= 1
        ctx.tables.touch(evaluation)
    else:
        ctx.runs[job.run].jobs.pop(job.id, None)
    ctx.due_runs[job.run] = None


def release(ctx: Context, digest: str) -> None:
    """The log may drop this body, unless it is the result of a live job."""
    if digest in ctx.bodies:
        ctx.count("results.foreign_body")
    elif digest not in ctx.tables.releases:
        ctx.tables.add(Release(digest=digest))
        ctx.new_releases.append(digest)


def attempt_failed(ctx: Context, lease: Lease, code: str, detail: str = "") -> None:
    """An attempt ended without a result: try again later, or give the job up."""
    job = ctx.tables.jobs[lease.job]
    record = next(record for record in job.attempts if record.id == lease.attempt)
    attempts.end(ctx, job, record, "failed", code=code, detail=detail[:200])
    ctx.count(f"attempts.failed.{code}")
    retry_s = 0.0
    if code.startswith(NOT_THE_JOBS_FAULT):
        job.losses += 1
    else:
        job.failures += 1
        if record.agent not in job.avoid:
            job.avoid = [*job.avoid, record.agent][-AVOID_LIMIT:]
        retry_s = backoff_s(ctx, job.failures)
    give_up_or_retry(ctx, job, retry_s)


def give_up_or_retry(ctx: Context, job: Job, retry_s: float = 0.0) -> None:
    """Fail the job when it has used up its attempts, otherwise queue it again."""
    most = ctx.tables.runs[job.run].spec.max_attempts
    if job.failures >= most:
        close(ctx, job, "failed", "attempts")
    elif job.losses >= most * LOSSES_PER_ATTEMPT:
        close(ctx, job, "failed", "losses")
    else:
        attempts.settle(ctx, job, retry_s)


def lost(ctx: Context, lease: Lease, reason: str) -> None:
    """Nobody answers for an attempt: let it win if it comes, but try elsewhere."""
    job = ctx.tables.jobs[lease.job]
    attempts.stray(ctx, lease, reason)
    give_up_or_retry(ctx, job)


def withdraw(ctx: Context, lease: Lease, reason: str) -> None:
    """Take an unanswered offer back."""
    job = ctx.tables.jobs[lease.job]
    record = next(record for record in job.attempts if record.id == lease.attempt)
    attempts.revoke(ctx, job, record, reason)
    attempts.settle(ctx, job)


def declined(ctx: Context, lease: Lease, reason: str) -> None:
    """The agent will not take it: nobody's failure."""
    job = ctx.tables.jobs[lease.job]
    record = next(record for record in job.attempts if record.id == lease.attempt)
    attempts.end(ctx, job, record, "declined", reason=reason)
    attempts.settle(ctx, job)


def backoff_s(ctx: Context, failures: int) -> float:
    """Exponential with full jitter, capped."""
    settings = ctx.settings
    most = min(settings.retry_backoff_max_s, settings.retry_backoff_s * 2 ** min(failures - 1, 30))
    return ctx.rng.uniform(0.0, most)
