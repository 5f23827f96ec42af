"""Evaluations: greedy accuracy of pinned versions on held-out items.

    start    version 0 of every trained policy, from when the weight store has it
    between  one policy's newest version every ``every_versions`` steps; one at a time, a version
             that would be due meanwhile is skipped
    end      every policy's head after its last step

What always holds: an evaluation never blocks training; its jobs only go to agents whose copy is
not past the pinned version; when no agent can serve it any more and something newer is stored, it
starts over at the newest version; at most ``MAX_OPEN_JOBS`` of its jobs exist at once.
"""

from typing import Literal

from scheduler.core import jobs
from scheduler.core.accounting import submit
from scheduler.core.admission import trained_policies
from scheduler.core.context import Context, EvaluationLive
from scheduler.core.effects import ProduceItems, RecordEvaluation
from scheduler.core.state import Evaluation, Job, Policy, Run
from transport.ids import job_id
from transport.messages import Item
from transport.runs import EvaluationSpec
from transport.status import EvaluationStatus

MAX_OPEN_JOBS = 64
ITEMS_PER_REQUEST = 256
KEEP_BETWEEN = 32
MAX_JOB_BYTES = 192 * 1024
"""Text of one job's items, at four bytes per character: an offer is one control frame."""


def advance(ctx: Context, run: Run) -> None:
    """Start what is due, make jobs, finish what is complete."""
    spec = run.spec.evaluation
    if spec is None or run.finishing:
        return
    _start_due(ctx, run, spec)
    for evaluation in open_evaluations(ctx, run):
        _fill(ctx, run, evaluation, spec)
        if evaluation.next_item >= evaluation.items and evaluation.open_jobs == 0:
            _finish(ctx, run, evaluation)


def open_evaluations(ctx: Context, run: Run) -> list[Evaluation]:
    return [
        ctx.tables.evaluations[id]
        for id in ctx.evaluations
        if ctx.tables.evaluations[id].run == run.name
    ]


def begin_end(ctx: Context, run: Run) -> bool:
    """Evaluate the heads after the last step; false when the run does not want that."""
    spec = run.spec.evaluation
    if spec is None:
        return False
    pinned = {policy.id: policy.head for policy in trained_policies(ctx, run)}
    for evaluation in open_evaluations(ctx, run):
        if evaluation.kind == "between":
            abandon(ctx, evaluation, "superseded")
    _create(ctx, run, "end", pinned, spec.items)
    return True


def items_produced(ctx: Context, run: Run, start: int, items: tuple[Item, ...]) -> None:
    """Held-out items arrived: every evaluation that waits for them gets its jobs."""
    spec = run.spec.evaluation
    if spec is None:
        return
    for evaluation in open_evaluations(ctx, run):
        if evaluation.next_item != start or start >= evaluation.items:
            continue
        if not items:
            evaluation.items = start
            ctx.tables.touch(evaluation)
        wanted = items[: evaluation.items - start]
        for part in _split(wanted, spec.items_per_job):
            _make_job(ctx, run, evaluation, part)
        # The request is answered, be it in part: what is missing is asked for again at once.
        ctx.evaluations[evaluation.id].asked_until = evaluation.next_item
        ctx.timers.cancel("produce", evaluation.id)
    ctx.due_runs[run.name] = None


def produce_due(ctx: Context, id: str) -> None:
    """Items did not come: ask again."""
    evaluation = ctx.tables.evaluations[id]
    ctx.evaluations[id].asked_until = evaluation.next_item
    ctx.due_runs[evaluation.run] = None


