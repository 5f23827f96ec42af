"""What operators, viewers and submitters ask.

What always holds: every request gets exactly one reply, now or (``waits``) later; whether a peer
may ask was checked by its role before; a submitter only sees and touches jobs of its own.
"""

from scheduler.core import (
    dead_letters,
    explain,
    external,
    orders,
    replays,
    runs,
    status,
    waits,
)
from scheduler.core.context import Context
from scheduler.core.effects import Reply
from scheduler.core.events import FromOperator
from transport.messages import (
    AgentLogsRequest,
    AgentOrder,
    CommandReply,
    DeadLettersRequest,
    EventsRequest,
    ExplainRequest,
    JobCancel,
    JobReplay,
    JobSubmit,
    Message,
    ResultsRequest,
    RunCommand,
    RunSubmit,
    StatusReply,
    StatusRequest,
)

AGENTS_PER_STATUS = 1000
"""More than a frame has room for."""


def answer(ctx: Context, event: FromOperator) -> None:
    """Answer a request, or make it wait."""
    match event.message:
        case ResultsRequest() as message:
            waits.ask_results(ctx, event, message)
        case EventsRequest() as message:
            waits.ask_events(ctx, event, message)
        case AgentLogsRequest() as message:
            waits.ask_log(ctx, event, message)
        case other:
            ctx.effects.append(Reply(event.peer, event.request, _answer(ctx, event, other)))


def _answer(ctx: Context, event: FromOperator, asked: Message) -> Message:
    peer = event.peer
    match asked:
        case RunSubmit(by=by):
            return runs.submit_run(ctx, asked, event.fault, by=_giver(peer, by))
        case RunCommand(by=by):
            return runs.command(ctx, asked, by=_giver(peer, by))
        case StatusRequest(agents_after=after):
            return StatusReply(status=status.build(ctx, ctx.now, after, AGENTS_PER_STATUS))
        case JobSubmit():
            return external.submit_jobs(ctx, peer, asked)
        case JobCancel():
            return external.cancel_jobs(ctx, peer, asked)
        case AgentOrder(by=by):
            return orders.give(ctx, _giver(peer, by), asked)
        case DeadLettersRequest():
            return dead_letters.page(ctx, asked)
        case JobReplay(by=by):
            return replays.replay(ctx, asked, by=_giver(peer, by))
        case ExplainRequest(subject=subject):
            return explain.explain(ctx, subject)
        case _:
            text = f"{type(asked).__name__} is not a command"
            return CommandReply(ok=False, code="command.unknown", message=text)


def _giver(peer: str, by: str) -> str:
    """Who gave an order: the key's name, which is sure, and for whom it says that it did."""
    return f"{peer}/{by}" if by else peer
