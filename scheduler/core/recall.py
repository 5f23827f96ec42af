"""Taking back what has not begun, for a place where it would be done clearly earlier.

When agents are idle and nothing waits in the queues, the attempts that wait on busy agents are
looked at, the last one of each, and the one that would be done latest is asked back if an idle
agent would be done in less than ``WORTH`` of that time, the recall's own round trip included, and
at least ``MIN_GAIN_S`` earlier. The agent gives it back if it has not begun, and the job is placed
anew, at the head of its queue.

What always holds: at most ``MAX_RECALLS`` are under way at a time, no more than agents are idle; a
job is taken back at most ``MAX_PER_JOB`` times, so that it does not wander for ever; a recall loses
nothing: until the agent gives it back the attempt is as good as any other. A recall that nobody
answers is forgotten after ``offer_timeout_s``.
"""

from scheduler.core import attempts, backlog, candidates, views
from scheduler.core.context import AgentLive, Context, Lease
from scheduler.core.placement import Choice, JobView, soonest
from scheduler.core.state import Job
from transport.messages import LeaseRecall

MAX_RECALLS = 4
MAX_LOOKED_AT = 16
MAX_PER_JOB = 2
WORTH = 0.6
MIN_GAIN_S = 1.0
AGAIN_S = 0.1
"""After a look that found nothing; every placing pass asks, and in a large fleet a look costs as
much as a placement."""


def look(ctx: Context) -> None:
    """Ask back what an idle agent would do clearly earlier; nothing that waits could use it."""
    if not len(ctx.backed_up) or not len(ctx.open_agents) or not ctx.settings.prefetch_groups:
        return
    if ctx.now < ctx.recall_again_s and len(ctx.open_agents) > ctx.settings.shortlist:
        return
    late_s = ctx.now - ctx.settings.offer_timeout_s
    for attempt in [name for name, at_s in ctx.recalls.items() if at_s <= late_s]:
        del ctx.recalls[attempt]
    while len(ctx.recalls) < MAX_RECALLS:
        lease = _latest(ctx)
        if lease is None or not _ask(ctx, lease):
            ctx.recall_again_s = ctx.now + AGAIN_S
            return


def answered(ctx: Context, lease: Lease, *, begun: bool) -> bool:
    """The agent's answer to a recall; false when it was never asked. A job that was given back is
    queued again by the caller."""
    if lease.recall_s is None:
        return False
    ctx.recalls.pop(lease.attempt, None)
    ctx.count("attempts.recall_refused" if begun else "attempts.recalled")
    if begun:
        attempts.started(ctx, lease)
    return True


def _latest(ctx: Context) -> Lease | None:
    """Of the last waiting attempts of some busy agents the one that would be done latest."""
    names = ctx.backed_up.names
    start, seen = 0, len(names)
    if seen > MAX_LOOKED_AT:
        start, seen = ctx.rng.randrange(seen), MAX_LOOKED_AT
    found: tuple[float, str, Lease] | None = None
    for offset in range(start, start + seen):
        name = names[offset % len(names)]
        live, agent = ctx.agents[name], ctx.tables.agents[name]
        lease = _last_waiting(ctx, live)
        if lease is None:
            continue
        key = (-backlog.ends_s(ctx, agent, live, lease), lease.attempt, lease)
        found = key if found is None else min(found, key, key=lambda entry: entry[:2])
    return None if found is None else found[2]


def _last_waiting(ctx: Context, live: AgentLive) -> Lease | None:
    for attempt in reversed(live.waiting):
        lease = ctx.leases[attempt]
        job = ctx.tables.jobs[lease.job]
        if lease.recall_s is None and _may_go(job):
            return lease
    return None


def _may_go(job: Job) -> bool:
    """Evaluations of a pinned version stay where it is."""
    recalled = sum(record.outcome == "recalled" for record in job.history)
    return not job.evaluation and recalled < MAX_PER_JOB


def _ask(ctx: Context, lease: Lease) -> bool:
    """Ask an attempt back if there is a clearly better place; false when there is none."""
    job = ctx.tables.jobs[lease.job]
    agent, live = ctx.tables.agents[lease.agent], ctx.agents[lease.agent]
    view = views.view_of(ctx, ctx.tables.runs[job.run], job)
    choice = _better_place(ctx, job, view, lease)
    stays_s = backlog.ends_s(ctx, agent, live, lease)
    away_s = live.estimate.rtt_s.value or 0.0
    if choice is None:
        return False
    goes_s = choice.score.cost + away_s
    if goes_s > WORTH * stays_s or stays_s - goes_s < MIN_GAIN_S:
        return False
    lease.recall_s = ctx.now
    ctx.recalls[lease.attempt] = ctx.now
    attempts.recallable(ctx, live, lease, is_so=False)
    ctx.send(lease.agent, LeaseRecall(attempt=lease.attempt, fence=lease.fence))
    ctx.note(lease.attempt, "recall", to=choice.agent, stays_s=stays_s, goes_s=goes_s)
    return True


def _better_place(ctx: Context, job: Job, view: JobView, lease: Lease) -> Choice | None:
    """The place of another agent that could begin at once and is not promised to a recall yet."""
    spare = len(ctx.recalls)

    def idle(name: str) -> bool:
        agent, live = ctx.tables.agents[name], ctx.agents[name]
        return name != lease.agent and live.load + job.sequences <= agent.slots

    found = candidates.shortlist(
        ctx, ctx.tables.runs[job.run], job, view, ctx.open_agents.names, idle
    )
    found = [candidate for candidate in found if candidate.agent not in job.avoid]
    if len(found) <= spare:
        return None
    return soonest(view, found, "recall")
