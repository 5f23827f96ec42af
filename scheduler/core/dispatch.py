"""Placing queued jobs on agents.

A pass stops what has missed its last batch (``lateness``) and gives sources turns (``fairness``):
evaluations and submitters' jobs up to their part of the slots, training by shares, then the rest
with what is left. After that the tails of batches get second attempts (``hedging``), and what waits
on busy agents may be taken back (``recall``). A pin keeps an agent's weights back, so in-between
evaluations of a run stay on the agents that hold some of them already, at most a tenth of the
fleet.

What always holds: a job goes only to a candidate (``candidates``); one pass looks at no more than
``shortlist`` candidates per placement, and a source ends its turns at the first time that none of
its families' first jobs can be placed, so it costs O(placements), not O(jobs x agents), and no
source waits for another one's job.
"""

import msgspec

from scheduler.core import absorbing, attempts, hedging, keepers, lateness, partials, recall, views
from scheduler.core.accounting import account
from scheduler.core.context import CONNECTED, Context
from scheduler.core.costs import spend
from scheduler.core.effects import Send
from scheduler.core.fairness import Source, Turns, over_quota
from scheduler.core.placement import Choice, FinishTime, soonest
from scheduler.core.shortlists import Shortlists
from scheduler.core.state import Job, Run
from scheduler.core.work import TRAINING, work_of
from transport.ids import item_seed
from transport.messages import LeaseOffer

HOLDER_SHARE = 10
"""In-between evaluations of a run are held by at most one in so many of the ready agents."""
MAX_HEADS = 8
"""How many families' first jobs are tried before a source's turns end."""


def place(ctx: Context) -> None:
    """Place whatever can be placed now."""
    ctx.dispatch_due = False
    keepers.look(ctx)
    lateness.stop(ctx)
    if not len(ctx.open_agents):
        return
    turns, ctx.shortlists = Turns(ctx), Shortlists()
    ctx.moved = ctx.shortlists.moved
    _take_turns(ctx, turns, capped=True)
    turns.uncap()
    _take_turns(ctx, turns, capped=False)
    ctx.moved = None
    if len(ctx.open_agents):
        _hedge_tails(ctx)
        recall.look(ctx)


def watch(ctx: Context) -> None:
    """What only time changes, once per heartbeat: policies that starve, batches that wait for
    their last groups, code that no agent has any more."""
    keepers.look(ctx)
    lateness.stop(ctx)
    for id, live in ctx.policies.items():
        row = account(ctx, id, "train").row if ctx.tables.policies[id].trained else None
        if row is None or row.in_flight or row.buffered:
            live.starved_since_s = None
        elif live.starved_since_s is None:
            live.starved_since_s = ctx.now
        else:
            ctx.dispatch_due = True
    for name, run_live in ctx.runs.items():
        if hedging.tails(ctx, ctx.tables.runs[name]):
            ctx.dispatch_due = True
        if run_live.codes and len(ctx.queue(name)) and not run_live.in_flight:
            _forget_code(ctx, name, TRAINING)
    for id, evaluation in ctx.evaluations.items():
        if len(ctx.queue(id)) and not evaluation.in_flight:
            of = ctx.tables.evaluations[id]
            _forget_code(ctx, of.run, of.name)
    if len(ctx.backed_up):
        ctx.dispatch_due = True


def _take_turns(ctx: Context, turns: Turns, *, capped: bool) -> None:
    while len(ctx.open_agents) and (source := turns.next(capped=capped)) is not None:
        job = _place_first(ctx, source)
        if job is not None:
            turns.placed(source, job.sequences)


def _place_first(ctx: Context, source: Source) -> Job | None:
    """Place the first job of a source that can be; None when none of the first ones can."""
    names = ctx.open_agents.names
    if source.kind == "between":
        holders = _holders(ctx, source.run)
        if len(holders) * HOLDER_SHARE >= max(HOLDER_SHARE, ctx.ready_agents):
            names = [name for name in holders if name in ctx.open_agents]
    for id in ctx.queue(source.queue).heads(MAX_HEADS):
        job = ctx.tables.jobs[id]
        if over_quota(ctx, source.run, job) or not _pins_stored(ctx, job):
            continue
        if _place(ctx, source.run, job, names):
            return job
    return None


def _holders(ctx: Context, run: Run) -> list[str]:
    """Agents that hold attempts of a run's in-between evaluations."""
    rows = [ctx.tables.evaluations[id] for id in ctx.evaluations]
    open_ids = [row.id for row in rows if row.run == run.name and row.kind == "between"]
    jobs = [ctx.tables.jobs[id] for row in open_ids for id in ctx.evaluations[row].jobs]
    records = [record for job in jobs for record in job.attempts if not record.stray]
    return list(dict.fromkeys(record.agent for record in records))


