"""What is said at the end of a run: results, the accounting, and checks that can fail.

Three checks decide whether the run was clean: every accounting row balances, every agent serves
exactly the published weights of the head version, and no group was trained twice along the
surviving lineage (read back from the trainer's own checkpoint).
"""

from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from farflow.evaluation_text import failure_text
from farflow.view import accounting_table, human_bytes, new_table
from transport.ids import policy_name
from transport.runs import HELD_OUT
from transport.status import AccountingRow, EvaluationStatus, PolicyStatus, SchedulerStatus

Lineage = Sequence[tuple[int, Sequence[str]]]
"""Steps with the job ids that each was trained on, as a checkpoint holds them."""


class EvaluationSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The first and the last finished evaluation of one name; ``pass_at`` is of the last, by k.
    One without an answer has no accuracy (None), and ``failures`` says which and why."""

    name: str
    samples: int
    items: int
    accuracy_before: float | None
    accuracy_after: float | None
    pass_at: dict[str, float]
    failures: tuple[str, ...] = ()


class PolicySummary(msgspec.Struct, frozen=True, kw_only=True):
    """One policy's result. ``accuracy_before`` and ``accuracy_after`` are those of the evaluation
    ``held-out``, and all of them are in ``evaluations``; ``trained_twice`` lists job ids, empty
    when all is well; ``lineage_groups`` is None for a frozen policy, and where the checkpoint could
    not be read."""

    policy: str
    steps: int
    version: int
    digest: str
    accuracy_before: float | None
    accuracy_after: float | None
    held_out_items: int
    lineage_groups: int | None
    trained_twice: tuple[str, ...]
    evaluations: tuple[EvaluationSummary, ...] = ()


class AgentDigest(msgspec.Struct, frozen=True, kw_only=True):
    """The weights an agent ended on, beside what was published."""

    agent: str
    policy: str
    version: int | None
    digest: str
    equal: bool


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The whole summary; ``problems`` is empty when every check passed. ``wall_s`` is how long
    `farflow up` ran and ``training_s`` from the first step that it saw to the last, both since it
    was ``resumed`` if it was."""

    run: str
    state: str
    reason: str
    wall_s: float
    training_s: float | None
    resumed: bool = False
    policies: tuple[PolicySummary, ...]
    agents: tuple[AgentDigest, ...]
    accounting: tuple[AccountingRow, ...]
    bytes_up: int
    bytes_down: int
    problems: tuple[str, ...]


def repeated(lineage: Lineage) -> tuple[str, ...]:
    """Job ids that occur more than once in ``(step, job ids)`` pairs, sorted."""
    seen: set[str] = set()
    twice: set[str] = set()
    for _, jobs in lineage:
        for job in jobs:
            (twice if job in seen else seen).add(job)
    return tuple(sorted(twice))


def summarise(
    status: SchedulerStatus,
    run: str,
    *,
    wall_s: float,
    training_s: float | None,
    resumed: bool = False,
    lineages: Mapping[str, Lineage | None],
) -> RunSummary:
    """Put a run's last status and the lineages of its checkpoints together; ``lineages`` has every
    trained policy's id, with None for one that could not be read."""
    state = next(r for r in status.runs if r.name == run)
    problems: list[str] = []
    policies = [_policy(p, lineages.get(p.policy)) for p in state.policies]
    agents = [
        AgentDigest(
            agent=agent.name,
            policy=policy.policy,
            version=agent.versions.get(policy.policy),
            digest=agent.digests.get(policy.policy, ""),
            equal=agent.digests.get(policy.policy, "") == policy.head_digest != "",
        )
        for agent in status.agents
        if agent.state not in ("gone", "lost")
        for policy in state.policies
    ]
    failed = state.state != "finished" or state.reason.startswith("failed")
    if failed:
        problems.append(f"the run is {state.state}: {state.reason or 'no reason given'}")
    problems.extend(
        f"accounting of {row.policy} ({row.kind}) is off by {row.balance}"
        for row in state.accounting
        if row.balance
    )
    problems.extend(
        f"evaluation {evaluation.name} of {policy.policy} {failure}"
        for policy in policies
        for evaluation in policy.evaluations
        for failure in evaluation.failures
    )
    problems.extend(
        f"agent {digest.agent} ended on version {digest.version} of {digest.policy}, whose digest "
        "differs from the published head"
        for digest in agents
        if not digest.equal and not failed
    )
    if not failed and not agents:
        problems.append("no agent was there at the end, so nobody's weights could be compared")
    for policy in policies:
        if not failed and policy.policy in lineages and policy.lineage_groups is None:
            problems.append(f"{policy.policy}: its checkpoint does not say what it was trained on")
        if policy.trained_twice:
            problems.append(
                f"{len(policy.trained_twice)} groups of {policy.policy} were trained twice along "
                f"the surviving lineage, among them {policy.trained_twice[0]}"
            )
        expected = sum(
            r.trained for r in state.accounting if r.policy == policy.policy and r.kind == "train"
        )
        if policy.lineage_groups is not None and policy.lineage_groups != expected:
            problems.append(
                f"{policy.policy}: the lineage holds {policy.lineage_groups} groups, the "
                f"accounting says {expected} were trained"
            )
    return RunSummary(
        run=run,
        state=state.state,
        reason=state.reason,
        wall_s=wall_s,
        training_s=training_s,
        resumed=resumed,
        policies=tuple(policies),
        agents=tuple(agents),
        accounting=state.accounting,
        bytes_up=sum(a.bytes_up for a in status.agents),
        bytes_down=sum(a.bytes_down for a in status.agents),
        problems=tuple(problems),
    )


