"""Commands that ask a scheduler: what is wrong before anything is asked, and help that is quick."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from farflow.cli import cli, main
from farflow.options import say_done

COMMANDS = (
    *("submit", "results", "cancel", "dead", "explain", "events", "logs"),
    *("drain", "cordon", "uncordon", "quarantine", "release"),
)


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "jobs.jsonl"
    path.write_text('{"id": "a", "prompt": "x"}\n')
    return path


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


@pytest.mark.parametrize(
    "name",
    [
        *("run submit", "run ls", "run pause", "run resume", "run stop", "status", "explain"),
        *("events", "logs", "drain", "cordon", "uncordon", "quarantine", "release"),
        *("submit", "results", "cancel", "dead ls", "dead show"),
    ],
)
def test_every_command_that_asks_a_scheduler_has_json(name: str) -> None:
    assert "--json" in CliRunner().invoke(cli, [*name.split(), "--help"]).output


@pytest.mark.parametrize("said", ["", "nothing to do: run r is paused already"])
def test_a_command_that_was_taken_says_what_the_scheduler_added(
    said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    say_done("r", "pause", said, as_json=False)
    say_done("r", "pause", said, as_json=True)
    text, row = capsys.readouterr().out.splitlines()
    assert text == f"pause r: {said or 'accepted'}"
    assert json.loads(row) == {"command": "pause", "subject": "r", "message": said}


@pytest.mark.parametrize(
    "words",
    [
        "submit r jobs.jsonl --bodies there",
        "submit r jobs.jsonl --deadline soon",
        "submit r jobs.jsonl --group-size 0",
        "submit r absent.jsonl",
        "results --cursor c",
        "results --timeout 5s",
        "results --limit 257",
        "events --timeout 5s",
        "events --follow --last 5",
        "cancel r",
        "dead replay",
        "dead replay r/t-1 --run r",
        "drain box1 --deadline -5",
        "logs box1 --lines 2001",
    ],
)
def test_wrong_usage_is_status_2(jobs: Path, words: str) -> None:
    result = CliRunner().invoke(cli, words.split())
    assert result.exit_code == 2, result.output


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("submit r jobs.jsonl", 78, "submitter key keys/submitter.toml: no such file; give the"),
        ("results", 78, "submitter key keys/submitter.toml"),
        ("cancel r a", 78, "submitter key keys/submitter.toml"),
        ("explain r/t-1", 78, "operator key keys/operator.toml"),
        ("events", 78, "operator key keys/operator.toml"),
        ("drain box1", 78, "operator key keys/operator.toml"),
        ("logs box1", 78, "operator key keys/operator.toml"),
        ("dead ls", 78, "operator key keys/operator.toml"),
        ("submit r bad.jsonl", 1, "bad.jsonl:1: id: missing"),
        ("agent drain", 1, "no agent runs on agent"),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    jobs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    status: int,
    said: str,
) -> None:
    (jobs.parent / "bad.jsonl").write_text('{"prompt": "x"}\n')
    monkeypatch.setattr("sys.argv", ["farflow", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == status
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
