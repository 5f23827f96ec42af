"""Commands in the documents exist, with those arguments; what they do is tested elsewhere:
``make`` targets by CI, the daemons and the operator's commands in ``tests/e2e``."""

import contextlib
import re
import shlex
from pathlib import Path

import click
import pytest

from farflow.cli import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(page: Path) -> list[str]:
    """Lines of the page's shell blocks, continued lines joined, comments cut."""
    found = []
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            text = line.split(" #")[0].strip()
            if text:
                found.append(text)
    return found


def inline(page: Path) -> list[str]:
    """``farflow`` command lines in running text."""
    text = page.read_text(encoding="utf-8")
    return [found for found in re.findall(r"`(farflow [^`\n]+)`", text) if "|" not in found]


ALL = sorted({(p.name, c) for p in PAGES for c in commands(p) if c.startswith("farflow ")})
INLINE = sorted({(p.name, c) for p in PAGES for c in inline(p)})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the documents name."""
    examples = ("examples/arithmetic.toml", "examples/solve_and_verify.toml")
    for name in ("deployment.toml", *examples, "RUN_FOLDER/deployment.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "FOLDER").mkdir()
    for name in ("box/agent.toml", "farflow-agent/agent.toml"):
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


def test_the_readme_names_existing_make_targets() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for line in commands(page):
            if line.startswith("make "):
                assert line.split()[1] in targets, f"{page.name}: {line}"