def _policy(policy: PolicyStatus, lineage: Lineage | None) -> PolicySummary:
    evaluations = _evaluations([e for e in policy.evaluations if e.done or e.failure])
    held_out = next((e for e in evaluations if e.name == HELD_OUT), None)
    return PolicySummary(
        policy=policy.policy,
        steps=policy.step,
        version=policy.head_version,
        digest=policy.head_digest,
        accuracy_before=None if held_out is None else held_out.accuracy_before,
        accuracy_after=None if held_out is None else held_out.accuracy_after,
        held_out_items=0 if held_out is None else held_out.items,
        lineage_groups=None if lineage is None else sum(len(jobs) for _, jobs in lineage),
        trained_twice=() if lineage is None else repeated(lineage),
        evaluations=evaluations,
    )


def _evaluations(done: Sequence[EvaluationStatus]) -> tuple[EvaluationSummary, ...]:
    by_name: dict[str, list[EvaluationStatus]] = {}
    for status in sorted(done, key=lambda e: (e.step, e.version)):
        by_name.setdefault(status.name, []).append(status)
    return tuple(
        EvaluationSummary(
            name=name,
            samples=found[-1].samples,
            items=found[-1].scored,
            accuracy_before=found[0].accuracy if found[0].done else None,
            accuracy_after=found[-1].accuracy if found[-1].done else None,
            pass_at=found[-1].pass_at,
            failures=tuple(f"v{e.version}: {failure_text(e)}" for e in found if not e.done),
        )
        for name, found in sorted(by_name.items())
    )


def render(summary: RunSummary) -> RenderableType:
    """The summary for a terminal."""
    parts: list[RenderableType] = []
    table = new_table(f"run {summary.run}: {summary.state} ({summary.reason})")
    for column in ("policy", "steps", "version", "held-out before", "after", "items"):
        table.add_column(column)
    for policy in summary.policies:
        table.add_row(
            policy_name(policy.policy),
            str(policy.steps),
            f"v{policy.version}",
            _percent(policy.accuracy_before),
            _percent(policy.accuracy_after),
            str(policy.held_out_items),
        )
    parts.append(table)
    if any(e.name != HELD_OUT or e.samples > 1 for p in summary.policies for e in p.evaluations):
        parts.append(_evaluation_table(summary))
    digests = new_table("weights at the end")
    for column in ("agent", "policy", "version", "digest", "equals the published"):
        digests.add_column(column)
    for digest in summary.agents:
        digests.add_row(
            digest.agent,
            policy_name(digest.policy),
            "-" if digest.version is None else f"v{digest.version}",
            digest.digest[:16],
            "yes" if digest.equal else "NO",
        )
    parts.append(digests)
    parts.append(accounting_table(summary.accounting))
    since = "since it was resumed " if summary.resumed else ""
    training = "" if summary.training_s is None else f", training {summary.training_s:.0f} s of it"
    parts.append(
        Text(
            f"{since}{summary.wall_s:.0f} s{training} · {human_bytes(summary.bytes_up)} up, "
            f"{human_bytes(summary.bytes_down)} down over the agents' links"
        )
    )
    if summary.problems:
        parts.extend(Text(f"PROBLEM: {problem}", style="bold red") for problem in summary.problems)
    else:
        parts.append(
            Text(
                "accounting balances, agents' weights equal the published, no group trained twice",
                style="green",
            )
        )
    return Group(*parts)


def _evaluation_table(summary: RunSummary) -> RenderableType:
    table = new_table("evaluations")
    for column in ("policy", "evaluation", "before", "after", "pass@k after", "answers", "items"):
        table.add_column(column)
    for policy in summary.policies:
        for found in policy.evaluations:
            chances = (f"{k}: {_percent(chance)}" for k, chance in found.pass_at.items())
            table.add_row(
                policy_name(policy.policy),
                found.name,
                _percent(found.accuracy_before),
                _percent(found.accuracy_after),
                ", ".join(chances) or "-",
                str(found.samples),
                str(found.items),
            )
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
