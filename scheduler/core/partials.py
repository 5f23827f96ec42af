"""Finished turns of attempts that still run: which ones of a job are kept, and when its next
attempt goes on from them.

What always holds: a job has at most one partial, from an attempt that was live when it was
announced, and the log is told to drop every other one that was heard of; it goes with the job's
result, with the job, and with an attempt that failed by the job's own fault (it might lead there
again); the next attempt goes on from it only while no other is counted on, if its oldest tokens
would still be fresh enough when they are used, and if it is of the pinned versions. What an agent
says of its turns is believed only so far: wrong, it costs work, and the result is judged by its own
tokens.
"""

from scheduler.core import attempts, bodies, views
from scheduler.core.context import Context, Lease
from scheduler.core.placement import Choice, steps_ahead
from scheduler.core.state import Job, Run
from transport.messages import PartialRef, PartialStored, PartialSummary
from transport.summaries import partial_fault


def stored(ctx: Context, message: PartialStored) -> None:
    """The log has these; those of the same attempts that were announced before are gone there."""
    for partial in message.partials:
        _heard(ctx, partial)


def drop(ctx: Context, job: Job) -> None:
    """The job's finished turns are needed no more."""
    if job.partial is not None:
        bodies.let_go(ctx, job.partial.digest)
        job.partial = None
        ctx.tables.touch(job)


def to_resume(ctx: Context, run: Run, job: Job, choice: Choice) -> PartialSummary | None:
    """The turns that an attempt of this choice should go on from, before it is made."""
    partial = job.partial
    if partial is None or any(not record.stray for record in job.attempts):
        return None
    for policy, version in views.pins(ctx, job).items():
        if partial.oldest.get(policy, version) != version:
            return None
    if job.kind == "train" and not _stays_fresh(ctx, run, job, partial, choice):
        ctx.count("partials.stale")
        return None
    return partial


def begin(ctx: Context, lease: Lease, partial: PartialSummary) -> PartialRef:
    """The attempt goes on from these: it begins as far behind as their oldest token."""
    lease.resumed = partial.oldest
    for policy in tuple(lease.deadlines):
        lag = ctx.policies[policy].tree.lag(partial.oldest.get(policy, -1))
        if lag is not None:
            attempts.expect_use(ctx, lease, policy, lag)
    ctx.count("partials.resumed")
    ctx.note(lease.attempt, "resumes", turns=partial.turns, earlier=partial.attempt)
    return PartialRef(digest=partial.digest, turns=partial.turns)


def _heard(ctx: Context, partial: PartialSummary) -> None:
    job = ctx.tables.jobs.get(partial.job)
    lease = attempts.find(ctx, partial.attempt, partial.fence, partial.agent)
    known = None if job is None else job.partial
    if known is not None and known.digest == partial.digest:
        return  # announced again
    if job is None or lease is None or lease.job != job.id:
        ctx.count("partials.late")
        bodies.release(ctx, partial.digest)
        return
    fault = _fault(ctx, job, lease, partial)
    if fault:
        ctx.count("partials.refused")
        ctx.note(partial.attempt, "partial refused", reason=fault)
        bodies.release(ctx, partial.digest)
        return
    if known is not None and known.attempt == partial.attempt:
        del ctx.bodies[known.digest]  # the log keeps the newest of an attempt
    elif known is not None:
        bodies.let_go(ctx, known.digest)
    ctx.bodies[partial.digest] = job.id
    job.partial = partial
    ctx.tables.touch(job)
    ctx.count("partials.kept")
    ctx.note(partial.attempt, "turns", finished=partial.turns)


def _fault(ctx: Context, job: Job, lease: Lease, partial: PartialSummary) -> str:
    """Why not to keep turns of a live attempt, or nothing."""
    fault = partial_fault(partial)
    if fault:
        return fault
    if partial.digest in ctx.tables.releases or partial.digest in ctx.bodies:
        return "its body belongs to something else"
    if ctx.tables.agents[lease.agent].quarantined:
        return "quarantined"
    for policy in partial.oldest:
        known = ctx.tables.policies.get(policy)
        if known is None or known.run != job.run:
            return f"versions of {policy}"
    known_partial = job.partial
    if known_partial is not None and partial.turns <= known_partial.turns:
        same = known_partial.attempt == partial.attempt
        if same or lease.record.stray:
            return f"{known_partial.turns} turns are there"
    return ""


def _stays_fresh(ctx: Context, run: Run, job: Job, partial: PartialSummary, choice: Choice) -> bool:
    """Whether some policy can still use these tokens when the group is back (as for placement, one
    is enough). Rules that refuse nothing for its predicted age (``choice.lags`` empty) look only at
    the age that they have."""
    asked = False
    for view in views.view_of(ctx, run, job).policies:
        oldest = partial.oldest.get(view.policy)
        if oldest is None:
            continue
        asked = True
        lag = ctx.policies[view.policy].tree.lag(oldest)
        ahead = steps_ahead(view, lag or 0, choice.score.cost) if choice.lags else 0
        if lag is not None and lag + ahead <= view.bound:
            return True
    return not asked
