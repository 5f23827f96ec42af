"""Results: summaries of bodies that the trajectory log holds.

What always holds: every announced digest is answered, so that the log can stop announcing it; a
job has at most one result, the first complete valid one of an attempt that was not revoked; the
body of any other summary is released. A summary comes from an agent, so nothing in it is trusted
before it is checked.
"""

from collections.abc import Sequence
from itertools import islice, zip_longest

from scheduler.core import (
    attempts,
    bodies,
    consumption,
    costs,
    curation,
    evaluation,
    jobs,
    learning,
    outcomes,
    partials,
    quarantine,
    rechecks,
)
from scheduler.core.accounting import move, open_copies
from scheduler.core.context import Context, Lease
from scheduler.core.events import Verdict, Verdicts
from scheduler.core.state import Job, Result
from scheduler.core.work import work_of
from transport.messages import (
    BodiesGone,
    BodiesReleased,
    GroupSummary,
    SummariesAccepted,
    TrajectoriesStored,
)
from transport.runs import MAX_ROLLOUTS
from transport.summaries import summary_fault

RELEASE_BATCH = 1000
_NOTHING_SAID = Verdict()


def stored(
    ctx: Context, service: str, message: TrajectoriesStored, verdicts: Sequence[Verdicts] = ()
) -> None:
    """Durable bodies were announced; ``verdicts`` of data functions go with the summaries."""
    for summary, said in zip_longest(message.summaries, verdicts[: len(message.summaries)]):
        _summary(ctx, summary, said or {})
    digests = tuple(summary.digest for summary in message.summaries)
    rechecked, ctx.new_rechecks = tuple(ctx.new_rechecks), []
    ctx.send(service, SummariesAccepted(digests=digests, rechecked=rechecked))


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


def _summary(ctx: Context, summary: GroupSummary, verdicts: Verdicts) -> None:
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
    _accept(ctx, job, lease, summary, verdicts)


def _fault(ctx: Context, job: Job, summary: GroupSummary) -> str:
    """What is wrong with a summary of a live attempt, or nothing."""
    sequences = job.sequences
    # A workflow may return several sequences per sibling; of an evaluation's, one is scored, and a
    # recheck counts all sequences of its group.
    rollouts, rest = divmod(len(summary.rewards), sequences)
    most = 1 if job.kind in ("eval", "recheck") else MAX_ROLLOUTS
    if rest or not 1 <= rollouts <= most or len(summary.lengths) != len(summary.rewards):
        return f"{len(summary.rewards)} rewards, {len(summary.lengths)} lengths of {sequences}"
    fault = summary_fault(summary)
    if fault:
        return fault
    workflow = work_of(ctx, job).workflow
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


def _accept(
    ctx: Context, job: Job, lease: Lease, summary: GroupSummary, verdicts: Verdicts
) -> None:
    quarantine.result_came(ctx, lease.agent)
    if job.external is not None and job.external.recheck is not None:
        rechecks.answered(ctx, job, lease, summary, job.external.recheck)
        return
    agent = ctx.tables.agents[lease.agent]
    costs.uploaded(ctx, job.run, agent, summary.size_bytes, sum(summary.lengths))
    learning.learn(ctx, job, lease, summary)
    curation.learn(ctx, job, summary)
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
    items = job.items
    if job.external is None:
        job.items = ()
    ctx.bodies[summary.digest] = job.id
    if job.external is not None:
        outcomes.deliver(ctx, job, job.external, summary)
    elif job.kind == "eval":
        _score(ctx, job, summary)
    else:
        ctx.runs[job.run].turnaround.add(ctx.now - job.created_s)
        _route(ctx, job, summary, verdicts)
        rechecks.consider(ctx, job, items, summary)
    if job.id in ctx.tables.jobs:
        jobs.drop_if_over(ctx, job)


def _score(ctx: Context, job: Job, summary: GroupSummary) -> None:
    evaluation.score(ctx, job, summary.rewards)
    for policy in open_copies(job):
        move(ctx, job, policy, "scored")


def _route(ctx: Context, job: Job, summary: GroupSummary, verdicts: Verdicts) -> None:
    """Hand the group to every policy that produced tokens in it and still wants it, unless one of
    its filters objects."""
    for policy in open_copies(job):
        span = summary.versions.get(policy)
        if span is None:
            move(ctx, job, policy, "dropped", "not_routed")
            continue
        verdict = verdicts.get(policy, _NOTHING_SAID)
        for name in verdict.failed:
            ctx.count(f"data.failed.{name}")
        if verdict.filter:
            move(ctx, job, policy, "filtered", verdict.filter)
            continue
        copy = job.copies[policy]
        copy.oldest = span[0]
        copy.score, copy.drawn = verdict.score, verdict.drawn
        if ctx.policies[policy].buffer.fifo:
            copy.arrived_s = ctx.now
        move(ctx, job, policy, "buffered")
        consumption.place(ctx, ctx.tables.policies[policy], job)
