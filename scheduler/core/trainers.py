"""Trainers: who trains which policy, and whether they are alive.

    absent -> waiting <-> training -> done          (as ``status`` shows it)

What always holds: a policy has at most one trainer, by key; the same incarnation saying hello
again goes on where it is, a new one starts from its checkpoint; a trainer that is silent for
``lost_after_s`` is absent, and its copies wait; once it has been gone for ``work_grace_s`` they are
dropped, and no more are made until it is back.
"""

import msgspec

from scheduler.core import consumption, steps
from scheduler.core.admission import running_groups
from scheduler.core.context import Context, PolicyLive, known_code
from scheduler.core.state import Policy, Version
from transport.ids import policy_name
from transport.messages import (
    PROTOCOL_VERSION,
    BatchRequest,
    CheckpointReport,
    Goodbye,
    GroupUnusable,
    Hello,
    HelloRequired,
    Message,
    Ping,
    Pong,
    Refuse,
    Role,
    RunState,
    StepReport,
    TrainerInventory,
    VersionAccepted,
    VersionStored,
    Welcome,
)

RETRY_S = 1.0


def message(ctx: Context, name: str, message: Message) -> None:
    """Anything that a trainer says. After our restart the trainer is known from its row, so what
    it says before it says hello again is not lost."""
    if isinstance(message, Hello):
        hello(ctx, name, message)
        return
    policy = ctx.tables.policies.get(ctx.trainers.get(name, ""))
    if policy is None:
        ctx.send(name, HelloRequired())
        ctx.count("trainers.unknown")
        return
    run = ctx.run_of(policy)
    if not run.live:
        # Whatever it wants, it is over; it goes on telling us until it hears so.
        ctx.send(name, RunState(run=run.name, state="finished"))
        return
    live = ctx.policies[policy.id]
    if not live.present:
        ctx.send(name, HelloRequired())
    else:
        _heard(ctx, policy, live)
    match message:
        case Ping(sequence=sequence, sent_s=sent_s):
            ctx.send(name, Pong(sequence=sequence, sent_s=sent_s))
        case BatchRequest() if message.policy == policy.id:
            consumption.request(ctx, policy, message)
        case GroupUnusable() if message.policy == policy.id:
            consumption.unusable(ctx, policy, message, known_code(message.code))
        case StepReport() if message.policy == policy.id:
            consumption.step_done(ctx, policy, message)
        case CheckpointReport() if message.policy == policy.id:
            consumption.checkpoint(ctx, policy, message)
        case Goodbye(reason=reason):
            ctx.note(policy.id, "trainer left", trainer=name, reason=reason[:100])
            live.present = False
        case _:
            ctx.count("trainers.unexpected_message")


def hello(ctx: Context, name: str, message: Hello) -> None:
    """A trainer introduces itself, with its last durable checkpoint."""
    refusal = _refusal(ctx, name, message)
    inventory = message.trainer
    if refusal is not None or inventory is None:
        refusal = refusal or Refuse(code="hello.invalid", message="no inventory")
        ctx.count(f"refused.{refusal.code}")
        ctx.send(name, msgspec.structs.replace(refusal, incarnation=message.incarnation))
        return
    policy = ctx.tables.policies[inventory.policy]
    live = ctx.policies[policy.id]
    reborn = message.incarnation > policy.incarnation or policy.trainer != name
    if policy.trainer != name and ctx.trainers.get(policy.trainer) == policy.id:
        del ctx.trainers[policy.trainer]
    ctx.trainers[name] = policy.id
    policy.trainer, policy.incarnation = name, message.incarnation
    ctx.tables.touch(policy)
    live.present = True
    _heard(ctx, policy, live)
    ctx.note(policy.id, "trainer", name=name, incarnation=message.incarnation)
    if reborn:
        consumption.roll_back(ctx, policy, inventory)
    elif inventory.checkpoint_step > policy.checkpoint_step:
        # Its report was lost; the same process goes on from where it is.
        report = CheckpointReport(
            policy=policy.id,
            step=inventory.checkpoint_step,
            version=inventory.checkpoint_version,
        )
        consumption.checkpoint(ctx, policy, report)
    run = ctx.run_of(policy)
    welcome = Welcome(
        term=ctx.term,
        heartbeat_s=ctx.settings.heartbeat_s,
        lost_after_s=ctx.settings.lost_after_s,
        run=run.spec,
        highest_version=policy.highest,
        stopping=run.state == "stopping" or policy.final,
        incarnation=message.incarnation,
    )
    ctx.send(name, welcome)
    if run.state == "paused":
        ctx.send(name, RunState(run=run.name, state="paused"))


def tell(ctx: Context, run: str, state: RunState) -> None:
    """Tell the trainers of a run about its state."""
    for name, policy in ctx.trainers.items():
        if ctx.tables.policies[policy].run == run:
            ctx.send(name, state)


def liveness_due(ctx: Context, id: str) -> None:
    """The trainer's timer fired: it may have been silent for too long."""
    policy = ctx.tables.policies.get(id)
    live = ctx.policies.get(id)
    if policy is None or live is None or not policy.trained:
        return
    settings = ctx.settings
    if live.present and ctx.now >= live.heard_s + settings.lost_after_s:
        live.present = False
        ctx.count("trainers.lost")
        ctx.note(id, "trainer silent", trainer=policy.trainer)
    gone_s = live.heard_s + settings.work_grace_s
    if ctx.now >= gone_s and not live.gone and not policy.final:
        live.gone = True
        ctx.note(id, "trainer gone", trainer=policy.trainer)
        ctx.count("trainers.gone")
        consumption.drop_waiting(ctx, policy, "dropped", "trainer_gone")
        ctx.due_runs[policy.run] = None
    watch(ctx, policy, live)


