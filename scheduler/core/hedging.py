"""Second attempts for the last groups of a batch.

The trainer waits, its batch lacks ``missing`` groups, nothing is queued: the batch is complete when
the ``missing``-th of the groups in flight is back. A group that is expected back at that time or
later gets a second attempt elsewhere if that one would be done in less than ``WORTH`` of the time.

    budget:   hedge tokens so far + expected tokens  <=  hedge_share x tokens so far

Example: hedge_share 0.03 and 10 million tokens so far allow 300 000 expected tokens of second
attempts, which is 31 groups of 8 x 1 200.

What always holds: a second attempt is never on an agent that has the job; a job has at most two
that count; the first complete result wins, as always, and the other attempt is revoked. Only the
tail is hedged, because of many groups those that finish first would be the short ones.
"""

from scheduler.core import backlog, candidates, views
from scheduler.core.context import Context
from scheduler.core.costs import spend
from scheduler.core.placement import Choice, JobView, soonest
from scheduler.core.state import Job, Policy, Run

TAIL_SHARE = 4
"""The last groups are at most one in so many of the batch (one at least)."""
WORTH = 0.6
MAX_PER_PASS = 4
MAX_FLYING = 256
"""A tail of more groups in flight than this is none."""


def waiting_tail(ctx: Context, policy: Policy) -> int:
    """How many last groups a trainer waits for; 0 when it does not, or lacks more than a tail."""
    request = policy.request
    if request is None or policy.final:
        return 0
    live = ctx.policies[policy.id]
    missing = request.groups - len(live.taken.get(request.step, ())) - len(live.buffer)
    return missing if 0 < missing <= max(1, request.groups // TAIL_SHARE) else 0


def tails(ctx: Context, run: Run) -> list[tuple[Policy, int]]:
    """Policies of a run whose batches lack their last groups."""
    if not run.spec.hedge_share or not len(ctx.runs[run.name].flying):
        return []
    if len(ctx.runs[run.name].flying) > MAX_FLYING or len(ctx.queue(run.name)):
        return []
    found = [(policy, waiting_tail(ctx, policy)) for policy in ctx.runs[run.name].trained]
    return [(policy, missing) for policy, missing in found if missing]


def pairs(ctx: Context, run: Run) -> list[tuple[Job, Choice, float]]:
    """Jobs to try a second time now, where, and with how many expected tokens."""
    found: list[tuple[Job, Choice, float]] = []
    row = spend(ctx, run.name)
    left = run.spec.hedge_share * row.tokens - row.hedge_tokens
    for policy, missing in tails(ctx, run):
        taken: dict[str, None] = dict.fromkeys(choice.agent for _, choice, _ in found)
        for due_s, job in _latecomers(ctx, run, policy, missing):
            if len(found) >= MAX_PER_PASS or any(job is other for other, _, _ in found):
                break
            view = views.view_of(ctx, run, job)
            tokens = view.tokens_mean * view.sequences
            if tokens > left:
                ctx.count("placement.hedge_budget")
                return found
            choice = _elsewhere(ctx, run, job, view, taken)
            if choice is not None and choice.score.cost < WORTH * due_s:
                left -= tokens
                taken[choice.agent] = None
                found.append((job, choice, tokens))
    return found


def _latecomers(ctx: Context, run: Run, policy: Policy, missing: int) -> list[tuple[float, Job]]:
    """Jobs in flight for a policy that are expected back last of those that the batch needs, or
    after them, with the seconds until then; without those that have a second attempt."""
    expected: list[tuple[float, str, Job]] = []
    for id in ctx.runs[run.name].flying:
        job = ctx.tables.jobs[id]
        copy = job.copies.get(policy.id)
        if copy is not None and copy.state == "in_flight":
            expected.append((_back_s(ctx, job), id, job))
    if len(expected) < missing:
        return []
    expected.sort(key=lambda entry: entry[:2])
    return [
        (due_s, job)
        for due_s, _, job in expected[missing - 1 :]
        if sum(not record.stray for record in job.attempts) == 1
    ]


def _back_s(ctx: Context, job: Job) -> float:
    """Seconds until the first of the job's attempts should be back."""
    least = candidates.NEVER_S
    for record in job.attempts:
        lease = ctx.leases[record.id]
        live = ctx.agents[record.agent]
        if record.stray:
            continue
        left_s = (live.estimate.rtt_s.value or 0.0) / 2.0
        left_s += views.estimate_of(ctx, job).body_bytes * (live.estimate.up_byte_s.value or 0.0)
        if not lease.spooled:
            left_s += backlog.ends_s(ctx, ctx.tables.agents[record.agent], live, lease)
        least = min(least, left_s)
    return least


def _elsewhere(
    ctx: Context, run: Run, job: Job, view: JobView, taken: dict[str, None]
) -> Choice | None:
    """The best agent that does not have the job and could begin at once."""
    has = {record.agent: None for record in job.attempts}

    def free(name: str) -> bool:
        agent, live = ctx.tables.agents[name], ctx.agents[name]
        at_once = live.load + job.sequences <= agent.slots or live.load == 0
        return at_once and name not in has and name not in taken

    found = candidates.shortlist(ctx, run, job, view, ctx.open_agents.names, free)
    return soonest(view, found, "hedge")
