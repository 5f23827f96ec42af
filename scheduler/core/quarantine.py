"""Evidence against agents, and their exclusion.

    evidence                          weight  why that much
    invalid summary                   1       a correct agent never sends one; three are no accident
    body the log refused as made up   1       the same
    body of another job (trainer)     1       the same
    body without trainable tokens     0.5     a strange workflow may do that
    body damaged (trainer)            0.25    as likely the log's disk
    other log-probabilities (trainer) 1       see ``honesty``; the third in a row all
    other rewards (two agents)        1.5     see ``rechecks``; of programs less
    many own failures in a row        all     10 in a row take minutes of back-off; others do well
    crash loop                        all     5 starts in 10 minutes without one result in between

Weights are added up and halve with every hour; from ``QUARANTINE_AT`` on the agent is quarantined:
it gets nothing new, its attempts are not counted on any more and its results are not accepted,
until an operator releases it. What may be the fault of a run or of the deployment (failures in a
row, crash loops) never excludes the last agent that could work.

What always holds: a quarantine has a reason, and its evidence is kept with the agent (bounded);
weights, failures in a row and starts are rows (``conduct``), so that neither a restart of the
scheduler nor an agent's own makes a clean slate; an operator's release and being forgotten do.
"""

from scheduler.core import agent_states
from scheduler.core.conduct import MAX_STARTS, Conduct
from scheduler.core.context import AgentLive, Context
from scheduler.core.failures import class_of
from scheduler.core.state import Agent

QUARANTINE_AT = 2.25
"""Three of weight 1 within forty minutes reach it and two of 1.5 within an hour, though the first
of them weigh less by then; two of weight 1 never do."""
HALF_LIFE_S = 3600.0
MAX_EVIDENCE = 20
MAX_LINE = 300
OWN_FAILURES = 10
CRASH_STARTS = 5
CRASH_WINDOW_S = 600.0
BODY_WEIGHTS = {"body.other": 1.0, "body.untrainable": 0.5, "body.damaged": 0.25}
"""By the code with which a trainer refuses a group."""


def evidence(ctx: Context, name: str, code: str, detail: str, weight: float = 1.0) -> None:
    """Something speaks against an agent; ``detail`` tells one observation from another, so that
    what two witnesses say of the same thing counts once."""
    agent = ctx.tables.agents.get(name)
    live = ctx.agents.get(name)
    line = f"{code}: {detail}"[:MAX_LINE]
    if agent is None or live is None or line in agent.evidence:
        return
    agent.evidence = [*agent.evidence, line][-MAX_EVIDENCE:]
    ctx.tables.touch(agent)
    ctx.count(f"quarantine.evidence.{code}")
    ctx.note(name, "evidence", code=code, detail=detail[:MAX_LINE], weight=weight)
    conduct = _conduct(ctx, name)
    conduct.weight *= 0.5 ** ((ctx.now - conduct.weighed_s) / HALF_LIFE_S)
    conduct.weight += weight
    conduct.weighed_s = ctx.now
    ctx.tables.add(conduct)
    if conduct.weight >= QUARANTINE_AT and not agent.quarantined:
        put(ctx, agent, live, code)


def failed(ctx: Context, name: str, code: str, detail: str) -> None:
    """An attempt on the agent failed."""
    fault = class_of(code)
    if fault == "data":
        evidence(ctx, name, code, detail)
    elif fault == "box" or code.startswith("engine"):
        conduct = _conduct(ctx, name)
        conduct.own_failures += 1
        ctx.tables.add(conduct)
        if conduct.own_failures >= OWN_FAILURES and _another_does_well(ctx, name):
            text = f"{conduct.own_failures} failures in a row, last {code}: {detail}"
            conduct.own_failures = 0
            evidence(ctx, name, "failures_in_a_row", text, QUARANTINE_AT)


def body_refused(ctx: Context, name: str, attempt: str, code: str) -> None:
    """A trainer cannot use what the agent's accepted result points to."""
    weight = BODY_WEIGHTS.get(code, 0.0)
    if weight:
        evidence(ctx, name, code, attempt, weight)


def result_came(ctx: Context, name: str) -> None:
    """The agent works: neither a crash loop nor a row of failures."""
    conduct = ctx.tables.conducts.get(name)
    if conduct is not None and (conduct.own_failures or conduct.starts):
        conduct.own_failures = 0
        conduct.starts = ()
        ctx.tables.touch(conduct)
        if conduct.clean:
            ctx.tables.remove(conduct)


def started(ctx: Context, agent: Agent) -> None:
    """The agent was started again without having said goodbye."""
    conduct = _conduct(ctx, agent.name)
    recent = (at for at in conduct.starts if at >= ctx.now - CRASH_WINDOW_S)
    starts = conduct.starts = (*recent, ctx.now)[-MAX_STARTS:]
    ctx.tables.add(conduct)
    if len(starts) >= CRASH_STARTS and _another_does_well(ctx, agent.name):
        text = (
            f"{len(starts)} starts in {ctx.now - starts[0]:.0f} s without a result,"
            f" up to incarnation {agent.incarnation}"
        )
        conduct.starts = ()
        evidence(ctx, agent.name, "crash_loop", text, QUARANTINE_AT)


def put(ctx: Context, agent: Agent, live: AgentLive, reason: str) -> None:
    """Exclude the agent."""
    agent.quarantined = reason[:MAX_LINE] or "operator"
    ctx.tables.touch(agent)
    ctx.count("quarantine.agents")
    ctx.note(agent.name, "quarantined", reason=agent.quarantined)
    agent_states.recount(ctx, agent, live)
    agent_states.lose_all(ctx, live.leases.values(), "quarantined")


def release(ctx: Context, agent: Agent, live: AgentLive) -> None:
    """An operator trusts it again: nothing is held against it any more. It gets new work after its
    next sign of life, so that what it still holds is counted on again first."""
    agent.quarantined = ""
    agent.evidence = []
    ctx.tables.touch(agent)
    forget(ctx, agent.name)
    ctx.note(agent.name, "released")
    if live.state == "ready" and live.leases:
        agent_states.set_state(ctx, agent, live, "suspect")
    agent_states.recount(ctx, agent, live)


def forget(ctx: Context, name: str) -> None:
    """What it did and what was found of its log-probabilities so far does not count."""
    conduct = ctx.tables.conducts.get(name)
    if conduct is not None:
        ctx.tables.remove(conduct)
    for policy in ctx.policies.values():
        policy.drifts.pop(name, None)


def _conduct(ctx: Context, name: str) -> Conduct:
    """Its row, or one that is not stored yet."""
    return ctx.tables.conducts.get(name) or Conduct(name=name)


def _another_does_well(ctx: Context, name: str) -> bool:
    """Whether some other agent may work and does not fail; looks at every agent, so only asked
    when a limit is reached."""
    return any(
        other != name
        and not live.failures
        and agent_states.may_work(ctx.tables.agents[other], live)
        for other, live in ctx.agents.items()
    )
