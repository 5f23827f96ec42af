"""Placing queued jobs on agents.

Order: evaluations of the start and the end, then in-between ones (at most a tenth of the slots),
then training jobs, one at a time from the run with the fewest sequences in flight, then in-between
evaluations again with what is left. A pin keeps an agent's weights back, so an in-between
evaluation stays on the agents that hold some of it already, at most a tenth of the fleet.

What always holds: a job goes only to a ready agent with room that advertises the run's workflow
and reward and serves verified copies of all its policies; a pinned one only where no copy is past
the pin; one pass looks at no more than ``shortlist`` candidates per placement and gives a queue up
at the first job that nobody can take, so it costs O(placements), not O(jobs x agents).
"""

from scheduler.core import attempts
from scheduler.core.accounting import account
from scheduler.core.context import AgentLive, Context, EvaluationLive
from scheduler.core.estimators import PRIOR_LINK_BYTES_S, PRIOR_RTT_S
from scheduler.core.placement import Candidate, JobView, PolicyView
from scheduler.core.state import Agent, Evaluation, Job, Run
from transport.messages import LeaseOffer, RewardSpec
from transport.runs import TaskSpec

BETWEEN_SHARE = 10
"""In-between evaluations may hold one in so many of the ready slots and agents."""
SEARCH_FACTOR = 4
"""How many agents may be looked at per candidate that a shortlist is to hold."""
STARVED_HEARTBEATS = 2
NEVER_S = 1e9
_MASK = 0x7FFF_FFFF_FFFF_FFFF


