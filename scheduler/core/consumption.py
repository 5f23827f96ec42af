"""Batches, steps and checkpoints: how groups are used up, once per lineage for the first time.

    buffered -> taken by step s -> trained (checkpoint >= s durable) -> body released
                     |    \\-> rejected (the trainer can not use it; the step is granted again)
                     \\-> buffered (the trainer came back from a checkpoint < s): abandoned + 1

A part of a batch may be groups that the policy was trained on before (``replay_pool``).

What always holds: a batch is granted whole and only with groups whose lag at the head is within
the bound; asking for a step again gives the same groups; the head only moves along the trainer's
own account (step reports, requests, its checkpoint when it comes back); what the trainer said
before its last rollback is ignored (``Policy.floor``).
"""

from scheduler.core import honesty, jobs, quarantine, replay_pool, steps
from scheduler.core.accounting import account, move
from scheduler.core.admission import spec_of
from scheduler.core.context import Context, PolicyLive
from scheduler.core.state import (
    WAITING_STATES,
    Job,
    PendingStep,
    Policy,
    StandingRequest,
    Version,
)
from transport.messages import (
    BatchGrant,
    BatchRequest,
    CheckpointReport,
    GroupRef,
    GroupUnusable,
    StepReport,
    TrainerInventory,
)
from transport.status import CopyState

UNPLACED_S = 60.0
"""How long a group may wait for its version to be announced."""


def advance(ctx: Context, policy: Policy) -> None:
    """Drop what is too old, grant what is asked for."""
    live = ctx.policies[policy.id]
    _expire(ctx, policy, live, live.buffer.expired(policy.step))
    request = policy.request
    if request is None or policy.final or ctx.run_of(policy).state != "running":
        return
    again = replay_pool.available(ctx, policy, request.step, request.groups)
    missing = request.groups - again - _batched(live, request.step)
    if len(live.buffer) < missing:
        # A run at the end of its budget stops when no batch can become complete any more.
        ctx.due_runs[policy.run] = None
        return
    bound = spec_of(ctx, policy).max_policy_lag
    for id in live.buffer.first(missing) if missing > 0 else ():
        job = ctx.tables.jobs[id]
        copy = job.copies[policy.id]
        lag = live.tree.path_lag(copy.oldest)
        if lag is None or lag > bound:
            # It looked newer than the head and is of a lineage that was left.
            _expire(ctx, policy, live, [id])
            ctx.due_policies[policy.id] = None
            continue
        copy.step, copy.lag = request.step, lag
        move(ctx, job, policy.id, "taken")
    if _batched(live, request.step) + again < request.groups:
        return
    replay_pool.take(ctx, policy, request.step, again)
    policy.request = None
    if live.granted_s:
        live.interval_s.observe(ctx.now - live.granted_s)
    live.granted_s = ctx.now
    ctx.tables.touch(policy)
    _grant(ctx, policy, live, request.step)


def _batched(live: PolicyLive, step: int) -> int:
    """Groups that the batch of a step has so far."""
    return len(live.taken.get(step, ())) + len(live.pool.taken.get(step, ()))


def place(ctx: Context, policy: Policy, job: Job) -> None:
    """Give a buffered group its deadline, or end its copy when it is too old already."""
    live = ctx.policies[policy.id]
    copy = job.copies[policy.id]
    oldest = copy.oldest
    deadline = live.buffer.deadline_of(job.id)
    if deadline is not None:
        live.unplaced.pop(job.id, None)
        live.buffer.add(job.id, job.index, deadline, copy.arrived_s)
        return
    live.unplaced.setdefault(job.id, ctx.now)
    if live.tree.path_lag(oldest) is not None or not live.tree.may_be_placed(oldest):
        _expire(ctx, policy, live, [job.id])


def replace_all(ctx: Context, policy: Policy) -> None:
    """The tree or the head has changed: give every buffered group its deadline anew."""
    live = ctx.policies[policy.id]
    for id in live.buffer.clear():
        live.unplaced[id] = ctx.now
    for id in tuple(live.unplaced):
        place(ctx, policy, ctx.tables.jobs[id])
    _stop_overtaken(ctx, policy, live)
    replay_pool.look(ctx, policy)
    ctx.due_policies[policy.id] = None


def _stop_overtaken(ctx: Context, policy: Policy, live: PolicyLive) -> None:
    """End copies of groups in flight whose first tokens are too old already: nothing that they may
    still become could be trained on, and they hold slots and quota."""
    bound = spec_of(ctx, policy).max_policy_lag
    for id in tuple(ctx.runs[policy.run].flying):
        job = ctx.tables.jobs[id]
        copy = job.copies.get(policy.id)
        if copy is None or copy.state != "in_flight":
            continue
        for record in job.attempts:
            version = ctx.leases[record.id].newest.get(policy.id)
            lag = None if version is None else live.tree.lag(version)
            if lag is None or lag <= bound:
                break
        else:
            ctx.note(id, "overtaken", policy=policy.id, head=policy.head)
            jobs.close_copy(ctx, job, policy.id, "expired", "overtaken")


