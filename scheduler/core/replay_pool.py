"""Groups that a policy is trained on again (``ReplaySpec``).

    trained by step s -> in the pool -> taken again by step u -> in the pool | gone
                             |                \\-> as if never taken (rollback below u)
                             \\-> gone: too old, pushed out, used up, unusable, the end

A batch of b groups takes up to floor(ratio b) from here, by the numbers that their selector gave
them: the highest first and the newest among equals, or where they are weights w, those with the
highest ln(u) / w (drawn in proportion to w without putting back: Efraimidis and Spirakis, 2006),
with u in (0, 1) a hash of (seed, policy, step, job). So the choice is a function of the rows.

What always holds: a group enters when the step that trained on it first is done, and only then; its
body is held as long as it is here; it is taken within ``max_policy_lag`` and at most ``max_uses``
times along the surviving lineage; when a trainer goes back to checkpoint c, groups first trained on
after c leave the pool (they are back in the buffer), and uses after c never were; at most ``keep``
groups are here, beside those of a step that runs.
"""

import math
from hashlib import blake2b

from scheduler.core import bodies
from scheduler.core.accounting import account
from scheduler.core.context import Context
from scheduler.core.kept import Kept, ReplayPool, Reuse
from scheduler.core.state import Policy
from transport.runs import ReplaySpec

_ROUNDING = 1e-9
"""0.29 x 100 is meant to be 29."""


def spec_of(ctx: Context, policy: Policy) -> ReplaySpec:
    return ctx.run_of(policy).spec.policies[policy.name].data.replay


def share(spec: ReplaySpec, groups: int) -> int:
    """How many groups of a batch may be such as were trained on before."""
    return math.floor(spec.ratio * groups + _ROUNDING)


def usable(ctx: Context, policy: Policy) -> int:
    """How many groups could be taken again now; O(1) while nothing changes."""
    pool = ctx.policies[policy.id].pool
    if pool.usable is None:
        pool.usable = len(_candidates(ctx, policy, pool))
    return pool.usable


def load(ctx: Context, entry: Kept) -> None:
    """Index a row of the last life."""
    pool = ctx.policies[entry.policy].pool
    pool.entries[entry.job] = entry
    if entry.uses and entry.uses[-1] > ctx.tables.policies[entry.policy].step:
        pool.taken.setdefault(entry.uses[-1], {})[entry.job] = None
    bodies.hold(ctx, entry.digest, entry.job)


def available(ctx: Context, policy: Policy, step: int, groups: int) -> int:
    """How many more groups a batch of ``groups`` takes from the pool."""
    pool = ctx.policies[policy.id].pool
    wanted = share(spec_of(ctx, policy), groups) - len(pool.taken.get(step, ()))
    return min(wanted, usable(ctx, policy)) if wanted > 0 else 0


def take(ctx: Context, policy: Policy, step: int, count: int) -> None:
    """Make so many, of those that are usable, part of the step's batch."""
    if count <= 0:
        return
    live = ctx.policies[policy.id]
    seed = ctx.run_of(policy).spec.seed
    ranked = sorted(
        (-_rank(entry, f"{seed}/{policy.id}/{step}/{entry.job}"), -entry.step, -entry.index, id)
        for id, entry in _candidates(ctx, policy, live.pool).items()
    )
    for *_, id in ranked[:count]:
        entry = live.pool.entries[id]
        entry.uses = [*entry.uses, step]
        entry.lag = live.tree.path_lag(entry.oldest) or 0
        ctx.tables.touch(entry)
        live.pool.taken.setdefault(step, {})[id] = None
        ctx.note(id, "taken again", policy=policy.id, step=step)
    live.pool.usable = None


def refuse(ctx: Context, policy: Policy, step: int, job: str, code: str) -> bool:
    """The trainer cannot use a group of the pool; false when it was not granted for that step."""
    pool = ctx.policies[policy.id].pool
    if job not in pool.taken.get(step, ()):
        return False
    ctx.count(f"replay.rejected.{code}")
    _remove(ctx, pool, pool.entries[job], "rejected")
    return True


def steps_done(ctx: Context, policy: Policy, step: int) -> None:
    """Steps from the last known one (``Policy.step``) up to this one have trained: what they took
    first may be taken again. Once: what has left the pool does not come back."""
    live = ctx.policies[policy.id]
    pool = live.pool
    for at in [at for at in sorted(pool.taken) if at <= step]:
        _reuse(ctx, policy).steps[at] = len(pool.taken.pop(at))
        pool.usable = None
    spec = spec_of(ctx, policy)
    if spec.ratio <= 0.0 or policy.final:
        return
    for at in [at for at in sorted(live.taken) if policy.step < at <= step]:
        for id in sorted(live.taken[at], key=lambda id: ctx.tables.jobs[id].index):
            _enter(ctx, policy, pool, id, at)
    surplus = len(pool.entries) - spec.keep
    for entry in [e for e in pool.entries.values() if not _runs(pool, e)][: max(0, surplus)]:
        _remove(ctx, pool, entry, "pushed out")


