"""Whether agents are honest about log-probabilities: what trainers find, per agent and policy.

A trainer reports with a step how far the recorded log-probabilities of groups are from those of the
weights that drew them (``StepReport.drifts``). Per agent and policy these means are added up,
weighted by tokens, until there are ``drift_tokens``; the window then closes, at the end of a step.
Of groups with older tokens (``StepReport.older``) only what is beyond ``SLACK`` times the way that
the policy has gone since then counts, so that an agent that is always behind is held to account
too, for a lie that is larger than that:

    mean <= max_drift       nothing is held against the agent, and it is a witness for the others
    mean >  max_drift       evidence ``logprobs.drift``, weight 1; the third in a row excludes

Rounding of an engine (bf16 kernels against the trainer's float32) gives 0.01 to 0.03 nats; what is
wrong with the run (another temperature, a tokenizer, a trainer's own fault) shows in all agents.
So an agent is only held to account when another one's window, closed within ``WITNESS_STEPS``
steps, says that the trainer, the settings and the weights can agree: without such a witness it is
counted (``honesty.unwitnessed``) and shown, no more.

What always holds: a group counts for the agent whose result was accepted, once per step of a
lineage; one window gives one piece of evidence, however bad its tokens were; windows begin anew
with every life of the scheduler and when an operator releases the agent.
"""

from scheduler.core import quarantine
from scheduler.core.asking import DriftWindow
from scheduler.core.context import Context, PolicyLive
from scheduler.core.state import Policy
from transport.messages import StepReport

DRIFT = "logprobs.drift"
IN_A_ROW = 3
WITNESS_STEPS = 10
SLACK = 2.0
"""How many times the way that the policy has gone since a version is put down to it: way and
difference are means over few tokens, and not the same ones."""


def compared(ctx: Context, policy: Policy, message: StepReport) -> None:
    """A step is done; its trainer says how far groups were from its weights. Only to be called once
    per step, while its groups are known."""
    spec = ctx.run_of(policy).spec
    live = ctx.policies[policy.id]
    if not spec.max_drift:
        return
    taken = live.taken.get(message.step, {})
    due: dict[str, DriftWindow] = {}
    for drift in (*message.drifts, *message.older):
        job = ctx.tables.jobs.get(drift.job) if drift.job in taken else None
        if job is None or job.result is None or job.result.agent not in ctx.agents:
            ctx.count("honesty.unknown_group")
            continue
        window = live.drifts.setdefault(job.result.agent, DriftWindow())
        window.tokens += drift.tokens
        difference, moved = max(0.0, drift.difference), max(0.0, drift.moved)
        if moved:
            window.older += drift.tokens * difference
            window.moved += drift.tokens * moved
        else:
            window.difference += drift.tokens * difference
        window.kl += drift.tokens * max(0.0, drift.kl)
        if window.tokens >= spec.drift_tokens:
            due[job.result.agent] = window
    for window in due.values():
        window.close(message.step, SLACK)
    for name, window in due.items():
        _judge(ctx, policy, live, name, window)


def _judge(ctx: Context, policy: Policy, live: PolicyLive, name: str, window: DriftWindow) -> None:
    bound = ctx.run_of(policy).spec.max_drift
    ctx.count("honesty.windows")
    if window.mean <= bound:
        window.above = 0
        return
    text = told(policy.id, window, bound)
    if not _witnessed(live, name, window.step, bound):
        window.above = 0
        ctx.count("honesty.unwitnessed")
        ctx.note(name, "drift", policy=policy.id, step=window.step, text=text)
        return
    window.above += 1
    weight = quarantine.QUARANTINE_AT if window.above >= IN_A_ROW else 1.0
    quarantine.evidence(ctx, name, DRIFT, text, weight)


def _witnessed(live: PolicyLive, name: str, step: int, bound: float) -> bool:
    """Whether another agent's log-probabilities were found to be right of late; later steps are of
    a lineage that was left."""
    return any(
        max(0, step - WITNESS_STEPS) < other.step <= step and other.mean <= bound
        for witness, other in live.drifts.items()
        if witness != name
    )


def told(policy: str, window: DriftWindow, bound: float) -> str:
    """The last closed window of an agent, for people."""
    way = f", beside {window.mean_moved:.3g} that the policy moved" if window.mean_moved else ""
    return (
        f"{policy} step {window.step}: {window.mean:.3g} nats a token from the trainer's over"
        f" {window.closed_tokens} tokens (max_drift {bound:g}), kl {window.mean_kl:.3g}{way}"
    )


def shown(ctx: Context, name: str) -> list[str]:
    """What was found of an agent, by policy."""
    found = []
    for id, live in ctx.policies.items():
        window = live.drifts.get(name)
        if window is not None and window.step:
            bound = ctx.run_of(ctx.tables.policies[id]).spec.max_drift
            found.append(f"log-probabilities of {told(id, window, bound)}")
    return found
