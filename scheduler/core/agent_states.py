"""What changes an agent's state, and everything that has to follow it.

What always holds: ``ready_slots`` and ``ready_agents`` count the agents that may get work (ready,
neither cordoned nor quarantined); an agent that left has no running liveness timer; losing one
makes its attempts stray.
"""

from collections.abc import Iterable

from scheduler.core import jobs
from scheduler.core.context import CONNECTED, AgentLive, AgentState, Context, Lease
from scheduler.core.state import Agent


def may_work(agent: Agent, live: AgentLive) -> bool:
    """Whether the agent may get offers when it has room."""
    return live.state == "ready" and not agent.cordoned and not agent.quarantined


def shown(agent: Agent, live: AgentLive) -> str:
    """The state as people see it: what keeps work away goes before how it is doing."""
    if agent.quarantined:
        return "quarantined"
    if agent.cordoned and live.state in ("joining", "ready"):
        return "cordoned"
    return live.state


def set_state(ctx: Context, agent: Agent, live: AgentLive, state: AgentState) -> None:
    if live.state != state:
        live.state = state
        ctx.note(agent.name, state)
    recount(ctx, agent, live)


def recount(ctx: Context, agent: Agent, live: AgentLive) -> None:
    """The state, slots or an order have changed."""
    counted = agent.slots if may_work(agent, live) else 0
    ctx.ready_slots += counted - live.counted_slots
    ctx.ready_agents += (counted > 0) - (live.counted_slots > 0)
    live.counted_slots = counted
    ctx.refresh_open(agent, live)


def ready_if_serving(ctx: Context, agent: Agent, live: AgentLive) -> None:
    if live.state == "joining" and agent.versions:
        set_state(ctx, agent, live, "ready")


def suspect_after_s(ctx: Context, live: AgentLive) -> float:
    return live.heartbeat_s * ctx.settings.suspect_after_missed


def lose(ctx: Context, agent: Agent, live: AgentLive, reason: str) -> None:
    ctx.count(f"agents.lost.{reason}")
    leave(ctx, agent, live, "lost", reason)


def leave(ctx: Context, agent: Agent, live: AgentLive, state: AgentState, reason: str) -> None:
    live.away = reason
    set_state(ctx, agent, live, state)
    ctx.timers.cancel("agent", agent.name)
    ctx.timers.set("forget", agent.name, ctx.now + ctx.settings.forget_agent_s)
    lose_all(ctx, live.leases.values(), f"agent_{reason}")


def lose_all(ctx: Context, leases: Iterable[Lease], reason: str) -> None:
    for lease in tuple(leases):
        if lease.attempt in ctx.leases and not lease.record.stray:
            jobs.lost(ctx, lease, reason)


def remind_to_drain(ctx: Context, agent: Agent, live: AgentLive) -> None:
    """Say an order to drain (again): it may not have arrived, and the agent shows no sign of it."""
    if agent.drain is not None and live.state in CONNECTED:
        set_state(ctx, agent, live, "draining")
        ctx.send(agent.name, agent.drain)


def block(ctx: Context, live: AgentLive, delay_s: float) -> None:
    """No offers for a while."""
    until_s = ctx.now + delay_s
    if until_s > live.blocked_until_s:
        live.blocked_until_s = until_s
        ctx.timers.set("unblock", live.name, until_s)
        ctx.refresh_open(ctx.tables.agents[live.name], live)
