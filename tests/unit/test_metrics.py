"""The metrics' table, the pages made of it, and what a scheduler's status says there."""

import json
import math
import re
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from scheduler.gateway.metrics import BridgeCounts, HttpCounts, render
from transport.status import (
    AccountingRow,
    AgentStatus,
    Alert,
    DemandStatus,
    EvaluationStatus,
    PolicyStatus,
    RunStatus,
    SchedulerStatus,
    StepStatus,
)
from transport.telemetry import METRICS, alert_rules, markdown, page

ROOT = Path(__file__).parents[2]


def status(agents: int = 2) -> SchedulerStatus:
    step = StepStatus(
        policy="sums/solver",
        step=7,
        version=9,
        reward_mean=0.25,
        policy_lag_mean=1.5,
        policy_lag_max=3,
        response_tokens=1000,
        busy_s=2.0,
        waiting_s=0.5,
        delta_bytes=None,
        full_bytes=4000,
        at_s=1.0,
    )
    evaluation = EvaluationStatus(
        policy="sums/solver", version=5, step=5, items=10, scored=10, accuracy=0.6, done=True
    )
    policy = PolicyStatus(
        policy="sums/solver",
        trainer="waiting",
        step=7,
        steps=100,
        head_version=9,
        head_digest="",
        checkpoint_step=5,
        buffered_groups=3,
        last_step=step,
        evaluations=(evaluation,),
    )
    row = AccountingRow(policy="sums/solver", kind="train", submitted=30, trained=20, queued=10)
    live = RunStatus(
        name="sums",
        state="running",
        reason="",
        policies=(policy,),
        accounting=(row,),
        cost_usd=1.5,
        turnaround_p50_s=2.0,
    )
    over = msgspec.structs.replace(live, name="old", state="finished")
    return SchedulerStatus(
        term=3,
        build="abc",
        uptime_s=60.0,
        runs=(over, live),
        agents=(
            *(agent(f"box-{number:04d}") for number in range(agents)),
            msgspec.structs.replace(agent("left"), state="gone"),
        ),
        counters={"loop.lag_ms": 12, "disk.free_mib": 2, "leases.offered": 40},
        demand=(
            DemandStatus(
                run="sums",
                binds="generation",
                more_slots=8,
                hardware="",
                steps_hour=100.0,
                steps_hour_with=150.0,
                reason="",
            ),
        ),
        alerts=(Alert(code="bias", subject='say "hi"\\\n', message="x", since_s=0.0),),
    )


def agent(name: str) -> AgentStatus:
    return AgentStatus(
        name=name,
        state="ready",
        slots=8,
        running_sequences=4,
        leases=2,
        rtt_s=0.05,
        rate_tokens_s=50.0,
        tokens_generated=1000,
        bytes_up=10,
        bytes_down=20,
        versions={"sums/solver": 7},
        digests={},
        groups_done=5,
        attempts_failed=1,
        down_bytes_s=1e6,
    )


