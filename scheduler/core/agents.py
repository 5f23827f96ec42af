"""Edge agents: who is there, what they hold, who is lost.

    joining -> ready <-> suspect -> lost        any -> draining, gone (said goodbye)
    reconnecting (known from rows after a restart) -> ready | lost

What always holds: only ready agents get offers; a suspect one gets none but loses nothing; losing
an agent makes its attempts stray, it does not revoke them; an older incarnation is refused; every
held attempt that the scheduler wants no more is named in the next reply.
"""

import msgspec

from scheduler.core import (
    agent_states,
    attempts,
    costs,
    introductions,
    jobs,
    keepers,
    quarantine,
    recall,
    waits,
)
from scheduler.core.context import CONNECTED, AgentLive, Context, Lease, known_code
from scheduler.core.failures import class_of
from scheduler.core.state import Agent
from transport.messages import (
    KNOWN_KINDS,
    AgentLog,
    AttemptFailed,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    HeldAttempt,
    Hello,
    HelloRequired,
    HostedPolicies,
    LeaseReplies,
    LeaseReply,
    LeaseRevoke,
    Message,
    VersionRef,
    VersionServing,
    Welcome,
)


def message(ctx: Context, name: str, message: Message) -> None:
    """Anything that an agent says."""
    live = ctx.agents.get(name)
    if isinstance(message, Hello):
        hello(ctx, name, message)
        return
    if live is None or live.state in ("reconnecting", "lost", "gone"):
        ctx.send(name, HelloRequired())
        if live is None:
            ctx.count("agents.unknown")
            return
    else:
        live.heard_s = ctx.now
    agent = ctx.tables.agents[name]
    match message:
        case Heartbeat():
            if live.state in CONNECTED:
                _heartbeat(ctx, agent, live, message)
        case LeaseReply():
            _lease_reply(ctx, live, message)
        case LeaseReplies(replies=replies):
            for reply in replies:
                _lease_reply(ctx, live, reply)
        case AttemptFailed():
            _attempt_failed(ctx, agent, live, message)
        case VersionServing():
            _serving(ctx, agent, live, message)
        case AgentLog():
            waits.log_came(ctx, name, message)
        case Goodbye():
            _goodbye(ctx, agent, live, message)
        case _:
            ctx.count("agents.unexpected_message")


def hello(ctx: Context, name: str, message: Hello) -> None:
    """An agent introduces itself: for the first time, again, or after a restart."""
    known = ctx.tables.agents.get(name)
    refusal = introductions.refusal(message, known)
    if refusal is not None:
        ctx.count(f"refused.{refusal.code}")
        ctx.note(name, "refused", code=refusal.code)
        ctx.send(name, msgspec.structs.replace(refusal, incarnation=message.incarnation))
        return
    inventory = message.agent
    assert inventory is not None  # noqa: S101 - looked at with the refusal
    reborn = introductions.is_reborn(message, known)
    live = ctx.agents.get(name)
    state = None if live is None else live.state
    agent = introductions.introduce(ctx, name, message, inventory, state)
    if live is None:
        live = AgentLive(name, "joining", ctx.heartbeat_s(), ctx.now)
        ctx.agents[name] = live
    live.heartbeat_s = ctx.heartbeat_s()
    live.heard_s = ctx.now
    if known is not None:
        live.back_s = ctx.now
    live.fits.clear()
    if reborn:
        if known is not None and live.state != "gone":
            quarantine.started(ctx, agent)
        live.declines = live.failures = 0
        live.blocked_until_s = 0.0
        live.tokens_generated = live.bytes_up = live.bytes_down = 0
    ctx.note(name, "hello", incarnation=message.incarnation, slots=agent.slots)
    agent_states.set_state(ctx, agent, live, "draining" if agent.draining else "joining")
    ctx.timers.cancel("forget", name)
    ctx.timers.set("agent", name, ctx.now + agent_states.suspect_after_s(ctx, live))
    _reconcile_hello(ctx, agent, live, inventory.held, reborn)
    agent_states.ready_if_serving(ctx, agent, live)
    keepers.look(ctx)
    welcome = Welcome(
        term=ctx.term,
        heartbeat_s=live.heartbeat_s,
        lost_after_s=ctx.lost_after_s(live.heartbeat_s),
        policies=ctx.hosted,
        incarnation=message.incarnation,
        upto=ctx.upto.get(name, {}),
        kinds=KNOWN_KINDS,
    )
    ctx.send(name, welcome)
    agent_states.remind_to_drain(ctx, agent, live)


def tell_hosted(ctx: Context) -> None:
    """The policies to host have changed."""
    for name, live in ctx.agents.items():
        if live.state in CONNECTED:
            ctx.send(name, HostedPolicies(policies=ctx.hosted))


