"""Metrics for Prometheus: what each is called, means and warns of, and how a page is written.

The tables of ``METRICS`` are the one source: the endpoints give what they name,
``docs/metrics.md`` is made from them (``python -m farflow config metrics``), and a test holds both
together. Names follow the project's conventions (https://prometheus.io/docs/practices/naming):
``farflow_`` first, the unit in the name, ``_total`` for counters.

The text format (version 0.0.4) is written here and read back with ``prometheus_client`` in the
tests: that library's own writer takes several times as long (``bench.operations``), which a scrape
of a thousand agents shows.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

ALERT_AFTER: Final = "1m"
"""For how long a condition holds before it is an alert."""

Daemon = Literal["scheduler", "agent", "trainer", "service"]


class Metric(NamedTuple):
    """One metric. ``labels`` in the order in which samples give their values; ``alert`` is a
    condition in PromQL and what to do, empty where none is advised."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()
    alert: str = ""
    remedy: str = ""


Sample = tuple[tuple[str, ...], float]
"""Values of the labels, and the value."""

_AGENT = ("agent",)
_POLICY = ("policy",)
_RUN = ("run",)

METRICS: Final[dict[Daemon, tuple[Metric, ...]]] = {
    "scheduler": (
        Metric("farflow_scheduler_info", "gauge", "Always 1.", ("build", "term")),
        Metric(
            "farflow_scheduler_uptime_seconds", "gauge", "Since this life of the scheduler began."
        ),
        Metric(
            "farflow_scheduler_status_age_seconds",
            "gauge",
            "How long ago the scheduler said what this page says.",
        ),
        Metric(
            "farflow_scheduler_loop_lag_seconds",
            "gauge",
            "The longest that the deciding loop was held up within the last minute.",
            alert="farflow_scheduler_loop_lag_seconds > 0.5",
            remedy="give the scheduler a processor of its own, or fewer agents",
        ),
        Metric(
            "farflow_scheduler_disk_free_bytes",
            "gauge",
            "Free on the disk of the scheduler's folder.",
            alert="farflow_scheduler_disk_free_bytes < 1e9",
            remedy="free space: the scheduler ends when it cannot write",
        ),
        Metric(
            "farflow_scheduler_happened_total",
            "counter",
            "How often a thing happened; `what` is a counter of `farflow status`.",
            ("what",),
        ),
        Metric(
            "farflow_alert",
            "gauge",
            "1 while an alert of `farflow status` stands.",
            ("code", "subject"),
            alert="farflow_alert == 1",
            remedy="`farflow status` says what to do",
        ),
        Metric(
            "farflow_agents",
            "gauge",
            "Agents by state.",
            ("state",),
            alert='farflow_agents{state="ready"} == 0',
            remedy="`farflow logs AGENT`, and `farflow agent doctor` on the box",
        ),
        Metric(
            "farflow_agent_slots", "gauge", "Concurrent sequences that an agent can draw.", _AGENT
        ),
        Metric("farflow_agent_running_sequences", "gauge", "Sequences that it draws now.", _AGENT),
        Metric("farflow_agent_leases", "gauge", "Attempts that it holds.", _AGENT),
        Metric("farflow_agent_round_trip_seconds", "gauge", "Smoothed, of heartbeats.", _AGENT),
        Metric(
            "farflow_agent_clock_offset_seconds",
            "gauge",
            "By how much the scheduler's clock is ahead of the agent's.",
            _AGENT,
            alert="abs(farflow_agent_clock_offset_seconds) > 1",
            remedy="start a time service on the box",
        ),
        Metric("farflow_agent_upload_bytes_per_second", "gauge", "Learnt from bodies.", _AGENT),
        Metric("farflow_agent_download_bytes_per_second", "gauge", "Learnt from weights.", _AGENT),
        Metric(
            "farflow_agent_quarantined",
            "gauge",
            "1 while an agent is excluded.",
            _AGENT,
            alert="farflow_agent_quarantined == 1",
            remedy="`farflow explain AGENT` shows the evidence; `farflow release AGENT`",
        ),
        Metric(
            "farflow_agent_tokens_total", "counter", "Tokens drawn in this incarnation.", _AGENT
        ),
        Metric("farflow_agent_sent_bytes_total", "counter", "Bytes to the cloud.", _AGENT),
        Metric("farflow_agent_received_bytes_total", "counter", "Bytes from the cloud.", _AGENT),
        Metric("farflow_agent_groups_total", "counter", "Groups accepted from it.", _AGENT),
        Metric(
            "farflow_agent_failed_attempts_total", "counter", "Attempts that failed there.", _AGENT
        ),
        Metric(
            "farflow_agent_versions_behind",
            "gauge",
            "Versions between what it generates with and the newest.",
            ("agent", "policy"),
            alert="farflow_agent_versions_behind > 8",
            remedy="its link is too slow for this policy's deltas: `farflow explain AGENT`",
        ),
        Metric("farflow_policy_step", "gauge", "Optimizer steps done.", _POLICY),
        Metric("farflow_policy_steps_wanted", "gauge", "Steps at which the run ends.", _POLICY),
        Metric("farflow_policy_head_version", "gauge", "Newest published version.", _POLICY),
        Metric("farflow_policy_checkpoint_step", "gauge", "Step of the last checkpoint.", _POLICY),
        Metric("farflow_policy_buffered_groups", "gauge", "Groups that wait for a batch.", _POLICY),
        Metric("farflow_policy_replay_groups", "gauge", "Groups kept to train on again.", _POLICY),
        Metric("farflow_policy_reward", "gauge", "Mean reward of the last step's groups.", _POLICY),
        Metric(
            "farflow_policy_lag_steps",
            "gauge",
            "Policy lag of the last step's groups; `of` is mean or max.",
            ("policy", "of"),
        ),
        Metric(
            "farflow_policy_last_step_seconds",
            "gauge",
            "Where the last step's time went; `in` is training or waiting.",
            ("policy", "in"),
            alert='farflow_policy_last_step_seconds{in="waiting"} > ignoring(in)'
            ' 4 * farflow_policy_last_step_seconds{in="training"}',
            remedy="the trainer starves: `farflow status` says whether more slots would help",
        ),
        Metric("farflow_policy_delta_bytes", "gauge", "Size of the last version's delta.", _POLICY),
        Metric("farflow_policy_full_bytes", "gauge", "Size of the whole weights.", _POLICY),
        Metric(
            "farflow_policy_trainer",
            "gauge",
            "1 for the state in which the policy's trainer is.",
            ("policy", "state"),
            alert='farflow_policy_trainer{state="absent"} == 1',
            remedy="start the trainer: `farflow trainer run`",
        ),
        Metric(
            "farflow_policy_accuracy",
            "gauge",
            "Last finished evaluation.",
            ("policy", "evaluation"),
        ),
        Metric(
            "farflow_groups",
            "gauge",
            "Where the (group, policy) pairs of a run are, as in `farflow status`.",
            ("run", "policy", "kind", "state"),
        ),
        Metric(
            "farflow_run_turnaround_seconds",
            "gauge",
            "From a job's creation to its accepted result.",
            ("run", "quantile"),
        ),
        Metric("farflow_run_cost_usd_total", "counter", "Agents' hours and egress so far.", _RUN),
        Metric("farflow_run_tokens_total", "counter", "Tokens of accepted groups.", _RUN),
        Metric("farflow_run_hedge_tokens_total", "counter", "Tokens of hedges that lost.", _RUN),
        Metric(
            "farflow_run_dead_letters",
            "gauge",
            "Jobs that were given up.",
            _RUN,
            alert="farflow_run_dead_letters > 0",
            remedy="`farflow dead ls`, then `farflow dead replay`",
        ),
        Metric("farflow_run_more_slots", "gauge", "Slots that would raise steps per hour.", _RUN),
        Metric("farflow_run_steps_per_hour", "gauge", "As the demand estimate sees it.", _RUN),
        Metric("farflow_http_connections", "gauge", "Connections to the HTTP interface now."),
        Metric(
            "farflow_http_refused_total",
            "counter",
            "Requests and connections that were refused, by code; `too_many_of_address` is"
            " `http.max_connections_per_address`.",
            ("code",),
        ),
        Metric(
            "farflow_mqtt_connected",
            "gauge",
            "1 while the MQTT bridge is connected; absent without `[mqtt]`.",
            alert="farflow_mqtt_connected == 0",
            remedy="`scheduler/logs/gateway.log` says why; nothing but MQTT suffers",
        ),
        Metric("farflow_mqtt_connections_total", "counter", "Connections made to the broker."),
        Metric("farflow_mqtt_published_total", "counter", "Messages given to the broker."),
        Metric(
            "farflow_mqtt_commands_total",
            "counter",
            "Commands over MQTT by the code of their answer, `ok` if carried out.",
            ("code",),
        ),
    ),
    "agent": (
        Metric("farflow_edge_tokens_total", "counter", "Tokens drawn since the start."),
        Metric("farflow_edge_running_sequences", "gauge", "Sequences in the engine now."),
        Metric("farflow_edge_waiting_sequences", "gauge", "Sequences that wait for a slot."),
        Metric("farflow_edge_slots", "gauge", "Concurrent sequences that the engine takes."),
        Metric("farflow_edge_sent_bytes_total", "counter", "Bytes to the cloud."),
        Metric("farflow_edge_received_bytes_total", "counter", "Bytes from the cloud."),
        Metric(
            "farflow_edge_spool_bytes",
            "gauge",
            "Bodies on disk that the cloud has not acknowledged.",
            alert="farflow_edge_spool_bytes > 5e8",
            remedy="the link is down or slow: `farflow agent doctor`",
        ),
        Metric("farflow_edge_attempts", "gauge", "Attempts that it holds."),
        Metric("farflow_edge_policy_version", "gauge", "Version in use.", _POLICY),
        Metric("farflow_edge_gpu_power_watts", "gauge", "Through NVML.", ("gpu",)),
        Metric(
            "farflow_edge_gpu_temperature_celsius",
            "gauge",
            "Through NVML.",
            ("gpu",),
            alert="farflow_edge_gpu_temperature_celsius > 90",
            remedy="look at the box's cooling; `farflow drain AGENT` before",
        ),
    ),
    "trainer": (
        Metric(
            "farflow_trainer_step",
            "gauge",
            "Last optimizer step of which there is a step, version or checkpoint.",
            ("kind",),
        ),
        Metric(
            "farflow_trainer_last_metric",
            "gauge",
            "The last line of each kind in `metrics.jsonl`.",
            ("kind", "name"),
        ),
    ),
    "service": (
        Metric(
            "farflow_service_happened_total",
            "counter",
            "Counters of the trajectory log and the weight store.",
            ("what",),
        ),
    ),
}
"""By the daemon that gives them."""


