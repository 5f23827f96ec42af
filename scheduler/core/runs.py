"""Runs: from submission over admission of work to the end.

    running <-> paused        any -> stopping -> finished (completed | stopped | failed: TEXT)

What always holds: a run's items are used in the order of its cursor, each once; a job is made only
while a policy has room (``admission``); every live run has had its task source started in this
life; a finished run has no jobs, no open evaluations and no versions, and its name is taken.
"""

from collections.abc import Callable

from scheduler.core import (
    agents,
    costs,
    curation,
    evaluation,
    external,
    intake,
    jobs,
    replay_pool,
    steps,
    trainers,
)
from scheduler.core.accounting import account
from scheduler.core.admission import spec_of, trained_policies
from scheduler.core.buffers import Buffer
from scheduler.core.context import Context, PolicyLive, RunLive
from scheduler.core.effects import RunEnded, StartTaskSource, StopTaskSource
from scheduler.core.estimators import RunEstimate
from scheduler.core.events import Verdict
from scheduler.core.state import Policy, Run, external_queue
from scheduler.core.versions import VersionTree
from scheduler.core.work import works_of
from transport.ids import NAME_RULE, is_name, policy_id
from transport.messages import CommandReply, Item, RunCommand, RunState, RunSubmit
from transport.run_faults import module_faults, run_faults
from transport.runs import RunSpec

ABANDONED = "abandoned"
"""The reason of a run that waits for no trainer to save and export."""


def submit_run(ctx: Context, message: RunSubmit, fault: str = "", *, by: str = "") -> CommandReply:
    """Take a run; the same one again is harmless. ``fault`` is what the shell found wrong, ``by``
    who submits it."""
    spec = message.run
    known = ctx.tables.runs.get(spec.name)
    if known is not None:
        return _submitted_before(known, spec)
    fault = _fault(spec, ctx.settings.task_modules) or fault
    if fault:
        ctx.count("refused.run.invalid")
        return CommandReply(ok=False, code="run.invalid", message=fault)
    run = Run(name=spec.name, spec=spec, created_s=ctx.now)
    ctx.tables.add(run)
    for name, policy_spec in spec.policies.items():
        id = policy_id(spec.name, name)
        ctx.tables.add(Policy(id=id, run=spec.name, name=name, trained=policy_spec.trained))
    index_run(ctx, run)
    for policy in trained_policies(ctx, run):
        account(ctx, policy.id, "train")
        trainers.watch(ctx, policy, ctx.policies[policy.id])
    ctx.note(run.name, "submitted", by=by)
    ctx.runs_changed()
    agents.tell_hosted(ctx)
    start_source(ctx, run)
    return CommandReply(ok=True)


def index_run(ctx: Context, run: Run) -> None:
    """Make the indexes of a run and its policies (new, or read from rows)."""
    workflow = run.spec.workflow
    ids: dict[str, str] = {name: policy_id(run.name, name) for name in workflow.policies}
    used = [ctx.tables.policies[id] for id in ids.values()]
    ctx.runs[run.name] = RunLive(
        policies=ids,
        trained=tuple(policy for policy in used if policy.trained),
        works=works_of(run.spec),
        evaluations=run.spec.all_evaluations(),
        estimate=RunEstimate(workflow.max_new_tokens, workflow.group_size),
    )
    for name in run.spec.policies:
        policy = ctx.tables.policies[policy_id(run.name, name)]
        tree = VersionTree()
        fifo = run.spec.policies[name].data.order == "fifo"
        buffer = Buffer(_deadline_of(ctx, policy, tree), fifo=fifo)
        live = PolicyLive(tree, buffer, ctx.now)
        ctx.policies[policy.id] = live
        if policy.last_step is not None:
            live.busy_s.observe(max(0.0, policy.last_step.busy_s))


def start_source(ctx: Context, run: Run) -> None:
    ctx.runs[run.name].source_started = True
    ctx.effects.append(StartTaskSource(run.spec))
    ctx.due_runs[run.name] = None
    ctx.timers.set_earlier("sweep", "", ctx.now + ctx.settings.heartbeat_s)