def give_up_unplaced(ctx: Context, policy: Policy) -> None:
    """End the copies whose versions nobody has announced in all this time."""
    live = ctx.policies[policy.id]
    overdue = [id for id, at_s in live.unplaced.items() if ctx.now - at_s > UNPLACED_S]
    _expire(ctx, policy, live, overdue)


def request(ctx: Context, policy: Policy, message: BatchRequest) -> None:
    """The trainer wants the batch of a step."""
    done = message.step - 1
    node = ctx.policies[policy.id].tree.nodes.get(message.head_version)
    if (
        done < policy.step
        or policy.final
        or not _current(policy, message.head_version)
        or (node is not None and node.step != done)
    ):
        ctx.count("trainers.stale_request")
        return
    if done > policy.step or message.head_version != policy.head:
        move_head(ctx, policy, done, message.head_version)
    groups = min(max(1, message.groups), spec_of(ctx, policy).batch_groups)
    policy.request = StandingRequest(message.step, groups)
    ctx.tables.touch(policy)
    ctx.due_policies[policy.id] = None


def unusable(ctx: Context, policy: Policy, message: GroupUnusable, code: str) -> None:
    """A granted group cannot be trained on: grant the step again without it."""
    live = ctx.policies[policy.id]
    groups = _batched(live, message.step)
    job = ctx.tables.jobs.get(message.job)
    if job is not None and message.job in live.taken.get(message.step, {}):
        if job.result is not None:
            quarantine.body_refused(ctx, job.result.agent, job.result.attempt, code)
        jobs.close_copy(ctx, job, policy.id, "rejected", code)
    elif not replay_pool.refuse(ctx, policy, message.step, message.job, code):
        ctx.count("trainers.stale_refusal")
        return
    if message.step == policy.step + 1 and policy.request is None:
        policy.request = StandingRequest(message.step, groups)
        ctx.tables.touch(policy)
    ctx.due_policies[policy.id] = None


def step_done(ctx: Context, policy: Policy, message: StepReport) -> None:
    """A step is done; its version is on the way to the weight store."""
    if message.step <= policy.reported and message.version > policy.floor:
        return  # reports are repeated until a grant confirms them
    news = message.step == policy.step + 1
    newest = max(policy.floor, policy.head) if news else policy.floor
    if message.step > policy.step + 1 or message.version <= newest:
        ctx.count("trainers.stale_report")
        return
    status = steps.status_of(ctx, policy, message)
    honesty.compared(ctx, policy, message)
    if news:
        move_head(ctx, policy, message.step, message.version)
    policy.reported = message.step
    ctx.policies[policy.id].busy_s.observe(max(0.0, message.busy_s))
    policy.last_step = status
    policy.unrecorded.append(PendingStep(status, message.metrics))
    steps.record_steps(ctx, policy)
    ctx.tables.touch(policy)


def checkpoint(ctx: Context, policy: Policy, message: CheckpointReport) -> None:
    """State of a step is durable at the trainer: what it trained on is used up."""
    version = message.version
    known = version > policy.floor or version == policy.checkpoint_version
    ahead = message.step > policy.step
    if not known or message.step < policy.checkpoint_step or (ahead and version <= policy.head):
        ctx.count("trainers.stale_checkpoint")
        return
    # The same step under a higher number: a trainer that came back published it once more.
    again = message.step == policy.step and version > max(policy.floor, policy.head)
    if ahead or again:
        move_head(ctx, policy, message.step, version)
    if (message.step, version) != (policy.checkpoint_step, policy.checkpoint_version):
        reach_checkpoint(ctx, policy, message.step, version)
    if message.final and not policy.final:
        policy.final = True
        policy.request = None
        ctx.tables.touch(policy)
        ctx.note(policy.id, "final", step=message.step, version=message.version)
        drop_waiting(ctx, policy, "cancelled", "policy_done")
        replay_pool.clear(ctx, policy)
        ctx.due_runs[policy.run] = None


def reach_checkpoint(ctx: Context, policy: Policy, step: int, version: int) -> None:
    """Groups taken up to ``step`` are trained for good; old versions are forgotten."""
    live = ctx.policies[policy.id]
    replay_pool.steps_done(ctx, policy, step)
    for at in sorted(live.taken):
        if at <= step:
            for id in tuple(live.taken[at]):
                jobs.close_copy(ctx, ctx.tables.jobs[id], policy.id, "trained", "")
    policy.checkpoint_step, policy.checkpoint_version = step, version
    replay_pool.checkpointed(ctx, policy, step)
    ctx.tables.touch(policy)
    ctx.note(policy.id, "checkpoint", step=step, version=version)
    keep = frozenset([version, *_open_pins(ctx, policy.id)])
    # No head can come below this checkpoint again, so older tokens are beyond the bound.
    below = step - spec_of(ctx, policy).max_policy_lag - 1
    for number in live.tree.prunable(below, keep):
        ctx.tables.remove(live.tree.nodes[number])
        live.tree.drop(number)


