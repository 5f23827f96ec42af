"""The view model from the state; reads only, O(agents + runs)."""

from collections import Counter
from copy import copy

from scheduler.core import demand, evaluation, trainers
from scheduler.core.admission import spec_of
from scheduler.core.agent_states import may_work, shown
from scheduler.core.constraints import without_model
from scheduler.core.context import Context
from scheduler.core.state import Agent, Evaluation, Policy, Run
from scheduler.core.work import TRAINING, Work
from transport.ids import policy_id
from transport.status import (
    AccountingRow,
    AgentStatus,
    Alert,
    EvaluationStatus,
    PolicyStatus,
    RunStatus,
    SchedulerStatus,
)

MAX_FINISHED_RUNS = 20


def build(
    ctx: Context, now: float, agents_after: str = "", most_agents: int | None = None
) -> SchedulerStatus:
    """Everything that a person sees; of the finished runs only the latest, and of the agents those
    whose names come after ``agents_after``, at most so many: ``status.agents_left_out`` among the
    counters says how many more there are."""
    ordered = sorted(ctx.tables.runs.values(), key=lambda run: (run.created_s, run.name))
    finished = [run.name for run in ordered if not run.live]
    hidden = frozenset(finished[:-MAX_FINISHED_RUNS])
    names = sorted(name for name in ctx.agents if name > agents_after)
    counters = ctx.counters()
    if most_agents is not None and len(names) > most_agents:
        counters["status.agents_left_out"] = len(names) - most_agents
    letters = Counter(dead.letter.run for dead in ctx.tables.dead.values())
    by_run: dict[str, list[Evaluation]] = {}
    for entry in ctx.tables.evaluations.values():
        by_run.setdefault(entry.run, []).append(entry)
    return SchedulerStatus(
        term=ctx.term,
        build=ctx.build,
        uptime_s=now - ctx.started_s,
        runs=tuple(
            _run(ctx, run, by_run.get(run.name, []), letters[run.name])
            for run in ordered
            if run.name not in hidden
        ),
        agents=tuple(_agent(ctx, name) for name in names[:most_agents]),
        counters=counters,
        demand=demand.demands(ctx),
        alerts=_alerts(ctx),
    )


def _alerts(ctx: Context) -> tuple[Alert, ...]:
    """What the core itself sees that wants a person; the daemon adds what it sees."""
    found: list[Alert] = []
    for id, live in ctx.policies.items():
        bias, since_s = live.lengths.standing, live.lengths.since_s
        if bias is not None and since_s is not None:
            text = (
                f"trained answers are {bias.ratio:.2f} times as long as returned ones; raise"
                " max_policy_lag, or look at what expires (`farflow status`)"
            )
            found.append(Alert(code="bias.length", subject=id, message=text, since_s=since_s))
        batch_groups = spec_of(ctx, ctx.tables.policies[id]).batch_groups
        unusable, since_s = live.unusable.standing(batch_groups), live.unusable.since_s
        if unusable:
            found.append(
                Alert(code="groups.unusable", subject=id, message=unusable, since_s=since_s)
            )
    return tuple(found)


def _run(ctx: Context, run: Run, evaluations: list[Evaluation], dead_letters: int) -> RunStatus:
    statuses = [
        status
        for entry in sorted(evaluations, key=lambda entry: entry.id)
        for status in evaluation.statuses(ctx, entry)
    ]
    policies = [ctx.tables.policies[policy_id(run.name, name)] for name in run.spec.policies]
    rows: list[AccountingRow] = []
    for policy in policies:
        for kind in ("train", "eval", "external", "recheck"):
            books = ctx.tables.accounts.get(f"{policy.id}|{kind}")
            if books is not None:
                rows.append(copy(books.row))
    live = ctx.runs.get(run.name)
    spend = ctx.tables.spends.get(run.name)
    return RunStatus(
        name=run.name,
        state=run.state,
        reason=run.reason or run.finishing or stuck(ctx, run),
        policies=tuple(_policy(ctx, run, policy, statuses) for policy in policies),
        accounting=tuple(rows),
        tenant=run.spec.tenant,
        cost_usd=0.0 if spend is None else spend.agents_usd + spend.egress_usd,
        tokens=0 if spend is None else spend.tokens,
        hedge_tokens=0 if spend is None else spend.hedge_tokens,
        external_open=0 if live is None else len(live.external),
        dead_letters=dead_letters,
        turnaround_p50_s=None if live is None else live.turnaround.quantile(0.5),
        turnaround_p95_s=None if live is None else live.turnaround.quantile(0.95),
    )


def stuck(ctx: Context, run: Run) -> str:
    """Why nobody takes the jobs that a running run has waiting, when that is plain."""
    live = ctx.runs.get(run.name)
    if live is None or run.state != "running":
        return ""
    agents = ctx.tables.agents
    ready = [agents[name] for name, it in ctx.agents.items() if may_work(agents[name], it)]
    if not len(ctx.queue(run.name)):
        return _no_weights(ctx, run) or (_stuck_evaluation(ctx, run, ready) if ready else "")
    if not ready:
        return nobody(ctx, run)
    return not_offered(live.works[TRAINING], ready)


