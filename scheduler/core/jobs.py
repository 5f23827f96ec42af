"""A job from its item to the end of its last copy.

    queued <-> in_flight -> done -> (row deleted when no policy needs the body any more)

What always holds: a job without open copies is deleted at once, its attempts revoked and its body
handed to the release list; a body is released exactly when its job is deleted, or when it never
became a job's result; the accounting rows remember what the deleted rows were.
"""

from scheduler.core import attempts, bodies, dead_letters, outcomes, partials, submitters
from scheduler.core.accounting import move, open_copies
from scheduler.core.context import Context, Lease
from scheduler.core.failures import class_of
from scheduler.core.state import WAITING_STATES, Job
from transport.status import CopyState

LOSSES_PER_ATTEMPT = 8
"""Losing agents is nobody's fault, but a job that takes every agent with it must end: it may be
lost this many times as often as it may fail."""
FAILURE_STREAK = 3
AVOID_LIMIT = 8


def close(ctx: Context, job: Job, state: CopyState, reason: str) -> None:
    """Move every copy that is still open to ``state``."""
    for policy in open_copies(job):
        move(ctx, job, policy, state, reason)
    drop_if_over(ctx, job)


def close_copy(ctx: Context, job: Job, policy: str, state: CopyState, reason: str) -> None:
    """Move one policy's copy to a state that ends it; others may still want the group."""
    _end_copy(ctx, job, policy, state, reason)
    drop_if_over(ctx, job)


def close_waiting(ctx: Context, job: Job, state: CopyState, reason: str) -> None:
    """Move every copy that no batch has taken to ``state``."""
    for policy, copy in job.copies.items():
        if copy.state in WAITING_STATES:
            _end_copy(ctx, job, policy, state, reason)
    drop_if_over(ctx, job)


def _end_copy(ctx: Context, job: Job, policy: str, state: CopyState, reason: str) -> None:
    move(ctx, job, policy, state, reason)
    for record in job.attempts:
        attempts.forget_use(ctx, ctx.leases[record.id], policy)


def drop_if_over(ctx: Context, job: Job) -> None:
    """Delete the job if no policy wants it or its body any more."""
    if open_copies(job):
        return
    if job.state != "done":
        attempts.revoke_all(ctx, job, "job_over")
        attempts.leave_queue(ctx, job)
    partials.drop(ctx, job)
    ctx.tables.remove(job)
    if job.external is not None:
        if job.external.recheck is None:
            outcomes.conclude(ctx, job, job.external)
        else:
            ctx.count(f"rechecks.{next(iter(job.copies.values())).state}")
            bodies.unhold(ctx, job.external.recheck.digest)
        submitters.unindex(ctx, job, job.external)
    elif job.result is not None:
        bodies.let_go(ctx, job.result.digest)
    if job.evaluation:
        ctx.evaluations[job.evaluation].jobs.pop(job.id, None)
        evaluation = ctx.tables.evaluations[job.evaluation]
        evaluation.open_jobs -= 1
        ctx.tables.touch(evaluation)
    elif job.external is None:
        ctx.runs[job.run].jobs.pop(job.id, None)
    ctx.due_runs[job.run] = None


def attempt_failed(ctx: Context, lease: Lease, code: str, detail: str = "") -> None:
    """An attempt ended without a result: try again later, or give the job up."""
    job = ctx.tables.jobs[lease.job]
    attempts.end(ctx, job, lease.record, "failed", code=code, detail=detail[:200])
    ctx.count(f"attempts.failed.{code}")
    retry_s = 0.0
    fault = class_of(code)
    if job.kind == "train" and fault != "away":
        for policy in open_copies(job):
            ctx.policies[policy].unusable.lost("failed", code, ctx.now)
    if fault == "job":
        job.failures += 1
        retry_s = backoff_s(ctx, job.failures)
    else:
        job.losses += 1
    if fault in ("job", "data"):
        partials.drop(ctx, job)  # going on from there may lead to the same end
    if fault not in ("away", "copy") and lease.agent not in job.avoid:
        job.avoid = [*job.avoid, lease.agent][-AVOID_LIMIT:]
    give_up_or_retry(ctx, job, retry_s, code)


def give_up_or_retry(ctx: Context, job: Job, retry_s: float = 0.0, code: str = "") -> None:
    """Fail the job when it has used up its attempts, otherwise queue it again. ``code`` is that of
    its last failure."""
    most = 1 if job.kind == "recheck" else ctx.tables.runs[job.run].spec.max_attempts
    if job.failures >= most:
        _give_up(ctx, job, "attempts", code)
    elif job.losses >= most * LOSSES_PER_ATTEMPT:
        _give_up(ctx, job, "losses", code)
    else:
        attempts.settle(ctx, job, retry_s)


def _give_up(ctx: Context, job: Job, reason: str, code: str) -> None:
    if job.evaluation:
        evaluation = ctx.tables.evaluations[job.evaluation]
        evaluation.failed += len(job.items)
        evaluation.failure = code or reason
        ctx.tables.touch(evaluation)
    close(ctx, job, "failed", reason)
    if job.kind not in ("eval", "recheck"):
        dead_letters.bury(ctx, job, reason)


def lost(ctx: Context, lease: Lease, reason: str) -> None:
    """Nobody answers for an attempt: let it win if it comes, but try elsewhere."""
    job = ctx.tables.jobs[lease.job]
    attempts.stray(ctx, lease, reason)
    give_up_or_retry(ctx, job)


def refuse_result(ctx: Context, lease: Lease, reason: str) -> None:
    """A complete result that is not to be trusted: its attempt ends, the job goes on without."""
    job = ctx.tables.jobs[lease.job]
    attempts.end(ctx, job, lease.record, "refused", reason=reason)
    partials.drop(ctx, job)
    attempts.settle(ctx, job)


def withdraw(ctx: Context, lease: Lease, reason: str) -> None:
    """Take an unanswered offer back."""
    job = ctx.tables.jobs[lease.job]
    attempts.revoke(ctx, job, lease.record, reason)
    attempts.settle(ctx, job)


def declined(ctx: Context, lease: Lease, reason: str) -> None:
    """The agent will not take it: nobody's failure."""
    job = ctx.tables.jobs[lease.job]
    what = "recalled" if reason == "recalled" else "declined"
    attempts.end(ctx, job, lease.record, what, reason=reason)
    attempts.settle(ctx, job)


def backoff_s(ctx: Context, failures: int) -> float:
    """Exponential with full jitter, capped."""
    settings = ctx.settings
    most = min(settings.retry_backoff_max_s, settings.retry_backoff_s * 2 ** min(failures - 1, 30))
    return ctx.rng.uniform(0.0, most)