def checkpointed(ctx: Context, policy: Policy, step: int) -> None:
    """Uses up to this step count for good; who has had all of its own goes."""
    pool = ctx.policies[policy.id].pool
    row = ctx.tables.reuses.get(policy.id)
    if row is not None and any(at <= step for at in row.steps):
        books = account(ctx, policy.id, "train")
        books.row.replayed += sum(count for at, count in row.steps.items() if at <= step)
        row.steps = {at: count for at, count in row.steps.items() if at > step}
        ctx.tables.touch(books)
        ctx.tables.touch(row)
    most = spec_of(ctx, policy).max_uses
    for entry in tuple(pool.entries.values()):
        if len(entry.uses) >= most and entry.uses[-1] <= step:
            _remove(ctx, pool, entry, "used up")


def roll_back(ctx: Context, policy: Policy, step: int) -> None:
    """Training goes on from the checkpoint of ``step``: what came after it never was."""
    pool = ctx.policies[policy.id].pool
    pool.usable = None
    pool.taken.clear()
    row = ctx.tables.reuses.get(policy.id)
    if row is not None:
        row.steps = {at: count for at, count in row.steps.items() if at <= step}
        ctx.tables.touch(row)
    for entry in tuple(pool.entries.values()):
        if entry.step > step:
            _remove(ctx, pool, entry, "rolled back")
        elif entry.uses and entry.uses[-1] > step:
            entry.uses = [at for at in entry.uses if at <= step]
            ctx.tables.touch(entry)


def look(ctx: Context, policy: Policy) -> None:
    """The tree or the head has changed: what is too old now goes, unless a step runs on it."""
    live = ctx.policies[policy.id]
    bound = ctx.run_of(policy).spec.policies[policy.name].max_policy_lag
    live.pool.usable = None
    for entry in tuple(live.pool.entries.values()):
        lag = live.tree.lag(entry.oldest)
        if (lag is None or lag > bound) and not _runs(live.pool, entry):
            _remove(ctx, live.pool, entry, "too old")


def clear(ctx: Context, policy: Policy) -> None:
    """The policy's last step is made, or its run is over."""
    pool = ctx.policies[policy.id].pool
    for entry in tuple(pool.entries.values()):
        _remove(ctx, pool, entry, "over")
    row = ctx.tables.reuses.get(policy.id)
    if row is not None:
        ctx.tables.remove(row)


def used_by(ctx: Context, policy: Policy, step: int) -> list[Kept]:
    """The groups of the pool that a step takes or took again."""
    pool = ctx.policies[policy.id].pool
    return [entry for entry in pool.entries.values() if step in entry.uses]


def _candidates(ctx: Context, policy: Policy, pool: ReplayPool) -> dict[str, Kept]:
    """What may be taken again at the present head. A weight of 0 is never drawn."""
    if not pool.entries:
        return {}
    spec, tree = spec_of(ctx, policy), ctx.policies[policy.id].tree
    bound = ctx.run_of(policy).spec.policies[policy.name].max_policy_lag
    found: dict[str, Kept] = {}
    for id, entry in pool.entries.items():
        if entry.drawn and entry.score <= 0.0:
            continue
        if len(entry.uses) < spec.max_uses and not _runs(pool, entry):
            lag = tree.path_lag(entry.oldest)
            if lag is not None and lag <= bound:
                found[id] = entry
    return found


def _runs(pool: ReplayPool, entry: Kept) -> bool:
    """Whether a step that is not done has it."""
    return bool(entry.uses) and entry.job in pool.taken.get(entry.uses[-1], ())


def _rank(entry: Kept, place: str) -> float:
    if not entry.drawn:
        return entry.score
    drawn = int.from_bytes(blake2b(place.encode(), digest_size=8).digest(), "big")
    return math.log((drawn + 1) / (2**64 + 1)) / entry.score


def _enter(ctx: Context, policy: Policy, pool: ReplayPool, id: str, step: int) -> None:
    job = ctx.tables.jobs[id]
    result, copy = job.result, job.copies[policy.id]
    if result is None:
        return
    entry = Kept(
        policy=policy.id,
        job=id,
        index=job.index,
        digest=result.digest,
        size_bytes=result.size_bytes,
        oldest=copy.oldest,
        reward_mean=result.reward_mean,
        response_tokens=result.response_tokens,
        step=step,
        score=copy.score,
        drawn=copy.drawn,
    )
    ctx.tables.add(entry)
    pool.entries[id] = entry
    pool.usable = None
    bodies.hold(ctx, entry.digest, id)


def _remove(ctx: Context, pool: ReplayPool, entry: Kept, why: str) -> None:
    del pool.entries[entry.job]
    pool.usable = None
    for jobs in pool.taken.values():
        jobs.pop(entry.job, None)
    for at in [at for at, jobs in pool.taken.items() if not jobs]:
        del pool.taken[at]
    ctx.tables.remove(entry)
    ctx.note(entry.job, "left the replay pool", policy=entry.policy, why=why)
    ctx.due_runs[ctx.tables.policies[entry.policy].run] = None
    bodies.unhold(ctx, entry.digest)


def _reuse(ctx: Context, policy: Policy) -> Reuse:
    row = ctx.tables.reuses.get(policy.id)
    if row is None:
        row = Reuse(policy=policy.id)
        ctx.tables.add(row)
    else:
        ctx.tables.touch(row)
    return row