def restart_unservable(ctx: Context, run: Run) -> None:
    """Start evaluations over that no agent can serve any more; looks at every agent."""
    for evaluation in open_evaluations(ctx, run):
        if not len(ctx.queue(evaluation.id)) or _servable(ctx, evaluation):
            continue
        newest = {
            id: max(version, ctx.policies[id].tree.newest_stored)
            for id, version in evaluation.pinned.items()
        }
        if newest == evaluation.pinned:
            continue
        ctx.count("evaluations.restarted")
        ctx.note(evaluation.id, "restarted", was=evaluation.pinned, now=newest)
        for job in tuple(ctx.evaluations[evaluation.id].jobs):
            jobs.close(ctx, ctx.tables.jobs[job], "cancelled", "version_passed")
        _pin(ctx, evaluation, newest)
        evaluation.next_item = evaluation.scored = evaluation.correct = 0
        evaluation.restarts += 1
        ctx.evaluations[evaluation.id] = EvaluationLive()
        ctx.tables.touch(evaluation)
        ctx.due_runs[run.name] = None


def abandon(ctx: Context, evaluation: Evaluation, reason: str) -> None:
    """Give an open evaluation up without a result."""
    for job in tuple(ctx.evaluations[evaluation.id].jobs):
        jobs.close(ctx, ctx.tables.jobs[job], "cancelled", reason)
    _close(ctx, evaluation)
    ctx.tables.remove(evaluation)
    ctx.note(evaluation.id, "abandoned", reason=reason)


def statuses(evaluation: Evaluation) -> list[EvaluationStatus]:
    """One status per pinned policy; they share the score."""
    return [
        EvaluationStatus(
            policy=policy,
            version=version,
            step=evaluation.steps[policy],
            items=evaluation.items,
            scored=evaluation.scored,
            accuracy=evaluation.correct / evaluation.scored if evaluation.scored else 0.0,
            done=evaluation.done,
        )
        for policy, version in evaluation.pinned.items()
    ]


def _start_due(ctx: Context, run: Run, spec: EvaluationSpec) -> None:
    policies = trained_policies(ctx, run)
    if not run.start_evaluated:
        # Its jobs wait for version 0, so that they are there before the first agent is ready.
        run.start_evaluated = True
        ctx.tables.touch(run)
        _create(ctx, run, "start", {policy.id: 0 for policy in policies}, spec.items)
    if not spec.every_versions:
        return
    busy = {id for e in open_evaluations(ctx, run) for id in e.pinned}
    for policy in policies:
        if policy.id not in busy and not policy.final:
            _between_due(ctx, run, policy, spec)


def _between_due(ctx: Context, run: Run, policy: Policy, spec: EvaluationSpec) -> None:
    tree = ctx.policies[policy.id].tree
    node = tree.nodes.get(tree.newest_stored)
    if node is None or not run.start_evaluated or node.version <= policy.floor:
        return
    last_step = run.spec.policies[policy.name].steps
    if node.step >= last_step or node.step - policy.evaluated_step < spec.every_versions:
        return
    _create(ctx, run, "between", {policy.id: node.version}, spec.items_between)


def _create(
    ctx: Context,
    run: Run,
    kind: Literal["start", "between", "end"],
    pinned: dict[str, int],
    items: int,
) -> None:
    run.evaluations += 1
    ctx.tables.touch(run)
    evaluation = Evaluation(
        id=f"{run.name}/v-{run.evaluations:06d}",
        run=run.name,
        kind=kind,
        pinned={},
        steps={},
        items=items,
    )
    ctx.tables.add(evaluation)
    ctx.evaluations[evaluation.id] = EvaluationLive()
    _pin(ctx, evaluation, pinned)
    ctx.note(evaluation.id, "started", kind=kind, pinned=pinned)
    ctx.due_runs[run.name] = None


def _pin(ctx: Context, evaluation: Evaluation, pinned: dict[str, int]) -> None:
    evaluation.pinned = dict(pinned)
    evaluation.steps = {}
    for id, version in pinned.items():
        node = ctx.policies[id].tree.nodes.get(version)
        policy = ctx.tables.policies[id]
        step = policy.step if node is None else node.step
        evaluation.steps[id] = policy.evaluated_step = step
        ctx.tables.touch(policy)


