"""Attempts of jobs on agents: leases, strays, revocation.

    offered -> leased -> ended                    ended: result, failure, decline, revocation
        \\         \\-> stray -> leased | ended     stray: agent lost, or no longer lists it

What always holds: an attempt has one ``Lease`` and is in ``Job.attempts``, or it is over; the
``load`` of an agent is the sequences of its counted leases, which a stray or spooled one is not; a
job with an attempt that is not stray is in flight, one without is queued (now or after its
back-off); losing an agent never revokes. A fence is (term, counter) and never given twice. The
tokens that an attempt is expected to take are taken from its run's bucket when it is offered and
given back when its agent does not take it.
"""

from scheduler.core import backlog, prefetch, views
from scheduler.core.accounting import move
from scheduler.core.context import AgentLive, Context, Lease
from scheduler.core.placement import Choice
from scheduler.core.state import Attempt, Job
from transport.ids import Fence, attempt_id
from transport.messages import AttemptRecord, LeaseRevoke

MAX_ATTEMPTS_LIVE = 4
MOST_COUNTED = 2
"""Attempts of a job that are counted on: the first and a hedge."""

MAX_HISTORY = 16
MAX_DETAIL = 200
NOT_TAKEN = ("declined", "recalled")
"""Ends of attempts that never began: nothing was spent."""


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
        offered_s=ctx.now,
    )
    job.attempts.append(record)
    ctx.tables.touch(job)
    scored = choice.score.scored
    lease = track(ctx, job, record, pinned, None if scored is None else scored[1].token_s)
    live = ctx.agents[choice.agent]
    live.offered_s = ctx.now
    _spend(ctx, job, lease.tokens)
    ctx.timers.set("attempt", record.id, ctx.now + ctx.settings.offer_timeout_s)
    ctx.count("attempts.offered")
    ctx.note(record.id, "offered", agent=choice.agent, why=choice.reason, score=choice.score)
    settle(ctx, job)
    return lease


def learn_tokens(ctx: Context, job: Job, lease: Lease, tokens: float) -> None:
    """A result says how many tokens it really took."""
    _spend(ctx, job, tokens - lease.tokens)
    lease.tokens = tokens


def _spend(ctx: Context, job: Job, tokens: float) -> None:
    """Evaluations, which no quota holds up, take nothing from training's; rechecks draw none."""
    if not job.evaluation and job.kind != "recheck":
        ctx.runs[job.run].bucket.take(tokens)


def track(
    ctx: Context, job: Job, record: Attempt, pinned: dict[str, int], token_s: float | None = None
) -> Lease:
    """Index an attempt (new, or read from a row); ``token_s`` of its agent where it is known."""
    lease = Lease(
        attempt=record.id,
        job=job.id,
        agent=record.agent,
        fence=record.fence,
        sequences=job.sequences,
        pinned=pinned,
        offered_s=record.offered_s,
        record=record,
        counted=not record.stray,
    )
    ctx.leases[record.id] = lease
    live = ctx.agents[record.agent]
    estimate = views.estimate_of(ctx, job)
    if token_s is None:
        prior_s = ctx.hardware.token_s(ctx.tables.agents[record.agent].hardware)
        token_s = live.estimate.token_time_s(views.kind_of(job), prior_s, ctx.now)
    lease.mean_s = estimate.tokens_mean * token_s
    lease.longest_s = estimate.tokens_longest * token_s
    lease.tokens = estimate.tokens_mean * job.sequences
    live.leases[record.id] = lease
    if lease.counted:
        _change_load(ctx, live, lease.sequences)
    return lease


def renew(ctx: Context, lease: Lease) -> None:
    """The agent holds it: accepted, and alive for another ``lease_s``."""
    if not lease.leased:
        lease.leased = True
        lease.accepted_s = ctx.now
        if lease.counted and lease.started_s is None:
            recallable(ctx, ctx.agents[lease.agent], lease, is_so=True)
        ctx.note(lease.attempt, "leased")
    lease.unlisted = False
    overdue_s = lease.offered_s + ctx.settings.attempt_max_s
    ctx.timers.set("attempt", lease.attempt, min(ctx.now + ctx.settings.lease_s, overdue_s))


