"""What a person sees of a scheduler: tables for a terminal, and plain lines for logs.

Pure functions of a ``SchedulerStatus``; nothing here asks anybody for anything. The live view,
``status`` and the summary draw the same tables.
"""

from collections.abc import Mapping, Sequence
from typing import get_args

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from farflow.evaluation_text import accuracy_text, failure_text, pass_at_text
from farflow.words import counted
from transport.ids import policy_name
from transport.runs import HELD_OUT
from transport.status import (
    AccountingRow,
    AgentStatus,
    Alert,
    CopyState,
    DemandStatus,
    EvaluationStatus,
    PolicyStatus,
    RunStatus,
    SchedulerStatus,
    StepStatus,
)

PLAIN_WIDTH = 160
"""Columns of tables that go to a file or pipe, which has no width of its own."""

SHOWN_OVER = 5
"""How many finished runs, and how many agents that left, have a line in ``farflow status``."""

MAX_HARDWARE = 24
"""Characters of it in a table."""

_SPARKS = "▁▂▃▄▅▆▇█"


def new_table(title: str) -> Table:
    """An empty table in the one style that all of them have; brackets in ``title`` (a reason may
    quote a file) are no markup."""
    heading = Text(title, style="bold")
    return Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def printable(text: str) -> str:
    """``text`` without what would steer a terminal: it may come from an agent or a prompt."""
    return "".join(each if each.isprintable() or each == "\t" else "·" for each in text)


def human_bytes(count: float) -> str:
    """Decimal units, as networks are sold: ``12.3 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The last ``width`` values between 0 and 1 as one line of blocks."""
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[min(top, max(0, int(v * top + 0.5)))] for v in values[-width:])


def delta_text(step: StepStatus | None) -> str:
    """Delta size against full size."""
    return "-" if step is None else _share_text(step.delta_bytes, step.full_bytes)


def _share_text(part: int | None, whole: int | None) -> str:
    if part is None or not whole:
        return "-"
    return f"{human_bytes(part)} / {human_bytes(whole)} ({100 * part / whole:.0f} %)"


def policy_delta_text(policy: PolicyStatus) -> str:
    """``delta_text`` of the last step, or of the newest version that is stored: storing one may
    take longer than a step."""
    last = policy.last_step
    if last is not None and last.delta_bytes is not None:
        return delta_text(last)
    return _share_text(policy.delta_bytes, policy.full_bytes)


def policy_table(run: RunStatus, rewards: Mapping[str, Sequence[float]]) -> Table:
    """One row per policy; ``rewards`` holds recent mean training rewards by policy id."""
    state = f"{run.state} ({printable(run.reason)})" if run.reason else run.state
    table = new_table(" · ".join((f"run {run.name}", state, *_run_facts(run))))
    columns = ("policy", "trainer", "step", "reward", "", "held-out", "lag", "buffer")
    for column in (*columns, "delta / full"):
        table.add_column("lag in steps" if column == "lag" else column)
    for policy in run.policies:
        last = policy.last_step
        cells = policy_cells(policy, rewards)
        if last is not None:
            cells["lag"] = f"mean {cells['lag']}, max {last.policy_lag_max}"
        table.add_row(*(cells[column] for column in columns), policy_delta_text(policy))
    return table


