"""What a result teaches: how fast its agent is, how long answers are, how much a run uses.

What always holds: nothing here decides anything or is durable; a result that was read twice is
learnt from once (its lease is over after the first time).
"""

from scheduler.core import attempts, prefetch
from scheduler.core.context import AgentLive, Context, Lease
from scheduler.core.estimators import MAX_KINDS, RunEstimate
from scheduler.core.state import Job
from scheduler.core.views import kind_of
from transport.messages import GroupSummary


def learn(ctx: Context, job: Job, lease: Lease, summary: GroupSummary) -> None:
    """An attempt's result has come; its items are still there."""
    live, agent = ctx.agents[lease.agent], ctx.tables.agents[lease.agent]
    estimate = live.estimate
    live.failures = 0
    # Another agent drew a part of what a resumed attempt brings: nothing is known of the speed.
    sample = None
    lengths = _of_siblings(job, summary.lengths)
    if not lease.resumed:
        sample = estimate.group_done(
            lengths=lengths,
            slots=agent.slots,
            generating_s=summary.generating_s,
            now=ctx.now,
            kind=kind_of(job),
        )
    if sample is not None:
        ctx.hardware.observe(agent.hardware, sample)
    if lease.accepted_s is not None and not _links_were_away(ctx, live, lease.accepted_s):
        on_agent_s = summary.queued_s + summary.generating_s
        upload_s = ctx.now - lease.accepted_s - on_agent_s
        estimate.uploaded(size_bytes=summary.size_bytes, upload_s=upload_s, now=ctx.now)
    run = ctx.runs[job.run]
    run.absorbers_age += 1
    attempts.learn_tokens(ctx, job, lease, float(sum(summary.lengths)))
    if job.kind == "train":
        run.estimate.group_done(lengths, summary.size_bytes)
        _learn_family(ctx, job, lengths, summary.size_bytes)
        for policy in summary.versions:
            if policy in job.copies and policy in ctx.policies:
                ctx.policies[policy].arrivals.observe(ctx.now)
    prefetch.learn(ctx, agent, live, float(summary.size_bytes))
    ctx.refresh_open(agent, live)


def _links_were_away(ctx: Context, live: AgentLive, since_s: float) -> bool:
    """Whether the agent or the trajectory log may have been without its links since then: what
    waited for them says nothing about the uplink."""
    back_s = max(live.back_s, ctx.log_back_s)
    return since_s < back_s + ctx.settings.reconnect_grace_s


def _of_siblings(job: Job, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens of each sibling, of all the sequences that a workflow returns for it: they are drawn
    one after the other (see ``edge_agent.workflow_registry.workflow`` for their order)."""
    if len(lengths) == job.sequences:
        return lengths
    siblings = job.sequences // max(1, len(job.items))
    of_item = len(lengths) // job.sequences * siblings
    return tuple(
        sum(lengths[first : start + of_item : siblings])
        for start in range(0, len(lengths), of_item)
        for first in range(start, start + siblings)
    )


def _learn_family(ctx: Context, job: Job, lengths: tuple[int, ...], size_bytes: int) -> None:
    """Answers of one task family are of similar length; bounded, the stalest family goes first."""
    family = job.items[0].family if job.items else ""
    if not family:
        return
    run = ctx.runs[job.run]
    workflow = ctx.tables.runs[job.run].spec.workflow
    known = run.families.pop(family, None)
    if known is None:
        known = RunEstimate(workflow.max_new_tokens, workflow.group_size)
    run.families[family] = known
    if len(run.families) > MAX_KINDS:
        del run.families[next(iter(run.families))]
    known.group_done(lengths, size_bytes)
