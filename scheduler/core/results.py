"""Results: summaries of bodies that the trajectory log holds.

What always holds: every announced digest is answered, so that the log can stop announcing it; a
job has at most one result, the first complete valid one of an attempt that was not revoked; the
body of any other summary is released. A summary comes from an agent, so nothing in it is trusted
before it is checked.
"""

from itertools import islice

from scheduler.core import (
    attempts,
    bodies,
    consumption,
    costs,
    jobs,
    learning,
    outcomes,
    partials,
    quarantine,
)
from scheduler.core.accounting import move, open_copies
from scheduler.core.context import Context, Lease
from scheduler.core.state import Job, Result
from transport.messages import (
    BodiesGone,
    BodiesReleased,
    GroupSummary,
    SummariesAccepted,
    TrajectoriesStored,
)
from transport.summaries import summary_fault

RELEASE_BATCH = 1000
ACCURATE = 1.0
"""An evaluated item counts as right from this reward on."""


def stored(ctx: Context, service: str, message: TrajectoriesStored) -> None:
    """Durable bodies were announced."""
    for summary in message.summaries:
        _summary(ctx, summary)
    digests = tuple(summary.digest for summary in message.summaries)
    ctx.send(service, SummariesAccepted(digests=digests))


def bodies_gone(ctx: Context, service: str, message: BodiesGone) -> None:
    """The log has dropped these."""
    for digest in message.digests:
        row = ctx.tables.releases.get(digest)
        if row is not None:
            ctx.tables.remove(row)
    if not ctx.tables.releases:
        ctx.timers.cancel("release", "")
    if ctx.releases_behind:
        repeat_releases(ctx, service)


def repeat_releases(ctx: Context, service: str) -> None:
    """Name the oldest pending releases again, at most one batch; the next one follows when the
    log has answered."""
    digests = list(islice(ctx.tables.releases, RELEASE_BATCH))
    ctx.releases_behind = len(digests) < len(ctx.tables.releases)
    send_releases(ctx, service, digests)


def send_releases(ctx: Context, service: str, digests: list[str]) -> None:
    """Tell the log what it may drop, and again later until it has."""
    for start in range(0, len(digests), RELEASE_BATCH):
        batch = tuple(digests[start : start + RELEASE_BATCH])
        ctx.send(service, BodiesReleased(digests=batch))
    if ctx.tables.releases:
        at = ctx.now + ctx.settings.release_repeat_s
        ctx.timers.set_earlier("release", "", at)


def _summary(ctx: Context, summary: GroupSummary) -> None:
    if ctx.bodies.get(summary.digest) == summary.job:
        return  # announced again because our answer was lost
    job = ctx.tables.jobs.get(summary.job)
    lease = attempts.find(ctx, summary.attempt, summary.fence, summary.agent)
    if job is None or lease is None or lease.job != summary.job:
        ctx.count("results.late")
        ctx.note(summary.attempt, "late result", digest=summary.digest, agent=summary.agent)
        bodies.release(ctx, summary.digest)
        return
    if ctx.tables.agents[lease.agent].quarantined:
        ctx.count("results.quarantined")
        bodies.release(ctx, summary.digest)
        jobs.refuse_result(ctx, lease, "quarantined")
        return
    fault = _fault(ctx, job, summary)
    if fault:
        ctx.count("results.invalid")
        bodies.release(ctx, summary.digest)
        jobs.attempt_failed(ctx, lease, "summary.invalid", fault)
        quarantine.failed(ctx, lease.agent, "summary.invalid", f"{summary.attempt}: {fault}")
        return
    _accept(ctx, job, lease, summary)


def _fault(ctx: Context, job: Job, summary: GroupSummary) -> str:
    """What is wrong with a summary of a live attempt, or nothing."""
    sequences = job.sequences
    if len(summary.rewards) != sequences or len(summary.lengths) != sequences:
        return f"{len(summary.rewards)} rewards, {len(summary.lengths)} lengths of {sequences}"
    fault = summary_fault(summary)
    if fault:
        return fault
    workflow = ctx.tables.runs[job.run].spec.workflow
    longest = workflow.max_sequence_tokens
    if job.external is not None and job.external.max_new_tokens:
        longest = longest // workflow.max_new_tokens * job.external.max_new_tokens
    if max(summary.lengths) > longest:
        return f"a sequence of {max(summary.lengths)} tokens, at most {longest}"
    if summary.digest in ctx.tables.releases or summary.digest in ctx.bodies:
        return "its body belongs to another result"
    for policy, (oldest, newest) in summary.versions.items():
        known = ctx.tables.policies.get(policy)
        if known is None or known.run != job.run or not 0 <= oldest <= newest:
            return f"version range of {policy}"
    return ""


def _accept(ctx: Context, job: Job, lease: Lease, summary: GroupSummary) -> None:
    quarantine.result_came(ctx.agents[lease.agent])
    agent = ctx.tables.agents[lease.agent]
    costs.uploaded(ctx, job.run, agent, summary.size_bytes, sum(summary.lengths))
    learning.learn(ctx, job, lease, summary)
    attempts.end(ctx, job, lease.record, "result", digest=summary.digest)
    attempts.revoke_all(ctx, job, "job_done")
    attempts.leave_queue(ctx, job)
    partials.drop(ctx, job)
    ctx.count("results.accepted")
    agent.groups_done += 1
    ctx.tables.touch(agent)
    job.result = Result(
        attempt=summary.attempt,
        agent=lease.agent,
        digest=summary.digest,
        size_bytes=summary.size_bytes,
        reward_mean=sum(summary.rewards) / len(summary.rewards),
        response_tokens=sum(summary.lengths),
    )
    if job.external is None:
        job.items = ()
    ctx.bodies[summary.digest] = job.id
    if job.external is not None:
        outcomes.deliver(ctx, job, job.external, summary)
    elif job.kind == "eval":
        _score(ctx, job, summary)
    else:
        ctx.runs[job.run].turnaround.add(ctx.now - job.created_s)
        _route(ctx, job, summary)
    if job.id in ctx.tables.jobs:
        jobs.drop_if_over(ctx, job)


def _score(ctx: Context, job: Job, summary: GroupSummary) -> None:
    evaluation = ctx.tables.evaluations[job.evaluation]
    evaluation.scored += len(summary.rewards)
    evaluation.correct += sum(reward >= ACCURATE for reward in summary.rewards)
    ctx.tables.touch(evaluation)
    for policy in open_copies(job):
        move(ctx, job, policy, "scored")


def _route(ctx: Context, job: Job, summary: GroupSummary) -> None:
    """Hand the group to every policy that produced tokens in it and still wants it."""
    for policy in open_copies(job):
        span = summary.versions.get(policy)
        if span is None:
            move(ctx, job, policy, "dropped", "not_routed")
            continue
        job.copies[policy].oldest = span[0]
        move(ctx, job, policy, "buffered")
        consumption.place(ctx, ctx.tables.policies[policy], job)
