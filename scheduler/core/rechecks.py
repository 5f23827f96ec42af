"""Rewards that are found again by another agent: a sample of accepted training groups.

    accepted group --(drawn)--> recheck by a second agent -> as recorded: nothing more
                                       | differs
                                       v
                                recheck by a third agent -> as recorded: evidence against the second
                                                       -> as the second: evidence against the first
                                                       -> neither: nobody is to blame

Where the run names agents that it trusts (``recheck_by``) only they are asked; what the first one
finds is the truth, so that no number of liars that agree can outvote it. Their own groups are not
looked at.

A recheck is a job of its own kind that goes to agents like a submitter's job: one attempt, in which
the agent fetches the body by its digest, scores its responses with the run's reward and sends the
same group back with the rewards that it found. Only rewards that are functions of item and response
are looked at, or nearly so (``REWARDS``), and only of workflows whose responses can be read off the
tokens (``WORKFLOWS``); ``edge_agent.recheck`` says what of a group is found again, the rest comes
back as it was recorded. Of ``code`` only a reward that was too high is: a program may fail for
want of time on one box and not on another, and even so it may draw lots, which is why a difference
weighs less.

What always holds: no agent checks itself, and the third is neither of the others; two of three
equal answers are needed before anything is held against an agent; at most ``MAX_OPEN`` rechecks of
a run are open, none waits longer than ``EXPIRE_S`` (there may be no third agent) or outlives its
run, and none that fails is tried again; the body is held until then.
"""

from scheduler.core import attempts, bodies, costs, external, jobs, quarantine
from scheduler.core.accounting import open_copies
from scheduler.core.context import Context, Lease
from scheduler.core.state import RECHECKER, External, Job, Recheck
from scheduler.core.work import work_of
from transport.ids import external_job_id
from transport.messages import GroupSummary, Item, SummariesAccepted

WEIGHTS = {"exact": 1.5, "math-verify": 1.5, "reasoning-gym": 1.5, "code": 0.5}
"""By reward. Two proven differences within an hour exclude (five or six of ``code``): one may be
another version of a library."""
WORKFLOWS = ("single_turn", "multi_turn", "solve_and_verify")
PLAIN = ("single_turn", "exact", "math-verify", "reasoning-gym")
"""What every agent that rechecks at all can find; the rest it says (``recheck_kinds``)."""
MAX_OPEN = 16
MAX_SHOWN = 1000
"""Bodies of open rechecks of all runs that a log is told of when it comes back."""
EXPIRE_S = 600.0
TOLERANCE = 1e-6
DIFFERS = "reward.differs"


def consider(ctx: Context, job: Job, items: tuple[Item, ...], summary: GroupSummary) -> None:
    """A training group was accepted; have its rewards found again if it is drawn. Agents cannot
    know which ones are."""
    run = ctx.tables.runs[job.run]
    share = run.spec.recheck_rewards
    if not share or not items or not open_copies(job) or job.result is None:
        return
    work = work_of(ctx, job)
    kinds = (work.workflow.reference, work.reward(items).name)
    if kinds[0] not in WORKFLOWS or kinds[1] not in WEIGHTS:
        return
    if ctx.sampling.random() >= share or run.finishing:
        return
    trusted = run.spec.recheck_by
    if job.result.agent in trusted:
        return
    nobody = not _any_ready(ctx, trusted) if trusted else ctx.ready_agents < 2
    if nobody or _open(ctx, job.run) >= MAX_OPEN:
        ctx.count("rechecks.skipped")
        return
    recheck = Recheck(
        job=job.id,
        attempt=job.result.attempt,
        agent=job.result.agent,
        digest=summary.digest,
        rewards=summary.rewards,
        kinds=tuple(kind for kind in kinds if kind not in PLAIN),
    )
    ctx.new_rechecks.append(summary.digest)
    _begin(ctx, job.run, f"{job.index}.1", job.index, items, recheck)


def show(ctx: Context, service: str) -> None:
    """Tell a log that does not know it any more which bodies agents may have."""
    found = ctx.submitters.get(RECHECKER)
    asked = (ctx.tables.jobs[id].external for id in (() if found is None else found.open))
    digests = [one.recheck.digest for one in asked if one is not None and one.recheck is not None]
    if digests:
        ctx.send(service, SummariesAccepted(digests=(), rechecked=tuple(digests[-MAX_SHOWN:])))