def command(ctx: Context, message: RunCommand, *, by: str = "") -> CommandReply:
    """Pause, resume or stop; or abandon, which waits for no trainer to save and export. ``by`` is
    who wants it."""
    run = ctx.tables.runs.get(message.run)
    if run is None:
        names = ", ".join(sorted(r.name for r in ctx.tables.runs.values() if r.live)) or "none"
        return CommandReply(
            ok=False, code="run.unknown", message=f"no run {message.run!r}; live runs: {names}"
        )
    if not run.live:
        text = f"run {run.name} is finished: {run.reason}"
        return CommandReply(ok=False, code="run.finished", message=text)
    if message.command == "abandon":
        _note_order(ctx, run, message, by)
        end(ctx, run, ABANDONED)
        run.finishing = ABANDONED
        ctx.tables.touch(run)
        ctx.due_runs[run.name] = None
        return CommandReply(ok=True)
    if message.command == "stop":
        if run.finishing:
            text = f"nothing to do: run {run.name} is stopping already ({run.finishing})"
            return CommandReply(ok=True, message=text)
        _note_order(ctx, run, message, by)
        end(ctx, run, "stopped")
        return CommandReply(ok=True)
    if run.state == "stopping":
        text = f"run {run.name} is stopping"
        return CommandReply(ok=False, code="run.stopping", message=text)
    wanted: RunState = (
        RunState(run=run.name, state="paused")
        if message.command == "pause"
        else RunState(run=run.name, state="running")
    )
    if run.state != wanted.state:
        _note_order(ctx, run, message, by)
        run.state = "paused" if message.command == "pause" else "running"
        ctx.tables.touch(run)
        ctx.note(run.name, run.state)
        trainers.tell(ctx, run.name, wanted)
        ctx.due_runs[run.name] = None
        ctx.due_policies.update(dict.fromkeys(p.id for p in trained_policies(ctx, run)))
        ctx.dispatch_due = True
        return CommandReply(ok=True)
    text = f"nothing to do: run {run.name} is {run.state} already"
    return CommandReply(ok=True, message=text)


def _note_order(ctx: Context, run: Run, message: RunCommand, by: str) -> None:
    ctx.note(run.name, f"ordered to {message.command}", by=by)


def items_produced(
    ctx: Context,
    name: str,
    start: int,
    items: tuple[Item, ...],
    verdicts: tuple[Verdict, ...] = (),
) -> None:
    """Training items arrived."""
    run = ctx.tables.runs.get(name)
    if run is None or not run.live:
        return
    if not intake.items_produced(ctx, run, start, items, verdicts):
        end(ctx, run, f"failed: the task source has no training item {start}")


def source_failed(ctx: Context, name: str, code: str, message: str) -> None:
    run = ctx.tables.runs.get(name)
    if run is not None and run.live:
        ctx.count("runs.task_source_failed")
        end(ctx, run, f"failed: {code}: {message}"[:500])


def end(ctx: Context, run: Run, reason: str) -> None:
    """Stop making and placing work; the run finishes once its trainers have exported."""
    if run.finishing:
        return
    run.finishing = reason
    run.state = "stopping"
    ctx.tables.touch(run)
    ctx.note(run.name, "stopping", reason=reason)
    _cancel_work(ctx, run, "run_stopping")
    trainers.tell(ctx, run.name, RunState(run=run.name, state="stopping"))
    ctx.due_runs[run.name] = None


def advance(ctx: Context, run: Run) -> None:
    """Evaluate, admit and finish, whatever is due."""
    policies = trained_policies(ctx, run)
    if run.finishing:
        over = all(policy.final or _given_up(ctx, policy) for policy in policies)
        if external.cancel_some(ctx, run) and (over or run.finishing == ABANDONED):
            _finish(ctx, run, run.finishing)
        return
    if all(policy.final for policy in policies):
        if not _end_evaluation_open(ctx, run):
            if run.end_evaluated or not evaluation.begin_end(ctx, run):
                end(ctx, run, "completed")
                return
            _cancel_training(ctx, run, "run_completed")
        evaluation.advance(ctx, run)
        return
    evaluation.advance(ctx, run)
    if run.state == "running":
        intake.admit(ctx, run)
        if intake.budget_spent(ctx, run):
            end(ctx, run, "stopped")
        elif costs.over_budget(ctx, run):
            ctx.count("runs.budget_spent")
            end(ctx, run, f"stopped: budget_usd = {run.spec.budget_usd:g} is spent")


def _submitted_before(known: Run, spec: RunSpec) -> CommandReply:
    """The same run again is harmless, also when it has ended; another one needs another name."""
    if known.spec != spec:
        if known.live:
            text = f"another run named {spec.name} is {known.state}; stop it, or use another name"
            return CommandReply(ok=False, code="run.exists", message=text)
        text = f"run {spec.name} is finished ({known.reason}) and its name is taken; use another"
        return CommandReply(ok=False, code="run.finished", message=text)
    if not known.live:
        text = f"has finished before ({known.reason}); to run it again, give it another name"
        return CommandReply(ok=True, message=text)
    return CommandReply(ok=True, message="already submitted")


