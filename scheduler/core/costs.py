"""What a run costs: agents' time by their price, and bytes that leave a box or the cloud.

    agent's time     price_usd_hour x time, split over the runs of the sequences it holds; an idle
                     agent's over the runs that it could work for, in proportion to their shares
    egress, edge     bytes of accepted bodies x the agent's egress_usd_gb
    egress, cloud    bytes of weights that agents fetched x settings.egress_usd_gb

What always holds: money is only added; a run whose ``budget_usd`` is spent is stopped once, with
that reason; what nobody priced costs nothing. Time between two sweeps counts at most
``MAX_SWEEP_S``, so that a scheduler that was held up invents no bill.
"""

from scheduler.core.context import CONNECTED, AgentLive, Context
from scheduler.core.state import Agent, Run, Spend

BYTES_PER_GB = 1e9
MAX_SWEEP_S = 60.0
MAX_COPIES = 2
"""An agent that says it fetched more than so many whole models is not believed."""
MAX_PRICE_USD_HOUR = 1000.0
MAX_EGRESS_USD_GB = 10.0
"""Nor is one that says it costs more: a mistake or a lie must not end runs by their budget."""


def spend(ctx: Context, run: str) -> Spend:
    """The run's row, made when first asked for."""
    found = ctx.tables.spends.get(run)
    if found is None:
        found = Spend(run=run)
        ctx.tables.add(found)
    return found


def total_usd(ctx: Context, run: str) -> float:
    found = ctx.tables.spends.get(run)
    return 0.0 if found is None else found.agents_usd + found.egress_usd


def accrue(ctx: Context, elapsed_s: float) -> None:
    """Charge the time since the last call; O(priced agents)."""
    hours = min(max(elapsed_s, 0.0), MAX_SWEEP_S) / 3600.0
    if hours <= 0.0 or not ctx.runs:
        return
    due: dict[str, float] = {}
    for name, live in ctx.agents.items():
        agent = ctx.tables.agents[name]
        if agent.price_usd_hour <= 0.0 or live.state not in CONNECTED:
            continue
        parts = _parts(ctx, agent, live)
        whole = sum(parts.values())
        for run, part in parts.items():
            due[run] = (
                due.get(run, 0.0)
                + min(agent.price_usd_hour, MAX_PRICE_USD_HOUR) * hours * part / whole
            )
    for run, usd in due.items():
        row = spend(ctx, run)
        row.agents_usd += usd
        ctx.tables.touch(row)
        _mark_due(ctx, run)


def uploaded(ctx: Context, run: str, agent: Agent, size_bytes: int, tokens: int) -> None:
    """A body of the run was accepted."""
    row = spend(ctx, run)
    row.tokens += tokens
    row.egress_usd += min(agent.egress_usd_gb, MAX_EGRESS_USD_GB) * size_bytes / BYTES_PER_GB
    ctx.tables.touch(row)
    _mark_due(ctx, run)


def fetched(ctx: Context, policy: str, version: int, fetched_bytes: int) -> None:
    """An agent has fetched weights of a policy; the caller passes each version of an agent once."""
    known = ctx.tables.policies.get(policy)
    if (
        known is None
        or policy not in ctx.policies
        or fetched_bytes <= 0
        or ctx.settings.egress_usd_gb <= 0.0
    ):
        return
    node = ctx.policies[policy].tree.nodes.get(version)
    if node is None or not node.full_bytes:
        return
    row = spend(ctx, known.run)
    billed = min(fetched_bytes, MAX_COPIES * node.full_bytes)
    row.egress_usd += ctx.settings.egress_usd_gb * billed / BYTES_PER_GB
    ctx.tables.touch(row)
    _mark_due(ctx, known.run)


def over_budget(ctx: Context, run: Run) -> bool:
    return 0.0 < run.spec.budget_usd <= total_usd(ctx, run.name)


def _parts(ctx: Context, agent: Agent, live: AgentLive) -> dict[str, float]:
    """Weights of the runs that pay for an agent's time; not empty while a run is live."""
    parts: dict[str, float] = {}
    for lease in live.leases.values():
        job = ctx.tables.jobs.get(lease.job)
        if job is not None and lease.counted and job.run in ctx.runs:
            parts[job.run] = parts.get(job.run, 0.0) + lease.sequences
    if parts:
        return parts
    runs = [ctx.tables.runs[name] for name in ctx.runs]
    able = [run for run in runs if run.spec.workflow.reference in agent.workflows]
    return {run.name: run.spec.share for run in able or runs}


def _mark_due(ctx: Context, name: str) -> None:
    run = ctx.tables.runs.get(name)
    if run is not None and name in ctx.runs and over_budget(ctx, run):
        ctx.due_runs[name] = None