def is_overdue(ctx: Context, lease: Lease) -> bool:
    """Whether its agent has held it for so long that it is not counted on, however alive."""
    return ctx.now >= lease.offered_s + ctx.settings.attempt_max_s


def started(ctx: Context, lease: Lease) -> None:
    """Its agent says that it runs."""
    live = ctx.agents[lease.agent]
    live.says_started = True
    ctx.recalls.pop(lease.attempt, None)
    if lease.started_s is None:
        begin_s = lease.begin_s
        # The news is up to a heartbeat old: the begin that was predicted is nearer, if it fits.
        fits = begin_s is not None and ctx.now - live.heartbeat_s <= begin_s <= ctx.now
        lease.started_s = begin_s if fits else ctx.now
        versions = ctx.tables.agents[lease.agent].versions
        lease.newest = {policy: ref.version for policy, ref in versions.items()}
        for policy, oldest in lease.resumed.items():
            lease.newest[policy] = min(oldest, lease.newest.get(policy, oldest))
        for policy in tuple(lease.deadlines):
            lag = ctx.policies[policy].tree.lag(lease.newest.get(policy, -1))
            if lag is not None:
                expect_use(ctx, lease, policy, lag)
        backlog.changed(live)
        recallable(ctx, live, lease, is_so=False)
        ctx.note(lease.attempt, "running")


def expect_use(ctx: Context, lease: Lease, policy: str, lag: int) -> None:
    """Count the attempt among those that a policy can use until so many steps from now, because it
    begins that far behind the head."""
    live = ctx.policies[policy]
    bound = ctx.tables.runs[ctx.tables.policies[policy].run].spec
    last = live.tree.head_step + bound.policies[ctx.tables.policies[policy].name].max_policy_lag
    forget_use(ctx, lease, policy)
    lease.deadlines[policy] = last - lag
    live.flying_by_deadline[last - lag] = live.flying_by_deadline.get(last - lag, 0) + 1


def forget_use(ctx: Context, lease: Lease, policy: str) -> None:
    """The policy does not count on this attempt any more."""
    at = lease.deadlines.pop(policy, None)
    if at is not None:
        counts = ctx.policies[policy].flying_by_deadline
        counts[at] -= 1
        if not counts[at]:
            del counts[at]


def waits(ctx: Context, lease: Lease) -> None:
    """Its agent says that it waits for a slot or for weights."""
    live = ctx.agents[lease.agent]
    if live.says_started and lease.begin_s is not None and lease.begin_s <= ctx.now:
        lease.begin_s = None
        backlog.changed(live)
    if lease.leased and lease.counted and lease.started_s is None and lease.recall_s is None:
        recallable(ctx, live, lease, is_so=True)


def recallable(ctx: Context, live: AgentLive, lease: Lease, is_so: bool) -> None:
    """Keep which attempts could be taken back, and which agents have some."""
    if is_so:
        live.waiting[lease.attempt] = None
    elif live.waiting.pop(lease.attempt, lease) is lease:
        return
    ctx.backed_up.put(live.name, bool(live.waiting))


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
    if lease.record.stray:
        return
    lease.record.stray = True
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
    live = ctx.agents[lease.agent]
    if not lease.spooled:
        agent = ctx.tables.agents[lease.agent]
        if not prefetch.has_room(ctx, agent, live, lease.sequences):
            return False
        lease.counted = True
        _change_load(ctx, live, lease.sequences)
    lease.record.stray = False
    ctx.tables.touch(job)
    ctx.note(lease.attempt, "revived")
    settle(ctx, job)
    return True


def is_spare(ctx: Context, lease: Lease) -> bool:
    """Whether enough others are counted on for a stray attempt's job, or one on the same agent."""
    if not lease.record.stray:
        return False
    job = ctx.tables.jobs[lease.job]
    counted = [record.agent for record in job.attempts if not record.stray]
    return len(counted) >= MOST_COUNTED or lease.agent in counted


