"""What placement is told of jobs and agents, and why an agent is none.

What always holds: a candidate is a ready agent with room, of the labels and the code that the job
wants, that serves a verified copy of all its policies and can still come to the pinned versions; a
shortlist looks at no more than ``shortlist`` x ``SEARCH_FACTOR`` agents; ``explain`` uses the same
tests and estimates as placement does.
"""

from collections.abc import Callable

from scheduler.core import backlog, prefetch
from scheduler.core.constraints import unmet, without_model
from scheduler.core.context import AgentLive, Context, PolicyLive
from scheduler.core.estimators import PRIOR_LINK_BYTES_S, PRIOR_RTT_S
from scheduler.core.placement import (
    Candidate,
    JobView,
    PolicyView,
    excess_lag,
    expected_s,
    parts_of,
    steps_meanwhile,
)
from scheduler.core.state import Agent, Job, Run
from scheduler.core.views import pins, view_of
from scheduler.core.work import Work, work_of
from transport.messages import ScoredCandidate

SEARCH_FACTOR = 4
"""How many agents may be looked at per candidate that a shortlist is to hold."""
DRAWN_SHARE = 4
"""Of a larger fleet a quarter of ``shortlist`` is drawn: the best of 16 random agents is among the
best 6 % of all (of 64: 2 %), at a quarter of the cost."""
NEVER_S = 1e9
MAX_EXPLAINED = 64
MAX_LOOKED_AT = 1024
BYTES_PER_GB = 1e9
_PRIOR_BYTE_S = 1.0 / PRIOR_LINK_BYTES_S

Accept = Callable[[str], bool]