def _pins_stored(ctx: Context, job: Job) -> bool:
    for policy, version in views.pins(ctx, job).items():
        node = ctx.policies[policy].tree.nodes.get(version)
        if node is None or not node.stored:
            return False
    return True


def _place(ctx: Context, run: Run, job: Job, names: list[str]) -> bool:
    """Offer a job to the best of some open agents."""
    view = ctx.shortlists.view(ctx, run, job)
    live = ctx.runs[run.name]
    if job.kind == "train" and isinstance(ctx.rule, FinishTime):
        view = msgspec.structs.replace(
            view,
            queued=len(ctx.queue(job.queue)),
            absorbers=absorbing.absorbers(ctx, run, job, view),
            patience_s=ctx.now - live.placed_s,
        )
    found = ctx.shortlists.candidates(ctx, run, job, view, names)
    choice = ctx.rule.choose(view, found, ctx.now) if found else None
    if choice is None:
        if found:
            held = soonest(view, found, "held") is not None
            ctx.count("placement.held" if held else "placement.refused_stale")
        return False
    if choice.reason != "best":
        ctx.count(f"placement.{choice.reason}")
    _offer(ctx, run, job, choice)
    if job.kind == "train":
        live.placed_s = ctx.now
    return True


def _offer(ctx: Context, run: Run, job: Job, choice: Choice) -> float:
    """Make an attempt and tell its agent; returns the tokens that it is expected to have."""
    pinned, work = views.pins(ctx, job), work_of(ctx, job)
    _use_code(ctx, run, work.workflow.reference, choice.agent)
    partial = partials.to_resume(ctx, run, job, choice)
    lease = attempts.start(ctx, job, choice, pinned)
    for policy, lag in choice.lags:
        attempts.expect_use(ctx, lease, policy, lag)
    resume = None if partial is None else partials.begin(ctx, lease, partial)
    run_live, workflow, external = ctx.runs[run.name], work.workflow, job.external
    max_new_tokens, temperature = workflow.max_new_tokens, workflow.temperature
    if external is not None:
        max_new_tokens = external.max_new_tokens or max_new_tokens
        temperature = temperature if external.temperature is None else external.temperature
    kind = "external" if job.kind == "recheck" else job.kind
    recheck = None if external is None else external.recheck
    offer = LeaseOffer(
        attempt=lease.attempt,
        fence=lease.fence,
        job=job.id,
        kind=kind,
        items=job.items,
        group_size=job.sequences // len(job.items),
        workflow=workflow.reference,
        settings=workflow.settings,
        policies=run_live.policies,
        reward=work.reward(job.items),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=item_seed(run.spec.seed, kind, job.index),
        lease_s=ctx.settings.lease_s,
        pinned=pinned,
        resume=resume,
        recheck="" if recheck is None else recheck.digest,
        chat_template_kwargs=work.arguments,
    )
    ctx.effects.append(Send(choice.agent, offer, job.prompt))
    return lease.tokens


def _hedge_tails(ctx: Context) -> None:
    for name in ctx.runs:
        run = ctx.tables.runs[name]
        if run.state != "running":
            continue
        for job, choice, _ in hedging.pairs(ctx, run):
            row = spend(ctx, name)
            row.hedge_tokens += round(_offer(ctx, run, job, choice))
            ctx.tables.touch(row)
            ctx.count("placement.hedged")


def _use_code(ctx: Context, run: Run, workflow: str, name: str) -> None:
    """The first agent that works for a run with a workflow says which code its groups come from."""
    live = ctx.runs[run.name]
    if workflow not in live.codes:
        live.codes[workflow] = ctx.tables.agents[name].workflows[workflow]
        for agent in ctx.agents.values():
            agent.fits.pop(run.name, None)


def _forget_code(ctx: Context, run: str, work: str) -> None:
    """No agent has the code that a work began with (all were upgraded): go on with another."""
    live = ctx.runs[run]
    workflow = live.works[work].workflow.reference
    if workflow not in live.codes:
        return
    for name, agent in ctx.agents.items():
        code = ctx.tables.agents[name].workflows.get(workflow)
        if agent.state in CONNECTED and code == live.codes[workflow]:
            return
    del live.codes[workflow]
    for agent in ctx.agents.values():
        agent.fits.pop(run, None)
    ctx.count("placement.code_changed")
    ctx.dispatch_due = True