def watch(ctx: Context, policy: Policy, live: PolicyLive) -> None:
    """Set the timer for the next thing that silence would change."""
    if live.present:
        ctx.timers.set("trainer", policy.id, live.heard_s + ctx.settings.lost_after_s)
    elif not live.gone:
        ctx.timers.set("trainer", policy.id, live.heard_s + ctx.settings.work_grace_s)
    else:
        ctx.timers.cancel("trainer", policy.id)


def state(ctx: Context, policy: Policy) -> str:
    """absent, waiting, training or done."""
    if policy.final:
        return "done"
    live = ctx.policies.get(policy.id)
    if live is None or not live.present:
        return "absent"
    training = policy.request is None and running_groups(ctx, policy) > 0
    return "training" if training else "waiting"


def version_stored(ctx: Context, service: str, message: VersionStored) -> None:
    """A version is durable in the weight store: its place in the tree is now certain."""
    ctx.send(service, VersionAccepted(policy=message.policy, version=message.version))
    policy = ctx.tables.policies.get(message.policy)
    live = ctx.policies.get(message.policy)
    if policy is None:
        ctx.count("versions.unknown_policy")
        return
    if live is None:  # of a run that is over: the store announces all that it keeps at its start
        ctx.count("versions.run_over")
        return
    before = live.tree.nodes.get(message.version)
    if before is not None and before.stored:
        if before.digest != message.digest:
            ctx.count("versions.conflict")
            ctx.note(policy.id, "version conflict", version=message.version)
        return
    if message.version == policy.head and message.step != policy.step:
        # The trainer's own account of its head counts.
        ctx.count("versions.conflict")
        ctx.note(policy.id, "version conflict", version=message.version, step=message.step)
        return
    below = policy.checkpoint_step - ctx.run_of(policy).spec.policies[policy.name].max_policy_lag
    if before is None and message.step < below - 1:
        return  # pruned, announced once more
    node = Version(
        policy=policy.id,
        version=message.version,
        parent=message.parent,
        step=message.step,
        digest=message.digest,
        delta_bytes=message.delta_bytes,
        full_bytes=message.full_bytes,
        stored=True,
    )
    if message.parent is not None and message.parent >= message.version:
        ctx.count("versions.malformed")
        return
    ctx.tables.add(node)
    live.tree.put(node)
    policy.highest = max(policy.highest, message.version)
    ctx.tables.touch(policy)
    ctx.note(policy.id, "version stored", version=message.version, step=message.step)
    if before is not None:
        # Agents could serve it before we knew its digest: look at them again.
        for agent in ctx.agents.values():
            agent.fits.pop(policy.run, None)
    consumption.replace_all(ctx, policy)
    steps.record_steps(ctx, policy)
    ctx.due_runs[policy.run] = None
    ctx.dispatch_due = True


def _heard(ctx: Context, policy: Policy, live: PolicyLive) -> None:
    live.heard_s = ctx.now
    if live.gone:
        live.gone = False
        ctx.due_runs[policy.run] = None
    watch(ctx, policy, live)


def _refusal(ctx: Context, name: str, message: Hello) -> Refuse | None:
    inventory = message.trainer
    if message.protocol != PROTOCOL_VERSION:
        return Refuse(
            code="protocol.version",
            message=f"protocol {message.protocol}, the scheduler speaks {PROTOCOL_VERSION}:"
            " install the same farflow on both sides",
        )
    if message.role is not Role.TRAINER or inventory is None or not _sane(inventory):
        return Refuse(code="hello.invalid", message="a trainer's hello needs its inventory")
    run_name = inventory.policy.rpartition("/")[0]
    run = ctx.tables.runs.get(run_name)
    if run is None:
        return Refuse(
            code="run.unknown", message=f"run {run_name!r} is not submitted yet", retry_s=RETRY_S
        )
    if not run.live:
        return Refuse(code="run.finished", message=f"run {run_name} is finished: {run.reason}")
    policy = ctx.tables.policies.get(inventory.policy)
    if policy is None or not policy.trained:
        return Refuse(
            code="policy.unknown",
            message=f"run {run_name} trains no policy {policy_name(inventory.policy)!r}; it has"
            f" {', '.join(sorted(n for n, p in run.spec.policies.items() if p.trained))}",
        )
    other = ctx.tables.policies.get(ctx.trainers.get(name, policy.id))
    if other is not None and other.id != policy.id and ctx.run_of(other).live:
        return Refuse(
            code="trainer.other_policy",
            message=f"this key trains {other.id}; a trainer has one policy and its own key",
        )
    if policy.trainer == name:
        if message.incarnation < policy.incarnation:
            return Refuse(
                code="trainer.superseded",
                message=f"a newer process (incarnation {policy.incarnation}) speaks with this key",
            )
        return None
    if policy.trainer and ctx.policies[policy.id].present:
        return Refuse(
            code="trainer.busy",
            message=f"{policy.id} is being trained by {policy.trainer}; stop that one first",
            retry_s=ctx.settings.lost_after_s,
        )
    return None


def _sane(inventory: TrainerInventory) -> bool:
    return inventory.checkpoint_step >= 0 and inventory.checkpoint_version >= 0
