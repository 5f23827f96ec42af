"""What a person sees: marks of agents, clocks, alerts, costs; nothing that steers a terminal."""

from typing import Any

import msgspec
from rich.console import Console

from farflow.view import (
    PLAIN_WIDTH,
    agent_state,
    alert_lines,
    clock_text,
    demand_lines,
    printable,
    screen,
)
from transport.status import AgentStatus, Alert, DemandStatus, RunStatus, SchedulerStatus


def agent(**changes: Any) -> AgentStatus:
    values: dict[str, Any] = {
        "name": "box1",
        "state": "ready",
        "slots": 8,
        "running_sequences": 3,
        "leases": 2,
        "rtt_s": 0.08,
        "rate_tokens_s": 30.0,
        "tokens_generated": 1,
        "bytes_up": 1,
        "bytes_down": 1,
        "versions": {"r/p": 4},
        "digests": {},
        "groups_done": 1,
        "attempts_failed": 0,
    }
    return AgentStatus(**{**values, **changes})


def status(**changes: Any) -> SchedulerStatus:
    empty = SchedulerStatus(term=1, build="b", uptime_s=0.0, runs=(), agents=(), counters={})
    return msgspec.structs.replace(empty, **changes)


def drawn(found: SchedulerStatus) -> str:
    console = Console(width=PLAIN_WIDTH)
    with console.capture() as capture:
        console.print(screen(found, {}, {}))
    return capture.get()


def test_agents_show_marks_hardware_clock_and_price() -> None:
    here = agent(cordoned=True, hardware="H100 [/bold]", clock_offset_s=-2.4, price_usd_hour=2.5)
    text = drawn(status(agents=(here,)))
    for expected in ("ready, cordoned", "H100 [/bold]", "-2.4 s", "2.50", "80 ms"):
        assert expected in text
    assert "USD/h" not in drawn(status(agents=(agent(),)))
    assert agent_state(agent(state="cordoned", cordoned=True)) == "cordoned"
    assert agent_state(agent(state="lost", quarantined="x")) == "lost, quarantined"


def test_a_clock_is_shown_with_its_sign() -> None:
    shown = [clock_text(offset_s) for offset_s in (None, 0.0031, -0.25, 75.0)]
    assert shown == ["-", "+3 ms", "-250 ms", "+75.0 s"]


def test_alerts_and_evidence_are_lines_of_their_own() -> None:
    alert = Alert(code="loop.lag", subject="scheduler", message="held up", since_s=1.0)
    bad = agent(quarantined="hash failures", evidence=("sums/t-1#1: digest differs",))
    assert alert_lines((alert,), (agent(), bad)) == [
        "loop.lag scheduler: held up",
        "agent box1 is quarantined: hash failures",
        "  sums/t-1#1: digest differs",
    ]
    assert "loop.lag scheduler: held up" in drawn(status(alerts=(alert,)))


def test_demand_says_what_more_slots_would_bring_or_why_nothing() -> None:
    more = DemandStatus(
        run="r",
        binds="generation",
        more_slots=64,
        hardware="H100",
        steps_hour=10.0,
        steps_hour_with=15.0,
        reason="trainers wait",
    )
    none = msgspec.structs.replace(more, more_slots=0, binds="staleness", reason="lag bound")
    assert demand_lines((more, none)) == [
        "r: 64 more slots (H100) would raise 10.0 steps/hour to 15.0: trainers wait",
        "r: no more slots wanted, staleness binds: lag bound",
    ]


def test_a_run_shows_its_cost_and_what_waits_in_it() -> None:
    run = RunStatus(
        name="r",
        state="running",
        reason="",
        policies=(),
        accounting=(),
        tenant="lab",
        cost_usd=12.345,
        external_open=3,
        dead_letters=2,
    )
    text = drawn(status(runs=(run,)))
    assert "run r · running · 12.35 USD · 3 jobs of others · 2 dead letters · tenant lab" in text


def test_what_comes_from_outside_does_not_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\nc\td\u200b") == "a·[2Jb··c\td·"