def not_offered(work: Work, ready: list[Agent]) -> str:
    """What none of these agents has of what a work needs, or nothing."""
    workflow = work.workflow.reference
    able = [agent for agent in ready if workflow in agent.workflows]
    if not able:
        return f"no agent offers workflow {workflow}"
    missing = [work.missing(agent) for agent in able]
    return f"no agent offers {missing[0]}" if all(missing) else ""


def _stuck_evaluation(ctx: Context, run: Run, ready: list[Agent]) -> str:
    for id in ctx.evaluations:
        row = ctx.tables.evaluations[id]
        if row.run == run.name and len(ctx.queue(id)):
            missing = not_offered(ctx.runs[run.name].works[row.name], ready)
            if missing:
                return f"evaluation {row.name}: {missing}"
    return ""


def nobody(ctx: Context, run: Run) -> str:
    """Why no agent may work, by what keeps how many of them; those that left are not there."""
    kinds = ("joining", "suspect", "draining", "reconnecting", "cordoned", "quarantined", "lost")
    states = Counter(shown(ctx.tables.agents[name], live) for name, live in ctx.agents.items())
    away = [f"{states[kind]} {kind}" for kind in kinds if states[kind]]
    text = "no agent is ready" + (f" ({', '.join(away)})" if away else "")
    missing = _no_weights(ctx, run) or _no_models(ctx, run)
    return f"{text}: {missing}" if states["joining"] and missing else text


def _no_models(ctx: Context, run: Run) -> str:
    """Which adapter's model none of the agents that are joining has, or nothing."""
    policies = {name: policy_id(run.name, name) for name in run.spec.workflow.policies}
    joining = [ctx.tables.agents[name] for name, it in ctx.agents.items() if it.state == "joining"]
    lacking = [without_model(run, policies, agent) for agent in joining]
    if not lacking or not all(lacking):
        return ""
    return f"none of them has the model for the adapter of {lacking[0]} (agent.local_models)"


def _no_weights(ctx: Context, run: Run) -> str:
    ids = [policy_id(run.name, name) for name in run.spec.workflow.policies]
    unmade = [id for id in ids if f"{id}@{ctx.tables.policies[id].head}" not in ctx.tables.versions]
    if not unmade:
        return ""
    return (
        f"the first weights of {', '.join(unmade)} are not there yet;"
        " its trainer publishes them (is it running?)"
    )


def _policy(
    ctx: Context, run: Run, policy: Policy, statuses: list[EvaluationStatus]
) -> PolicyStatus:
    live = ctx.policies.get(policy.id)
    head = ctx.tables.versions.get(f"{policy.id}@{policy.head}")
    nodes = () if live is None else live.tree.nodes.values()
    deltas = (node for node in nodes if node.stored and node.delta_bytes)
    newest = max(deltas, key=lambda node: node.version, default=None)
    return PolicyStatus(
        policy=policy.id,
        trainer=trainers.state(ctx, policy),
        step=policy.step,
        steps=run.spec.policies[policy.name].steps,
        head_version=policy.head,
        head_digest="" if head is None else head.digest,
        checkpoint_step=policy.checkpoint_step,
        buffered_groups=0 if live is None else len(live.buffer) + len(live.unplaced),
        last_step=policy.last_step,
        evaluations=tuple(status for status in statuses if status.policy == policy.id),
        replay_groups=0 if live is None else len(live.pool.entries),
        delta_bytes=None if newest is None else newest.delta_bytes,
        full_bytes=None if newest is None else newest.full_bytes,
    )


def _agent(ctx: Context, name: str) -> AgentStatus:
    live = ctx.agents[name]
    agent = ctx.tables.agents[name]
    token_s = live.estimate.token_s.value
    return AgentStatus(
        name=name,
        state=shown(agent, live),
        slots=agent.slots,
        # The last heartbeat may be older than the end of what it counted.
        running_sequences=live.running_sequences if live.leases and live.state != "gone" else 0,
        leases=len(live.leases),
        rtt_s=live.estimate.rtt_s.value,
        rate_tokens_s=_rate(token_s),
        tokens_generated=live.tokens_generated,
        bytes_up=live.bytes_up,
        bytes_down=live.bytes_down,
        versions={policy: ref.version for policy, ref in agent.versions.items()},
        digests={policy: ref.digest for policy, ref in agent.versions.items()},
        groups_done=agent.groups_done,
        attempts_failed=agent.attempts_failed,
        hardware=agent.hardware,
        labels=agent.labels,
        cordoned=agent.cordoned,
        quarantined=agent.quarantined,
        evidence=tuple(agent.evidence),
        clock_offset_s=live.clock_offset_s,
        price_usd_hour=agent.price_usd_hour,
        up_bytes_s=_rate(live.estimate.up_byte_s.value),
        down_bytes_s=_rate(live.estimate.down_byte_s.value),
        spool_bytes=live.spool_bytes,
        gpus=live.gpus,
    )


def _rate(unit_s: float | None) -> float | None:
    """Units per second from seconds per unit."""
    return 1.0 / unit_s if unit_s else None
