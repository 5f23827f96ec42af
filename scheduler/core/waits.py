"""Requests that are answered later: results and events that are not there yet, an agent's log.

What always holds: every request gets exactly one reply, at the latest when its time is up; at most
``MAX_WAITING`` wait, and one more is answered at once with what there is; while nobody waits an
event costs nothing here. Waiting requests are not durable: who asked asks again.
"""

import msgspec

from scheduler.core import orders, outcomes, transitions
from scheduler.core.asking import Waiting, WaitKind
from scheduler.core.context import CONNECTED, Context
from scheduler.core.effects import Reply
from scheduler.core.events import FromOperator
from scheduler.core.submitters import submitter
from transport.messages import (
    AgentLog,
    AgentLogRequest,
    AgentLogs,
    AgentLogsRequest,
    CommandReply,
    EventsRequest,
    Message,
    ResultsRequest,
)

MAX_WAITING = 1024
MAX_WAITING_PER_PEER = 64
LOG_WAIT_S = 15.0
MAX_LOG_BYTES = 255 * 1024
"""Lines of one reply; the agent's own frame was no larger than that, but for its header."""


def ask_results(ctx: Context, event: FromOperator, message: ResultsRequest) -> None:
    """Confirm, and answer now or once there is a result."""
    outcomes.confirm(ctx, event.peer, message.after)
    found = outcomes.page(ctx, event.peer, message.after, message.limit)
    behind = found.last < message.after
    if found.results or behind or not _wait(ctx, "results", event, message.wait_s):
        if behind:
            ctx.count("external.ahead_of_store")
        ctx.effects.append(Reply(event.peer, event.request, found))
    else:
        submitter(ctx, event.peer).waiting[ctx.waited] = None


def ask_events(ctx: Context, event: FromOperator, message: EventsRequest) -> None:
    """Answer now, or once there is a transition."""
    after = transitions.newest(ctx) if message.after is None else message.after
    found = transitions.page(ctx, after, message.limit, message.subject)
    if found.transitions or found.missed or not _wait(ctx, "events", event, message.wait_s):
        ctx.effects.append(Reply(event.peer, event.request, found))
    else:
        ctx.waiting[ctx.waited].seen = found.last
        ctx.listeners[ctx.waited] = None


def ask_log(ctx: Context, event: FromOperator, message: AgentLogsRequest) -> None:
    """Hand the request to the agent; its answer, or silence, is the reply."""
    live = ctx.agents.get(message.agent)
    refusal: CommandReply | None = None
    if live is None:
        refusal = orders.unknown(ctx, message.agent)
    elif live.state not in CONNECTED:
        refusal = _silent(message.agent, f"is {live.state}")
    elif not _wait(ctx, "logs", event, LOG_WAIT_S, message.agent):
        text = (
            f"{MAX_WAITING_PER_PEER} requests of one key, or {MAX_WAITING} in all, wait already;"
            " try again"
        )
        refusal = CommandReply(ok=False, code="requests.too_many", message=text)
    if refusal is not None:
        ctx.effects.append(Reply(event.peer, event.request, refusal))
        return
    wanted = AgentLogRequest(request=ctx.waited, run=message.run, lines=message.lines)
    ctx.send(message.agent, wanted)


def log_came(ctx: Context, agent: str, message: AgentLog) -> None:
    """An agent's lines, for whoever asked for them."""
    waiting = ctx.waiting.get(message.request)
    if waiting is None or waiting.kind != "logs" or waiting.agent != agent:
        ctx.count("requests.late_log")
        return
    lines = message.lines
    while lines and len(msgspec.msgpack.encode(lines)) > MAX_LOG_BYTES:
        lines = lines[max(1, len(lines) // 8) :]
    _answer(ctx, message.request, AgentLogs(agent=agent, lines=lines))


def answer_ready(ctx: Context) -> None:
    """At the end of an event: whoever waits for what it brought gets it."""
    if ctx.new_results:
        names, ctx.new_results = ctx.new_results, {}
        for name in names:
            for number in tuple(ctx.submitters[name].waiting):
                _try_results(ctx, number)
    if ctx.listeners:
        newest = transitions.newest(ctx)
        for number in tuple(ctx.listeners):
            if ctx.waiting[number].seen < newest:
                _try_events(ctx, number)


def due(ctx: Context, number: int) -> None:
    """The time of a request is up."""
    waiting = ctx.waiting.get(number)
    if waiting is None:
        return
    match waiting.message:
        case ResultsRequest(after=after, limit=limit):
            _answer(ctx, number, outcomes.page(ctx, waiting.peer, after, limit))
        case EventsRequest(limit=limit, subject=subject):
            _answer(ctx, number, transitions.page(ctx, waiting.seen, limit, subject))
        case _:
            text = f"has not answered within {LOG_WAIT_S:.0f} s"
            _answer(ctx, number, _silent(waiting.agent, text))


def _try_results(ctx: Context, number: int) -> None:
    waiting = ctx.waiting[number]
    assert isinstance(waiting.message, ResultsRequest)  # noqa: S101 - its kind says so
    message = waiting.message
    found = outcomes.page(ctx, waiting.peer, message.after, message.limit)
    if found.results:
        _answer(ctx, number, found)


def _try_events(ctx: Context, number: int) -> None:
    waiting = ctx.waiting[number]
    assert isinstance(waiting.message, EventsRequest)  # noqa: S101 - its kind says so
    found = transitions.page(ctx, waiting.seen, waiting.message.limit, waiting.message.subject)
    waiting.seen = found.last
    if found.transitions or found.missed:
        _answer(ctx, number, found)


def _wait(
    ctx: Context, kind: WaitKind, event: FromOperator, wait_s: float, agent: str = ""
) -> bool:
    """Make a request wait under the number ``ctx.waited``; false when it has to be answered."""
    if wait_s <= 0.0:
        return False
    of_peer = sum(waiting.peer == event.peer for waiting in ctx.waiting.values())
    if len(ctx.waiting) >= MAX_WAITING or of_peer >= MAX_WAITING_PER_PEER:
        ctx.count("requests.too_many")
        return False
    ctx.waited += 1
    ctx.waiting[ctx.waited] = Waiting(kind, event.peer, event.request, event.message, agent=agent)
    ctx.timers.set("wait", str(ctx.waited), ctx.now + wait_s)
    return True


def _answer(ctx: Context, number: int, message: Message) -> None:
    waiting = ctx.waiting.pop(number)
    ctx.listeners.pop(number, None)
    if waiting.kind == "results":
        submitter(ctx, waiting.peer).waiting.pop(number, None)
    ctx.timers.cancel("wait", str(number))
    ctx.effects.append(Reply(waiting.peer, waiting.request, message))


def _silent(agent: str, what: str) -> CommandReply:
    text = f"agent {agent} {what}; look at its own log, or at its box"
    return CommandReply(ok=False, code="agent.silent", message=text)
