"""A scheduler's status as a page of metrics. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from transport.runs import HELD_OUT
from transport.status import (
    AgentStatus,
    CopyState,
    PolicyStatus,
    RunStatus,
    SchedulerStatus,
)
from transport.telemetry import Sample, page

_AGENT_STATES = ("joining", "ready", "suspect", "lost", "draining", "gone")
_TRAINER_STATES = ("absent", "waiting", "training", "done")
_GAUGES = {
    "loop.lag_ms": ("farflow_scheduler_loop_lag_seconds", 1e-3),
    "disk.free_mib": ("farflow_scheduler_disk_free_bytes", float(2**20)),
}
"""Counters of the status that are gauges, and what their unit is worth."""

_Found = Iterator[tuple[str, tuple[str, ...], float | None]]


@dataclass(slots=True)
class BridgeCounts:
    """What the MQTT bridge did in this life of its process; ``commands`` by the code of their
    answer, ``ok`` for those that were carried out."""

    connected: bool = False
    connections: int = 0
    published: int = 0
    commands: Counter[str] = field(default_factory=Counter)

    def facts(self) -> dict[str, Any]:
        """For the log."""
        return {
            "connected": self.connected,
            "connections": self.connections,
            "published": self.published,
            "commands": dict(self.commands),
        }


@dataclass(frozen=True, slots=True)
class HttpCounts:
    """What the HTTP interface says of itself: connections now, refusals by code in this life, and
    how old the status is of which it makes the page."""

    connections: int
    refused: Mapping[str, int]
    status_age_s: float


def render(
    status: SchedulerStatus, bridge: BridgeCounts | None = None, http: HttpCounts | None = None
) -> bytes:
    """The page; agents that said goodbye and runs that ended are left out, so that a scheduler of
    weeks does not grow its page."""
    samples: dict[str, list[Sample]] = defaultdict(list)
    if http is not None:
        samples["farflow_scheduler_status_age_seconds"] = [((), round(http.status_age_s, 3))]
        samples["farflow_http_connections"] = [((), http.connections)]
        samples["farflow_http_refused_total"] = [
            ((code,), count) for code, count in sorted(http.refused.items())
        ]
    if bridge is not None:
        samples["farflow_mqtt_connected"] = [((), int(bridge.connected))]
        samples["farflow_mqtt_connections_total"] = [((), bridge.connections)]
        samples["farflow_mqtt_published_total"] = [((), bridge.published)]
        samples["farflow_mqtt_commands_total"] = [
            ((code,), count) for code, count in sorted(bridge.commands.items())
        ]
    for name, labels, value in _all(status):
        if value is not None:
            samples[name].append((labels, value))
    return page("scheduler", samples)


def _all(status: SchedulerStatus) -> _Found:
    yield "farflow_scheduler_info", (status.build, str(status.term)), 1
    yield "farflow_scheduler_uptime_seconds", (), status.uptime_s
    for name, count in sorted(status.counters.items()):
        if name in _GAUGES:
            metric, unit = _GAUGES[name]
            yield metric, (), count * unit
        else:
            yield "farflow_scheduler_happened_total", (name,), count
    for alert in status.alerts:
        yield "farflow_alert", (alert.code, alert.subject), 1
    states = Counter(agent.state for agent in status.agents)
    for state in sorted({*_AGENT_STATES, *states}):
        yield "farflow_agents", (state,), states[state]
    runs = [run for run in status.runs if run.state != "finished"]
    heads = {p.policy: p.head_version for run in runs for p in run.policies}
    for agent in status.agents:
        if agent.state != "gone":
            yield from _agent(agent, heads)
    for run in runs:
        yield from _run(run)
        for policy in run.policies:
            yield from _policy(policy)
    for demand in status.demand:
        yield "farflow_run_more_slots", (demand.run,), demand.more_slots
        yield "farflow_run_steps_per_hour", (demand.run,), demand.steps_hour


def _agent(agent: AgentStatus, heads: dict[str, int]) -> _Found:
    own = (agent.name,)
    yield "farflow_agent_slots", own, agent.slots
    yield "farflow_agent_running_sequences", own, agent.running_sequences
    yield "farflow_agent_leases", own, agent.leases
    yield "farflow_agent_round_trip_seconds", own, agent.rtt_s
    yield "farflow_agent_clock_offset_seconds", own, agent.clock_offset_s
    yield "farflow_agent_upload_bytes_per_second", own, agent.up_bytes_s
    yield "farflow_agent_download_bytes_per_second", own, agent.down_bytes_s
    yield "farflow_agent_quarantined", own, int(bool(agent.quarantined))
    yield "farflow_agent_tokens_total", own, agent.tokens_generated
    yield "farflow_agent_sent_bytes_total", own, agent.bytes_up
    yield "farflow_agent_received_bytes_total", own, agent.bytes_down
    yield "farflow_agent_groups_total", own, agent.groups_done
    yield "farflow_agent_failed_attempts_total", own, agent.attempts_failed
    for policy, version in sorted(agent.versions.items()):
        if policy in heads:
            yield "farflow_agent_versions_behind", (agent.name, policy), heads[policy] - version


def _run(run: RunStatus) -> _Found:
    own = (run.name,)
    for quantile, value in (("0.5", run.turnaround_p50_s), ("0.95", run.turnaround_p95_s)):
        yield "farflow_run_turnaround_seconds", (run.name, quantile), value
    yield "farflow_run_cost_usd_total", own, run.cost_usd
    yield "farflow_run_tokens_total", own, run.tokens
    yield "farflow_run_hedge_tokens_total", own, run.hedge_tokens
    yield "farflow_run_dead_letters", own, run.dead_letters
    for row in run.accounting:
        for state in ("submitted", *get_args(CopyState), "abandoned", "requeued", "replayed"):
            count = getattr(row, state)
            if count or state in ("submitted", "trained"):
                yield "farflow_groups", (run.name, row.policy, row.kind, state), count


def _policy(policy: PolicyStatus) -> _Found:
    own = (policy.policy,)
    yield "farflow_policy_step", own, policy.step
    yield "farflow_policy_steps_wanted", own, policy.steps
    yield "farflow_policy_head_version", own, policy.head_version
    yield "farflow_policy_checkpoint_step", own, policy.checkpoint_step
    yield "farflow_policy_buffered_groups", own, policy.buffered_groups
    yield "farflow_policy_replay_groups", own, policy.replay_groups
    for state in sorted({*_TRAINER_STATES, policy.trainer}):
        yield "farflow_policy_trainer", (policy.policy, state), int(state == policy.trainer)
    last = policy.last_step
    if last is not None:
        yield "farflow_policy_reward", own, last.reward_mean
        yield "farflow_policy_lag_steps", (policy.policy, "mean"), last.policy_lag_mean
        yield "farflow_policy_lag_steps", (policy.policy, "max"), last.policy_lag_max
        yield "farflow_policy_last_step_seconds", (policy.policy, "training"), last.busy_s
        yield "farflow_policy_last_step_seconds", (policy.policy, "waiting"), last.waiting_s
        yield "farflow_policy_delta_bytes", own, last.delta_bytes
        yield "farflow_policy_full_bytes", own, last.full_bytes
    newest = {e.name or HELD_OUT: e for e in policy.evaluations if e.done}
    for name, evaluation in sorted(newest.items()):
        yield "farflow_policy_accuracy", (policy.policy, name), evaluation.accuracy