def liveness_due(ctx: Context, name: str) -> None:
    """The agent's timer fired: it may have been silent for too long."""
    live = ctx.agents.get(name)
    if live is None or live.state in ("lost", "gone"):
        return
    agent = ctx.tables.agents[name]
    if live.state == "reconnecting":
        agent_states.lose(ctx, agent, live, "not_back")
        return
    lost_s = live.heard_s + ctx.lost_after_s(live.heartbeat_s)
    suspect_s = live.heard_s + agent_states.suspect_after_s(ctx, live)
    if ctx.now >= lost_s:
        agent_states.lose(ctx, agent, live, "silent")
    elif ctx.now >= suspect_s:
        if live.state == "ready":
            agent_states.set_state(ctx, agent, live, "suspect")
        ctx.timers.set("agent", name, lost_s)
    else:
        ctx.timers.set("agent", name, suspect_s)


def revoked(ctx: Context, name: str) -> None:
    """It cannot come back with the key that it had, so nothing is waited for."""
    live = ctx.agents.get(name)
    if live is not None and live.state in ("lost", "gone"):
        live.away = "revoked"
    elif live is not None:
        agent_states.lose(ctx, ctx.tables.agents[name], live, "revoked")


def attempt_due(ctx: Context, attempt: str) -> None:
    """An offer was not answered in time, or a lease not renewed."""
    lease = ctx.leases.get(attempt)
    if lease is None:
        return
    if lease.leased:
        jobs.lost(ctx, lease, "lapsed")
        return
    live = ctx.agents[lease.agent]
    jobs.withdraw(ctx, lease, "offer_timeout")
    agent_states.block(ctx, live, ctx.settings.offer_timeout_s)


def unblock_due(ctx: Context, name: str) -> None:
    live = ctx.agents.get(name)
    if live is not None:
        ctx.refresh_open(ctx.tables.agents[name], live)


def forget_due(ctx: Context, name: str) -> None:
    """An agent has been away for long: forget it unless it still holds something."""
    live = ctx.agents.get(name)
    if live is None or live.state not in ("lost", "gone") or live.leases:
        return
    agent = ctx.tables.agents[name]
    if agent.cordoned or agent.quarantined:
        return  # it must not come back as somebody that nothing is known of
    ctx.tables.remove(agent)
    del ctx.agents[name]
    quarantine.forget(ctx, name)
    ctx.note(name, "forgotten")


def _reconcile_hello(
    ctx: Context, agent: Agent, live: AgentLive, held: tuple[HeldAttempt, ...], reborn: bool
) -> None:
    """What it holds goes on; what it does not hold was never received, or is over."""
    listed = {entry.attempt: entry for entry in held}
    for lease in tuple(live.leases.values()):
        if lease.attempt not in ctx.leases:
            continue  # ended with its job a moment ago
        entry = listed.get(lease.attempt)
        if entry is not None and entry.fence == lease.fence:
            _still_held(ctx, agent, lease, entry)
        elif reborn:
            jobs.attempt_failed(ctx, lease, "agent.restarted")
        elif not lease.leased:
            jobs.withdraw(ctx, lease, "not_received")
        elif not lease.record.stray:
            attempts.unlisted(ctx, lease)


def _still_held(ctx: Context, agent: Agent, lease: Lease, entry: HeldAttempt) -> bool:
    """Renew a listed lease; false when it is given up for want of room. What a quarantined agent
    holds, what is overdue and what is more than enough goes on without being counted on."""
    if entry.spooled:
        attempts.spooled(ctx, lease)
    elif entry.started:
        attempts.started(ctx, lease)
    else:
        attempts.waits(ctx, lease)
    spare = attempts.is_overdue(ctx, lease) or attempts.is_spare(ctx, lease)
    if agent.quarantined or spare:
        return True
    if lease.record.stray and not attempts.revive(ctx, lease):
        job = ctx.tables.jobs[lease.job]
        attempts.revoke(ctx, job, lease.record, "no_room")
        return False
    attempts.renew(ctx, lease)
    return True


def _heartbeat(ctx: Context, agent: Agent, live: AgentLive, message: Heartbeat) -> None:
    unknown: list[str] = []
    listed: dict[str, None] = {}
    for entry in message.held:
        lease = attempts.find(ctx, entry.attempt, entry.fence, agent.name)
        if lease is None or not _still_held(ctx, agent, lease, entry):
            unknown.append(entry.attempt)
        else:
            listed[entry.attempt] = None
    for lease in live.leases.values():
        if lease.leased and lease.attempt not in listed and not lease.record.stray:
            attempts.unlisted(ctx, lease)
    live.running_sequences = message.running_sequences
    live.tokens_generated = message.tokens_generated
    live.bytes_up, live.bytes_down = message.bytes_up, message.bytes_down
    live.spool_bytes, live.gpus = message.spool_bytes, message.gpus
    if message.rtt_s is not None and 0.0 <= message.rtt_s < 3600.0:
        live.estimate.rtt_s.observe(message.rtt_s, ctx.now)
    live.clock_offset_s = message.clock_offset_s
    _take_versions(ctx, agent, message.versions)
    if message.draining != agent.draining:
        agent.draining = message.draining
        ctx.tables.touch(agent)
    if message.draining:
        if agent.drain is not None:
            agent.drain = None
            ctx.tables.touch(agent)
        agent_states.set_state(ctx, agent, live, "draining")
    elif agent.drain is not None:
        agent_states.remind_to_drain(ctx, agent, live)
    elif live.state in ("suspect", "draining"):
        agent_states.set_state(ctx, agent, live, "joining")
    agent_states.ready_if_serving(ctx, agent, live)
    reply = HeartbeatReply(
        sequence=message.sequence,
        sent_s=message.sent_s,
        unknown=tuple(unknown),
        upto=ctx.upto.get(agent.name, {}),
    )
    if unknown:
        ctx.count("agents.held_unknown", len(unknown))
    ctx.send(agent.name, reply)


