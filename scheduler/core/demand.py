"""How many more slots would raise a run's steps per hour, and when none would.

For one trained policy, with T the trainer's busy seconds per step, b groups per batch of S
sequences of m tokens each, L the lag bound, u the share of returned groups that is used:

    mu      = u x sum over ready agents of slots / (seconds per token x m x S)       groups per s
    floor   = max(T, (D + G) / (L + 1/2))      what no number of slots can beat
    step    = max(floor, b / mu)

D is the time a new version takes to an agent (round trip, delta over its link, pause), G that of a
group (longest sibling, upload), both of the slots that would be added: a result is fresh enough
only if D + G fits into the steps that the bound allows (the per-agent condition of research on
geo-distributed rollouts, ECHO-2's provisioning rule with the half step of waiting in the buffer).

    step <= 1.05 T             training binds: the trainer is never starved
    floor >= 0.97 step         links bind when D > G, else staleness: faster links, smaller deltas,
                               shorter answers or a higher bound help, slots do not
    otherwise                  generation binds: slots for b / floor groups per second

Example: T = 10 s, b = 32, S = 8, m = 500, 50 tokens/s a slot, 128 ready slots: mu = 128 x 50 / 500
/ 8 = 1.6 groups/s, a step takes 20 s; with D + G = 15 s and L = 4 the floor is T, so twice the
slots, 128 more, would double the steps per hour.
"""

import math

from scheduler.core.accounting import account
from scheduler.core.admission import new_groups, spec_of, trained_policies
from scheduler.core.context import AgentLive, Context
from scheduler.core.estimators import PRIOR_LINK_BYTES_S, PRIOR_RTT_S
from scheduler.core.state import Agent, Policy, Run
from scheduler.core.work import TRAINING
from transport.status import DemandStatus

TRAINING_BINDS = 1.05
NO_GAIN = 0.97
MAX_SLOTS = 1_000_000


def demands(ctx: Context) -> tuple[DemandStatus, ...]:
    """One entry per running run; O(runs x agents)."""
    return tuple(
        _of_run(ctx, ctx.tables.runs[name])
        for name in ctx.runs
        if ctx.tables.runs[name].state == "running"
    )


def _of_run(ctx: Context, run: Run) -> DemandStatus:
    """The policy that wants most slots speaks for its run."""
    found = [
        _of_policy(ctx, run, policy) for policy in trained_policies(ctx, run) if not policy.final
    ]
    if not found:
        return _nothing(run, "nothing", "every trainer has made its last step")
    return max(found, key=lambda one: (one.more_slots, one.binds == "generation"))


def _of_policy(ctx: Context, run: Run, policy: Policy) -> DemandStatus:
    live = ctx.policies[policy.id]
    busy_s = live.busy_s.value
    if not live.present:
        return _nothing(run, "training", f"{policy.id} has no trainer that answers")
    unusable = live.unusable.standing(spec_of(ctx, policy).batch_groups)
    if unusable:
        return _nothing(run, "nothing", f"{policy.id}: {unusable}")
    if busy_s is None:
        return _nothing(run, "nothing", f"{policy.id} has not made a step yet")
    busy_s = max(busy_s, 1e-3)
    spec = spec_of(ctx, policy)
    estimate = ctx.runs[run.name].estimate
    siblings = run.spec.workflow.group_size
    tokens = max(estimate.tokens_mean, 1.0)
    ready = _ready(ctx, run)
    used = _used_share(ctx, policy)
    groups_s = used * sum(
        agent.slots / (_token_s(ctx, agent, one) * tokens * siblings) for agent, one in ready
    )
    hardware, token_s = _best_hardware(ctx, ready)
    weights_s, group_s = _pipeline_s(ctx, policy, ready, estimate.tokens_longest * token_s)
    floor_s = max(busy_s, (weights_s + group_s) / (spec.max_policy_lag + 0.5))
    step_s = max(floor_s, new_groups(spec) / groups_s) if groups_s > 0 else math.inf
    if step_s <= TRAINING_BINDS * busy_s:
        text = f"{policy.id}: generation keeps up with the trainer ({busy_s:.3g} s a step)"
        return _nothing(run, "training", text, step_s)
    if floor_s >= NO_GAIN * step_s:
        binds = "links" if weights_s > group_s else "staleness"
        text = (
            f"{policy.id}: new weights take {weights_s:.3g} s and a group {group_s:.3g} s, too long"
            f" for a lag of {spec.max_policy_lag} at {busy_s:.3g} s a step; more slots would only"
            " make results that are too old"
        )
        return _nothing(run, binds, text, step_s)
    missing_s = new_groups(spec) / floor_s - groups_s
    slots = math.ceil(missing_s * tokens * siblings * token_s / used)
    return DemandStatus(
        run=run.name,
        binds="generation",
        more_slots=min(max(slots, 1), MAX_SLOTS),
        hardware=hardware,
        steps_hour=3600.0 / step_s,
        steps_hour_with=3600.0 / floor_s,
        reason=f"{policy.id}: the trainer is busy {busy_s:.3g} s a step and waits for the rest",
    )