def read(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_a_status_is_read_back_by_prometheus_own_parser():
    found = read(render(status()))
    own = (("policy", "sums/solver"),)
    assert found["farflow_policy_step", own] == 7
    assert found["farflow_policy_lag_steps", (("of", "max"), *own)] == 3
    assert found["farflow_policy_last_step_seconds", (("in", "waiting"), *own)] == 0.5
    assert found["farflow_agent_versions_behind", (("agent", "box-0001"), *own)] == 2
    assert found["farflow_agent_download_bytes_per_second", (("agent", "box-0000"),)] == 1e6
    assert ("farflow_agent_upload_bytes_per_second", (("agent", "box-0000"),)) not in found
    assert ("farflow_policy_delta_bytes", own) not in found, "None is no number"
    assert found["farflow_scheduler_loop_lag_seconds", ()] == pytest.approx(0.012)
    assert found["farflow_scheduler_disk_free_bytes", ()] == 2 * 2**20
    assert found["farflow_scheduler_happened_total", (("what", "leases.offered"),)] == 40
    assert found["farflow_alert", (("code", "bias"), ("subject", 'say "hi"\\\n'))] == 1
    assert found["farflow_policy_trainer", (*own, ("state", "waiting"))] == 1
    assert found["farflow_policy_trainer", (*own, ("state", "absent"))] == 0
    groups = {dict(labels)["state"]: v for (n, labels), v in found.items() if n == "farflow_groups"}
    assert groups == {"submitted": 30, "trained": 20, "queued": 10}
    assert found["farflow_run_turnaround_seconds", (("quantile", "0.5"), ("run", "sums"))] == 2.0
    assert found["farflow_policy_accuracy", (("evaluation", "held-out"), *own)] == 0.6


def test_what_is_over_takes_no_room():
    found = read(render(status()))
    assert not [key for key in found if ("run", "old") in key[1] or ("agent", "left") in key[1]]
    assert found["farflow_agents", (("state", "gone"),)] == 1


def test_names_follow_the_conventions():
    names = [metric.name for found in METRICS.values() for metric in found]
    assert len(names) == len(set(names))
    for found in METRICS.values():
        for metric in found:
            assert metric.name.startswith("farflow_")
            assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
            assert metric.help.endswith("."), metric.name
            assert bool(metric.alert) == bool(metric.remedy), metric.name
            assert not metric.alert or metric.name in metric.alert


def test_a_page_has_each_metric_once_and_no_empty_or_foreign_one():
    made = page(
        "scheduler", {"farflow_agents": [(("a",), 1), (("b",), math.nan)], "farflow_alert": []}
    )
    assert made.decode().splitlines() == [
        "# HELP farflow_agents Agents by state.",
        "# TYPE farflow_agents gauge",
        'farflow_agents{state="a"} 1',
    ]
    with pytest.raises(KeyError):
        page("scheduler", {"farflow_unheard_of": [((), 1)]})
    with pytest.raises(ValueError, match="argument"):
        page("scheduler", {"farflow_agents": [(("a", "b"), 1)]})


def test_every_metric_of_the_table_is_given():
    bridge = BridgeCounts(connected=True, commands=Counter(ok=1))
    http = HttpCounts(connections=1, refused={"http.busy": 2}, status_age_s=0.5)
    given = {key[0] for key in read(render(_full(), bridge, http))}
    assert given == {metric.name for metric in METRICS["scheduler"]}


def _full() -> SchedulerStatus:
    whole = status()
    live = whole.runs[1]
    policy = live.policies[0]
    assert policy.last_step is not None
    step = msgspec.structs.replace(policy.last_step, delta_bytes=10)
    live = msgspec.structs.replace(
        live, policies=(msgspec.structs.replace(policy, last_step=step),)
    )
    first = msgspec.structs.replace(whole.agents[0], up_bytes_s=1.0, clock_offset_s=0.1)
    return msgspec.structs.replace(whole, runs=(live,), agents=(first,))


def test_the_page_of_metrics_is_made_from_the_table():
    assert (ROOT / "docs" / "metrics.md").read_text() == markdown(), (
        "run: python -m farflow config metrics > docs/metrics.md"
    )


def test_the_rules_of_alerts_are_made_from_the_table():
    text = (ROOT / "examples" / "alerts.yml").read_text()
    assert text == alert_rules(), "run: python -m farflow config alerts > examples/alerts.yml"
    groups = yaml.safe_load(text)["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    alerts = [metric for found in METRICS.values() for metric in found if metric.alert]
    assert [" ".join(metric.alert.split()) for metric in alerts] == [r["expr"] for r in rules]
    assert [metric.remedy for metric in alerts] == [r["annotations"]["description"] for r in rules]
    assert len({rule["alert"] for rule in rules}) == len(rules)


def test_grafanas_dashboard_asks_for_metrics_that_there_are():
    dashboard = json.loads((ROOT / "examples" / "grafana.json").read_text())
    known = {metric.name: metric for found in METRICS.values() for metric in found}
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    rows = {panel["title"] for panel in dashboard["panels"]} - {p["title"] for p in panels}
    assert rows == {"In short", "Policies", "Groups", "Links", "Scheduler and alerts"} | {"Agents"}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in panels:
        for target in panel["targets"]:
            found = re.findall(r"(farflow_\w+)(?:\{([^}]*)\})?", target["expr"])
            assert found, panel["title"]
            for name, selector in found:
                labels = set(re.findall(r"(\w+)=", selector)) - {"job"}
                assert labels <= set(known[name].labels), (panel["title"], name)
            legend = set(re.findall(r"{{(\w+)}}", target["legendFormat"])) - {"instance"}
            assert legend <= {label for name, _ in found for label in known[name].labels}
            counted = [name for name, _ in found if known[name].kind == "counter"]
            shown = "rate(" in target["expr"] or panel["type"] == "stat"
            assert not counted or shown, panel["title"]
