"""Attempts of jobs on agents: leases, strays, revocation.

    offered -> leased -> ended                    ended: result, failure, decline, revocation
        \\         \\-> stray -> leased | ended     stray: agent lost, or no longer lists it

What always holds: an attempt has one ``Lease`` and is in ``Job.attempts``, or it is over; the
``load`` of an agent is the sequences of its counted leases, which a stray or spooled one is not; a
job with an attempt that is not stray is in flight, one without is queued (now or after its
back-off); losing an agent never revokes. A fence is (term, counter) and never given twice.
"""

from scheduler.core.accounting import move
from scheduler.core.context import AgentLive, Context, Lease
from scheduler.core.placement import Choice
from scheduler.core.state import Attempt, Job
from transport.ids import Fence, attempt_id
from transport.messages import LeaseRevoke

MAX_ATTEMPTS_LIVE = 4


def find(ctx: Context, attempt: str, fence: Fence, agent: str) -> Lease | None:
    """The live lease that a message of ``agent`` is about, if it is really that one."""
    lease = ctx.leases.get(attempt)
    if lease is None or lease.fence != fence or lease.agent != agent:
        return None
    return lease


def start(ctx: Context, job: Job, choice: Choice, pinned: dict[str, int]) -> Lease:
    """Make an attempt; the caller sends the offer."""
    while len(job.attempts) >= MAX_ATTEMPTS_LIVE:
        revoke(ctx, job, job.attempts[0], "too_many_attempts")
    job.attempts_made += 1
    record = Attempt(
        id=attempt_id(job.id, job.attempts_made),
        fence=ctx.next_fence(),
        agent=choice.agent,
    )
    job.attempts.append(record)
    ctx.tables.touch(job)
    lease = track(ctx, job, record, pinned)
    live = ctx.agents[choice.agent]
    live.offered_s = ctx.now
    ctx.timers.set("attempt", record.id, ctx.now + ctx.settings.offer_timeout_s)
    ctx.count("attempts.offered")
    ctx.note(record.id, "offered", agent=choice.agent, why=choice.reason, score=choice.score)
    settle(ctx, job)
    return lease


def track(ctx: Context, job: Job, record: Attempt, pinned: dict[str, int]) -> Lease:
    """Index an attempt (new, or read from a row)."""
    lease = Lease(
        attempt=record.id,
        job=job.id,
        agent=record.agent,
        fence=record.fence,
        sequences=job.sequences,
        pinned=pinned,
        offered_s=ctx.now,
        counted=not record.stray,
    )
    ctx.leases[record.id] = lease
    live = ctx.agents[record.agent]
    live.leases[record.id] = lease
    if lease.counted:
        _change_load(ctx, live, lease.sequences)
    return lease


def renew(ctx: Context, lease: Lease) -> None:
    """The agent holds it: accepted, and alive for another ``lease_s``."""
    if not lease.leased:
        lease.leased = True
        lease.accepted_s = ctx.now
        ctx.note(lease.attempt, "leased")
    lease.unlisted = False
    ctx.timers.set("attempt", lease.attempt, ctx.now + ctx.settings.lease_s)


def spooled(ctx: Context, lease: Lease) -> None:
    """Its result is in the agent's spool: it occupies no slot any more."""
    if not lease.spooled:
        lease.spooled = True
        _uncount(ctx, lease)
        ctx.note(lease.attempt, "spooled")


def unlisted(ctx: Context, lease: Lease) -> None:
    """Its agent is alive and does not name it: its result is on the way, or it is lost."""
    if not lease.unlisted:
        lease.unlisted = True
        at = ctx.now + ctx.settings.lost_after_s
        ctx.timers.set_earlier("attempt", lease.attempt, at)


def stray(ctx: Context, lease: Lease, reason: str) -> None:
    """Count on it no more, but let it win; the job gets a sibling attempt."""
    job = ctx.tables.jobs[lease.job]
    record = _record(job, lease)
    if record.stray:
        return
    record.stray = True
    job.losses += 1
    ctx.tables.touch(job)
    ctx.timers.cancel("attempt", lease.attempt)
    _uncount(ctx, lease)
    ctx.count(f"attempts.stray.{reason}")
    ctx.note(lease.attempt, "stray", reason=reason)
    settle(ctx, job)


