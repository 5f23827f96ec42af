"""Stopping what can no longer be used, as soon as that is certain.

The rule by finish time refuses a group when d + steps > bound (``placement``). Asked again of a
group that has begun, at the moment in which a batch goes out: while its step runs a group is used
one step from now at the earliest, so what began ``bound`` steps behind the head has missed its last
batch. It would hold its slots and its place in the quota for the rest of the step, often longer
than it took so far, and be ``overtaken`` then. It is stopped now, and fresh groups begin.

Example: bound 2, steps of 12 s. Of 90 groups in flight 20 began two versions ago when a batch goes
out; their slots are free 12 s sooner.

What always holds: nothing is stopped that a batch of the running step could use, should it be
granted once more with groups of the head; attempts that have not begun are not stopped, as they
will begin with what their agent has then; only within a heartbeat of a batch's going out, and only
when some attempt has missed it, are the policy's groups in flight looked at, so that it costs
O(groups in flight) once per step. The baselines do not look ahead: their groups run on until they
are overtaken.
"""

from scheduler.core import attempts, jobs
from scheduler.core.admission import running_groups, spec_of
from scheduler.core.context import Context
from scheduler.core.placement import FinishTime
from scheduler.core.state import Job, Policy


def stop(ctx: Context) -> None:
    """End the copies of groups in flight that have missed their last batch."""
    if not isinstance(ctx.rule, FinishTime):
        return
    for id, live in ctx.policies.items():
        if not live.flying_by_deadline or ctx.now - live.granted_s > ctx.settings.heartbeat_s:
            continue
        policy = ctx.tables.policies[id]
        if policy.request is not None or not running_groups(ctx, policy):
            continue
        if min(live.flying_by_deadline) <= policy.step:
            _stop_late(ctx, policy)


def _stop_late(ctx: Context, policy: Policy) -> None:
    bound = spec_of(ctx, policy).max_policy_lag
    for id in tuple(ctx.runs[policy.run].flying):
        job = ctx.tables.jobs[id]
        copy = job.copies.get(policy.id)
        if copy is not None and copy.state == "in_flight" and _is_late(ctx, policy, job, bound):
            ctx.note(id, "late", policy=policy.id, head=policy.head)
            jobs.close_copy(ctx, job, policy.id, "expired", "overtaken")


def _is_late(ctx: Context, policy: Policy, job: Job, bound: int) -> bool:
    """Whether all attempts of a group have begun too far behind for the next step."""
    late = True
    for record in job.attempts:
        lease = ctx.leases[record.id]
        version = lease.newest.get(policy.id)
        lag = None if version is None else ctx.policies[policy.id].tree.lag(version)
        late = late and lag is not None and lag >= bound
        if version is None and lease.deadlines.get(policy.id, policy.step + 1) <= policy.step:
            # It has not begun: with the next version, or it is going to be stopped.
            attempts.expect_use(ctx, lease, policy.id, bound - 1)
    return late