def shortlist(
    ctx: Context, run: Run, job: Job, view: JobView, names: list[str], accept: Accept | None = None
) -> list[Candidate]:
    """Agents of ``names`` (all of them open) that may take the job: all of a small fleet, a run of
    neighbours from a random place of a large one; those on which the job failed only when there
    is no other."""
    most = ctx.settings.shortlist
    start, seen = 0, len(names)
    if seen > most:
        most = max(1, most // DRAWN_SHARE)
        start, seen = ctx.rng.randrange(seen), min(seen, SEARCH_FACTOR * most)
    pinned, work = pins(ctx, job), work_of(ctx, job)
    asked = job.external
    asks_more = bool(pinned) or (asked is not None and bool(asked.require or asked.recheck))
    found: list[Candidate] = []
    avoided: list[Candidate] = []
    known, lives = ctx.tables.agents, ctx.agents
    for offset in range(start, start + seen):
        name = names[offset if offset < len(names) else offset - len(names)]
        if accept is not None and not accept(name):
            continue
        agent, live = known[name], lives[name]
        if not prefetch.has_room(ctx, agent, live, job.sequences):
            continue
        if not fits(ctx, run, agent, live, work) or (
            asks_more and _unsuited(ctx, job, agent, live)
        ):
            continue
        candidate = candidate_of(ctx, view, agent, live, pinned)
        if candidate is None:
            continue
        (avoided if name in job.avoid else found).append(candidate)
        if len(found) >= most:
            break
    return found or avoided


def fits(ctx: Context, run: Run, agent: Agent, live: AgentLive, work: Work) -> bool:
    """Whether an agent can do a work of a run at all."""
    known = live.fits.get(run.name)
    if known is None:
        known = live.fits[run.name] = {}
    why = known.get(work.name)
    if why is None:
        why = known[work.name] = _misfit(ctx, run, agent, work)
    return not why


def candidate_of(
    ctx: Context,
    view: JobView,
    agent: Agent,
    live: AgentLive,
    pinned: dict[str, int],
    *,
    at_once: bool = False,
) -> Candidate | None:
    """An agent as the rules see it, or as it were if it had slots free (``at_once``); None when it
    has a version that has no place in the tree."""
    estimate = live.estimate
    rtt_s = estimate.rtt_s.value
    if rtt_s is None:
        rtt_s = PRIOR_RTT_S
    token_s = estimate.token_time_s(view.kind, ctx.hardware.token_s(agent.hardware), ctx.now)
    up_byte_s = estimate.up_byte_s.recovered(_PRIOR_BYTE_S, ctx.now)
    first_s = wait_s = 0.0
    if live.load and not at_once:
        first_s, wait_s = backlog.starts(
            ctx,
            agent,
            live,
            view.sequences,
            view.tokens_mean * token_s,
            view.tokens_longest * token_s,
        )
    elif view.sequences > agent.slots:
        wait_s = (view.sequences / agent.slots - 1.0) * view.tokens_mean * token_s
    lags: list[int] = []
    for policy in view.policies:
        lag = _lag_at_start(ctx, policy, agent, live, rtt_s + first_s)
        if lag is None:
            return None
        lags.append(lag)
    waits_for_weights = pinned or estimate.pause_s.value
    return Candidate(
        agent=agent.name,
        slots=agent.slots,
        load=live.load,
        rtt_s=rtt_s,
        wait_s=wait_s,
        token_s=token_s,
        up_byte_s=up_byte_s,
        catch_up_s=_catch_up_s(ctx, view, agent, live, pinned) if waits_for_weights else 0.0,
        lags=tuple(lags),
        idle_s=NEVER_S if live.offered_s is None else ctx.now - live.offered_s,
        token_usd=_token_usd(view, agent, token_s),
    )


def obstacle(ctx: Context, run: Run, job: Job, name: str) -> str:
    """Why an agent cannot take a job now, whatever the rule says; empty when it could."""
    agent, live = ctx.tables.agents[name], ctx.agents[name]
    if live.state != "ready":
        return live.state
    if agent.quarantined:
        return f"quarantined: {agent.quarantined}"
    if agent.cordoned:
        return "cordoned"
    if live.blocked_until_s > ctx.now:
        return f"blocked for {live.blocked_until_s - ctx.now:.1f} s"
    misfit = _misfit(ctx, run, agent, work_of(ctx, job)) or _unsuited(ctx, job, agent, live)
    if misfit:
        return misfit
    if not prefetch.has_room(ctx, agent, live, job.sequences):
        return "full"
    return ""


def explain(ctx: Context, job: Job) -> tuple[ScoredCandidate, ...]:
    """Every known agent as placement sees it for this job, those that have it first, then by cost,
    then those that cannot take it; at most ``MAX_EXPLAINED``."""
    run = ctx.tables.runs[job.run]
    if job.run not in ctx.runs or job.state == "done":
        return ()
    view = view_of(ctx, run, job)
    pinned = pins(ctx, job)
    holders = {record.agent: record for record in job.attempts}
    looked_at = [*holders, *(name for name in ctx.agents if name not in holders)][:MAX_LOOKED_AT]
    scored: list[tuple[int, float, str, ScoredCandidate]] = []
    for name in looked_at:
        agent, live = ctx.tables.agents[name], ctx.agents[name]
        why = "" if name in holders else obstacle(ctx, run, job, name)
        rank = 0 if name in holders else 2 if why else 1
        candidate = None
        if all(policy in agent.versions for policy in ctx.runs[run.name].policies.values()):
            candidate = candidate_of(ctx, view, agent, live, pinned)
        cost_s = None if candidate is None else expected_s(view, candidate)
        if name in holders:
            why = "stray" if holders[name].stray else "chosen"
        elif not why:
            why = _verdict(ctx, job, view, candidate, cost_s)
        found = ScoredCandidate(
            agent=name,
            verdict=why,
            cost_s=cost_s,
            parts={} if candidate is None else dict(parts_of(view, candidate)),
        )
        scored.append((rank, NEVER_S if cost_s is None else cost_s, name, found))
    scored.sort(key=lambda entry: entry[:3])
    return tuple(entry[3] for entry in scored[:MAX_EXPLAINED])


def _verdict(
    ctx: Context, job: Job, view: JobView, candidate: Candidate | None, cost_s: float | None
) -> str:
    if candidate is None or cost_s is None:
        return "serves a version of unknown place"
    if ctx.settings.placement == "finish-time":
        excess = excess_lag(view, candidate, cost_s)
        if excess is None:
            strict = excess_lag(view.tolerant(), candidate, cost_s)
            return f"too stale by {strict}"
    if candidate.agent in job.avoid:
        return "avoided: failed here"
    return "possible"


def _misfit(ctx: Context, run: Run, agent: Agent, work: Work) -> str:
    """Why an agent cannot do a work of a run at all, or nothing."""
    live = ctx.runs[run.name]
    label = unmet(run.spec.require, agent)
    if label:
        return f"label {label}"
    workflow = work.workflow.reference
    code = agent.workflows.get(workflow)
    if code is None:
        return f"no workflow {workflow}"
    if code != live.codes.get(workflow, code):
        return f"other code of workflow {workflow}"
    missing = work.missing(agent)
    if missing:
        return f"no {missing}"
    unadapted = without_model(run, live.policies, agent)
    if unadapted:
        return f"no model for the adapter of {unadapted} (agent.local_models)"
    for id in live.policies.values():
        ref = agent.versions.get(id)
        if ref is None:
            return f"not serving {id}"
        node = ctx.policies[id].tree.nodes.get(ref.version)
        if node is not None and node.digest and ref.digest and node.digest != ref.digest:
            ctx.count("placement.refused_digest")
            return f"its copy of {id} is not version {ref.version}"
    return ""


def _unsuited(ctx: Context, job: Job, agent: Agent, live: AgentLive) -> str:
    """Why an agent cannot do this job of a run whose work it can do, or nothing: what the job
    itself requires, and whether the agent can still come to the pinned versions, and to no other
    pin meanwhile."""
    if job.external is not None:
        label = unmet(job.external.require, agent)
        if label:
            return f"label {label}"
        recheck = job.external.recheck
        if recheck is not None and not agent.rechecks:
            return "finds no rewards again"
        if recheck is not None and not {*recheck.kinds} <= {*agent.recheck_kinds}:
            return f"finds no rewards of {' and '.join(recheck.kinds)} again"
        if recheck is not None and agent.name in (recheck.agent, recheck.second):
            return "has found these rewards before"
    if job.evaluation and agent.name in ctx.evaluations[job.evaluation].declined:
        return "past the pinned version"
    for policy, version in pins(ctx, job).items():
        ref = agent.versions.get(policy)
        if ref is None:
            return f"not serving {policy}"
        if ref.version > version:
            return "past the pinned version"
        kept = ctx.upto.get(agent.name, {}).get(policy, version)
        if kept < version:
            return f"keeps version {kept} of {policy} back for an evaluation"
        for lease in live.leases.values():
            if lease.pinned.get(policy, version) != version:
                return f"pinned to version {lease.pinned[policy]} of {policy}"
    return ""


def _lag_at_start(
    ctx: Context, policy: PolicyView, agent: Agent, live: AgentLive, starts_s: float
) -> int | None:
    """Steps from the version that a group there would begin with to the present head; negative
    when it begins only after further versions. None: that version has no place in the tree."""
    known = ctx.policies[policy.policy]
    tree = known.tree
    version = agent.versions[policy.policy].version
    newest = tree.newest_stored
    arrives_s = 0.0
    if ctx.upto.get(agent.name, {}).get(policy.policy, newest) < newest:
        return tree.lag(version)  # it will begin with that, whenever it begins
    if version < newest:
        arrives_s = arrival_s(ctx, known, policy.policy, agent, live)
        if starts_s < arrives_s:
            return tree.lag(version)
        version = newest
    lag = tree.lag(version)
    if lag is None or policy.busy_s is None or starts_s - arrives_s < policy.busy_s:
        return lag
    fetch_s = _fetch_s(known, live, 1)
    return lag - int(steps_meanwhile(policy, max(0.0, starts_s - max(arrives_s, fetch_s))))


def arrival_s(ctx: Context, known: PolicyLive, policy: str, agent: Agent, live: AgentLive) -> float:
    """Seconds until the newest stored version should be in use on an agent that is behind it,
    counted from when it took the one it has: of an agent that took that long ago a late arrival is
    expected. Counting from when the newest was stored, as its bytes do, promises too much (what
    decoding and verifying take is not in it): measured in the simulator, more groups expire."""
    behind = max(1, known.tree.newest_stored - agent.versions[policy].version)
    fetch_s = _fetch_s(known, live, behind)
    left_s = live.served_s.get(policy, 0.0) + fetch_s - ctx.now
    return left_s if left_s > 0.0 else backlog.OVERRUN * -left_s


def _fetch_s(known: PolicyLive, live: AgentLive, behind: int) -> float:
    node = known.tree.nodes.get(known.tree.newest_stored)
    delta_bytes = 0 if node is None else node.delta_bytes or 0
    size_bytes = behind * delta_bytes
    if node is not None and node.full_bytes:
        size_bytes = min(size_bytes, node.full_bytes)
    byte_s = live.estimate.down_byte_s.value
    rtt_s = live.estimate.rtt_s.value
    return (
        size_bytes * (_PRIOR_BYTE_S if byte_s is None else byte_s)
        + (live.estimate.pause_s.value or 0.0)
        + (PRIOR_RTT_S if rtt_s is None else rtt_s)
    )


def _catch_up_s(
    ctx: Context, view: JobView, agent: Agent, live: AgentLive, pinned: dict[str, int]
) -> float:
    """Time until the pinned versions are there, or the pause of a swap that is coming."""
    pause_s = live.estimate.pause_s.value or 0.0
    if not pinned:
        if not pause_s:
            return 0.0
        behind = 0
        for wanted in view.policies:
            newest = ctx.policies[wanted.policy].tree.newest_stored
            behind += agent.versions[wanted.policy].version < newest
        return pause_s * behind
    total_s = 0.0
    for policy, target in pinned.items():
        known = ctx.policies.get(policy)
        if known is not None:
            behind = max(0, target - agent.versions[policy].version)
            total_s += _fetch_s(known, live, behind) if behind else 0.0
    return total_s


def _token_usd(view: JobView, agent: Agent, token_s: float) -> float:
    """What a token costs there: the slot's share of the box while it is drawn, and its bytes on
    the way out."""
    if not agent.price_usd_hour and not agent.egress_usd_gb:
        return 0.0
    tokens = max(1.0, view.tokens_mean * view.sequences)
    slot_usd = agent.price_usd_hour / 3600.0 / agent.slots * token_s
    return slot_usd + agent.egress_usd_gb * view.body_bytes / BYTES_PER_GB / tokens
