"""What always holds of placement's own indexes and promises: O(state), for tests and small
simulations.
"""

from collections import Counter

from scheduler.core.context import Context
from scheduler.core.invariants_life import require
from scheduler.core.recall import MAX_PER_JOB, MAX_RECALLS


def check_placement(ctx: Context) -> None:
    """Raises ``InvariantViolation`` with the story of what is wrong."""
    _check_flying(ctx)
    _check_second_attempts(ctx)
    _check_recalls(ctx)
    _check_pools(ctx)
    _check_deadlines(ctx)


def _check_flying(ctx: Context) -> None:
    for name, live in ctx.runs.items():
        mine = [job for job in ctx.tables.jobs.values() if job.run == name]
        training = {j.id for j in mine if j.kind == "train" and j.state == "in_flight"}
        require(ctx, live.flying.keys() == training, name, "index of training jobs in flight")
        sequences = sum(
            job.sequences for job in mine if job.external is not None and job.state == "in_flight"
        )
        require(ctx, live.external_in_flight == sequences, name, "external sequences in flight")


def _check_second_attempts(ctx: Context) -> None:
    """At most two attempts of a job count, never on one agent; the budget is kept. Tokens so far
    only grow, and an attempt is charged when it is made."""
    for job in ctx.tables.jobs.values():
        agents = [record.agent for record in job.attempts if not record.stray]
        require(ctx, len(agents) <= 2, job.id, f"{len(agents)} attempts count")
        require(ctx, len(set(agents)) == len(agents), job.id, f"twice on {agents}")
    for row in ctx.tables.spends.values():
        run = ctx.tables.runs.get(row.run)
        if run is not None:
            most = run.spec.hedge_share * row.tokens + 1
            require(ctx, row.hedge_tokens <= most, row.run, f"hedges {row.hedge_tokens} > {most}")


def _check_recalls(ctx: Context) -> None:
    require(ctx, len(ctx.recalls) <= MAX_RECALLS, "recalls", f"{list(ctx.recalls)}")
    for attempt in ctx.recalls:
        lease = ctx.leases.get(attempt)
        asked = lease is not None and lease.recall_s is not None and lease.started_s is None
        require(ctx, asked, attempt, "recalled, and over or begun")
    for job in ctx.tables.jobs.values():
        times = sum(record.outcome == "recalled" for record in job.history)
        require(ctx, times <= MAX_PER_JOB, job.id, f"recalled {times} times")


def _check_pools(ctx: Context) -> None:
    for name, live in ctx.agents.items():
        agent = ctx.tables.agents[name]
        usable = live.state == "ready" and not agent.cordoned and not agent.quarantined
        require(ctx, (name in ctx.ready) == usable, name, "pool of ready agents")
        require(ctx, usable or name not in ctx.open_agents, name, "open and not usable")
        waiting = {
            id
            for id, lease in live.leases.items()
            if lease.leased and lease.counted and lease.started_s is None and lease.recall_s is None
        }
        listed = set(live.waiting)
        require(ctx, listed <= waiting, name, f"could not be taken back: {listed - waiting}")
        require(ctx, (name in ctx.backed_up) == bool(listed), name, "pool of backed up agents")


def _check_deadlines(ctx: Context) -> None:
    for id, live in ctx.policies.items():
        flying = Counter(
            lease.deadlines[id] for lease in ctx.leases.values() if id in lease.deadlines
        )
        require(ctx, live.flying_by_deadline == dict(flying), id, "deadlines in flight")
        buffered = Counter(entry[0] for entry in live.buffer.entries())
        require(ctx, live.buffer.by_deadline == dict(buffered), id, "deadlines in the buffer")
