"""Agents that keep a version back for an evaluation before training.

Agents never go back to an older version. A pin holds one back only while it has work of that pin,
and where few agents train fast, all of them could pass it between two jobs of the evaluation. So
one agent, the evaluation's keeper, is told in ``Welcome`` and with every reply to a heartbeat not
to pass it, and gets no work that is pinned to a newer version.

What always holds: an evaluation of the start with open jobs has at most one keeper, an agent that
can do its work and has not passed its versions; one that is lost or unsuited is replaced as long as
there is another; without open jobs nothing is kept back, so that a source without items holds up
nobody; nothing of this is durable, the scheduler's next life chooses again.
"""

from itertools import islice

from scheduler.core.candidates import fits
from scheduler.core.context import AgentLive, Context
from scheduler.core.state import Evaluation

MAX_LOOKED_AT = 256
"""Of the agents that are there, among which a keeper is looked for; a larger fleet does not pass a
version all at once."""

_CANNOT, _JOINS, _SERVES = range(3)
_HERE = ("joining", "ready", "suspect", "reconnecting")


def look(ctx: Context) -> None:
    """Work out anew who keeps what back (``Context.upto``); O(open evaluations of the start) while
    their keepers serve."""
    ctx.upto = {}
    for id, live in ctx.evaluations.items():
        evaluation = ctx.tables.evaluations[id]
        if evaluation.kind != "start" or not evaluation.open_jobs:
            continue
        rank = _rank(ctx, evaluation, live.keeper)
        if rank < _SERVES:
            ranks = {live.keeper: rank}  # which stays the first of equals
            here = (name for name, agent in ctx.agents.items() if agent.state in _HERE)
            for name in islice(here, MAX_LOOKED_AT):
                ranks[name] = _rank(ctx, evaluation, name)
            live.keeper = max(ranks, key=lambda name: ranks[name])
            rank = ranks[live.keeper]
        if rank > _CANNOT:
            upto = ctx.upto.setdefault(live.keeper, {})
            for policy, version in evaluation.pinned.items():
                upto[policy] = min(version, upto.get(policy, version))


def is_past(ctx: Context, evaluation: Evaluation, name: str) -> bool:
    """Whether an agent has a newer version than the pinned ones."""
    versions = ctx.tables.agents[name].versions
    return name in ctx.evaluations[evaluation.id].declined or any(
        id in versions and versions[id].version > version
        for id, version in evaluation.pinned.items()
    )


def _goes_past(live: AgentLive, evaluation: Evaluation) -> bool:
    """Whether an agent has work that is pinned to a newer version: kept back, it could never do
    it, and that work's pin would keep the evaluation's away."""
    return any(
        lease.pinned.get(id, version) > version
        for lease in live.leases.values()
        for id, version in evaluation.pinned.items()
    )


def _rank(ctx: Context, evaluation: Evaluation, name: str) -> int:
    live, agent = ctx.agents.get(name), ctx.tables.agents.get(name)
    if live is None or agent is None or agent.cordoned or agent.quarantined:
        return _CANNOT
    if live.state not in _HERE:
        return _CANNOT
    work = ctx.runs[evaluation.run].works[evaluation.name]
    if (
        is_past(ctx, evaluation, name)
        or _goes_past(live, evaluation)
        or work.workflow.reference not in agent.workflows
    ):
        return _CANNOT
    if not agent.versions.keys() >= evaluation.pinned.keys():
        return _JOINS
    return _SERVES if fits(ctx, ctx.tables.runs[evaluation.run], agent, live, work) else _CANNOT
