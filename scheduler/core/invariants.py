"""What always holds, checked over everything: O(state), for tests and small simulations.

Each function checks one family and names the entity whose story explains a violation.
"""

from collections import Counter

from scheduler.core.accounting import open_copies
from scheduler.core.agent_states import may_work, shown
from scheduler.core.context import Context
from scheduler.core.invariants_data import check_data
from scheduler.core.invariants_life import check_life
from scheduler.core.invariants_life import require as _require
from scheduler.core.invariants_placement import check_placement
from scheduler.core.state import OPEN_STATES, Job, Policy
from transport.ids import job_of

_COUNTED = ("queued", "in_flight", "buffered", "taken")


def check(ctx: Context) -> None:
    """Raises ``InvariantViolation`` with the story of what is wrong."""
    _check_books(ctx)
    for job in ctx.tables.jobs.values():
        _check_job(ctx, job)
    _check_leases(ctx)
    _check_agents(ctx)
    for id in ctx.policies:
        _check_policy(ctx, ctx.tables.policies[id])
    _check_bodies(ctx)
    _check_runs(ctx)
    check_life(ctx)
    check_placement(ctx)
    check_data(ctx)


def _check_books(ctx: Context) -> None:
    """Jobs are conserved: the books equal the copies."""
    found: Counter[tuple[str, str]] = Counter()
    for job in ctx.tables.jobs.values():
        for policy, copy in job.copies.items():
            if copy.state in OPEN_STATES:
                found[f"{policy}|{job.kind}", copy.state] += 1
    for key, books in ctx.tables.accounts.items():
        _require(ctx, books.row.balance == 0, key, f"balance {books.row.balance}")
        for state in _COUNTED:
            counted, real = getattr(books.row, state), found[key, state]
            _require(ctx, counted == real, key, f"{state}: books {counted}, copies {real}")


def _check_job(ctx: Context, job: Job) -> None:
    states = {copy.state for copy in job.copies.values() if copy.state in OPEN_STATES}
    active = any(not record.stray for record in job.attempts)
    queued = job.id in ctx.queue(job.queue)
    retried = ctx.timers.due("job", job.id) is not None
    _require(ctx, bool(open_copies(job)), job.id, "nobody wants it")
    match job.state:
        case "queued":
            _require(ctx, states == {"queued"}, job.id, f"queued with copies {states}")
            _require(ctx, not active, job.id, "queued with a live attempt")
            _require(ctx, queued != retried, job.id, "neither queued nor waiting for a retry")
        case "in_flight":
            _require(ctx, states == {"in_flight"}, job.id, f"in flight with copies {states}")
            _require(ctx, active, job.id, "in flight without an attempt")
        case "done":
            _require(ctx, states <= {"buffered", "taken"}, job.id, f"done with copies {states}")
            _require(ctx, job.result is not None, job.id, "done without a result")
            _require(ctx, not job.attempts, job.id, "done with attempts")
    _require(ctx, job.state == "queued" or not (queued or retried), job.id, "queued twice")
    spec = ctx.tables.runs[job.run].spec
    for policy, copy in job.copies.items():
        live = ctx.policies[policy]
        buffered, taken = copy.state == "buffered", copy.state == "taken"
        places = (job.id in live.buffer) + (job.id in live.unplaced)
        _require(ctx, places == buffered, job.id, f"{places} places in the buffer of {policy}")
        in_step = job.id in live.taken.get(copy.step, {})
        _require(ctx, in_step == taken, job.id, f"taken by {policy}")
        bound = spec.policies[ctx.tables.policies[policy].name].max_policy_lag
        _require(ctx, not taken or copy.lag <= bound, job.id, f"lag {copy.lag} beyond {bound}")


def _check_leases(ctx: Context) -> None:
    fences: dict[tuple[int, int], str] = {}
    attempts = {record.id: job for job in ctx.tables.jobs.values() for record in job.attempts}
    _require(ctx, attempts.keys() == ctx.leases.keys(), "leases", "leases are not the attempts")
    for id, lease in ctx.leases.items():
        job = attempts[id]
        record = next(record for record in job.attempts if record.id == id)
        _require(ctx, lease.job == job.id == job_of(id), id, "lease of another job")
        _require(ctx, lease.fence == record.fence, id, "fence changed")
        _require(ctx, lease.fence <= (ctx.term, ctx.fences), id, "fence of the future")
        _require(ctx, lease.fence not in fences, id, "fence given twice")
        fences[lease.fence] = id
        _require(ctx, lease.counted == (not record.stray and not lease.spooled), id, "counted")
        timed = ctx.timers.due("attempt", id) is not None
        _require(ctx, timed == (not record.stray), id, "clock")
        _require(ctx, id in ctx.agents[lease.agent].leases, id, f"not with {lease.agent}")
    held = sum(len(live.leases) for live in ctx.agents.values())
    _require(ctx, held == len(ctx.leases), "leases", "agents hold leases that are over")


