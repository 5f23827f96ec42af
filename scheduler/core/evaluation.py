"""Evaluations: how good pinned versions are on items that are not trained on.

A run has any number of them, by name, each with settings of its own and on its own clock:

    start    version 0 of every trained policy, from when the weight store has it
    between  one policy's newest version every ``every_versions`` steps; one at a time of each name,
             a version that would be due meanwhile is skipped
    end      every policy's head after its last step

What always holds: an evaluation never blocks training; its jobs only go to agents whose copy is
not past the pinned version, and of one of the start an agent does not pass it (``keepers``); when
no agent can serve it any more and something newer is stored, it starts over at the newest version;
at most ``MAX_OPEN_JOBS`` of its jobs exist at once, and at most
``MAX_OPEN_BETWEEN`` in-between evaluations of a run; all items of a job have one reward.
"""

from typing import Literal

from scheduler.core import jobs, keepers
from scheduler.core.accounting import submit
from scheduler.core.admission import trained_policies
from scheduler.core.context import Context, EvaluationLive
from scheduler.core.effects import ProduceItems, RecordEvaluation
from scheduler.core.pass_at import pass_at
from scheduler.core.state import Evaluation, Job, Policy, Run
from scheduler.core.work import Work
from transport.ids import job_id
from transport.messages import Item
from transport.runs import EvaluationSpec
from transport.status import EvaluationStatus

MAX_OPEN_JOBS = 64
MAX_OPEN_BETWEEN = 8
ITEMS_PER_REQUEST = 256
KEEP_BETWEEN = 32
KEEP_BETWEEN_EACH = 4
"""Finished in-between evaluations that are kept: of a run, and of each name at least."""

MAX_JOB_BYTES = 192 * 1024
"""Text of one job's items, at four bytes per character: an offer is one control frame."""


def advance(ctx: Context, run: Run) -> None:
    """Start what is due, make jobs, finish what is complete."""
    specs = ctx.runs[run.name].evaluations
    if not specs or run.finishing:
        return
    _start_due(ctx, run, specs)
    for evaluation in open_evaluations(ctx, run):
        _fill(ctx, run, evaluation, specs[evaluation.name])
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
    specs = {name: spec for name, spec in ctx.runs[run.name].evaluations.items() if spec.at_end}
    if not specs:
        return False
    pinned = {policy.id: policy.head for policy in trained_policies(ctx, run)}
    for evaluation in open_evaluations(ctx, run):
        if evaluation.kind == "between":
            abandon(ctx, evaluation, "superseded")
    for name, spec in specs.items():
        _create(ctx, run, name, "end", pinned, spec.items)
    return True


def items_produced(ctx: Context, run: Run, name: str, start: int, items: tuple[Item, ...]) -> None:
    """Items of an evaluation arrived: all of that name that wait for them get their jobs."""
    live = ctx.runs[run.name]
    for evaluation in open_evaluations(ctx, run):
        if evaluation.name != name or evaluation.next_item != start or start >= evaluation.items:
            continue
        if not items:
            evaluation.items = start
            ctx.tables.touch(evaluation)
        wanted = items[: evaluation.items - start]
        for part in _split(wanted, live.works[name], live.evaluations[name].items_of_job()):
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
        evaluation.next_item = evaluation.scored = evaluation.correct = evaluation.failed = 0
        evaluation.failure = ""
        evaluation.counts = []
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


def score(ctx: Context, job: Job, rewards: tuple[float, ...]) -> None:
    """A job's result has come: ``samples`` rewards of each of its items, item by item."""
    evaluation = ctx.tables.evaluations[job.evaluation]
    right_from = ctx.runs[job.run].evaluations[evaluation.name].accuracy_threshold
    samples = evaluation.samples
    counts = evaluation.counts or [0] * (samples + 1)
    for first in range(0, len(rewards), samples):
        right = sum(reward >= right_from for reward in rewards[first : first + samples])
        evaluation.scored += 1
        evaluation.correct += right
        counts[right] += 1
    if samples > 1:
        evaluation.counts = counts
    ctx.tables.touch(evaluation)


def statuses(ctx: Context, evaluation: Evaluation) -> list[EvaluationStatus]:
    """One status per pinned policy; they share the score."""
    spec = ctx.tables.runs[evaluation.run].spec.all_evaluations().get(evaluation.name)
    counts, answers = evaluation.counts, evaluation.scored * evaluation.samples
    reported = () if spec is None or not counts else spec.reported_k()
    chances = {str(k): pass_at(counts, k) for k in reported}
    return [
        EvaluationStatus(
            policy=policy,
            version=version,
            step=evaluation.steps[policy],
            items=evaluation.items,
            scored=evaluation.scored,
            accuracy=evaluation.correct / answers if answers else 0.0,
            done=evaluation.done and evaluation.scored > 0,
            name=evaluation.name,
            samples=evaluation.samples,
            pass_at=chances,
            failed=evaluation.failed,
            failure=_failure(evaluation),
        )
        for policy, version in evaluation.pinned.items()
    ]


def _failure(evaluation: Evaluation) -> str:
    over = evaluation.done and not evaluation.scored
    return evaluation.failure or ("it has no items" if over else "")


def _start_due(ctx: Context, run: Run, specs: dict[str, EvaluationSpec]) -> None:
    policies = trained_policies(ctx, run)
    if not run.start_evaluated:
        # Its jobs wait for version 0, so that they are there before the first agent is ready.
        run.start_evaluated = True
        ctx.tables.touch(run)
        for name, spec in specs.items():
            if spec.at_start:
                _create(ctx, run, name, "start", {policy.id: 0 for policy in policies}, spec.items)
    for name, spec in specs.items():
        if not spec.every_versions:
            continue
        under_way = open_evaluations(ctx, run)
        busy = {id for e in under_way if e.name == name for id in e.pinned}
        room = MAX_OPEN_BETWEEN - sum(e.kind == "between" for e in under_way)
        for policy in policies:
            if room > 0 and policy.id not in busy and not policy.final:
                room -= _between_due(ctx, run, policy, name, spec)