def place(ctx: Context) -> None:
    """Place whatever can be placed now."""
    ctx.dispatch_due = False
    if not len(ctx.open_agents):
        return
    between: list[Evaluation] = []
    for id in ctx.evaluations:
        evaluation = ctx.tables.evaluations[id]
        if not len(ctx.queue(id)) or not _placeable(ctx, evaluation.run):
            continue
        if evaluation.kind == "between":
            between.append(evaluation)
        else:
            _place_evaluation(ctx, evaluation)
    for evaluation in between:
        _place_evaluation(ctx, evaluation, most=max(1, ctx.ready_slots // BETWEEN_SHARE))
    _place_training(ctx)
    for evaluation in between:
        _place_evaluation(ctx, evaluation)


def watch_starved(ctx: Context) -> None:
    """Note since when a policy has had nothing buffered, taken or in flight."""
    for id, live in ctx.policies.items():
        row = account(ctx, id, "train").row if ctx.tables.policies[id].trained else None
        if row is None or row.in_flight or row.buffered:
            live.starved_since_s = None
        elif live.starved_since_s is None:
            live.starved_since_s = ctx.now
        else:
            ctx.dispatch_due = True


def item_seed(run_seed: int, kind: str, index: int) -> int:
    """The seed of a job's generation: the same on whatever agent and attempt (splitmix64)."""
    x = (run_seed * 0x9E3779B97F4A7C15 + index * 2 + (kind == "eval")) & 0xFFFF_FFFF_FFFF_FFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFF_FFFF_FFFF_FFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFF_FFFF_FFFF_FFFF
    return (x ^ (x >> 31)) & _MASK


def reward_of(task: TaskSpec) -> RewardSpec:
    match task.reward:
        case "verifier":
            return RewardSpec(name="reasoning-gym", dataset=task.dataset)
        case "exact":
            return RewardSpec(name="exact")
        case "math-verify":
            return RewardSpec(name="math-verify")


def _place_evaluation(ctx: Context, evaluation: Evaluation, most: int | None = None) -> None:
    """Place its jobs while there is room, up to ``most`` sequences in flight."""
    queue = ctx.queue(evaluation.id)
    live = ctx.evaluations[evaluation.id]
    while len(ctx.open_agents) and (most is None or live.in_flight < most):
        id = queue.first()
        if id is None or not _pins_stored(ctx, evaluation):
            return
        among = _holders(ctx, live) if evaluation.kind == "between" else None
        if among is not None and len(among) * BETWEEN_SHARE < max(BETWEEN_SHARE, ctx.ready_agents):
            among = None
        if not _place(ctx, ctx.tables.jobs[id], evaluation.pinned, among):
            return


def _holders(ctx: Context, live: EvaluationLive) -> list[str]:
    """Agents that hold attempts of an evaluation."""
    jobs = [ctx.tables.jobs[id] for id in live.jobs]
    records = [record for job in jobs for record in job.attempts if not record.stray]
    return list(dict.fromkeys(record.agent for record in records))


def _place_training(ctx: Context) -> None:
    waiting = [name for name in ctx.runs if _placeable(ctx, name) and len(ctx.queue(name))]
    while waiting and len(ctx.open_agents):
        name = min(waiting, key=lambda name: (ctx.runs[name].in_flight, name))
        id = ctx.queue(name).first()
        if id is None or not _place(ctx, ctx.tables.jobs[id], {}):
            waiting.remove(name)


def _placeable(ctx: Context, run: str) -> bool:
    return ctx.tables.runs[run].state == "running"


def _pins_stored(ctx: Context, evaluation: Evaluation) -> bool:
    for policy, version in evaluation.pinned.items():
        node = ctx.policies[policy].tree.nodes.get(version)
        if node is None or not node.stored:
            return False
    return True


def _place(ctx: Context, job: Job, pinned: dict[str, int], among: list[str] | None = None) -> bool:
    """Offer a job to the best agent, or to the best ``among`` some."""
    run = ctx.tables.runs[job.run]
    view = _job_view(ctx, run, job)
    names = (
        ctx.open_agents.names
        if among is None
        else [name for name in among if name in ctx.open_agents]
    )
    candidates = _shortlist(ctx, run, job, view, pinned, names)
    choice = ctx.rule.choose(view, candidates, ctx.now) if candidates else None
    if choice is None:
        if candidates:
            ctx.count("placement.refused_stale")
        return False
    lease = attempts.start(ctx, job, choice, pinned)
    run_live = ctx.runs[run.name]
    offer = LeaseOffer(
        attempt=lease.attempt,
        fence=lease.fence,
        job=job.id,
        kind=job.kind,
        items=job.items,
        group_size=job.sequences // len(job.items),
        workflow=run.spec.workflow.reference,
        settings=run.spec.workflow.settings,
        policies=run_live.policies,
        reward=run_live.reward,
        max_new_tokens=run.spec.workflow.max_new_tokens,
        temperature=run.spec.workflow.temperature if job.kind == "train" else 0.0,
        seed=item_seed(run.spec.seed, job.kind, job.index),
        lease_s=ctx.settings.lease_s,
        pinned=pinned,
    )
    ctx.send(choice.agent, offer)
    return True


def _job_view(ctx: Context, run: Run, job: Job) -> JobView:
    estimate = ctx.runs[run.name].estimate
    views: list[PolicyView] = []
    if job.kind == "train":
        patience_s = STARVED_HEARTBEATS * ctx.settings.heartbeat_s
        for id, copy in job.copies.items():
            if copy.state != "queued":
                continue
            live = ctx.policies[id]
            spec = run.spec.policies[ctx.tables.policies[id].name]
            row = account(ctx, id, "train").row
            under_way = row.in_flight + row.buffered
            since = live.starved_since_s
            starved = under_way == 0 and since is not None and ctx.now - since >= patience_s
            views.append(
                PolicyView(
                    id,
                    spec.max_policy_lag,
                    live.busy_s.value,
                    under_way // spec.batch_groups,
                    starved,
                )
            )
    return JobView(
        job=job.id,
        sequences=job.sequences,
        tokens_mean=estimate.tokens_mean,
        tokens_longest=estimate.tokens_longest,
        body_bytes=estimate.body_bytes,
        policies=tuple(views),
    )


def _shortlist(
    ctx: Context, run: Run, job: Job, view: JobView, pinned: dict[str, int], names: list[str]
) -> list[Candidate]:
    """Agents of ``names`` that may take the job: all of a small fleet, a run of neighbours from a
    random place of a large one; those on which the job failed only when there is no other."""
    most = ctx.settings.shortlist
    start, seen = 0, len(names)
    if len(names) > most:
        start, seen = ctx.rng.randrange(len(names)), min(len(names), SEARCH_FACTOR * most)
    found: list[Candidate] = []
    avoided: list[Candidate] = []
    for offset in range(seen):
        name = names[(start + offset) % len(names)]
        candidate = _candidate(ctx, run, job, view, name, pinned)
        if candidate is None:
            continue
        (avoided if name in job.avoid else found).append(candidate)
        if len(found) >= most:
            break
    return found or avoided


def _candidate(
    ctx: Context, run: Run, job: Job, view: JobView, name: str, pinned: dict[str, int]
) -> Candidate | None:
    agent = ctx.tables.agents[name]
    live = ctx.agents[name]
    if not attempts.has_room(ctx, agent.slots, live.load, job.sequences):
        return None
    fits = live.fits.get(run.name)
    if fits is None:
        fits = live.fits[run.name] = _fits(ctx, run, agent)
    if not fits or (pinned and not _may_pin(ctx, job, agent, live, pinned)):
        return None
    lags: list[int] = []
    for policy in view.policies:
        lag = ctx.policies[policy.policy].tree.lag(agent.versions[policy.policy].version)
        if lag is None:
            return None
        lags.append(lag)
    estimate = live.estimate
    token_s = estimate.token_s.value
    rtt_s = estimate.rtt_s.value
    up_byte_s = estimate.up_byte_s.value
    return Candidate(
        agent=name,
        slots=agent.slots,
        load=live.load,
        rtt_s=PRIOR_RTT_S if rtt_s is None else rtt_s,
        token_s=ctx.hardware.token_s(agent.hardware) if token_s is None else token_s,
        up_byte_s=1.0 / PRIOR_LINK_BYTES_S if up_byte_s is None else up_byte_s,
        catch_up_s=_catch_up_s(ctx, agent, live, pinned),
        lags=tuple(lags),
        idle_s=NEVER_S if live.offered_s is None else ctx.now - live.offered_s,
    )


def _fits(ctx: Context, run: Run, agent: Agent) -> bool:
    """Whether the agent knows workflow and reward and has a verified copy of every policy."""
    live = ctx.runs[run.name]
    if run.spec.workflow.reference not in agent.workflows or live.reward.name not in agent.rewards:
        return False
    for id in live.policies.values():
        ref = agent.versions.get(id)
        if ref is None:
            return False
        node = ctx.policies[id].tree.nodes.get(ref.version)
        if node is not None and node.digest and ref.digest and node.digest != ref.digest:
            ctx.count("placement.refused_digest")
            return False
    return True


def _may_pin(ctx: Context, job: Job, agent: Agent, live: AgentLive, pinned: dict[str, int]) -> bool:
    """Whether the agent can still come to the pinned versions, and to no other pin meanwhile."""
    if agent.name in ctx.evaluations[job.evaluation].declined:
        return False
    for policy, version in pinned.items():
        if agent.versions[policy].version > version:
            return False
        for lease in live.leases.values():
            if lease.pinned.get(policy, version) != version:
                return False
    return True


def _catch_up_s(ctx: Context, agent: Agent, live: AgentLive, pinned: dict[str, int]) -> float:
    """Time until the pinned versions are there, or the pause of a swap that is coming."""
    pause_s = live.estimate.pause_s.value or 0.0
    byte_s = live.estimate.down_byte_s.value
    byte_s = 1.0 / PRIOR_LINK_BYTES_S if byte_s is None else byte_s
    total_s = 0.0
    for policy, ref in agent.versions.items():
        known = ctx.policies.get(policy)
        if known is None:
            continue
        target = pinned.get(policy)
        if target is None:
            total_s += pause_s if ref.version < known.tree.newest_stored else 0.0
            continue
        node = known.tree.nodes.get(target)
        behind = max(0, target - ref.version)
        delta_bytes = 0 if node is None else node.delta_bytes or 0
        total_s += behind * (delta_bytes * byte_s + pause_s)
    return total_s
