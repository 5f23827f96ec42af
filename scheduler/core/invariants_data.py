"""What always holds of trained groups that may be trained on again, and of items: O(state), for
tests and small simulations.
"""

from collections import Counter

from scheduler.core import curation, replay_pool
from scheduler.core.admission import spec_of
from scheduler.core.context import Context
from scheduler.core.invariants_life import require
from scheduler.core.kept import Kept
from scheduler.core.state import Policy


def check_data(ctx: Context) -> None:
    """Raises ``InvariantViolation`` with the story of what is wrong."""
    held: Counter[str] = Counter()
    for entry in ctx.tables.kept.values():
        require(ctx, entry.policy in ctx.policies, entry.job, "kept for a run that is over")
        held[entry.digest] += 1
        require(ctx, ctx.bodies.get(entry.digest) == entry.job, entry.job, "kept without its body")
    for job in ctx.tables.jobs.values():
        if job.external is not None and job.external.recheck is not None:
            held[job.external.recheck.digest] += 1
    require(ctx, ctx.held_bodies == held, "bodies", "held for others than those that may use them")
    for id in ctx.policies:
        _check_pool(ctx, ctx.tables.policies[id])
    _check_items(ctx)


def _check_items(ctx: Context) -> None:
    """Every item of a run was used or skipped; histories are those of live runs, and bounded."""
    for run in ctx.tables.runs.values():
        used = run.submitted_groups + run.skipped
        require(ctx, run.cursor == used, run.name, f"{used} items used or skipped of {run.cursor}")
        most = curation.MAX_SKIPPED
        require(ctx, run.skipped_in_row <= most, run.name, f"{run.skipped_in_row} skipped in a row")
    indexed = 0
    for name, live in ctx.runs.items():
        indexed += len(live.histories)
        numbers = [history.number for history in live.histories.values()]
        require(ctx, numbers == sorted(set(numbers)), name, "histories are out of order")
        require(ctx, len(numbers) <= curation.MAX_HISTORIES, name, f"{len(numbers)} histories")
        for item, history in live.histories.items():
            row = ctx.tables.histories.get(history.key)
            require(ctx, row is history and history.item == item, name, f"history of {item}")
    rows = len(ctx.tables.histories)
    require(ctx, rows == indexed, "items", f"{rows} histories, {indexed} of live runs")


def _check_pool(ctx: Context, policy: Policy) -> None:
    """The index mirrors the rows, within the bounds of the run."""
    id, pool = policy.id, ctx.policies[policy.id].pool
    spec = replay_pool.spec_of(ctx, policy)
    rows = {entry.job: entry for entry in ctx.tables.kept.values() if entry.policy == id}
    require(ctx, pool.entries == rows, id, "the replay pool is not its rows")
    running = sum(map(len, pool.taken.values()))
    most = spec.keep + running
    require(ctx, len(rows) <= most, id, f"{len(rows)} groups kept, at most {most}")
    require(ctx, not rows or spec.ratio > 0.0, id, "groups kept that nobody wants")
    require(ctx, not rows or not policy.final, id, "groups kept after the last step")
    batch = spec_of(ctx, policy).batch_groups
    for step, jobs in pool.taken.items():
        require(ctx, step == policy.step + 1, id, f"step {step} takes again at {policy.step}")
        allowed = replay_pool.share(spec, batch)
        require(ctx, 0 < len(jobs) <= allowed, id, f"{len(jobs)} taken again, at most {allowed}")
    for entry in rows.values():
        _check_entry(ctx, policy, entry)
    reused = ctx.tables.reuses.get(id)
    for step in () if reused is None else reused.steps:
        since = policy.checkpoint_step < step <= policy.step
        require(ctx, since, id, f"step {step} trained on groups again, unconfirmed")


def _check_entry(ctx: Context, policy: Policy, entry: Kept) -> None:
    live = ctx.policies[policy.id]
    spec = spec_of(ctx, policy)
    job = ctx.tables.jobs.get(entry.job)
    copy = None if job is None else job.copies.get(policy.id)
    state = "trained" if copy is None else copy.state
    require(ctx, state in ("trained", "taken"), entry.job, f"kept and {state}")
    confirmed = entry.step <= policy.checkpoint_step
    require(ctx, (state == "trained") == confirmed, entry.job, f"{state} by step {entry.step}")
    uses = entry.uses
    require(ctx, uses == sorted(set(uses)), entry.job, f"used by {uses}")
    require(ctx, len(uses) <= spec.data.replay.max_uses, entry.job, f"used {len(uses)} times")
    require(ctx, entry.step <= policy.step, entry.job, f"kept before step {entry.step}")
    require(ctx, not uses or entry.step < uses[0], entry.job, f"{uses} not after {entry.step}")
    taken = bool(uses) and uses[-1] > policy.step
    indexed = bool(uses) and entry.job in live.pool.taken.get(uses[-1], ())
    require(ctx, taken == indexed, entry.job, f"taken again by {uses}")
    require(ctx, not taken or entry.lag <= spec.max_policy_lag, entry.job, f"lag {entry.lag}")