def _between_due(ctx: Context, run: Run, policy: Policy, name: str, spec: EvaluationSpec) -> bool:
    """Start an in-between evaluation of a policy if it is due; whether it was."""
    tree = ctx.policies[policy.id].tree
    node = tree.nodes.get(tree.newest_stored)
    if node is None or node.version <= policy.floor:
        return False
    last_step = run.spec.policies[policy.name].steps
    since = node.step - policy.evaluated_steps.get(name, 0)
    if node.step >= last_step or since < spec.every_versions:
        return False
    _create(ctx, run, name, "between", {policy.id: node.version}, spec.items_between)
    return True


def _create(
    ctx: Context,
    run: Run,
    name: str,
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
        name=name,
        samples=ctx.runs[run.name].evaluations[name].samples,
    )
    ctx.tables.add(evaluation)
    ctx.evaluations[evaluation.id] = EvaluationLive()
    _pin(ctx, evaluation, pinned)
    ctx.note(evaluation.id, "started", name=name, kind=kind, pinned=pinned)
    ctx.due_runs[run.name] = None


def _pin(ctx: Context, evaluation: Evaluation, pinned: dict[str, int]) -> None:
    evaluation.pinned = dict(pinned)
    evaluation.steps = {}
    for id, version in pinned.items():
        node = ctx.policies[id].tree.nodes.get(version)
        policy = ctx.tables.policies[id]
        step = policy.step if node is None else node.step
        evaluation.steps[id] = step
        policy.evaluated_steps = {**policy.evaluated_steps, evaluation.name: step}
        ctx.tables.touch(policy)


def _fill(ctx: Context, run: Run, evaluation: Evaluation, spec: EvaluationSpec) -> None:
    """Ask for the next items while there is room for their jobs."""
    live = ctx.evaluations[evaluation.id]
    if live.asked_until > evaluation.next_item or not ctx.runs[run.name].source_started:
        return
    per_job = spec.items_of_job()
    most = max(1, ITEMS_PER_REQUEST // per_job)
    room = min(most, MAX_OPEN_JOBS - evaluation.open_jobs) * per_job
    count = min(room, evaluation.items - evaluation.next_item)
    if count <= 0:
        return
    live.asked_until = evaluation.next_item + count
    ctx.effects.append(ProduceItems(run.name, "eval", evaluation.next_item, count, evaluation.name))
    ctx.timers.set("produce", evaluation.id, ctx.now + ctx.settings.produce_repeat_s)


def _make_job(ctx: Context, run: Run, evaluation: Evaluation, items: tuple[Item, ...]) -> None:
    job = Job(
        id=job_id(run.name, "e", run.eval_jobs),
        run=run.name,
        kind="eval",
        index=run.eval_jobs,
        sequences=len(items) * evaluation.samples,
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


def _split(items: tuple[Item, ...], work: Work, most: int) -> list[tuple[Item, ...]]:
    """Jobs' worth of items: of one part of a mixture, few enough, and small enough to fit an
    offer's frame together."""
    parts: list[list[Item]] = []
    filling: dict[str, tuple[list[Item], int]] = {}
    for item in items:
        item_bytes = 4 * (len(item.prompt) + len(item.answer) + len(item.meta))
        family = work.family(item)
        part, size_bytes = filling.get(family, ([], 0))
        if not part or len(part) == most or size_bytes + item_bytes > MAX_JOB_BYTES:
            part, size_bytes = [], 0
            parts.append(part)
        part.append(item)
        filling[family] = part, size_bytes + item_bytes
    return [tuple(part) for part in parts]


def _servable(ctx: Context, evaluation: Evaluation) -> bool:
    """Whether some agent is not past the pinned versions, or there is no agent at all."""
    present = False
    for name, live in ctx.agents.items():
        agent = ctx.tables.agents[name]
        if live.state not in ("ready", "suspect", "reconnecting"):
            continue
        if agent.cordoned or agent.quarantined:
            continue
        present = True
        serves = agent.versions.keys() >= evaluation.pinned.keys()
        if serves and not keepers.is_past(ctx, evaluation, name):
            return True
    return not present


def _finish(ctx: Context, run: Run, evaluation: Evaluation) -> None:
    evaluation.done = True
    ctx.tables.touch(evaluation)
    _close(ctx, evaluation)
    if evaluation.kind == "end":
        run.end_evaluated = not any(e.kind == "end" for e in open_evaluations(ctx, run))
        ctx.tables.touch(run)
    ctx.due_runs[run.name] = None
    ctx.note(
        evaluation.id,
        "done",
        name=evaluation.name,
        scored=evaluation.scored,
        correct=evaluation.correct,
    )
    for status in statuses(ctx, evaluation):
        ctx.effects.append(RecordEvaluation(run.name, status))
    between = [
        e
        for e in ctx.tables.evaluations.values()
        if (e.run, e.name, e.kind) == (run.name, evaluation.name, "between")
    ]
    keep = max(KEEP_BETWEEN_EACH, KEEP_BETWEEN // len(ctx.runs[run.name].evaluations))
    for old in between[: len(between) - keep]:
        if old.done:
            ctx.tables.remove(old)


def _close(ctx: Context, evaluation: Evaluation) -> None:
    del ctx.evaluations[evaluation.id]
    ctx.queues.pop(evaluation.id, None)
    ctx.timers.cancel("produce", evaluation.id)