def answered(ctx: Context, job: Job, lease: Lease, summary: GroupSummary, recheck: Recheck) -> None:
    """An agent has found rewards."""
    agent = ctx.tables.agents[lease.agent]
    costs.uploaded(ctx, job.run, agent, summary.size_bytes, 0)
    attempts.end(ctx, job, lease.record, "result", digest=summary.digest)
    bodies.release(ctx, summary.digest)
    _judge(ctx, job, lease.agent, summary.rewards, recheck)
    jobs.close(ctx, job, "delivered", "")


def _judge(
    ctx: Context, job: Job, agent: str, rewards: tuple[float, ...], recheck: Recheck
) -> None:
    if _same(rewards, recheck.rewards):
        ctx.count("rechecks.agree")
        if recheck.second:
            others = f"{recheck.agent} and {agent} find"
            _differs(ctx, job, recheck.second, recheck, recheck.found, recheck.rewards, others)
    elif agent in ctx.tables.runs[job.run].spec.recheck_by:
        ctx.count("rechecks.differ")
        others = f"{agent}, which run.recheck_by trusts, finds"
        _differs(ctx, job, recheck.agent, recheck, recheck.rewards, rewards, others)
    elif not recheck.second:
        ctx.count("rechecks.differ")
        ctx.note(recheck.agent, "reward differs", attempt=recheck.attempt, second=agent)
        third = Recheck(
            job=recheck.job,
            attempt=recheck.attempt,
            agent=recheck.agent,
            digest=recheck.digest,
            rewards=recheck.rewards,
            second=agent,
            found=rewards,
            kinds=recheck.kinds,
        )
        _begin(ctx, job.run, f"{job.index}.2", job.index, job.items, third)
    elif _same(rewards, recheck.found):
        others = f"{recheck.second} and {agent} find"
        _differs(ctx, job, recheck.agent, recheck, recheck.rewards, recheck.found, others)
    else:
        ctx.count("rechecks.undecided")
        ctx.note(recheck.agent, "reward undecided", attempt=recheck.attempt)


def _differs(
    ctx: Context,
    job: Job,
    name: str,
    recheck: Recheck,
    said: tuple[float, ...],
    truth: tuple[float, ...],
    others: str,
) -> None:
    """``others`` begins the clause that says who is believed."""
    pairs = list(zip(said, truth, strict=False))
    at = next((i for i, pair in enumerate(pairs) if not _close(*pair)), None)
    if at is None:
        return  # of another length, which the check of the summary excludes
    text = f"{recheck.attempt}: {said[at]:g} for response {at}, {others} {truth[at]:g}"
    weight = WEIGHTS[work_of(ctx, job).reward(job.items).name]
    quarantine.evidence(ctx, name, DIFFERS, text, weight)


def _begin(
    ctx: Context, run: str, id: str, index: int, items: tuple[Item, ...], recheck: Recheck
) -> None:
    trusted = ctx.tables.runs[run].spec.recheck_by
    asked = External(
        submitter=RECHECKER,
        id=id,
        due_s=ctx.now + EXPIRE_S,
        require={"agent": trusted} if trusted else {},
        recheck=recheck,
    )
    job = Job(
        id=external_job_id(run, RECHECKER, id),
        run=run,
        kind="recheck",
        index=index,
        sequences=len(recheck.rewards),
        items=items,
        copies={},
        created_s=ctx.now,
        external=asked,
    )
    bodies.hold(ctx, recheck.digest, recheck.job)
    ctx.count("rechecks.begun")
    external.enter(ctx, job, asked)


def _any_ready(ctx: Context, names: tuple[str, ...]) -> bool:
    """Whether one of these agents can be asked now."""
    return any(name in ctx.agents and ctx.agents[name].state == "ready" for name in names)


def _open(ctx: Context, run: str) -> int:
    found = ctx.submitters.get(RECHECKER)
    return 0 if found is None else sum(id.startswith(f"{run}/") for id in found.open)


def _same(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return len(one) == len(other) and all(map(_close, one, other))


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE
