"""The plain words of ``explain``: what keeps a job, policy, run, evaluation or agent waiting.

What always holds: nothing is changed; the cost is that of the few things that are named.
"""

from collections import Counter
from typing import Final

from scheduler.core import honesty, replay_pool, trainers
from scheduler.core.accounting import waiting
from scheduler.core.admission import (
    admissible,
    room,
    running_groups,
    spec_of,
    trained_policies,
    wants_groups,
)
from scheduler.core.admission import bound as groups_bound
from scheduler.core.agent_states import may_work, shown
from scheduler.core.constraints import without_model
from scheduler.core.context import Context, Lease
from scheduler.core.state import Agent, Copy, Evaluation, Job, Policy, Run
from scheduler.core.status import stuck
from scheduler.core.views import pins
from transport.messages import ScoredCandidate

_SHOWN = 8
_CODE = 8
"""Digits of a fingerprint that people are shown."""


def times(count: int) -> str:
    """``once``, ``twice``, ``3 times``, ``never``."""
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def of_job(ctx: Context, job: Job, scored: tuple[ScoredCandidate, ...]) -> list[str]:
    """Why an open job is where it is."""
    found: list[str] = []
    if job.state == "done":
        found += [_copy(ctx, policy, copy) for policy, copy in job.copies.items()]
    else:
        if job.state == "queued":
            found += _queued(ctx, job, scored)
        for record in job.attempts:
            found += of_lease(ctx, ctx.leases[record.id])
        found += [
            f"{policy} does not take it: {copy.reason}"
            for policy, copy in job.copies.items()
            if copy.state == "dropped"
        ]
    if job.failures or job.losses:
        most = ctx.tables.runs[job.run].spec.max_attempts
        found.append(f"failed {job.failures} of at most {most} times, lost {times(job.losses)}")
    if job.avoid:
        found.append(f"it failed on {', '.join(job.avoid)}")
    if job.replays:
        found.append(f"it was a dead letter {times(job.replays)}")
    if job.external is not None and job.external.due_s:
        found.append(f"its deadline is in {job.external.due_s - ctx.now:.1f} s")
    return found


def of_lease(ctx: Context, lease: Lease) -> list[str]:
    """Where an attempt is and how long it may take."""
    agent, live = ctx.tables.agents[lease.agent], ctx.agents[lease.agent]
    age_s = ctx.now - lease.offered_s
    where = f"{lease.attempt} on {lease.agent} ({shown(agent, live)})"
    if not lease.leased:
        return [f"{where}: offered {age_s:.1f} s ago, not answered yet"]
    if lease.spooled:
        return [f"{where}: generated, its result is on its way"]
    if not lease.counted:
        return [f"{where}: not counted on any more; its result wins if it comes first"]
    text = f"{where}: in flight for {age_s:.1f} s"
    if lease.started_s is not None:
        text += f", running for {ctx.now - lease.started_s:.1f} s"
    if lease.longest_s:
        text += f", expected {lease.longest_s:.1f} s of generation"
    if lease.unlisted:
        text += "; its agent does not list it"
    return [text]


def of_policy(ctx: Context, policy: Policy) -> tuple[str, list[str]]:
    """What a policy's trainer waits for and what its quota allows."""
    live = ctx.policies.get(policy.id)
    if live is None:
        return "finished", [f"its run is over, at step {policy.step}, version {policy.head}"]
    if not policy.trained:
        return "frozen", ["it is not trained: its version 0 is used as it is"]
    spec = spec_of(ctx, policy)
    state = trainers.state(ctx, policy)
    found = [f"step {policy.step} of {spec.steps}, head {policy.head}"]
    under_way = waiting(ctx, policy.id) + running_groups(ctx, policy)
    bound = groups_bound(ctx, policy)
    left = room(ctx, policy)
    if left:
        found.append(f"quota: {under_way} of {bound} groups under way, room for {left}")
    else:
        found.append(f"waits for quota: {under_way} of {bound} groups are under way")
    request = policy.request
    if request is not None:
        again = replay_pool.available(ctx, policy, request.step, request.groups)
        have = len(live.taken.get(request.step, ())) + len(live.buffer) + again
        found.append(
            f"its trainer waits for the batch of step {request.step}:"
            f" {have} of {request.groups} groups are there"
        )
    if live.pool.entries:
        found.append(f"{len(live.pool.entries)} groups are kept to be trained on again")
    if live.unplaced:
        found.append(f"{len(live.unplaced)} groups wait for their version to be announced")
    if live.gone:
        found.append(f"its trainer has been silent for {ctx.now - live.heard_s:.0f} s")
    elif not live.present:
        found.append(f"its trainer {policy.trainer or '(none yet)'} is not connected")
    if live.starved_since_s is not None:
        found.append(
            f"nothing in flight or buffered for {ctx.now - live.starved_since_s:.1f} s:"
            " any agent may take its groups now"
        )
    return state, found