def page(daemon: Daemon, samples: Mapping[str, Iterable[Sample]]) -> bytes:
    """A page in the text format; ``samples`` by the name of a metric of ``daemon``. Metrics without
    samples are left out; so are values that are not numbers.

    Raises:
        KeyError: a sample of an unknown metric.
    """
    known = {metric.name: metric for metric in METRICS[daemon]}
    lines: list[str] = []
    rendered: dict[tuple[str, ...], dict[tuple[str, ...], str]] = {}
    for name, found in samples.items():
        metric = known[name]
        start = len(lines)
        texts = rendered.setdefault(metric.labels, {})  # an agent's name is in a dozen metrics
        for values, value in found:
            if value != value:  # NaN
                continue
            labels = texts.get(values)
            if labels is None:
                labels = texts[values] = _labels(metric.labels, values)
            lines.append(f"{name}{labels} {value!r}")
        if len(lines) > start:
            lines[start:start] = [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}"]
    lines.append("")
    return "\n".join(lines).encode()


def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    if not names and not values:
        return ""
    pairs = zip(names, values, strict=True)
    return "{" + ",".join(f'{name}="{_escaped(text)}"' for name, text in pairs) + "}"


def _escaped(text: str) -> str:
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return text
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def alert_rules() -> str:
    """``examples/alerts.yml``: every alert of the table as a rule of Prometheus. Texts are written
    as JSON, which YAML reads as well."""
    lines = ["# Made by `farflow config alerts` from the table of docs/metrics.md.", "groups:"]
    for daemon, found in METRICS.items():
        alerts = [metric for metric in found if metric.alert]
        if not alerts:
            continue
        lines += [f"  - name: farflow-{daemon}", "    rules:"]
        for metric in alerts:
            words = metric.name.split("_")
            lines += [
                f"      - alert: {''.join(word.capitalize() for word in words)}",
                f"        expr: {json.dumps(' '.join(metric.alert.split()))}",
                f"        for: {ALERT_AFTER}",
                "        labels:",
                "          severity: warning",
                "        annotations:",
                f"          summary: {json.dumps(metric.help)}",
                f"          description: {json.dumps(metric.remedy)}",
            ]
    return "\n".join(lines) + "\n"


