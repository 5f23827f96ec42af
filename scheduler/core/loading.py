"""A new life from the rows of the last one.

What always holds after ``load``: every index mirrors the rows; agents that had not said goodbye are
``reconnecting`` and their attempts are live, with lease clocks that start anew after
``reconnect_grace_s``; jobs that waited for a retry are queued at once; nothing has been sent.
"""

from collections.abc import Iterable

from scheduler.core import (
    attempts,
    bodies,
    consumption,
    curation,
    dead_letters,
    outcomes,
    replay_pool,
    runs,
    submitters,
    trainers,
    views,
)
from scheduler.core.context import AgentLive, Context, EvaluationLive
from scheduler.core.state import Job, Row


def load(ctx: Context, rows: Iterable[Row]) -> None:
    """Take in all rows and rebuild what follows from them.

    Raises:
        StoreError: a row is unknown or does not decode; names it.
    """
    for table, key, value in rows:
        ctx.tables.load(table, key, value)
    _load_runs(ctx)
    _load_agents(ctx)
    dead_letters.load(ctx)
    outcomes.load(ctx)
    for job in tuple(ctx.tables.jobs.values()):
        _load_job(ctx, job)
    for entry in sorted(ctx.tables.kept.values(), key=lambda kept: (kept.step, kept.index)):
        replay_pool.load(ctx, entry)
    curation.load(ctx)
    for live in ctx.agents.values():
        live.inherited = live.load
    if ctx.tables.releases:
        ctx.timers.set("release", "", ctx.now + ctx.settings.release_repeat_s)
    ctx.runs_changed()


def boot(ctx: Context) -> None:
    """The first effects of a life: live runs need their task sources again."""
    for name in tuple(ctx.runs):
        runs.start_source(ctx, ctx.tables.runs[name])
    for id in ctx.policies:
        consumption.replace_all(ctx, ctx.tables.policies[id])


def _load_runs(ctx: Context) -> None:
    ordered = sorted(ctx.tables.runs.values(), key=lambda run: (run.created_s, run.name))
    for run in ordered:
        if run.live:
            runs.index_run(ctx, run)
    # A key that trained for several runs one after another belongs to the live one.
    for policy in sorted(
        ctx.tables.policies.values(), key=lambda p: (ctx.run_of(p).live, ctx.run_of(p).created_s)
    ):
        if policy.trainer:
            ctx.trainers[policy.trainer] = policy.id
    for node in ctx.tables.versions.values():
        live = ctx.policies.get(node.policy)
        if live is not None:
            live.tree.put(node)
    for id, live in ctx.policies.items():
        policy = ctx.tables.policies[id]
        live.tree.move_head(policy.head, policy.floor)
        if policy.trained:
            trainers.watch(ctx, policy, live)
    for evaluation in ctx.tables.evaluations.values():
        if not evaluation.done:
            asked = evaluation.next_item
            ctx.evaluations[evaluation.id] = EvaluationLive(asked_until=asked)


def _load_agents(ctx: Context) -> None:
    for agent in ctx.tables.agents.values():
        ctx.agents[agent.name] = AgentLive(
            agent.name, "gone" if agent.gone else "reconnecting", ctx.heartbeat_s(), ctx.now
        )
        if agent.gone:
            ctx.timers.set("forget", agent.name, ctx.now + ctx.settings.forget_agent_s)
        else:
            ctx.timers.set("agent", agent.name, ctx.now + ctx.settings.reconnect_grace_s)


def _load_job(ctx: Context, job: Job) -> None:
    if job.evaluation:
        ctx.evaluations[job.evaluation].jobs[job.id] = None
    elif job.external is not None:
        submitters.index(ctx, job, job.external)
        if job.external.recheck is not None:
            bodies.hold(ctx, job.external.recheck.digest, job.external.recheck.job)
    else:
        ctx.runs[job.run].jobs[job.id] = None
    if job.state == "in_flight":
        attempts.count_in_flight(ctx, job, job.sequences)
    pinned = views.pins(ctx, job)
    lease_s = ctx.settings.reconnect_grace_s + ctx.settings.lease_s
    for record in job.attempts:
        lease = attempts.track(ctx, job, record, dict(pinned))
        if not record.stray:
            # Whether it was accepted is not in the rows: the agent's hello will tell.
            lease.leased = True
            ctx.timers.set("attempt", record.id, ctx.now + lease_s)
    if job.result is not None:
        ctx.bodies[job.result.digest] = job.id
    if job.partial is not None:
        ctx.bodies[job.partial.digest] = job.id
    for policy, copy in job.copies.items():
        live = ctx.policies[policy]
        if copy.state == "taken":
            live.taken.setdefault(copy.step, {})[job.id] = None
        elif copy.state == "buffered":
            live.unplaced[job.id] = ctx.now  # gets its place with the first settling
    attempts.settle(ctx, job)