def _check_agents(ctx: Context) -> None:
    prefetch = ctx.settings.prefetch_groups
    slots = 0
    for name, live in ctx.agents.items():
        agent = ctx.tables.agents[name]
        sizes = [lease.sequences for lease in live.leases.values() if lease.counted]
        _require(ctx, live.load == sum(sizes), name, f"load {live.load} of {sizes}")
        largest = max(sizes, default=0)
        ahead = max(prefetch * largest, live.most_prefetch)
        room = max(live.most_slots + ahead, largest, live.inherited)
        _require(ctx, live.load <= room, name, f"load {live.load} beyond {room}")
        works = may_work(agent, live)
        counted = agent.slots if works else 0
        slots += counted
        _require(ctx, live.counted_slots == counted, name, f"{live.counted_slots} slots counted")
        is_open = name in ctx.open_agents
        _require(ctx, not is_open or works, name, f"open while {shown(agent, live)}")
        trusted = [id for id in live.leases if not _stray(ctx, id)]
        excluded = bool(agent.quarantined)
        _require(ctx, not (excluded and trusted), name, f"quarantined, and counts on {trusted}")
        timed = ctx.timers.due("agent", name) is not None
        away = live.state in ("lost", "gone")
        _require(ctx, timed != away, name, f"{live.state} with timer {timed}")
    ready = sum(may_work(ctx.tables.agents[name], live) for name, live in ctx.agents.items())
    _require(ctx, slots == ctx.ready_slots, "agents", f"{ctx.ready_slots} ready slots, not {slots}")
    _require(ctx, ready == ctx.ready_agents, "agents", f"{ctx.ready_agents} ready, not {ready}")
    _require(ctx, ctx.agents.keys() == ctx.tables.agents.keys(), "agents", "rows and index differ")


def _check_policy(ctx: Context, policy: Policy) -> None:
    live = ctx.policies[policy.id]
    tree = live.tree
    id = policy.id
    for node in tree.nodes.values():
        _require(ctx, ctx.tables.versions.get(node.key) is node, id, f"row of {node.version}")
        parent = None if node.parent is None else tree.nodes.get(node.parent)
        if parent is not None:
            _require(ctx, parent.version < node.version, id, f"{node.version} before its parent")
            _require(ctx, parent.step <= node.step, id, f"{node.version} steps back")
    _require(ctx, tree.head == policy.head, id, "head")
    _require(ctx, tree.highest <= policy.highest, id, "a number beyond the highest")
    head = tree.nodes.get(policy.head)
    if policy.trainer:
        _require(ctx, head is not None and head.step == policy.step, id, "head is at another step")
    _require(ctx, policy.checkpoint_step <= policy.step, id, "checkpoint of the future")
    for step, jobs in live.taken.items():
        taken = policy.checkpoint_step < step <= policy.step + 1
        _require(ctx, taken and bool(jobs), id, f"step {step} holds {list(jobs)}")
    bound = ctx.tables.runs[policy.run].spec.policies[policy.name].max_policy_lag
    for job in live.buffer.jobs():
        oldest = ctx.tables.jobs[job].copies[id].oldest
        lag = tree.lag(oldest)
        _require(ctx, lag is not None and lag <= bound, job, f"buffered with lag {lag}")


def _check_bodies(ctx: Context) -> None:
    """A body is needed or released, never both."""
    digests = {job.result.digest: job.id for job in ctx.tables.jobs.values() if job.result}
    for job in ctx.tables.jobs.values():
        if job.partial is not None:
            _require(ctx, job.state != "done", job.id, "done, and keeps finished turns")
            digests[job.partial.digest] = job.id
        if job.external is not None and job.external.recheck is not None:
            digests[job.external.recheck.digest] = job.external.recheck.job
    for entry in ctx.tables.kept.values():
        digests[entry.digest] = entry.job
    for outcome in ctx.tables.outcomes.values():
        if outcome.result.digest:
            digests[outcome.result.digest] = outcome.job
    _require(ctx, digests == ctx.bodies, "bodies", "index and jobs differ")
    for digest in ctx.tables.releases:
        _require(ctx, digest not in digests, digests.get(digest, ""), "its body was released")
    pending = bool(ctx.tables.releases)
    timed = ctx.timers.due("release", "") is not None
    _require(ctx, timed or not pending, "bodies", "releases that nobody repeats")


def _check_runs(ctx: Context) -> None:
    live = {run.name for run in ctx.tables.runs.values() if run.live}
    _require(ctx, ctx.runs.keys() == live, "runs", "indexes are not of the live runs")
    for name, run in ctx.runs.items():
        jobs = [job for job in ctx.tables.jobs.values() if job.run == name]
        training = {job.id for job in jobs if job.kind == "train"}
        _require(ctx, run.jobs.keys() == training, name, "index of jobs")
        flying = sum(job.sequences for job in jobs if job.id in training and _flies(job))
        _require(ctx, run.in_flight == flying, name, f"in flight {run.in_flight}, not {flying}")
    for id, evaluation in ctx.evaluations.items():
        row = ctx.tables.evaluations[id]
        mine = {job.id: job for job in ctx.tables.jobs.values() if job.evaluation == id}
        _require(ctx, evaluation.jobs.keys() == mine.keys(), id, "index of jobs")
        _require(ctx, row.open_jobs == len(mine), id, f"{row.open_jobs} open, not {len(mine)}")
        flying = sum(job.sequences for job in mine.values() if _flies(job))
        _require(ctx, evaluation.in_flight == flying, id, "sequences in flight")
        _require(ctx, not row.done, id, "done and open")
        _require(ctx, row.run in live, id, "open in a finished run")
        _require(ctx, row.name in ctx.runs[row.run].works, id, "of no evaluation of its run")
        _require(ctx, sum(row.counts) in (0, row.scored), id, f"scored {row.scored}, not counted")


def _stray(ctx: Context, attempt: str) -> bool:
    job = ctx.tables.jobs[job_of(attempt)]
    return next(record for record in job.attempts if record.id == attempt).stray


def _flies(job: Job) -> bool:
    return job.state == "in_flight"
