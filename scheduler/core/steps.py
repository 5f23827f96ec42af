"""What is recorded of optimizer steps.

What always holds: each step of a lineage is recorded once, in order.
"""

import math

import msgspec

from scheduler.core import replay_pool
from scheduler.core.context import Context
from scheduler.core.effects import RecordStep
from scheduler.core.state import Policy, Version
from transport.messages import StepReport
from transport.status import StepStatus

MAX_UNRECORDED = 2
"""Steps that may wait for their version's size before they are recorded without it."""
REWARD_METRIC = "reward_mean"
"""A trainer that reports it knows better than the summaries which sequences it used."""


def record_steps(ctx: Context, policy: Policy, *, everything: bool = False) -> None:
    """Record steps in order, each once the size of its version is known (or at the latest when
    ``MAX_UNRECORDED`` more have come)."""
    tree = ctx.policies[policy.id].tree
    while policy.unrecorded:
        pending = policy.unrecorded[0]
        node = tree.nodes.get(pending.status.version)
        known = node is not None and node.stored
        if not (known or everything or len(policy.unrecorded) > MAX_UNRECORDED):
            return
        if node is not None and known:
            pending.status = _with_size(pending.status, node)
        del policy.unrecorded[0]
        last = policy.last_step
        if last is not None and last.version == pending.status.version:
            policy.last_step = pending.status
        ctx.tables.touch(policy)
        ctx.effects.append(RecordStep(policy.run, pending.status, pending.metrics))


def status_of(ctx: Context, policy: Policy, message: StepReport) -> StepStatus:
    """Means over the step's batch, with what it trained on again."""
    live = ctx.policies[policy.id]
    again = replay_pool.used_by(ctx, policy, message.step)
    rewards = [entry.reward_mean for entry in again]
    lags = [entry.lag for entry in again]
    tokens = sum(entry.response_tokens for entry in again)
    for id in live.taken.get(message.step, ()):
        job = ctx.tables.jobs[id]
        if job.result is not None:
            rewards.append(job.result.reward_mean)
            lags.append(job.copies[policy.id].lag)
            tokens += job.result.response_tokens
    reported = message.metrics.get(REWARD_METRIC, math.nan)
    status = StepStatus(
        policy=policy.id,
        step=message.step,
        version=message.version,
        reward_mean=reported if math.isfinite(reported) else sum(rewards) / max(1, len(rewards)),
        policy_lag_mean=sum(lags) / max(1, len(lags)),
        policy_lag_max=max(lags, default=0),
        response_tokens=tokens,
        busy_s=message.busy_s,
        waiting_s=message.waiting_s,
        delta_bytes=None,
        full_bytes=None,
        at_s=ctx.now - ctx.run_of(policy).created_s,
    )
    node = live.tree.nodes.get(message.version)
    return status if node is None or not node.stored else _with_size(status, node)


def _with_size(status: StepStatus, node: Version) -> StepStatus:
    return msgspec.structs.replace(status, delta_bytes=node.delta_bytes, full_bytes=node.full_bytes)