def of_run(ctx: Context, run: Run) -> list[str]:
    """What a run waits for."""
    live = ctx.runs.get(run.name)
    if live is None:
        return [f"it ended: {run.reason}"]
    found: list[str] = []
    if run.finishing:
        open_trainers = [p.id for p in trained_policies(ctx, run) if not p.final]
        found.append(
            f"it ends ({run.finishing}); {', '.join(open_trainers) or 'nobody'} has yet to"
            " export its model"
        )
    if run.state == "paused":
        found.append(
            f"it is paused: nothing is placed or granted; `farflow run resume {run.name}` goes on"
        )
    queued, external = len(ctx.queue(run.name)), len(live.external)
    found.append(f"{queued} training jobs queued, {live.in_flight} sequences in flight")
    if external:
        found.append(f"{external} jobs of submitters are open")
    why = stuck(ctx, run)
    if why:
        found.append(f"queued: {why}")
    if not queued and run.state == "running" and not admissible(ctx, run):
        wanting = [policy for policy in trained_policies(ctx, run) if wants_groups(ctx, policy)]
        full = [policy.id for policy in wanting if not room(ctx, policy)]
        if full:
            found.append(f"no new groups: {', '.join(full)} waits for quota")
    if run.skipped:
        found.append(f"{run.skipped} of {run.cursor} items were skipped by curators")
    if run.spec.max_groups:
        found.append(f"{run.submitted_groups} of max_groups {run.spec.max_groups} are made")
    return found


def of_evaluation(ctx: Context, evaluation: Evaluation) -> tuple[str, list[str]]:
    found = [
        f"{evaluation.name} ({evaluation.kind}): {evaluation.scored} of {evaluation.items} items"
        f" scored, {evaluation.open_jobs} jobs open"
    ]
    if evaluation.failed:
        found.append(f"{evaluation.failed} items failed, the last with {evaluation.failure}")
    if evaluation.done:
        return ("done" if evaluation.scored else "not done"), found
    found += _pins_missing(ctx, evaluation.pinned)
    if evaluation.restarts:
        found.append(f"started over {times(evaluation.restarts)}: its version was passed")
    return "open", found


_AWAY: Final = {
    "silent": "it has been silent for too long",
    "not_back": "it did not come back after the scheduler's restart",
    "revoked": "its key was revoked: it needs a new one, `farflow agent enrol --new-key`",
}


def of_agent(ctx: Context, name: str) -> tuple[str, list[str]]:
    """Why an agent gets work or none."""
    agent, live = ctx.tables.agents[name], ctx.agents[name]
    silent_s = ctx.now - live.heard_s
    found = [f"{live.load} sequences on {agent.slots} slots, heard {silent_s:.1f} s ago"]
    if live.state in ("lost", "gone") and live.away:
        found.append(_AWAY.get(live.away, live.away))
    if agent.quarantined:
        found.append(f"quarantined: {agent.quarantined}; `farflow release {name}` trusts it again")
    if agent.cordoned:
        found.append(f"cordoned: it gets no new work; `farflow uncordon {name}` ends that")
    if agent.drain is not None:
        found.append("was ordered to drain and has not said yet that it does")
    if live.blocked_until_s > ctx.now:
        found.append(
            f"no offers for {live.blocked_until_s - ctx.now:.1f} s, after"
            f" {live.declines} declines and {live.failures} failures in a row"
        )
    if live.state == "joining":
        found.append("it serves no version yet")
    if may_work(agent, live) and name not in ctx.open_agents and live.blocked_until_s <= ctx.now:
        found.append("it has no room")
    found += _other_code(ctx, agent) + _no_model(ctx, agent)
    found += honesty.shown(ctx, name)
    found += [f"evidence: {line}" for line in agent.evidence]
    return shown(agent, live), found