def roll_back(ctx: Context, policy: Policy, inventory: TrainerInventory) -> None:
    """A new incarnation of the trainer goes on from its checkpoint: what was taken after it is
    free again."""
    live = ctx.policies[policy.id]
    step, version = inventory.checkpoint_step, inventory.checkpoint_version
    steps.record_steps(ctx, policy, everything=True)
    returned = [id for at in sorted(live.taken) if at > step for id in live.taken[at]]
    policy.floor = max(policy.highest, live.tree.highest, policy.head)
    policy.highest = policy.floor
    policy.request = None
    reach_checkpoint(ctx, policy, step, version)
    replay_pool.roll_back(ctx, policy, step)
    _set_head(ctx, policy, step, version, parent=None)
    policy.reported = step
    books = account(ctx, policy.id, "train")
    for id in returned:
        job = ctx.tables.jobs[id]
        books.row.abandoned += 1
        move(ctx, job, policy.id, "buffered")
        live.unplaced[id] = ctx.now
        place(ctx, policy, job)
    ctx.tables.touch(books)
    if returned:
        ctx.count("trainers.rollbacks")
    ctx.note(policy.id, "starts", step=step, version=version, returned=len(returned))


def move_head(ctx: Context, policy: Policy, step: int, version: int) -> None:
    """The trainer now holds ``version`` after ``step``."""
    _set_head(ctx, policy, step, version, parent=policy.head)
    ctx.note(policy.id, "head", step=step, version=version)


def drop_waiting(ctx: Context, policy: Policy, state: CopyState, reason: str) -> None:
    """End all copies of a policy that no batch has taken."""
    for id in tuple(ctx.runs[policy.run].jobs):
        job = ctx.tables.jobs.get(id)
        copy = None if job is None else job.copies.get(policy.id)
        if job is not None and copy is not None and copy.state in WAITING_STATES:
            jobs.close_copy(ctx, job, policy.id, state, reason)


def _set_head(ctx: Context, policy: Policy, step: int, version: int, *, parent: int | None) -> None:
    live = ctx.policies[policy.id]
    if version not in live.tree.nodes:
        node = Version(policy=policy.id, version=version, parent=parent, step=step)
        ctx.tables.add(node)
        live.tree.put(node)
    replay_pool.steps_done(ctx, policy, step)
    policy.step, policy.head = step, version
    if policy.request is not None and policy.request.step != step + 1:
        policy.request = None
    policy.highest = max(policy.highest, version)
    live.tree.move_head(version, policy.floor)
    replace_all(ctx, policy)
    ctx.tables.touch(policy)
    ctx.due_runs[policy.run] = None
    ctx.dispatch_due = True


def _current(policy: Policy, version: int) -> bool:
    """Whether a head or checkpoint is of the lineage that the trainer follows now."""
    return version in (policy.head, policy.checkpoint_version) or version > max(
        policy.floor, policy.head
    )


def _expire(ctx: Context, policy: Policy, live: PolicyLive, ids: list[str]) -> None:
    for id in ids:
        job = ctx.tables.jobs[id]
        oldest = job.copies[policy.id].oldest
        lag = live.tree.path_lag(oldest)
        ctx.note(id, "too old", policy=policy.id, oldest=oldest, lag=lag, head=policy.head)
        jobs.close_copy(ctx, job, policy.id, "expired", "unknown_version" if lag is None else "lag")


def _grant(ctx: Context, policy: Policy, live: PolicyLive, step: int) -> None:
    groups: list[GroupRef] = []
    for id in sorted(live.taken.get(step, ())):
        job = ctx.tables.jobs[id]
        if job.result is not None:
            groups.append(
                GroupRef(
                    job=id,
                    digest=job.result.digest,
                    size_bytes=job.result.size_bytes,
                    policy_lag=job.copies[policy.id].lag,
                )
            )
    again = live.pool.taken.get(step, ())
    for id in sorted(again):
        entry = live.pool.entries[id]
        groups.append(
            GroupRef(
                job=id,
                digest=entry.digest,
                size_bytes=entry.size_bytes,
                policy_lag=entry.lag,
                replay=True,
            )
        )
    ctx.note(policy.id, "granted", step=step, groups=len(groups), again=len(again))
    ctx.send(policy.trainer, BatchGrant(policy=policy.id, step=step, groups=tuple(groups)))


def _open_pins(ctx: Context, policy: str) -> list[int]:
    """Versions of a policy that open evaluations and external jobs are pinned to."""
    pins = [ctx.tables.evaluations[id].pinned for id in ctx.evaluations]
    external = ctx.runs[ctx.tables.policies[policy].run].pins
    return [
        *(pinned[policy] for pinned in pins if policy in pinned),
        *(version for pinned, version in external if pinned == policy),
    ]
