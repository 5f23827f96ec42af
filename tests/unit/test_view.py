"""What a person sees: marks of agents, clocks, alerts, costs; nothing that steers a terminal."""

import json
import re
from typing import Any

import msgspec
from rich.console import Console
from status_views import run as run_row
from status_views import step

from farflow.evaluation_text import evaluation_line
from farflow.inspect_commands import event_lines, history_lines
from farflow.view import (
    PLAIN_WIDTH,
    agent_state,
    agents_line,
    alert_lines,
    clock_text,
    counter_notes,
    demand_lines,
    overview,
    policy_delta_text,
    printable,
    screen,
    token_rate,
)
from farflow.words import counted, human_age
from transport.messages import Events, Explanation, Transition
from transport.status import (
    AccountingRow,
    AgentStatus,
    Alert,
    DemandStatus,
    EvaluationStatus,
    PolicyStatus,
    RunStatus,
    SchedulerStatus,
)


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


def test_what_an_agent_says_of_its_hardware_steers_no_terminal() -> None:
    shown = drawn(status(agents=(agent(hardware="\x1b[2J\x9b1mH100"),)))
    assert "\x1b" not in shown
    assert "\x9b" not in shown
    assert "·[2J·1mH100" in shown


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
        "r: more slots would not help, the lag bound sets the pace: lag bound",
    ]
    idle = msgspec.structs.replace(none, binds="nothing", reason="r/p has not made a step yet")
    assert demand_lines((idle,)) == ["r: more slots would not help: r/p has not made a step yet"]


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
    stuck = msgspec.structs.replace(run, reason="no agent is ready (1 joining)")
    assert "run r · running (no agent is ready (1 joining)) ·" in drawn(status(runs=(stuck,)))
    one = msgspec.structs.replace(run, external_open=1, dead_letters=1)
    assert "1 job of others · 1 dead letter ·" in drawn(status(runs=(one,)))


def test_a_rate_that_was_not_measured_is_derived_from_that_of_a_slot() -> None:
    assert "90 tok/s" in agents_line((agent(),), {})
    assert "7 tok/s" in agents_line((agent(),), {"box1": 7.0})
    assert token_rate(agent(rate_tokens_s=None)) == 0.0


def run_status(name: str, state: str) -> RunStatus:
    row = AccountingRow(policy=f"{name}/solver", kind="train", submitted=3, trained=3)
    return RunStatus(name=name, state=state, reason="why", policies=(), accounting=(row,))


def overview_of(found: SchedulerStatus, *, every: bool) -> str:
    console = Console(width=PLAIN_WIDTH)
    with console.capture() as capture:
        console.print(overview(found, every=every))
    return capture.get()


def test_what_is_over_has_a_line_and_the_rest_is_behind_all() -> None:
    runs = (*(run_status(f"old{n}", "finished") for n in range(8)), run_status("new", "running"))
    agents = (agent(), *(agent(name=f"left{n}", state="gone") for n in range(7)))
    found = status(runs=runs, agents=agents)
    text = overview_of(found, every=False)
    assert "accounting of run new" in text
    assert text.count("accounting of run") == 1
    assert "old7 · finished (why)" in text
    assert "old2" not in text
    assert "agent left4 · gone · 1 group done" in text
    assert "left5" not in text
    assert "not shown: 3 finished runs, 2 gone agents; --all shows them" in text
    whole = overview_of(found, every=True)
    assert "accounting of run old0" in whole
    assert "left6" in whole
    assert "not shown" not in whole


def test_a_finished_run_whose_books_do_not_balance_says_so_in_its_line() -> None:
    row = AccountingRow(policy="r/solver", kind="train", submitted=3, trained=2)
    run = msgspec.structs.replace(run_status("r", "finished"), accounting=(row,))
    assert "accounting off by 1" in overview_of(status(runs=(run,)), every=False)


def test_counts_and_ages_are_english() -> None:
    assert [counted(n, "attempt") for n in (0, 1, 2)] == ["0 attempts", "1 attempt", "2 attempts"]
    ages = [human_age(seconds) for seconds in (-1.0, 12.4, 180.0, 7200.0, 432000.0)]
    assert ages == ["0 s", "12 s", "3 min", "2 h", "5 d"]


def test_a_history_has_ages_and_only_its_end() -> None:
    lines = tuple(f"{10 + n}.500 r/t-1#1 offered agent=a" for n in range(30))
    found = Explanation(
        subject="a", kind="agent", state="ready", reasons=(), history=lines, now_s=60.5
    )
    shown = history_lines(found, 20)
    assert shown[0] == "(10 earlier lines; --all shows them)"
    assert (len(shown), shown[-1]) == (21, "21 s ago: r/t-1#1 offered agent=a")
    assert len(history_lines(found, None)) == 30
    silent = msgspec.structs.replace(found, now_s=0.0)  # an older scheduler
    assert history_lines(silent, None) == list(lines)