def _nothing(run: Run, binds: str, reason: str, step_s: float = math.inf) -> DemandStatus:
    return DemandStatus(
        run=run.name,
        binds=binds,
        more_slots=0,
        hardware="",
        steps_hour=3600.0 / step_s,
        steps_hour_with=3600.0 / step_s,
        reason=reason,
    )


def _ready(ctx: Context, run: Run) -> list[tuple[Agent, AgentLive]]:
    """Ready agents that know the run's workflow and rewards."""
    work = ctx.runs[run.name].works[TRAINING]
    found: list[tuple[Agent, AgentLive]] = []
    for name, live in ctx.agents.items():
        agent = ctx.tables.agents[name]
        able = work.workflow.reference in agent.workflows
        if live.state == "ready" and able and not work.missing(agent):
            found.append((agent, live))
    return found


def _token_s(ctx: Context, agent: Agent, live: AgentLive) -> float:
    known = live.estimate.token_s.value
    return max(ctx.hardware.token_s(agent.hardware) if known is None else known, 1e-9)


def _best_hardware(ctx: Context, ready: list[tuple[Agent, AgentLive]]) -> tuple[str, float]:
    """The kind of hardware to add, by cost per token where every kind has a price, else by speed,
    and its seconds per token."""
    kinds: dict[str, tuple[float, float]] = {}
    for agent, live in ready:
        token_s = _token_s(ctx, agent, live)
        slot_usd = agent.price_usd_hour / 3600.0 / agent.slots
        best = kinds.get(agent.hardware)
        if best is None or token_s < best[0]:
            kinds[agent.hardware] = (token_s, slot_usd * token_s)
    if not kinds:
        return "", max(ctx.hardware.token_s(""), 1e-9)
    priced = all(usd > 0.0 for _, usd in kinds.values())
    name = min(kinds, key=lambda kind: (kinds[kind][1 if priced else 0], kind))
    return name, kinds[name][0]


def _pipeline_s(
    ctx: Context, policy: Policy, ready: list[tuple[Agent, AgentLive]], generate_s: float
) -> tuple[float, float]:
    """Seconds that a new version takes to a typical agent, and that a group takes back."""
    node = ctx.tables.versions.get(f"{policy.id}@{policy.head}")
    delta_bytes = 0 if node is None else node.delta_bytes or 0
    body_bytes = ctx.runs[policy.run].estimate.body_bytes
    rtt = _median([live.estimate.rtt_s.value for _, live in ready], PRIOR_RTT_S)
    down = _median([live.estimate.down_byte_s.value for _, live in ready], 1 / PRIOR_LINK_BYTES_S)
    up = _median([live.estimate.up_byte_s.value for _, live in ready], 1 / PRIOR_LINK_BYTES_S)
    pause = _median([live.estimate.pause_s.value for _, live in ready], 0.0)
    return rtt + delta_bytes * down + pause, rtt + generate_s + body_bytes * up


def _median(values: list[float | None], prior: float) -> float:
    known = sorted(value for value in values if value is not None)
    return known[len(known) // 2] if known else prior


def _used_share(ctx: Context, policy: Policy) -> float:
    """Share of the groups that came back which was or will be trained on; at least a tenth, so
    that a bad start does not ask for the moon."""
    row = account(ctx, policy.id, "train").row
    used = row.trained + row.taken + row.buffered
    lost = row.expired + row.filtered + row.rejected
    return max(0.1, used / (used + lost)) if used + lost else 1.0
