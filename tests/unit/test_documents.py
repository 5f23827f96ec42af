"""Commands in the documents exist, with those arguments. What they do is tested elsewhere: the
``farflow`` lines of shell blocks are run in ``tests/e2e/test_documented_commands.py`` and
``test_three_hosts.py``, ``make`` targets by CI, benches by their own tests."""

import contextlib
import importlib.util
import re
import shlex
from pathlib import Path

import click
import pytest
from document_commands import PAGES, ROOT, commands, inline, on_hosts

from farflow.cli import cli
from scheduler.gateway.routes import ROUTES

BENCH_OPTIONS = {"--json", "--quick"}
"""What every bench takes (bench/report.py)."""

ALL = sorted({(p.name, c) for p in PAGES for c in commands(p) if c.startswith("farflow ")})
INLINE = sorted({(p.name, c) for p in PAGES for c in inline(p)})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the documents name."""
    for path in sorted((ROOT / "examples").rglob("*.toml")):
        name = path.relative_to(ROOT)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    folders = ("", "RUN_FOLDER/", "cloud/", "runs/arithmetic-0001/")
    for name in (*(f"{f}deployment.toml" for f in folders), "examples/mine.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "FOLDER").mkdir()
    for name in ("agent/agent.toml", "box/agent.toml", "farflow-agent/agent.toml"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    for name in ("FILE", "jobs.jsonl", "agent.toml", "trial.toml", "nightly.tar"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parse(line: str) -> None:
    """Parse as the command line would, without running anything."""
    words = shlex.split(line)[1:]
    command: click.Command = cli
    name = "farflow"
    with click.Context(cli) as context:
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            name = words.pop(0)
            found = command.get_command(context, name)
            assert found is not None, f"{line}: no command {name!r}"
            command = found
        if not isinstance(command, click.Group):
            command.make_context(name, words, parent=context)


@pytest.mark.parametrize(("page", "line"), ALL)
def test_a_command_in_a_block_parses(folder: Path, page: str, line: str) -> None:
    parse(line)


@pytest.mark.parametrize(("page", "line"), INLINE)
def test_a_command_in_the_text_exists(folder: Path, page: str, line: str) -> None:
    with contextlib.suppress(click.MissingParameter):  # the text may leave the arguments out
        parse(line)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = [*PAGES, ROOT / "CONTRIBUTING.md"]
    lines = {(p.name, line) for p in pages for line in [*commands(p), *inline(p, "make")]}
    named = {
        (page, word)
        for page, line in lines
        if line.startswith("make ")
        for word in line.split()[1:]
    }
    assert {word for _, word in named} >= {"run", "test"}
    assert [one for one in sorted(named) if one[1] not in targets] == []


def test_python_programs_exist_and_take_the_options() -> None:
    found = {(p.name, line) for p in PAGES for line in [*commands(p), *inline(p, "python")]}
    found = {(page, line) for page, line in found if line.startswith("python ")}
    assert len(found) >= 8
    for page, line in sorted(found):
        words = shlex.split(line)[1:]
        if words[0] != "-m":
            assert (ROOT / words[0]).is_file(), f"{page}: {line}"
            continue
        assert importlib.util.find_spec(words[1]), f"{page}: {line}"
        assert words[1].startswith("bench."), f"{page}: {line}"
        source = Path(importlib.util.find_spec(words[1]).origin).read_text()
        own = set(re.findall(r'add_argument\("(--[a-z-]+)"', source))
        used = {word for word in words[2:] if word.startswith("-")}
        assert used <= own | BENCH_OPTIONS, f"{page}: {line}"


def test_three_hosts_are_ten_minutes_of_reading_and_typing() -> None:
    """At 200 words a minute and 40 typed words (of five characters) a minute, from the beginning of
    the page; the commands' own time is in ``tests/e2e/test_three_hosts.py``."""
    page = ROOT / "docs" / "getting-started.md"
    text = page.read_text(encoding="utf-8").split("## Where to go on")[0]
    typed = on_hosts(page)
    assert sum(line.startswith("farflow ") for line in typed) >= 8
    reading_min = len(text.split()) / 200
    typing_min = sum(len(line) for line in typed) / 5 / 40
    assert reading_min + typing_min < 10, (reading_min, typing_min)


def test_addresses_that_are_asked_with_curl_are_routes_of_the_gateway() -> None:
    lines = [line for page in PAGES for line in commands(page) if line.startswith("curl ")]
    asked = {found for line in lines for found in re.findall(r"127\.0\.0\.1:7780(/\S+)", line)}
    assert len(asked) >= 4
    patterns = [re.sub(r"\{[^}]*\}", r"[^?]+", route.path) for route in ROUTES]
    assert [a for a in sorted(asked) if not any(re.fullmatch(p, a) for p in patterns)] == []
