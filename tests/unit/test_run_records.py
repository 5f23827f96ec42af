"""``farflow run history`` and ``farflow run compare``: recorded runs, without a scheduler."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from status_views import step

from farflow.cli import cli
from farflow.commands import run_group
from farflow.plots import read_metrics
from farflow.run_records import find_records, read_record, reward_until
from scheduler.core.effects import RecordEvaluation, RecordStep, RunEnded
from scheduler.metrics_file import MetricsFiles
from transport.errors import ConfigError
from transport.runtime.clock import ManualClock
from transport.runtime.files import lock_folder
from transport.status import EvaluationStatus


def record(folder: Path, run: str, rewards: list[float], *, ended: bool = True) -> Path:
    """A run as a scheduler records it: a step a minute, evaluations before and after."""
    clock = ManualClock()
    files = MetricsFiles(folder, clock)

    def evaluated(number: int, accuracy: float, name: str = "held-out") -> None:
        status = EvaluationStatus(
            policy="first/solver",
            version=number,
            step=number,
            items=10,
            scored=10,
            accuracy=accuracy,
            done=True,
            name=name,
        )
        files.record(RecordEvaluation(run, status))

    evaluated(0, 0.1)
    evaluated(0, 0.9, "other")
    for number, reward in enumerate(rewards, 1):
        clock.advance(60.0)
        files.record(RecordStep(run, step(number, reward), {"loss": 1.0}))
    evaluated(len(rewards), 0.8)
    if ended:
        files.record(RunEnded(run, "completed", cost_usd=1.25, tokens=5000))
    return folder / "runs" / run / "metrics.jsonl"


def invoke(*argv: str) -> Result:
    return CliRunner().invoke(run_group, argv)


def test_a_record_says_what_the_run_came_to(tmp_path: Path) -> None:
    file = record(tmp_path, "first", [0.1, 0.2, 0.3, 0.4])
    [found] = read_record(file)
    assert (found.run, found.policy, found.state, found.steps) == (
        *("first", "first/solver", "completed"),
        4,
    )
    assert found.hours == pytest.approx(4 / 60)
    assert (found.accuracy_before, found.accuracy_after) == (0.1, 0.8)
    assert found.reward == pytest.approx(0.25)
    assert (found.policy_lag_mean, found.policy_lag_max) == (1.5, 3)
    assert found.busy_share == pytest.approx(1.0 / 1.5)
    assert (found.trained_tokens, found.tokens, found.cost_usd) == (4000, 5000, 1.25)
    assert found.accuracies == {0: 0.1, 4: 0.8}
    assert found.label == "first/solver"
    assert reward_until(found, 3, 2) == pytest.approx(0.25)
    assert reward_until(found, 9, 2) is None


def test_after_a_rollback_the_later_record_of_a_step_counts(tmp_path: Path) -> None:
    file = record(tmp_path, "first", [0.1, 0.2])
    files = MetricsFiles(tmp_path, ManualClock())
    with file.open("ab") as torn:
        torn.write(b'{"type": "step", "po')
    files.record(RecordStep("first", step(2, 0.6), {}))
    with file.open("ab") as other:
        other.write(b'{"type": "step"}\n{"type": "later"}\n[]\n')
    [found] = read_record(file)
    assert found.rewards == {1: 0.1, 2: 0.6}
    assert (found.state, found.tokens, found.cost_usd) == ("open", None, None)


def test_runs_are_found_where_daemons_put_them(tmp_path: Path) -> None:
    first = record(tmp_path / "scheduler", "a", [0.1])
    second = record(tmp_path / "scheduler", "b", [0.1])
    assert find_records([tmp_path / "scheduler"]) == [first, second]
    assert find_records([tmp_path / "scheduler" / "runs"]) == [first, second]
    assert find_records([first.parent, first, second.parent]) == [first, second]
    with pytest.raises(ConfigError, match=r"no metrics\.jsonl there"):
        find_records([tmp_path])


def test_history_lists_and_compare_aligns(tmp_path: Path) -> None:
    record(tmp_path, "slow", [0.1] * 20, ended=False)
    record(tmp_path, "fast", [0.05 * n for n in range(40)])
    shown = invoke("history", str(tmp_path)).stdout
    assert [line.split()[0] for line in shown.splitlines() if "solver" in line] == [
        "fast/solver",
        "slow/solver",
    ]
    rows = [
        json.loads(line)
        for line in invoke("history", str(tmp_path), "--json").stdout.split("\n")
        if line
    ]
    assert [(row["run"], row["state"], row["steps"]) for row in rows] == [
        ("first", "completed", 40),
        ("first", "open", 20),
    ]
    assert "rewards" not in rows[0]
    shown = invoke("compare", str(tmp_path)).stdout
    lines = {line.split("  ")[0].strip(): line.split()[-2:] for line in shown.splitlines()}
    assert lines["steps"] == ["40", "20"]
    assert lines["reward at step 20"] == ["0.925", "0.100"]  # steps that both have
    assert "reward at step 40" not in lines
    told = [
        json.loads(line)
        for line in invoke("compare", str(tmp_path), "--json").stdout.split("\n")
        if line
    ]
    assert told[1]["rewards_at"]["20"] == pytest.approx(0.1)


def test_a_comparison_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    record(tmp_path, "a", [0.1, 0.2])
    result = invoke("compare", str(tmp_path), "--plot", str(tmp_path / "out.png"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    for place in (tmp_path / "none" / "x.png", Path("/dev/full")):
        refused = CliRunner().invoke(cli, ["run", "compare", str(tmp_path), "--plot", str(place)])
        assert isinstance(refused.exception, ConfigError)
        assert str(place) in str(refused.exception)


@pytest.mark.timeout(10)
def test_a_line_that_nests_too_deep_is_skipped_and_a_pipe_is_refused(tmp_path: Path) -> None:
    deep = '{"type": "step", "x": ' + "[" * 5000
    (tmp_path / "metrics.jsonl").write_text(deep + "\n" + deep + "\n")
    assert read_record(tmp_path / "metrics.jsonl") == []
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="it is not a regular file"):
        read_record(tmp_path / "pipe")


def test_a_run_without_records_yet_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    for command in ("history", "compare"):
        result = CliRunner().invoke(cli, ["run", command, str(tmp_path)])
        assert (result.exit_code, result.stdout) == (0, "")
        assert result.stderr == f"nothing is recorded yet in {tmp_path / 'metrics.jsonl'}\n"


def test_a_run_of_up_that_was_interrupted_is_there_and_marked(tmp_path: Path) -> None:
    ended, left = tmp_path / "first-0001", tmp_path / "first-0002"
    copy = record(ended / "state" / "scheduler", "first", [0.1, 0.2])
    (ended / "metrics.jsonl").write_bytes(copy.read_bytes())
    inner = record(left / "state" / "scheduler", "first", [0.1], ended=False)
    assert find_records([tmp_path]) == [ended / "metrics.jsonl", inner]
    assert find_records([left]) == [inner]
    rows = [
        json.loads(line) for line in invoke("history", str(tmp_path), "--json").stdout.splitlines()
    ]
    assert [row["state"] for row in rows] == ["completed", "interrupted"]
    shown = invoke("compare", str(ended), str(left)).stdout
    assert "first-0002/solver" in shown
    with lock_folder(left):  # still running
        assert read_record(inner)[0].state == "open"


def test_an_evaluation_without_a_result_has_no_accuracy_but_a_reason(tmp_path: Path) -> None:
    file = record(tmp_path, "first", [0.1, 0.2])
    lost = EvaluationStatus(
        policy="first/solver", version=3, step=3, items=10, scored=0, accuracy=0.0, done=False,
        failed=10, failure="workflow.malformed",
    )  # fmt: skip
    MetricsFiles(tmp_path, ManualClock()).record(RecordEvaluation("first", lost))
    [found] = read_record(file)
    assert (found.accuracy_before, found.accuracy_after) == (0.1, None)
    said = "evaluation held-out v3 not done: 10 items failed (workflow.malformed)"
    assert said in invoke("history", str(tmp_path)).stdout