def test_events_have_the_time_of_day_and_may_be_of_one_kind() -> None:
    happened = tuple(
        Transition(number=n, at_s=5.0 + n, subject="a", what=what, facts={"x": "\x1b"})
        for n, what in enumerate(("hello", "ready"))
    )
    page = Events(transitions=happened, last=2, now_s=7.0)
    [line] = event_lines(page, "ready", as_json=False)
    assert re.fullmatch(r"1\t\d\d:\d\d:\d\d\ta\tready\tx=·", line)
    rows = [json.loads(text) for text in event_lines(page, "", as_json=True)]
    assert [row["at_s"] for row in rows] == [5.0, 6.0]


def test_what_comes_from_outside_does_not_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\nc\td\u200b") == "a·[2Jb··c\td·"


def evaluated(name: str, version: int, accuracy: float, **changes: Any) -> EvaluationStatus:
    facts = {"policy": "r/p", "step": version, "items": 20, "scored": 20, "done": True}
    return EvaluationStatus(
        **{"name": name, "version": version, "accuracy": accuracy, **facts, **changes}
    )


def with_evaluations(*found: EvaluationStatus) -> str:
    policy = PolicyStatus(
        policy="r/p", trainer="training", step=4, steps=9, head_version=4, head_digest="",
        checkpoint_step=0, buffered_groups=0, last_step=None, evaluations=found,
    )  # fmt: skip
    run = RunStatus(name="r", state="running", reason="", policies=(policy,), accounting=())
    return drawn(status(runs=(run,)))


def test_evaluations_have_a_row_each_where_there_is_more_to_say_than_held_out() -> None:
    plain = [evaluated("held-out", 0, 0.25), evaluated("held-out", 4, 0.5)]
    text = with_evaluations(*plain)
    assert "25.0 % → 50.0 % (v4)" in text
    assert "evaluations of run" not in text
    chances = {"samples": 4, "pass_at": {"1": 0.375, "4": 0.75}}
    running = evaluated("maths", 4, 0.0, done=False, scored=3, samples=4)
    text = with_evaluations(*plain, evaluated("maths", 0, 0.375, **chances), running)
    assert "evaluations of run r" in text
    row = next(line for line in text.splitlines() if "maths" in line)
    for expected in ("37.5 %", "pass@1 37.5 %, pass@4 75.0 %", "v4: 3 of 20 items"):
        assert expected in row


def test_a_finished_evaluation_is_a_line_with_its_name_and_answers() -> None:
    assert evaluation_line(evaluated("held-out", 4, 0.5)) == (
        "evaluation p v4 accuracy 50.0 % over 20 held-out items"
    )
    found = evaluated("maths", 4, 0.5, samples=2, pass_at={"1": 0.5, "2": 0.75})
    assert evaluation_line(found) == (
        "evaluation maths p v4 accuracy 50.0 % over 20 items of 2 answers each,"
        " pass@1 50.0 %, pass@2 75.0 %"
    )


def test_the_delta_of_the_newest_stored_version_is_shown_while_the_last_step_s_is_on_its_way() -> (
    None
):
    first = run_row("first", step(41, 0.5))
    [policy] = first.policies
    last = msgspec.structs.replace(step(42, 0.5), delta_bytes=None, full_bytes=None)
    waits = msgspec.structs.replace(policy, last_step=last)
    stored = msgspec.structs.replace(waits, delta_bytes=20_000, full_bytes=100_000)
    assert policy_delta_text(policy) == "10 B / 100 B (10 %)"
    assert policy_delta_text(waits) == "-"
    assert policy_delta_text(stored) == "20.0 kB / 100.0 kB (20 %)"
    shown = drawn(status(runs=(msgspec.structs.replace(first, policies=(stored,)),)))
    assert "20.0 kB / 100.0 kB" in shown
    assert "lag in steps" in shown
    assert "mean 1.5, max 3" in shown


def test_what_was_refused_is_said_in_words() -> None:
    assert (
        counter_notes(status(counters={"refused.run.unknown": 0, "placement.refused_x": 2})) == []
    )
    [line] = counter_notes(status(counters={"refused.run.unknown": 6, "refused.other": 1}))
    assert line.startswith(
        "refused.CODE: what peers asked for and did not get; run.unknown: of a run"
    )
    assert "other" not in line


FAILED = {"scored": 0, "done": False, "failed": 20, "failure": "workflow.malformed"}


def test_an_evaluation_without_answers_is_not_done_and_says_why():
    found = evaluated("held-out", 4, 0.0, **FAILED)
    said = "not done: 20 items failed (workflow.malformed)"
    assert evaluation_line(found) == f"evaluation p v4 {said}"
    text = with_evaluations(found)
    assert "0.0 %" not in text
    assert f"v4: {said}" in text
    empty = evaluated("held-out", 4, 0.0, scored=0, done=False, failure="it has no items")
    assert evaluation_line(empty) == "evaluation p v4 not done: it has no items"


def test_an_evaluation_that_lost_items_says_so_beside_its_result():
    found = evaluated("held-out", 4, 0.5, scored=12, failed=8, failure="reward.timeout")
    assert evaluation_line(found) == (
        "evaluation p v4 accuracy 50.0 % over 12 held-out items; 8 items failed (reward.timeout)"
    )