def _other_code(ctx: Context, agent: Agent) -> list[str]:
    """Runs whose groups an agent cannot make as others do, and what to install there."""
    found: list[str] = []
    for name, live in ctx.runs.items():
        codes = {ctx.tables.runs[name].spec.workflow.reference: "", **live.codes}
        for workflow, wanted in codes.items():
            code = agent.workflows.get(workflow)
            if code is None:
                found.append(
                    f"no work of run {name}: it has no workflow {workflow}; install its module"
                    " there and name it in agent.workflows"
                )
            elif wanted and code != wanted:
                found.append(
                    f"no work of run {name}: its code of workflow {workflow} ({code[:_CODE]}) is"
                    f" not that of the run's groups ({wanted[:_CODE]}); install the same version"
                    " there and restart it"
                )
    return found


def _no_model(ctx: Context, agent: Agent) -> list[str]:
    """Runs whose adapters an agent has no model for, and what to set there."""
    lacking = {
        name: without_model(ctx.tables.runs[name], live.policies, agent)
        for name, live in ctx.runs.items()
    }
    return [
        f"no work of run {name}: {policy} is published as an adapter; name the folder of its model"
        ' in agent.local_models there, with an engine that takes adapters (agent.engine = "torch")'
        for name, policy in lacking.items()
        if policy
    ]


def _queued(ctx: Context, job: Job, scored: tuple[ScoredCandidate, ...]) -> list[str]:
    run = ctx.tables.runs[job.run]
    if run.state != "running":
        return [f"queued: run {run.name} is {run.state}"]
    retry_s = ctx.timers.due("job", job.id)
    if retry_s is not None:
        return [f"queued: tried again in {retry_s - ctx.now:.1f} s, after it failed"]
    missing = _pins_missing(ctx, pins(ctx, job)) or _run_quota(ctx, run, job)
    if missing:
        return missing
    possible = [found for found in scored if found.verdict == "possible"]
    if possible:
        ahead = len(ctx.queue(job.queue)) - 1
        return [
            f"queued: {len(possible)} agents could take it; {ahead} other jobs wait in its"
            " queue, or a better place is expected soon"
        ]
    if not scored:
        return ["queued: there is no agent"]
    verdicts = Counter(found.verdict for found in scored)
    ordered = sorted(verdicts.items(), key=lambda entry: (-entry[1], entry[0]))
    return [
        "queued: no agent can take it",
        *(f"{count} agents: {verdict}" for verdict, count in ordered[:_SHOWN]),
    ]


def _run_quota(ctx: Context, run: Run, job: Job) -> list[str]:
    """The run's own limits, as ``fairness.over_quota`` applies them, without touching a bucket."""
    live, spec = ctx.runs[run.name], run.spec
    if job.evaluation:
        return []
    flying, most = live.in_flight + live.external_in_flight, spec.max_sequences_in_flight
    if most and flying and flying + job.sequences > most:
        return [f"queued: {flying} sequences are in flight, max_sequences_in_flight is {most}"]
    level = live.bucket.level
    if spec.tokens_per_minute and level is not None and level <= 0.0:
        return [f"queued: tokens_per_minute {spec.tokens_per_minute} is used up for now"]
    return []


def _pins_missing(ctx: Context, pinned: dict[str, int]) -> list[str]:
    found: list[str] = []
    for policy, version in pinned.items():
        node = ctx.policies[policy].tree.nodes.get(version) if policy in ctx.policies else None
        if node is None or not node.stored:
            found.append(f"queued: version {version} of {policy} is not in the weight store")
    return found


def _copy(ctx: Context, policy: str, copy: Copy) -> str:
    live = ctx.policies[policy]
    match copy.state:
        case "buffered":
            request = ctx.tables.policies[policy].request
            wants = "its trainer has not asked" if request is None else f"for {request.groups}"
            return f"{policy}: one of {len(live.buffer)} buffered groups; next batch: {wants}"
        case "taken":
            return f"{policy}: taken by step {copy.step}, until a checkpoint of it is durable"
        case state:
            return f"{policy}: {state}" + (f" ({copy.reason})" if copy.reason else "")
