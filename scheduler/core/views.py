"""Jobs, and the policies that want them, as placement sees them.

What always holds: O(1) per job but for the few deadlines that groups of a policy have; nothing here
changes anything.
"""

from scheduler.core import backlog
from scheduler.core.accounting import account
from scheduler.core.admission import next_batch, running_groups
from scheduler.core.context import Context, PolicyLive
from scheduler.core.estimators import RunEstimate
from scheduler.core.placement import JobView, PolicyView
from scheduler.core.state import Job, Run
from scheduler.core.work import work_of

STARVED_HEARTBEATS = 2
MAX_LEVELS = 8
"""Lags to begin with that are told apart."""


def pins(ctx: Context, job: Job) -> dict[str, int]:
    """The versions that a job must be made with, by policy id."""
    if job.evaluation:
        return ctx.tables.evaluations[job.evaluation].pinned
    if job.kind == "train" and ctx.tables.runs[job.run].spec.mode == "sync":
        return {
            id: ctx.tables.policies[id].head
            for id, copy in job.copies.items()
            if copy.state in ("queued", "in_flight")
        }
    return {} if job.external is None else job.external.pinned


def kind_of(job: Job) -> str:
    """Work that takes the same time per token: of one run and task family."""
    return f"{job.run}|{job.items[0].family}" if job.items else f"{job.run}|"


def estimate_of(ctx: Context, job: Job) -> RunEstimate:
    live = ctx.runs[job.run]
    return live.families.get(job.items[0].family if job.items else "", live.estimate)


def max_new_tokens(ctx: Context, job: Job) -> int:
    """The job's own limit; 0 where it is the run's."""
    if job.evaluation:
        return work_of(ctx, job).workflow.max_new_tokens
    return 0 if job.external is None else job.external.max_new_tokens


def view_of(ctx: Context, run: Run, job: Job) -> JobView:
    """What placement knows of a job now."""
    estimate = estimate_of(ctx, job)
    mean, longest = estimate.tokens_mean, estimate.tokens_longest
    most = max_new_tokens(ctx, job)
    if most:
        longest = min(longest, float(most))
        mean = min(mean, longest)
    policies = (
        tuple(
            _policy_view(ctx, run, id, itself=copy.state == "in_flight")
            for id, copy in job.copies.items()
            if copy.state in ("queued", "in_flight")
        )
        if job.kind == "train" and run.spec.mode == "async"
        else ()
    )
    return JobView(
        kind=kind_of(job),
        sequences=job.sequences,
        tokens_mean=mean,
        tokens_longest=longest,
        tokens_likely=estimate.tokens_likely,
        body_bytes=estimate.body_bytes,
        policies=policies,
    )


def _policy_view(ctx: Context, run: Run, id: str, *, itself: bool) -> PolicyView:
    """``itself``: the group is one of those in flight, and does not go before itself."""
    live, policy = ctx.policies[id], ctx.tables.policies[id]
    spec = run.spec.policies[policy.name]
    row = account(ctx, id, "train").row
    since = live.starved_since_s
    patience_s = STARVED_HEARTBEATS * ctx.settings.heartbeat_s
    running = running_groups(ctx, policy)
    batch = next_batch(ctx, policy, spec)  # the rest is replayed and waits for nobody
    return PolicyView(
        policy=id,
        bound=spec.max_policy_lag,
        busy_s=live.busy_s.value,
        batch=batch,
        ready=row.buffered + running,
        in_flight=row.in_flight - itself,
        grant_s=_next_grant_s(ctx, live, running, row.buffered, batch),
        interval_s=_interval_s(live),
        running=running,
        earlier=_earlier(live, running, spec.max_policy_lag),
        rate=live.arrivals.per_s(ctx.now),
        starved=not (row.in_flight or row.buffered)
        and since is not None
        and ctx.now - since >= patience_s,
    )


def _interval_s(live: PolicyLive) -> float | None:
    """From one batch to the next, as it was lately; never less than the trainer needs."""
    busy_s, interval_s = live.busy_s.value, live.interval_s.value
    return None if busy_s is None or interval_s is None else max(busy_s, interval_s, 1e-3)


def _next_grant_s(ctx: Context, live: PolicyLive, running: int, buffered: int, batch: int) -> float:
    """Seconds until the next batch goes out: the running step has to end, the batch to fill."""
    interval_s, busy_s = _interval_s(live), live.busy_s.value
    if interval_s is None or busy_s is None:
        return 0.0
    fills_s = max(0, batch - buffered) * interval_s / batch
    if not running:
        return fills_s
    left_s = live.granted_s + busy_s - ctx.now
    return max(fills_s, left_s if left_s > 0.0 else backlog.OVERRUN * -left_s)


def _earlier(live: PolicyLive, running: int, bound: int) -> tuple[tuple[int, int], ...]:
    """Per lag to begin with, from 1 on: groups that go before such a group because they can be used
    no longer than it, at hand and in flight."""
    head_step = live.tree.head_step
    found: list[tuple[int, int]] = []
    for lag in range(1, min(bound, MAX_LEVELS) + 1):
        last = head_step + bound - lag
        at_hand = sum(count for at, count in live.buffer.by_deadline.items() if at <= last)
        flying = sum(count for at, count in live.flying_by_deadline.items() if at <= last)
        found.append((running + at_hand, flying))
    return tuple(found)