def _fill(ctx: Context, run: Run, evaluation: Evaluation, spec: EvaluationSpec) -> None:
    """Ask for the next items while there is room for their jobs."""
    live = ctx.evaluations[evaluation.id]
    if live.asked_until > evaluation.next_item or not ctx.runs[run.name].source_started:
        return
    most = max(1, ITEMS_PER_REQUEST // spec.items_per_job)
    room = min(most, MAX_OPEN_JOBS - evaluation.open_jobs) * spec.items_per_job
    count = min(room, evaluation.items - evaluation.next_item)
    if count <= 0:
        return
    live.asked_until = evaluation.next_item + count
    ctx.effects.append(ProduceItems(run.name, "eval", evaluation.next_item, count))
    ctx.timers.set("produce", evaluation.id, ctx.now + ctx.settings.produce_repeat_s)


def _make_job(ctx: Context, run: Run, evaluation: Evaluation, items: tuple[Item, ...]) -> None:
    job = Job(
        id=job_id(run.name, "e", run.eval_jobs),
        run=run.name,
        kind="eval",
        index=run.eval_jobs,
        sequences=len(items),
        items=items,
        copies={},
        evaluation=evaluation.id,
    )
    run.eval_jobs += 1
    evaluation.next_item += len(items)
    evaluation.open_jobs += 1
    ctx.tables.touch(run)
    ctx.tables.touch(evaluation)
    ctx.tables.add(job)
    ctx.evaluations[evaluation.id].jobs[job.id] = None
    for policy in evaluation.pinned:
        submit(ctx, job, policy, "queued")
    ctx.queue(job.queue).add(job.id, job.index)
    ctx.dispatch_due = True


def _split(items: tuple[Item, ...], most: int) -> list[tuple[Item, ...]]:
    """Jobs' worth of items: few enough, and small enough to fit an offer's frame together."""
    parts: list[list[Item]] = []
    size_bytes = 0
    for item in items:
        item_bytes = 4 * (len(item.prompt) + len(item.answer) + len(item.meta))
        if not parts or len(parts[-1]) == most or size_bytes + item_bytes > MAX_JOB_BYTES:
            parts.append([])
            size_bytes = 0
        parts[-1].append(item)
        size_bytes += item_bytes
    return [tuple(part) for part in parts]


def _servable(ctx: Context, evaluation: Evaluation) -> bool:
    """Whether some agent is not past the pinned versions, or there is no agent at all."""
    declined = ctx.evaluations[evaluation.id].declined
    present = False
    for name, live in ctx.agents.items():
        agent = ctx.tables.agents[name]
        if live.state not in ("ready", "suspect", "reconnecting"):
            continue
        if agent.cordoned or agent.quarantined:
            continue
        present = True
        versions = agent.versions
        if name not in declined and all(
            id in versions and versions[id].version <= version
            for id, version in evaluation.pinned.items()
        ):
            return True
    return not present


def _finish(ctx: Context, run: Run, evaluation: Evaluation) -> None:
    evaluation.done = True
    ctx.tables.touch(evaluation)
    _close(ctx, evaluation)
    if evaluation.kind == "end":
        run.end_evaluated = True
        ctx.tables.touch(run)
    ctx.due_runs[run.name] = None
    ctx.note(evaluation.id, "done", scored=evaluation.scored, correct=evaluation.correct)
    for status in statuses(evaluation):
        ctx.effects.append(RecordEvaluation(run.name, status))
    between = [
        e for e in ctx.tables.evaluations.values() if e.run == run.name and e.kind == "between"
    ]
    for old in between[: len(between) - KEEP_BETWEEN]:
        if old.done:
            ctx.tables.remove(old)


def _close(ctx: Context, evaluation: Evaluation) -> None:
    del ctx.evaluations[evaluation.id]
    ctx.queues.pop(evaluation.id, None)
    ctx.timers.cancel("produce", evaluation.id)