def _fault(spec: RunSpec, task_modules: tuple[str, ...]) -> str:
    """What is wrong with a run, with the key to change, or nothing."""
    if not is_name(spec.name):
        return f"name: {spec.name!r} must be {NAME_RULE}"
    bad = next((name for name in spec.policies if not is_name(name)), None)
    if bad is not None:
        return f"policies: {bad!r} must be {NAME_RULE}"
    used = spec.workflow.policies
    unknown = next((name for name in used if name not in spec.policies), None)
    if unknown is not None or not used:
        return f"workflow.policies: {unknown or 'empty'}; policies are {', '.join(spec.policies)}"
    idle = next((n for n, p in spec.policies.items() if p.trained and n not in used), None)
    if idle is not None:
        return f"policies.{idle}: trained, but workflow.policies does not use it"
    if not any(spec.policies[name].trained for name in used):
        return "policies: at least one that the workflow uses must be trained"
    return next(run_faults(spec), "") or next(module_faults(spec, task_modules), "")


def _given_up(ctx: Context, policy: Policy) -> bool:
    """A trainer that never came, or is away without having made a step, has nothing to export; one
    that is gone will not."""
    live = ctx.policies[policy.id]
    unstarted = not live.present and policy.step == 0
    return not policy.trainer or live.gone or unstarted


def _end_evaluation_open(ctx: Context, run: Run) -> bool:
    return any(e.kind == "end" for e in evaluation.open_evaluations(ctx, run))


def _cancel_training(ctx: Context, run: Run, reason: str) -> None:
    for id in tuple(ctx.runs[run.name].jobs):
        jobs.close_waiting(ctx, ctx.tables.jobs[id], "cancelled", reason)


def _cancel_work(ctx: Context, run: Run, reason: str) -> None:
    _cancel_training(ctx, run, reason)
    for found in evaluation.open_evaluations(ctx, run):
        evaluation.abandon(ctx, found, reason)


def _finish(ctx: Context, run: Run, reason: str) -> None:
    """The end: close what is open, forget what only a live run needs."""
    for id in tuple(ctx.runs[run.name].jobs):
        jobs.close(ctx, ctx.tables.jobs[id], "cancelled", "run_finished")
    for found in evaluation.open_evaluations(ctx, run):
        evaluation.abandon(ctx, found, "run_finished")
    run.state, run.reason, run.ended_s = "finished", reason, ctx.now
    ctx.tables.touch(run)
    policies = [ctx.tables.policies[policy_id(run.name, name)] for name in run.spec.policies]
    for policy in policies:
        steps.record_steps(ctx, policy, everything=True)
        replay_pool.clear(ctx, policy)
    trainers.tell(ctx, run.name, RunState(run=run.name, state="finished"))
    for policy in policies:
        for node in ctx.policies.pop(policy.id).tree.nodes.values():
            if node.version != policy.head:
                ctx.tables.remove(node)
        ctx.timers.cancel("trainer", policy.id)
        for agent in ctx.agents.values():
            agent.billed.pop(policy.id, None)
            agent.served_s.pop(policy.id, None)
    curation.forget(ctx, run.name)
    del ctx.runs[run.name]
    ctx.queues.pop(run.name, None)
    ctx.queues.pop(external_queue(run.name), None)
    ctx.timers.cancel("produce", run.name)
    ctx.timers.cancel("cancel", run.name)
    ctx.effects.append(StopTaskSource(run.name))
    spend = ctx.tables.spends.get(run.name)
    cost_usd = 0.0 if spend is None else spend.agents_usd + spend.egress_usd
    tokens = 0 if spend is None else spend.tokens
    ctx.effects.append(RunEnded(run.name, reason, cost_usd, tokens))
    ctx.note(run.name, "finished", reason=reason)
    ctx.count("runs.finished")
    ctx.runs_changed()
    agents.tell_hosted(ctx)


def _deadline_of(ctx: Context, policy: Policy, tree: VersionTree) -> Callable[[str], int | None]:
    """The last head step at which a job's result may be trained on by this policy."""
    bound = spec_of(ctx, policy).max_policy_lag
    return lambda job: tree.deadline(ctx.tables.jobs[job].copies[policy.id].oldest, bound)
