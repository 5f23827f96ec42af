"""How many more groups may be under way for a policy.

    L  max_policy_lag        B  batch_groups       S  steps of the policy
    s  last completed step   w  groups queued, in flight or buffered
    r  groups taken by the step that is running (0 between steps)

    room = min((L + 1) B, (S - s) B) - w - r

With w + r groups ahead of it a new group is trained on within L + 1 steps from now, that is after
at most L more versions, so its lag stays within L if it starts at the head (AReaL's bound, counted
from what is open instead of from the beginning, so that filtered, expired and lost groups give
their share back by themselves). The second term stops a group that no step is left for.

Policies that learn from the same groups would drift apart if each took groups of its own whenever
it had room first, and every group would serve one of them. So a policy with room waits for a full
one of about its own pace, but never longer than two of its usual steps: a slower, stuck or dead
trainer costs the others nothing but its own copies.

A run of ``mode`` sync has one barrier per step instead: its policies wait for the slowest one, and

    room = B - w - r        for policies at the least completed step, 0 for those ahead of it

so that nothing is made while a trainer works and every group begins at the head (``views.pins``).

A policy that is trained on groups again needs fewer new ones: with a share of R = floor(ratio B)
groups per batch from the pool, of which u are there now, B (L + 1) becomes (B - R) (L + 1) + R - u.

Example: L = 1, B = 4, S = 10, step 9 running (s = 8, r = 4): min(8, 8) - w - 4 leaves room for the
4 groups of step 10 and no more.

What always holds: ``room`` counts a running batch, because its version is not out yet.
"""

from scheduler.core import replay_pool
from scheduler.core.accounting import waiting
from scheduler.core.context import Context
from scheduler.core.state import Policy, Run
from transport.runs import PolicySpec

SAME_PACE = 1.5
"""How much longer another policy's step may be for it to be waited for."""
PATIENCE = 2.0
"""How many of its usual steps it is waited for."""


def spec_of(ctx: Context, policy: Policy) -> PolicySpec:
    return ctx.run_of(policy).spec.policies[policy.name]


def running_groups(ctx: Context, policy: Policy) -> int:
    """Groups taken by the step that is not completed."""
    return len(ctx.policies[policy.id].taken.get(policy.step + 1, ()))


def room(ctx: Context, policy: Policy) -> int:
    """Groups that may be submitted for a policy now; never negative."""
    return max(0, bound(ctx, policy) - waiting(ctx, policy.id) - running_groups(ctx, policy))


def bound(ctx: Context, policy: Policy) -> int:
    """Groups that may be under way for a policy."""
    spec = spec_of(ctx, policy)
    sync = ctx.run_of(policy).spec.mode == "sync"
    steps = min(1 if sync else spec.max_policy_lag + 1, spec.steps - policy.step)
    if steps <= 0 or (sync and _is_ahead(ctx, policy)):
        return 0
    # What the pool cannot give to the next batch has to be made.
    return (steps - 1) * new_groups(spec) + next_batch(ctx, policy, spec)


def new_groups(spec: PolicySpec) -> int:
    """Groups per batch that are trained on for the first time, once there are enough others."""
    return spec.batch_groups - replay_pool.share(spec.data.replay, spec.batch_groups)


def next_batch(ctx: Context, policy: Policy, spec: PolicySpec) -> int:
    """New groups that the next batch needs."""
    again = replay_pool.share(spec.data.replay, spec.batch_groups)
    return spec.batch_groups - (min(again, replay_pool.usable(ctx, policy)) if again else 0)


def _is_ahead(ctx: Context, policy: Policy) -> bool:
    """Whether another policy that goes on has completed fewer steps."""
    others = trained_policies(ctx, ctx.run_of(policy))
    return any(other.step < policy.step for other in others if wants_groups(ctx, other))


def trained_policies(ctx: Context, run: Run) -> tuple[Policy, ...]:
    """Policies that the run's workflow uses and trains, in the order of the workflow."""
    return ctx.runs[run.name].trained


def wants_groups(ctx: Context, policy: Policy) -> bool:
    """Whether the policy's trainer is, or may come back, to train on more groups."""
    return not policy.final and not ctx.policies[policy.id].gone


def admissible(ctx: Context, run: Run) -> int:
    """Training jobs that may be made for a run now: as long as one policy has room, and no other
    one that is full is about to have some."""
    wanting = [policy for policy in trained_policies(ctx, run) if wants_groups(ctx, policy)]
    rooms = [room(ctx, policy) for policy in wanting]
    wanted = max(rooms, default=0)
    drift = run.spec.mode == "async" and len(wanting) > 1
    if drift and wanted > 0 and min(rooms) == 0:
        full = [policy for policy, left in zip(wanting, rooms, strict=True) if left == 0]
        hungry = [policy for policy, left in zip(wanting, rooms, strict=True) if left > 0]
        if any(_is_soon(ctx, policy, hungry) for policy in full):
            return 0
    if run.spec.max_groups:
        wanted = min(wanted, run.spec.max_groups - run.submitted_groups)
    own_jobs = len(ctx.tables.jobs) - ctx.external_open
    return max(0, min(wanted, ctx.settings.max_queued_jobs - own_jobs))


def _is_soon(ctx: Context, policy: Policy, hungry: list[Policy]) -> bool:
    """Whether a full policy's step should end any moment; sets a timer for when it did not."""
    live = ctx.policies[policy.id]
    paces = [ctx.policies[other.id].busy_s.value for other in hungry]
    known = [pace for pace in paces if pace is not None]
    if not live.present or not running_groups(ctx, policy) or not known:
        return False
    busy_s = min(known) if live.busy_s.value is None else live.busy_s.value
    until_s = live.granted_s + PATIENCE * busy_s
    if busy_s > SAME_PACE * min(known) or ctx.now >= until_s:
        return False
    ctx.timers.set_earlier("admit", policy.run, until_s)
    return True
