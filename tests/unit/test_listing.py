"""Lists: a table on a terminal, the same headings and tabs elsewhere."""

import pytest
from click.testing import CliRunner

from farflow.commands import run_group
from farflow.listing import Lines, print_list

HEADS = ("name", "state", "reason")
ROWS = [("a", "running", ""), ("b", "finished", "a\tb\x1b[2J")]


def test_elsewhere_rows_are_lines_under_a_heading(capsys: pytest.CaptureFixture[str]) -> None:
    print_list(HEADS, ROWS)
    whole = capsys.readouterr().out
    assert whole == "name\tstate\treason\na\trunning\t-\nb\tfinished\ta b·[2J\n"
    lines = Lines(HEADS)
    for row in ROWS:
        lines.add(*row)
    assert capsys.readouterr().out == whole
    print_list(HEADS, [])
    assert capsys.readouterr().out == ""


def test_on_a_terminal_they_are_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "60")
    print_list(HEADS, ROWS)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    [heads] = [line for line in lines if "reason" in line]
    [first] = [line for line in lines if "running" in line]
    assert heads.index("state") == first.index("running")
    assert heads.index("reason") == first.index("-")
    assert not any("\t" in line for line in lines)


def test_the_runs_of_a_scheduler_have_a_heading(monkeypatch: pytest.MonkeyPatch) -> None:
    from status_views import status

    monkeypatch.setattr("farflow.commands.with_operator", lambda *_, **__: status())
    said = CliRunner().invoke(run_group, ["ls"], catch_exceptions=False).stdout.splitlines()
    assert said[0] == "run\tstate\tsteps\treason"
    assert said[1:]
    assert {line.count("\t") for line in said} == {3}
    assert not any(line.endswith("\t") for line in said)