def revive(ctx: Context, lease: Lease) -> bool:
    """A stray attempt is listed by its agent again; false when the agent has no room for it, so
    that it should be given up."""
    job = ctx.tables.jobs[lease.job]
    record = _record(job, lease)
    live = ctx.agents[lease.agent]
    if not lease.spooled:
        slots = ctx.tables.agents[lease.agent].slots
        if not has_room(ctx, slots, live.load, lease.sequences):
            return False
        lease.counted = True
        _change_load(ctx, live, lease.sequences)
    record.stray = False
    ctx.tables.touch(job)
    ctx.note(lease.attempt, "revived")
    settle(ctx, job)
    return True


def is_stray(ctx: Context, lease: Lease) -> bool:
    return _record(ctx.tables.jobs[lease.job], lease).stray


def end(ctx: Context, job: Job, record: Attempt, what: str, **facts: object) -> None:
    """Forget an attempt; the caller settles the job."""
    lease = ctx.leases.pop(record.id)
    _uncount(ctx, lease)
    live = ctx.agents[lease.agent]
    del live.leases[record.id]
    job.attempts.remove(record)
    ctx.timers.cancel("attempt", record.id)
    ctx.tables.touch(job)
    ctx.note(record.id, what, **facts)
    if live.state in ("lost", "gone") and not live.leases:
        ctx.timers.set("forget", live.name, ctx.now + ctx.settings.forget_agent_s)


def revoke(ctx: Context, job: Job, record: Attempt, reason: str) -> None:
    """End an attempt and tell its agent."""
    end(ctx, job, record, "revoked", reason=reason)
    ctx.count(f"attempts.revoked.{reason}")
    message = LeaseRevoke(attempt=record.id, fence=record.fence, reason=reason)
    ctx.send(record.agent, message)


def revoke_all(ctx: Context, job: Job, reason: str) -> None:
    for record in tuple(job.attempts):
        revoke(ctx, job, record, reason)


def settle(ctx: Context, job: Job, retry_s: float = 0.0) -> None:
    """Bring the job's state and its place in the queue in line with its attempts."""
    if job.state == "done":
        return
    active = any(not record.stray for record in job.attempts)
    queue = ctx.queue(job.queue)
    if active:
        queue.discard(job.id)
        ctx.timers.cancel("job", job.id)
    elif retry_s > 0.0:
        queue.discard(job.id)
        ctx.timers.set("job", job.id, ctx.now + retry_s)
    elif ctx.timers.due("job", job.id) is None:
        queue.add(job.id, job.index)
        ctx.dispatch_due = True
    state = "in_flight" if active else "queued"
    if job.state == state:
        return
    count_in_flight(ctx, job, job.sequences if active else -job.sequences)
    job.state = "in_flight" if active else "queued"
    for policy, copy in job.copies.items():
        if copy.state in ("queued", "in_flight"):
            move(ctx, job, policy, job.state)
    ctx.tables.touch(job)


def leave_queue(ctx: Context, job: Job) -> None:
    """The job is done or given up: no attempt is wanted any more."""
    ctx.queue(job.queue).discard(job.id)
    ctx.timers.cancel("job", job.id)
    if job.state == "in_flight":
        count_in_flight(ctx, job, -job.sequences)
    job.state = "done"
    ctx.tables.touch(job)


def has_room(ctx: Context, slots: int, load: int, sequences: int) -> bool:
    """Whether an agent takes a job: up to its slots and the prefetch, and an idle one always (a
    group larger than the agent runs in waves)."""
    return load == 0 or load + sequences <= slots + ctx.settings.prefetch_groups * sequences


def count_in_flight(ctx: Context, job: Job, sequences: int) -> None:
    """Keep the sequences in flight of the job's run or evaluation."""
    if job.evaluation:
        ctx.evaluations[job.evaluation].in_flight += sequences
    else:
        ctx.runs[job.run].in_flight += sequences


def _record(job: Job, lease: Lease) -> Attempt:
    return next(record for record in job.attempts if record.id == lease.attempt)


def _uncount(ctx: Context, lease: Lease) -> None:
    if lease.counted:
        lease.counted = False
        _change_load(ctx, ctx.agents[lease.agent], -lease.sequences)
        ctx.dispatch_due = True


def _change_load(ctx: Context, live: AgentLive, sequences: int) -> None:
    live.load += sequences
    ctx.refresh_open(ctx.tables.agents[live.name], live)
