"""What operators order agents to do.

    drain       finish what is held and leave; said again until the agent says that it does
    cordon      keep what is held, get nothing new       uncordon  undo it
    quarantine  get nothing new, and nothing is accepted release   undo it, forget the evidence

What always holds: orders are in the agent's row before anybody hears of them, and survive our
restarts; cordon and quarantine survive the agent's own, and an agent under either is never
forgotten; an order to drain is for the next process as well until one has said that it follows,
said goodbye or was lost (``introductions``); an order that is given twice is harmless.
"""

from scheduler.core import agent_states, quarantine
from scheduler.core.context import CONNECTED, AgentLive, Context
from scheduler.core.state import Agent
from transport.messages import AgentOrder, CommandReply, DrainOrder

_SHOWN = 10


def give(ctx: Context, operator: str, message: AgentOrder) -> CommandReply:
    """Carry out an order, or say why not."""
    agent = ctx.tables.agents.get(message.agent)
    live = ctx.agents.get(message.agent)
    if agent is None or live is None:
        return unknown(ctx, message.agent)
    nothing = _nothing_to_do(agent, message.order)
    if nothing:
        return CommandReply(ok=True, message=f"nothing to do: {nothing}")
    ctx.count(f"orders.{message.order}")
    ctx.note(agent.name, f"ordered to {message.order}", by=operator, reason=message.reason)
    match message.order:
        case "drain":
            return _drain(ctx, agent, live, message)
        case "cordon" | "uncordon":
            agent.cordoned = message.order == "cordon"
            ctx.tables.touch(agent)
            agent_states.recount(ctx, agent, live)
        case "quarantine":
            text = f"by {operator}: {message.reason or 'no reason given'}"
            agent.evidence = [*agent.evidence, text][-quarantine.MAX_EVIDENCE :]
            quarantine.put(ctx, agent, live, text)
        case "release":
            quarantine.release(ctx, agent, live)
    return CommandReply(ok=True)


def _nothing_to_do(agent: Agent, order: str) -> str:
    """Why an order would change nothing, or "" when it does."""
    match order:
        case "cordon" if agent.cordoned:
            return f"{agent.name} is cordoned already"
        case "uncordon" if not agent.cordoned:
            return f"{agent.name} is not cordoned"
        case "quarantine" if agent.quarantined:
            return f"{agent.name} is quarantined already: {agent.quarantined}"
        case "release" if not agent.quarantined and not agent.evidence:
            return f"{agent.name} is not quarantined, and there is no evidence against it"
    return ""


def unknown(ctx: Context, name: str) -> CommandReply:
    """The refusal for an agent that has never spoken."""
    known = sorted(ctx.agents)
    names = ", ".join(known[:_SHOWN]) or "none"
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    text = f"no agent {name!r} has said hello; agents: {names}{more}"
    return CommandReply(ok=False, code="agent.unknown", message=text)


def _drain(ctx: Context, agent: Agent, live: AgentLive, message: AgentOrder) -> CommandReply:
    if live.state not in CONNECTED and live.state != "reconnecting":
        text = f"{agent.name} is {live.state} and hears nothing; cordon it to keep work away"
        return CommandReply(ok=False, code="agent.away", message=text)
    agent.drain = DrainOrder(deadline_s=message.deadline_s, reason=message.reason or "operator")
    ctx.tables.touch(agent)
    agent_states.remind_to_drain(ctx, agent, live)
    later = "" if live.state in CONNECTED else "it is told as soon as it has reconnected"
    return CommandReply(ok=True, message=later)
