"""Items into jobs: what a run's task source is asked for, and how much of it becomes work.

What always holds: items are used in the order of the run's cursor, each once, unless curators skip
it; a job is made only
while one of the run's policies has room; a policy without room gets a dropped copy, so that the
books show what it missed; at most one batch of items is held in reserve, in memory only (items are
a function of seed and index, so asking again costs nothing but time).
"""

from scheduler.core import curation
from scheduler.core.accounting import account, submit
from scheduler.core.admission import admissible, room, trained_policies, wants_groups
from scheduler.core.attempts import settle
from scheduler.core.context import Context, RunLive
from scheduler.core.effects import ProduceItems
from scheduler.core.events import Verdict
from scheduler.core.state import Job, Run
from transport.ids import job_id
from transport.messages import Item

ITEMS_PER_REQUEST = 256


def items_produced(
    ctx: Context,
    run: Run,
    start: int,
    items: tuple[Item, ...],
    verdicts: tuple[Verdict, ...] = (),
) -> bool:
    """Training items arrived; those that continue the cursor are kept. False when the source has
    none where the cursor stands. ``verdicts`` of curators go with the items, place by place."""
    live = ctx.runs[run.name]
    next_item = run.cursor + len(live.reserve)
    if not items:
        return start != next_item
    fresh = items[next_item - start :] if start <= next_item else ()
    room_left = max(0, live.asked_until - next_item)
    live.reserve.extend(fresh[:room_left])
    for item, verdict in zip(items, verdicts, strict=False):
        for name in verdict.failed:
            ctx.count(f"data.failed.{name}")
        if verdict.filter and next_item <= item.index < next_item + room_left:
            live.skips[item.index] = verdict.filter
    if fresh:
        # The request is answered, be it in part: what is missing is asked for again at once.
        live.asked_until = run.cursor + len(live.reserve)
        ctx.timers.cancel("produce", run.name)
    ctx.due_runs[run.name] = None
    return True


def produce_due(ctx: Context, name: str) -> None:
    """Items did not come: ask again."""
    run = ctx.tables.runs.get(name)
    live = ctx.runs.get(name)
    if run is not None and live is not None:
        live.asked_until = run.cursor + len(live.reserve)
        ctx.due_runs[name] = None


def admit(ctx: Context, run: Run) -> None:
    """Turn items into jobs as far as there is room, and fetch items ahead of it."""
    live = ctx.runs[run.name]
    wanted = admissible(ctx, run)
    while wanted > 0 and live.reserve:
        item = live.reserve.popleft()
        if curation.skips(ctx, run, live, item):
            continue
        _make_job(ctx, run, item)
        wanted = admissible(ctx, run)
    if not _over_budget(run):
        _fetch_ahead(ctx, run, live, wanted)


def budget_spent(ctx: Context, run: Run) -> bool:
    """Whether ``max_groups`` were made and no trainer can get another whole batch out of them."""
    if not _over_budget(run):
        return False
    for policy in trained_policies(ctx, run):
        row = account(ctx, policy.id, "train").row
        if wants_groups(ctx, policy) and (row.queued or row.in_flight or policy.request is None):
            return False
    return True


def _fetch_ahead(ctx: Context, run: Run, live: RunLive, wanted: int) -> None:
    """Keep one batch of items in reserve, so that a finished step need not wait for the source."""
    next_item = run.cursor + len(live.reserve)
    if live.asked_until > next_item:
        return
    policies = trained_policies(ctx, run)
    if not any(wants_groups(ctx, policy) for policy in policies):
        return
    batch = max(run.spec.policies[policy.name].batch_groups for policy in policies)
    if len(live.reserve) * 2 > batch and not wanted:
        return
    count = min(wanted + batch - len(live.reserve), ITEMS_PER_REQUEST)
    if count > 0:
        live.asked_until = next_item + count
        ctx.effects.append(ProduceItems(run.name, "train", next_item, count))
        ctx.timers.set("produce", run.name, ctx.now + ctx.settings.produce_repeat_s)


def _make_job(ctx: Context, run: Run, item: Item) -> None:
    job = Job(
        id=job_id(run.name, "t", run.cursor),
        run=run.name,
        kind="train",
        index=run.cursor,
        sequences=run.spec.workflow.group_size,
        items=(item,),
        copies={},
        priority=run.spec.priority,
        created_s=ctx.now,
    )
    run.cursor += 1
    run.submitted_groups += 1
    ctx.tables.touch(run)
    enter(ctx, run, job)


def enter(ctx: Context, run: Run, job: Job) -> None:
    """Begin a new training job, or one that was a dead letter: at least one policy has room."""
    ctx.tables.add(job)
    ctx.runs[run.name].jobs[job.id] = None
    for policy in trained_policies(ctx, run):
        if policy.final:
            continue
        if ctx.policies[policy.id].gone:
            submit(ctx, job, policy.id, "dropped", "trainer_gone")
        elif room(ctx, policy) > 0:
            submit(ctx, job, policy.id, "queued")
        else:
            submit(ctx, job, policy.id, "dropped", "quota")
    settle(ctx, job)
    ctx.dispatch_due = True


def _over_budget(run: Run) -> bool:
    return 0 < run.spec.max_groups <= run.submitted_groups