def policy_cells(policy: PolicyStatus, rewards: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """What tables show of a policy, by the column's heading; ``rewards`` so far by policy id are
    drawn without one."""
    last = policy.last_step
    return {
        "policy": policy_name(policy.policy),
        "trainer": policy.trainer,
        "step": f"{policy.step}/{policy.steps}",
        "reward": "-" if last is None else f"{last.reward_mean:.3f}",
        "": sparkline(rewards.get(policy.policy, ()), 12),
        "held-out": accuracy_text(policy.evaluations),
        "lag": "-" if last is None else f"{last.policy_lag_mean:.1f}",
        "buffer": str(policy.buffered_groups),
    }


def evaluation_table(run: RunStatus) -> Table | None:
    """One row per policy and evaluation; None where ``policy_table`` says all."""
    table = new_table(f"evaluations of run {run.name}")
    for column in ("policy", "evaluation", "accuracy", "pass@k", "answers", "items", "now"):
        table.add_column(column)
    told = False
    for policy in run.policies:
        by_name: dict[str, list[EvaluationStatus]] = {}
        for status in policy.evaluations:
            by_name.setdefault(status.name, []).append(status)
        for name, found in by_name.items():
            last = next((e for e in reversed(found) if e.done), found[-1])
            told = told or name != HELD_OUT or last.samples > 1 or any(e.failure for e in found)
            table.add_row(
                policy_name(policy.policy),
                name,
                accuracy_text(found, name),
                pass_at_text(last) if last.done else "-",
                str(last.samples),
                str(last.scored if last.done else last.items),
                _now(found),
            )
    return table if told else None


def _now(found: Sequence[EvaluationStatus]) -> str:
    """What is under way of one name, or why its latest has no result or not all of it."""
    if found[-1].failure:
        return f"v{found[-1].version}: {failure_text(found[-1])}"
    running = next((e for e in reversed(found) if not e.done and not e.failure), None)
    if running is None:
        return ""
    return f"v{running.version}: {running.scored} of {running.items} items"


def _run_facts(run: RunStatus) -> list[str]:
    """What a run costs and what waits in it, where there is any."""
    facts = [f"{run.cost_usd:.2f} USD"] if run.cost_usd else []
    facts += [f"{counted(run.external_open, 'job')} of others"] if run.external_open else []
    facts += [counted(run.dead_letters, "dead letter")] if run.dead_letters else []
    facts += [f"tenant {run.tenant}"] if run.tenant else []
    return facts


def agent_state(agent: AgentStatus) -> str:
    """``ready``, ``ready, cordoned``, ``lost, quarantined`` ..."""
    marks = ["cordoned"] if agent.cordoned and agent.state != "cordoned" else []
    marks += ["quarantined"] if agent.quarantined and agent.state != "quarantined" else []
    return ", ".join((agent.state, *marks))


def agent_table(agents: Sequence[AgentStatus], rates: Mapping[str, float]) -> Table:
    """One row per agent; ``rates`` holds measured tokens per second by agent name, where they are
    missing ``token_rate`` is shown."""
    priced = any(agent.price_usd_hour for agent in agents)
    table = new_table("agents")
    columns = ["agent", "state", "hardware", *(["USD/h"] if priced else []), "rtt", "clock"]
    columns += ["tokens/s", "slots", "leases", "groups", "version", "up", "down"]
    for column in columns:
        table.add_column(column)
    for agent in agents:
        cells = agent_cells(agent, rates)
        cells["hardware"] = cells["hardware"][:MAX_HARDWARE]
        table.add_row(*(Text(cells[column]) for column in columns))
    return table


def agent_cells(agent: AgentStatus, rates: Mapping[str, float]) -> dict[str, str]:
    """What tables show of an agent, by the column's heading; ``rates`` as in ``agent_table``."""
    versions = ", ".join(f"{policy_name(p)} v{v}" for p, v in sorted(agent.versions.items()))
    return {
        "agent": agent.name,
        "state": agent_state(agent),
        "hardware": printable(agent.hardware) or "-",
        "USD/h": f"{agent.price_usd_hour:.2f}" if agent.price_usd_hour else "-",
        "rtt": "-" if agent.rtt_s is None else f"{1000 * agent.rtt_s:.0f} ms",
        "clock": clock_text(agent.clock_offset_s),
        "tokens/s": f"{rates.get(agent.name, token_rate(agent)):.0f}",
        "slots": f"{agent.running_sequences}/{agent.slots}",
        "leases": str(agent.leases),
        "groups": str(agent.groups_done),
        "version": versions or "-",
        "up": human_bytes(agent.bytes_up),
        "down": human_bytes(agent.bytes_down),
    }


def token_rate(agent: AgentStatus) -> float:
    """Tokens per second of all slots that are in use, from the learnt rate of one."""
    return (agent.rate_tokens_s or 0.0) * agent.running_sequences


def clock_text(offset_s: float | None) -> str:
    """By how much a clock is off: ``+3 ms``, ``-2.5 s``; + when the scheduler's is ahead."""
    if offset_s is None:
        return "-"
    return f"{1000 * offset_s:+.0f} ms" if abs(offset_s) < 1.0 else f"{offset_s:+.1f} s"


def alert_lines(alerts: Sequence[Alert], agents: Sequence[AgentStatus]) -> list[str]:
    """What wants a person: alerts, and why an agent is quarantined."""
    lines = [f"{alert.code} {alert.subject}: {alert.message}" for alert in alerts]
    for agent in agents:
        if agent.quarantined:
            lines.append(f"agent {agent.name} is quarantined: {agent.quarantined}")
            lines += [f"  {evidence}" for evidence in agent.evidence]
    return lines


_BINDS = {
    "training": ", training sets the pace",
    "links": ", the links set the pace",
    "staleness": ", the lag bound sets the pace",
}


def demand_lines(demand: Sequence[DemandStatus]) -> list[str]:
    """What more slots would bring each run, or why nothing."""
    return [
        f"{one.run}: {counted(one.more_slots, 'more slot')} ({one.hardware or 'any hardware'})"
        " would raise "
        f"{one.steps_hour:.1f} steps/hour to {one.steps_hour_with:.1f}: {one.reason}"
        if one.more_slots
        else f"{one.run}: more slots would not help{_BINDS.get(one.binds, '')}: {one.reason}"
        for one in demand
    ]


def accounting_table(rows: Sequence[AccountingRow], run: str = "") -> Table:
    """Where every (group, policy) went; the last column says whether the row balances."""
    table = new_table(f"accounting of run {run}" if run else "accounting")
    table.add_column("policy")
    table.add_column("kind")
    used = [s for s in get_args(CopyState) if any(getattr(row, s) for row in rows)]
    rare = ("requeued", "replayed")
    outside = ["abandoned", *(name for name in rare if any(getattr(row, name) for row in rows))]
    for column in ("submitted", *used, *outside, "balance"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            policy_name(row.policy),
            row.kind,
            str(row.submitted),
            *(str(getattr(row, s)) for s in used),
            *(str(getattr(row, s)) for s in outside),
            "ok" if row.balance == 0 else f"off by {row.balance}",
        )
    return table


def screen(
    status: SchedulerStatus,
    rewards: Mapping[str, Sequence[float]],
    rates: Mapping[str, float],
    note: str = "",
) -> RenderableType:
    """The live view."""
    parts: list[RenderableType] = []
    for run in status.runs:
        parts.append(policy_table(run, rewards))
        evaluations = evaluation_table(run)
        parts += [] if evaluations is None else [evaluations]
    parts.append(agent_table(status.agents, rates))
    parts += [Text(line, style="yellow") for line in alert_lines(status.alerts, status.agents)]
    parts += [Text(line, style="dim") for line in demand_lines(status.demand)]
    if note:
        parts.append(Text(note, style="dim"))
    return Group(*parts)


def overview(status: SchedulerStatus, *, every: bool = False) -> RenderableType:
    """What ``farflow status`` prints: as ``screen``, with accounting and counters. Of what is over
    (finished runs, agents that said goodbye) only the latest few have a line, unless ``every``."""
    live, over = list(status.runs), []
    here, gone = list(status.agents), []
    if not every:
        live = [run for run in status.runs if run.state != "finished"]
        over = [run for run in status.runs if run.state == "finished"]
        here = [agent for agent in status.agents if agent.state != "gone"]
        gone = [agent for agent in status.agents if agent.state == "gone"]
    shown = msgspec.structs.replace(status, runs=tuple(live), agents=tuple(here))
    parts: list[RenderableType] = [screen(shown, {}, {})]
    parts += [accounting_table(run.accounting, run.name) for run in live if run.accounting]
    parts += [Text(_finished_line(run)) for run in over[-SHOWN_OVER:]]
    parts += [Text(_gone_line(agent)) for agent in gone[:SHOWN_OVER]]
    hidden = [
        counted(len(found) - SHOWN_OVER, what)
        for found, what in ((over, "finished run"), (gone, "gone agent"))
        if len(found) > SHOWN_OVER
    ]
    if hidden:
        parts.append(Text(f"not shown: {', '.join(hidden)}; --all shows them", style="dim"))
    parts.append(Text(counters_line(status), style="dim"))
    parts += [Text(line, style="dim") for line in counter_notes(status)]
    return Group(*parts)


def _finished_line(run: RunStatus) -> str:
    steps = ", ".join(f"{policy_name(p.policy)} {p.step}/{p.steps}" for p in run.policies)
    off = [row for row in run.accounting if row.balance]
    books = f" · accounting off by {off[0].balance}" if off else ""
    return printable(f"run {run.name} · finished ({run.reason}) · {steps}{books}")


def _gone_line(agent: AgentStatus) -> str:
    return f"agent {agent.name} · gone · {counted(agent.groups_done, 'group')} done"


def counters_line(status: SchedulerStatus) -> str:
    """How often which thing happened in the scheduler, as names and numbers."""
    return "counters: " + ", ".join(f"{k} {v}" for k, v in sorted(status.counters.items()) if v)


_REFUSED = {
    "run.unknown": "of a run that is not submitted (yet); a trainer asks until it is",
    "run.finished": "of a run that is over",
    "agent.duplicate": "a second process with a connected agent's key",
}


def counter_notes(status: SchedulerStatus) -> list[str]:
    """What the counters ``refused.CODE`` mean, where there are any."""
    named = [name.partition("refused.") for name, n in sorted(status.counters.items()) if n]
    codes = [code for before, found, code in named if found and not before]
    told = "".join(f"; {code}: {_REFUSED[code]}" for code in codes if code in _REFUSED)
    return [f"refused.CODE: what peers asked for and did not get{told}"] if codes else []


def step_line(step: StepStatus) -> str:
    """One optimizer step as a line for a log."""
    return (
        f"step {step.step} {policy_name(step.policy)} v{step.version} "
        f"reward {step.reward_mean:.3f} lag {step.policy_lag_mean:.1f} "
        f"(max {step.policy_lag_max}) tokens {step.response_tokens} "
        f"busy {step.busy_s:.2f} s waiting {step.waiting_s:.2f} s delta {delta_text(step)}"
    )


def agents_line(agents: Sequence[AgentStatus], rates: Mapping[str, float]) -> str:
    """All agents in one line for a log."""
    parts = []
    for agent in agents:
        rtt = "-" if agent.rtt_s is None else f"{1000 * agent.rtt_s:.0f} ms"
        newest = max(agent.versions.values(), default=None)
        parts.append(
            f"{agent.name} {agent_state(agent)} rtt {rtt} "
            f"{rates.get(agent.name, token_rate(agent)):.0f} tok/s "
            f"{agent.running_sequences}/{agent.slots} slots "
            f"v{'-' if newest is None else newest}"
        )
    return "agents: " + " | ".join(parts)