def _take_versions(ctx: Context, agent: Agent, versions: dict[str, VersionRef]) -> None:
    if versions == agent.versions:
        return
    kept = {policy: ref for policy, ref in versions.items() if policy in ctx.hosted}
    if kept != agent.versions:
        live = ctx.agents[agent.name]
        for policy, ref in kept.items():
            if agent.versions.get(policy) != ref and policy in ctx.policies:
                live.served_s[policy] = ctx.now
        agent.versions = kept
        live.fits.clear()
        ctx.tables.touch(agent)
        ctx.dispatch_due = True


def _serving(ctx: Context, agent: Agent, live: AgentLive, message: VersionServing) -> None:
    ref = VersionRef(version=message.version, digest=message.digest)
    _take_versions(ctx, agent, {**agent.versions, message.policy: ref})
    live.estimate.fetched(
        fetched_bytes=message.fetched_bytes,
        fetch_s=message.fetch_s,
        pause_s=message.pause_s,
        now=ctx.now,
    )
    billed = live.billed.get(message.policy, -1)
    if message.version > billed and message.policy in ctx.policies:
        live.billed[message.policy] = message.version
        costs.fetched(ctx, message.policy, message.version, message.fetched_bytes)
    ctx.note(agent.name, "serving", policy=message.policy, version=message.version)
    agent_states.ready_if_serving(ctx, agent, live)


def _lease_reply(ctx: Context, live: AgentLive, message: LeaseReply) -> None:
    lease = attempts.find(ctx, message.attempt, message.fence, live.name)
    if lease is None:
        if message.accepted:
            # Taken back in the meantime; say it again in case the agent heard it in this order.
            revoke = LeaseRevoke(attempt=message.attempt, fence=message.fence, reason="unknown")
            ctx.send(live.name, revoke)
        ctx.count("attempts.late_reply")
        return
    if message.accepted:
        live.declines = 0
        if not lease.record.stray:
            attempts.renew(ctx, lease)
        recall.answered(ctx, lease, begun=True)
        return
    reason = known_code(message.reason)
    if reason == "recalled" and recall.answered(ctx, lease, begun=False):
        jobs.declined(ctx, lease, reason)
        return
    ctx.count(f"attempts.declined.{reason}")
    evaluation = ctx.tables.jobs[lease.job].evaluation
    if reason == "version_passed" and evaluation:
        ctx.evaluations[evaluation].declined[live.name] = None
    else:
        live.declines += 1
        delay_s = live.heartbeat_s * 2 ** min(live.declines - 1, 10)
        agent_states.block(ctx, live, min(delay_s, ctx.settings.retry_backoff_max_s))
    jobs.declined(ctx, lease, reason)


def _attempt_failed(ctx: Context, agent: Agent, live: AgentLive, message: AttemptFailed) -> None:
    lease = attempts.find(ctx, message.attempt, message.fence, agent.name)
    if lease is None:
        ctx.count("attempts.late_failure")
        return
    code = known_code(message.code)
    agent.attempts_failed += 1
    ctx.tables.touch(agent)
    if not _is_the_jobs(ctx, lease, code):
        live.failures += 1
        if live.failures >= jobs.FAILURE_STREAK:
            agent_states.block(ctx, live, jobs.backoff_s(ctx, live.failures))
    jobs.attempt_failed(ctx, lease, code, message.detail)
    quarantine.failed(ctx, agent.name, code, f"{lease.attempt}: {message.detail[:200]}")


def _is_the_jobs(ctx: Context, lease: Lease, code: str) -> bool:
    """Whether another agent speaks for this one: a few jobs that fail everywhere would otherwise
    give every agent a break, and the jobs behind them would wait."""
    elsewhere = any(name != lease.agent for name in ctx.tables.jobs[lease.job].avoid)
    return elsewhere and class_of(code) == "job"


def _goodbye(ctx: Context, agent: Agent, live: AgentLive, message: Goodbye) -> None:
    agent.gone = True
    ctx.tables.touch(agent)
    ctx.note(agent.name, "goodbye", reason=message.reason[:100])
    agent_states.leave(ctx, agent, live, "gone", "goodbye")