def markdown() -> str:
    """``docs/metrics.md``: every metric with its alert."""
    titles: dict[Daemon, str] = {
        "scheduler": "Scheduler (`GET /metrics` of the HTTP server)",
        "agent": "Agent (`[agent] metrics_port`)",
        "trainer": "Trainer (`[trainer] metrics_port`)",
        "service": "Trajectory log, weight store (`[scheduler] services_metrics_port`, the next)",
    }
    lines = [
        "# Metrics",
        "",
        "Made by `farflow config metrics` from `transport/telemetry.py`, for Prometheus;"
        " [operations](operations.md) says how to have them scraped, and `examples/grafana.json`"
        " is a dashboard of them,"
        " `examples/alerts.yml` (`farflow config alerts`) has the alerts as rules.",
    ]
    for daemon, title in titles.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| metric | type | labels | meaning |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| `{m.name}` | {m.kind} | {', '.join(f'`{x}`' for x in m.labels)} | {m.help} |"
            for m in METRICS[daemon]
        ]
    lines += ["", "## Alerts", "", "| when | what to do |", "|---|---|"]
    lines += [
        f"| `{' '.join(m.alert.split())}` | {m.remedy} |"
        for found in METRICS.values()
        for m in found
        if m.alert
    ]
    return "\n".join(lines) + "\n"