def end(ctx: Context, job: Job, record: Attempt, what: str, **facts: object) -> None:
    """Forget an attempt; the caller settles the job."""
    lease = ctx.leases.pop(record.id)
    _uncount(ctx, lease)
    live = ctx.agents[lease.agent]
    del live.leases[record.id]
    ctx.recalls.pop(record.id, None)
    for policy in tuple(lease.deadlines):
        forget_use(ctx, lease, policy)
    if what in NOT_TAKEN:
        _spend(ctx, job, -lease.tokens)
    job.attempts.remove(record)
    ended = AttemptRecord(
        attempt=record.id,
        agent=record.agent,
        offered_s=lease.offered_s,
        ended_s=ctx.now,
        outcome="lost" if record.stray and what != "result" else what,
        detail="" if what == "result" else _detail(facts),
    )
    job.history = [*job.history, ended][-MAX_HISTORY:]
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
    active = False
    for record in job.attempts:
        if not record.stray:
            active = True
            break
    queue = ctx.queue(job.queue)
    if active:
        queue.discard(job.id)
        ctx.timers.cancel("job", job.id)
    elif retry_s > 0.0:
        queue.discard(job.id)
        ctx.timers.set("job", job.id, ctx.now + retry_s)
    elif ctx.timers.due("job", job.id) is None:
        queue.add(job.id, job.index, job.priority, _lane(job))
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


def _lane(job: Job) -> str:
    """Jobs of one lane can be taken by the same agents, as far as that is the job's matter."""
    family = job.items[0].family if job.items else ""
    asked = job.external
    if asked is None:
        # What only a policy with a full buffer and no trainer wants is refused for a long time.
        wanting = [id for id, copy in job.copies.items() if copy.state in ("queued", "in_flight")]
        return f"{family} {' '.join(wanting)}" if len(job.copies) > 1 else family
    if not (asked.pinned or asked.require or asked.recheck):  # nearly all of them
        return f"{asked.submitter} {family} [] [] ()"
    pins = sorted(asked.pinned.items())
    require = sorted((label, sorted(values)) for label, values in asked.require.items())
    heard = () if asked.recheck is None else (asked.recheck.agent, asked.recheck.second)
    return f"{asked.submitter} {family} {pins} {require} {heard}"


def leave_queue(ctx: Context, job: Job) -> None:
    """The job is done or given up: no attempt is wanted any more."""
    ctx.queue(job.queue).discard(job.id)
    ctx.timers.cancel("job", job.id)
    if job.state == "in_flight":
        count_in_flight(ctx, job, -job.sequences)
    job.state = "done"
    ctx.tables.touch(job)


def count_in_flight(ctx: Context, job: Job, sequences: int) -> None:
    """Keep the sequences in flight of the job's run or evaluation, and which training jobs are."""
    live = ctx.runs[job.run]
    if job.evaluation:
        ctx.evaluations[job.evaluation].in_flight += sequences
    elif job.external is not None:
        live.external_in_flight += sequences
    else:
        live.in_flight += sequences
        if sequences > 0:
            live.flying[job.id] = None
        else:
            live.flying.pop(job.id, None)


def _detail(facts: dict[str, object]) -> str:
    told = [str(facts[key]) for key in ("reason", "code", "detail") if facts.get(key)]
    return ": ".join(told)[:MAX_DETAIL]


def _uncount(ctx: Context, lease: Lease) -> None:
    if lease.counted:
        lease.counted = False
        recallable(ctx, ctx.agents[lease.agent], lease, is_so=False)
        _change_load(ctx, ctx.agents[lease.agent], -lease.sequences)
        ctx.dispatch_due = True


def _change_load(ctx: Context, live: AgentLive, sequences: int) -> None:
    live.load += sequences
    ctx.refresh_open(ctx.tables.agents[live.name], live)
