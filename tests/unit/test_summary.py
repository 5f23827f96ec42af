"""The checks at the end of a run: each of them fails when it should."""

import io

import msgspec
import pytest
from rich.console import Console

from farflow.summary import RunSummary, render, repeated, summarise
from farflow.up import training_time
from transport.status import (
    AccountingRow,
    AgentStatus,
    EvaluationStatus,
    PolicyStatus,
    RunStatus,
    SchedulerStatus,
)

POLICY = "run/solver"
LINEAGE = [(1, ("run/t-000000", "run/t-000001")), (2, ("run/t-000002",))]


def agent(**changes):
    facts = {
        "name": "near", "state": "ready", "slots": 8, "running_sequences": 0, "leases": 0,
        "rtt_s": None, "rate_tokens_s": None, "tokens_generated": 0, "bytes_up": 1, "bytes_down": 2,
        "versions": {POLICY: 2}, "digests": {POLICY: "aa"}, "groups_done": 3, "attempts_failed": 0,
    }  # fmt: skip
    return AgentStatus(**{**facts, **changes})


def summary(*, agents=None, row=None, lineage=LINEAGE, reason="completed", **run) -> RunSummary:
    policy = PolicyStatus(
        policy=POLICY, trainer="done", step=2, steps=2, head_version=2, head_digest="aa",
        checkpoint_step=2, buffered_groups=0, last_step=None,
        evaluations=run.get("evaluations", ()),
    )  # fmt: skip
    row = row or AccountingRow(policy=POLICY, kind="train", submitted=4, trained=3, expired=1)
    state = RunStatus(
        name="run", state=run.get("state", "finished"), reason=reason, policies=(policy,),
        accounting=(row,),
    )  # fmt: skip
    status = SchedulerStatus(
        term=1, build="", uptime_s=1.0, runs=(state,), counters={},
        agents=(agent(),) if agents is None else agents,
    )  # fmt: skip
    return summarise(status, "run", wall_s=1.0, training_s=None, lineages={POLICY: lineage})


def text(found: RunSummary) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(render(found))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("reason", ["completed", "stopped"])
def test_a_clean_run_has_no_problems(reason):
    found = summary(reason=reason)
    assert found.problems == ()
    assert "no group trained twice" in text(found)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"row": AccountingRow(policy=POLICY, kind="train", submitted=5, trained=3)}, "off by 2"),
        ({"agents": (agent(digests={POLICY: "bb"}),)}, "differs from the published head"),
        ({"agents": (agent(digests={}),)}, "differs from the published head"),
        ({"agents": (agent(state="lost"),)}, "no agent was there"),
        ({"lineage": [*LINEAGE, (3, ("run/t-000000",))]}, "trained twice"),
        ({"lineage": LINEAGE[:1]}, "the lineage holds 2 groups, the accounting says 3"),
        ({"lineage": None}, "does not say what it was trained on"),
        ({"reason": "failed: task: x"}, "failed: task: x"),
        ({"state": "running", "reason": ""}, "the run is running"),
    ],
)
def test_every_check_can_fail(changes, expected):
    found = summary(**changes)
    assert any(expected in problem for problem in found.problems), found.problems
    assert "PROBLEM" in text(found)
    assert "no group trained twice" not in text(found)


def test_a_failed_run_is_said_to_have_failed_and_nothing_else():
    found = summary(
        reason="failed: no such line",
        agents=(),
        lineage=None,
        row=AccountingRow(policy=POLICY, kind="train", submitted=1, cancelled=1),
    )
    assert found.problems == ("the run is finished: failed: no such line",)


def test_brackets_in_a_reason_are_shown_as_they_are():
    assert "failed: [task] a[/b]" in text(summary(reason="failed: [task] a[/b]"))


def test_repeated_jobs_are_found_within_and_across_steps():
    assert repeated([(1, ("a", "b", "b")), (2, ("c", "a"))]) == ("a", "b")


def evaluated(name: str, version: int, accuracy: float, **changes) -> EvaluationStatus:
    facts = {"policy": POLICY, "step": version, "items": 8, "scored": 8, "done": True}
    return EvaluationStatus(
        **{"name": name, "version": version, "accuracy": accuracy, **facts, **changes}
    )


def test_every_evaluation_is_summed_up_from_its_first_to_its_last():
    maths = {"samples": 4, "pass_at": {"1": 0.5, "4": 0.875}}
    found = summary(
        evaluations=(
            evaluated("maths", 0, 0.25, samples=4, pass_at={"1": 0.25, "4": 0.5}),
            evaluated("held-out", 0, 0.125),
            evaluated("maths", 2, 0.5, **maths),
            evaluated("held-out", 2, 0.625),
            evaluated("maths", 2, 0.0, done=False),
        )
    )
    [policy] = found.policies
    assert (policy.accuracy_before, policy.accuracy_after) == (0.125, 0.625)
    assert [(e.name, e.accuracy_before, e.accuracy_after) for e in policy.evaluations] == [
        ("held-out", 0.125, 0.625),
        ("maths", 0.25, 0.5),
    ]
    shown = next(line for line in text(found).splitlines() if "maths" in line)
    for expected in ("25.0 %", "50.0 %", "1: 50.0 %, 4: 87.5 %"):
        assert expected in shown
    assert "evaluations" not in text(summary(evaluations=(evaluated("held-out", 2, 0.625),)))


def test_both_times_of_a_resumed_run_are_of_its_last_life():
    records = [
        {"type": "evaluation", "wall_s": 1000.0},
        *({"type": "step", "at_s": at, "wall_s": 1000.0 + at} for at in (1.0, 2.0, 3.0)),
        *({"type": "step", "at_s": at, "wall_s": 2000.0 + at} for at in (4.0, 6.0)),
        {"type": "end", "wall_s": 2007.0},
    ]
    assert training_time(records, 2000.0) == (2.0, True)
    assert training_time(records, 900.0) == (1005.0, False)
    assert training_time(records[:2], 900.0) == (None, False)
    assert training_time([], 900.0) == (None, False)
    found = msgspec.structs.replace(summary(), wall_s=9.0, training_s=2.0)
    assert "\n9 s, training 2 s of it" in text(found)
    resumed = msgspec.structs.replace(found, resumed=True)
    assert "since it was resumed 9 s, training 2 s of it" in text(resumed)


def test_an_evaluation_without_a_result_is_a_problem_and_no_accuracy():
    lost = {"scored": 0, "done": False, "failed": 20, "failure": "workflow.malformed"}
    found = summary(
        evaluations=(evaluated("held-out", 0, 0.0, **lost), evaluated("held-out", 2, 0.5))
    )
    [policy] = found.policies
    assert (policy.accuracy_before, policy.accuracy_after) == (None, 0.5)
    [problem] = [text for text in found.problems if "evaluation" in text]
    assert problem == (
        f"evaluation held-out of {policy.policy} v0: not done: 20 items failed (workflow.malformed)"
    )
