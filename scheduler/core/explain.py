"""Why something waits, and why it went where it went, in words.

    job   queued -> leased -> running -> returned -> accepted | rejected | expired | cancelled
                                                     | dead letter

What always holds: an explanation comes from the tests and estimates that decide (``candidates``,
``admission``), looks at no more agents than ``candidates.explain`` does and at no job but the one
that was asked for, changes nothing, and fits one control frame.
"""

import msgspec

from scheduler.core import outcomes, reasons
from scheduler.core.candidates import explain as scored_candidates
from scheduler.core.context import Context
from scheduler.core.state import Job
from transport.ids import job_of
from transport.messages import (
    AttemptRecord,
    CommandReply,
    Explanation,
    Message,
    ScoredCandidate,
)

MAX_HISTORY = 200
MAX_LINE = 500
MAX_REPLY_BYTES = 192 * 1024
_ACCEPTED = ("trained", "scored", "delivered")
_REJECTED = ("filtered", "dropped")
_ENDS = ("expired", "rejected", "cancelled", "failed", *_ACCEPTED, *_REJECTED)


def explain(ctx: Context, subject: str) -> Message:
    """About a job, attempt, agent, policy, run or evaluation; what is over is told from memory."""
    job = ctx.tables.jobs.get(subject)
    if job is not None:
        return _fitting(_job(ctx, job))
    if "#" in subject and (job := ctx.tables.jobs.get(job_of(subject))) is not None:
        return _fitting(_attempt(ctx, job, subject))
    if subject in ctx.tables.policies:
        policy = ctx.tables.policies[subject]
        state, why = reasons.of_policy(ctx, policy)
        return _fitting(_plain(ctx, subject, "policy", state, why))
    if subject in ctx.tables.runs:
        run = ctx.tables.runs[subject]
        return _fitting(_plain(ctx, subject, "run", run.state, reasons.of_run(ctx, run)))
    if subject in ctx.tables.evaluations:
        state, why = reasons.of_evaluation(ctx, ctx.tables.evaluations[subject])
        return _fitting(_plain(ctx, subject, "evaluation", state, why))
    if subject in ctx.agents:
        state, why = reasons.of_agent(ctx, subject)
        return _fitting(_plain(ctx, subject, "agent", state, why))
    return _over(ctx, subject)


def job_state(ctx: Context, job: Job) -> str:
    """The state of an open job in the words of the life cycle."""
    if job.state == "done":
        return "returned"
    leases = [ctx.leases[record.id] for record in job.attempts if not record.stray]
    if not leases:
        return "queued"
    if any(lease.started_s is not None or lease.spooled for lease in leases):
        return "running"
    return "leased"


def _job(ctx: Context, job: Job) -> Explanation:
    scored = scored_candidates(ctx, job)
    state = job_state(ctx, job)
    why = reasons.of_job(ctx, job, scored)
    history = [*map(_record_line, job.history), *ctx.story(job.id)]
    return _explanation(ctx, job.id, "job", state, why, history, scored)


def _attempt(ctx: Context, job: Job, attempt: str) -> Explanation:
    lease = ctx.leases.get(attempt)
    past = [record for record in job.history if record.attempt == attempt]
    history = [*map(_record_line, past), *ctx.story(attempt)]
    if lease is not None:
        state = "stray" if not lease.counted and not lease.spooled else "offered"
        if lease.leased and state != "stray":
            state = "running" if lease.started_s is not None else "leased"
        return _explanation(ctx, attempt, "attempt", state, reasons.of_lease(ctx, lease), history)
    if past:
        state, why = past[-1].outcome, [_record_line(past[-1])]
        return _explanation(ctx, attempt, "attempt", state, why, history)
    why = ["it is not one of the job's live attempts, nor among the last that are remembered"]
    return _explanation(ctx, attempt, "attempt", "over", why, history)


def _plain(ctx: Context, subject: str, kind: str, state: str, why: list[str]) -> Explanation:
    return _explanation(ctx, subject, kind, state, why, ctx.story(subject))


def _over(ctx: Context, subject: str) -> Message:
    """What is known of something that has no row any more."""
    history = ctx.story(subject)
    dead = ctx.tables.dead.get(subject)
    if dead is not None:
        letter = dead.letter
        why = [
            f"given up ({letter.reason}) {ctx.now - letter.died_s:.0f} s ago;"
            f" `farflow dead replay {subject}` queues it"
        ]
        lines = [*map(_record_line, letter.attempts), *history]
        return _fitting(_explanation(ctx, subject, "job", "dead letter", why, lines))
    ended = outcomes.known(ctx, subject)
    if ended is not None:
        waits = ctx.concluded[subject] in ctx.tables.outcomes
        what = "waits to be confirmed by" if waits else "was confirmed by"
        why = [f"its result {what} its submitter"]
        return _fitting(_explanation(ctx, subject, "job", ended[0], why, history))
    if not history:
        text = (
            f"nothing is known of {subject!r}: name a job, attempt, agent, policy, run or"
            " evaluation as `farflow status` and `farflow events` do"
        )
        return CommandReply(ok=False, code="subject.unknown", message=text)
    state = _last_end(ctx, subject)
    why = ["it is over and has no row any more; what is remembered is in its history"]
    kind = "attempt" if "#" in subject else "job"
    return _fitting(_explanation(ctx, subject, kind, state, why, history))


def _last_end(ctx: Context, subject: str) -> str:
    """How a job ended, by the last transition that ended a copy of it."""
    for _, about, what, _ in reversed(ctx.entries):
        if about == subject and what in _ENDS:
            if what in _ACCEPTED:
                return "accepted"
            return "rejected" if what in _REJECTED else what
    return "over"


def _explanation(
    ctx: Context,
    subject: str,
    kind: str,
    state: str,
    why: list[str],
    history: list[str],
    scored: tuple[ScoredCandidate, ...] = (),
) -> Explanation:
    return Explanation(
        subject=subject,
        kind=kind,
        state=state,
        reasons=tuple(line[:MAX_LINE] for line in why),
        candidates=scored,
        history=tuple(line[:MAX_LINE] for line in history[-MAX_HISTORY:]),
        now_s=ctx.now,
    )


def _record_line(record: AttemptRecord) -> str:
    took_s = record.ended_s - record.offered_s
    detail = f" ({record.detail})" if record.detail else ""
    return (
        f"{record.ended_s:.3f} {record.attempt} was {record.outcome}{detail}"
        f" on {record.agent} after {took_s:.1f} s"
    )


def _fitting(found: Explanation) -> Explanation:
    """The oldest history and the last candidates go when a frame has no room for all."""
    while len(msgspec.msgpack.encode(found)) > MAX_REPLY_BYTES:
        keep = len(found.candidates) * 3 // 4
        found = msgspec.structs.replace(
            found,
            history=found.history[len(found.history) // 4 + 1 :],
            candidates=found.candidates[:keep],
            reasons=found.reasons[:100],
        )
    return found
