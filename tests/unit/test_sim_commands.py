"""``farflow sim``: what its commands print, write and refuse."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from recorded_log import recorded, write_log
from sim_worlds import SMALL

from sim.cli import sim_group
from sim.compare import RULES
from sim.scenario import shipped_scenarios

TEXT = """
name = "tiny"
sites = { near = 20, far = 200 }
group_size = 2
steps = 2

[agents]
per_site = 1
slots = [4]
tokens_per_s = [50.0, 100.0]
usd_hour = [1.0, 2.0]

[policies.policy]
batch_groups = 2

[workload]
mean_tokens = 200.0
train_s = 2.0
delta_bytes = 1000000
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return path


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(sim_group, [str(word) for word in words])


def call_json(*words: str | Path) -> dict[str, object]:
    found = call(*words, "--json")
    assert found.exit_code == 0, found.output
    answer = json.loads(found.stdout)
    assert isinstance(answer, dict)
    return answer


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing is tested elsewhere, and takes seconds."""
    monkeypatch.setattr("sim.picture_style.importlib.util.find_spec", lambda name: None)


def test_list_names_scenarios_and_rules() -> None:
    text = call("list").stdout
    for name in (*shipped_scenarios(), *RULES):
        assert name in text
    assert set(call_json("list")["scenarios"]) == set(shipped_scenarios())  # type: ignore[call-overload]


def test_run_prints_the_result(tiny: Path) -> None:
    text = call("run", tiny).stdout
    assert "tiny, finish-time, seed 0" in text
    assert "steps per hour" in text
    answer = call_json("run", tiny, "--seed", "3", "--placement", "nearest", "--set", "steps=1")
    assert (answer["seed"], answer["placement"]) == (3, "nearest")
    assert answer["steps"] == {"sim/policy": 1}
    assert answer["problems"] == []


def test_what_run_leaves_comes_out_of_export(tiny: Path, without_pictures: None) -> None:
    ran = call("run", tiny, "--out", "out")
    assert ran.exit_code == 0
    assert "farflow[plots]" in ran.stderr
    steps = call("export", "out", "--table", "steps").stdout.splitlines()
    assert steps[0] == "policy,step,began_s,ended_s,groups,lag_mean"
    assert len(steps) >= 3
    rows = json.loads(call("export", "out", "--table", "steps", "--format", "json").stdout)
    assert [row["step"] for row in rows] == list(range(1, len(steps)))
    written = call("export", "out", "--out", "tables").stdout.split()
    assert {Path(path).name for path in written} >= {
        "result.csv",
        "agents.csv",
        "attempts.csv",
        "fetches.csv",
        "policy_lag.csv",
        "samples.csv",
    }
    assert all(Path(path).read_text().count("\n") >= 2 for path in written)
    document = call_json("export", "out")
    assert set(document) == {"scenario", "result", "recording"}
    assert call("export", "out", "--format", "json").stdout.strip() == "out/export.json"
    assert json.loads(Path("out/export.json").read_text()) == document


def test_compare_pairs_the_seeds(tiny: Path, without_pictures: None) -> None:
    options = ("--placement", "finish-time,nearest", "--seeds", "2", "--jobs", "1")
    text = call("compare", tiny, *options).stdout
    assert text.splitlines()[1].startswith("finish-time")
    assert text.splitlines()[2].startswith("nearest")
    answer = call_json("compare", tiny, *options, "--out", "out")
    first, second = answer["measures"]  # type: ignore[misc]
    assert first["ratio"] is None
    assert second["seeds"] == [0, 1]
    assert second["ratio"]["low"] <= second["ratio"]["mean"] <= second["ratio"]["high"]
    rules = call("export", "out", "--table", "rules").stdout.splitlines()
    assert [line.split(",")[0] for line in rules] == ["name", "finish-time", "nearest"]
    assert len(call("export", "out", "--table", "results").stdout.splitlines()) == 5


def test_sweep_goes_over_every_combination(tiny: Path, without_pictures: None) -> None:
    answer = call_json(
        *("sweep", tiny, "--set", "workload.train_s=1,2", "--range", "group_size=1:2:2"),
        *("--set", "steps=1", "--seeds", "1", "--jobs", "1", "--out", "out"),
    )
    values = [point["values"] for point in answer["points"]]  # type: ignore[attr-defined]
    assert values == [
        {"workload.train_s": train_s, "group_size": size} for train_s in (1, 2) for size in (1, 2)
    ]
    assert len(call("export", "out", "--table", "points").stdout.splitlines()) == 5


def test_plan_gives_both_answers(tiny: Path) -> None:
    plan = call_json("plan", tiny, "--seeds", "1", "--jobs", "1")
    kinds = [addition["kind"] for addition in plan["additions"]]  # type: ignore[attr-defined]
    assert sorted(set(kinds)) == ["agent", "bound", "delta", "links", "trainer"]
    text = call("plan", tiny, "--seeds", "1", "--jobs", "1").stdout
    for words in ("what binds, by formula:", "what binds, by experiment:", "a step costs $"):
        assert words in text


def test_replay_of_a_recorded_log(tiny: Path) -> None:
    _, told = recorded(SMALL)
    write_log(Path("state/scheduler/events"), SMALL, told)
    text = call("replay", "state/scheduler").stdout
    assert "equal: every batch gave the effects that were recorded" in text
    assert call_json("replay", ".")["equal"] is True
    other = call_json("replay", ".", "--placement", "nearest", "--seeds", "1", "--steps", "2")
    assert other["placement"] == "nearest"
    assert (
        "over finish-time"
        in call(*("replay", ".", "--placement", "nearest", "--seeds", "1", "--steps", "2")).stdout
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("run", "nowhere"), "is not shipped; there are aws12-mixed"),
        (("run", "missing.toml"), "missing.toml: No such file"),
        (("run", "tiny.toml", "--placement", "best"), "no rule 'best'; there are finish-time"),
        (("run", "tiny.toml", "--placement", "all"), "`run` takes one rule"),
        (("run", "tiny.toml", "--report"), "--report: where to? say --out DIR"),
        (("run", "tiny.toml", "--out", "tiny.toml/x"), "--out tiny.toml/x: Not a directory"),
        (("run", "tiny.toml", "--set", "workload.train=1"), "did you mean workload.train_s"),
        (("run", "tiny.toml", "--set", "scheduler.lease_s=x"), "scheduler of scenario tiny"),
        (("run", "tiny.toml", "--set", "agents.usd_hour=[1.0]"), "agents.usd_hour: give one price"),
        (("compare", "tiny.toml", "--placement", "finish-time,x"), "no rule 'x'"),
        (("sweep", "tiny.toml"), "nothing varies; give --set"),
        (("sweep", "tiny.toml", "--set", "steps=1,0"), "steps = 0: Expected `int` >= 1"),
        (("sweep", "tiny.toml", "--range", "steps=1:2"), "from:to:count"),
        (
            ("sweep", "tiny.toml", "--set", "steps=1,2", "--range", "steps=1:2:2"),
            "steps is given twice",
        ),
        (("export", "."), "make one with `farflow sim run SCENARIO --out ."),
        (("plan", "tiny.toml", "--placement", "all"), "`plan` takes one rule"),
        (("replay", "."), "no event log; give a run's folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_errors_name_what_is_wrong_and_what_to_do(
    tiny: Path, words: tuple[str, ...], says: str
) -> None:
    found = call(*words)
    assert found.exit_code == 78, found.output
    assert says in found.stderr
    assert found.stdout == ""


def test_a_report_without_matplotlib_is_refused_before_the_work(
    tiny: Path, without_pictures: None
) -> None:
    found = call("run", tiny, "--out", "out", "--report")
    assert found.exit_code == 78
    assert "pip install 'farflow[plots]'" in found.stderr
    assert not Path("out").exists()


def test_a_broken_export_folder_names_its_file(tiny: Path) -> None:
    Path("result.json").write_text("{}")
    found = call("export", ".")
    assert found.exit_code == 78
    assert "result.json: of another version" in found.stderr
    assert call("export", ".", "--table", "x").exit_code == 78


def test_an_unknown_table_is_refused_with_those_there_are(
    tiny: Path, without_pictures: None
) -> None:
    assert call("run", tiny, "--set", "steps=1", "--out", "out").exit_code == 0
    found = call("export", "out", "--table", "jobs")
    assert "there is no 'jobs'; there are result, agents, attempts" in found.stderr


BUSY = """
import sys
from sim import run
from sim.cli import sim_group

before = run.Simulation._watch

def watch(self, argument):
    if self.steps_made == 1 and not getattr(watch, "said", False):
        watch.said = True
        print("under way", flush=True)
        sys.stdin.readline()
    before(self, argument)

run.Simulation._watch = watch
sim_group(sys.argv[1:])
"""


def test_an_interrupted_run_keeps_what_is_done(tiny: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY, "run", str(tiny), "--set", "steps=100000", "--json"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "under way\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate("go on\n", timeout=25)
    assert process.returncode == 130, err
    answer = json.loads(out)
    assert answer["finished"] is False
    assert answer["steps"]["sim/policy"] >= 1
    assert "interrupted" in err


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from sim.cli import sim_group\n"
        "try: sim_group(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'matplotlib', 'scheduler.core.machine', 'sim.run'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
