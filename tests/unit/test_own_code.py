"""``farflow config check`` looks at users' own code as far as it can be imported."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from farflow.commands import config_check
from transport.errors import ConfigError

RUN = """
[run]
name = "r"
[policies.p]
model = "."
[task]
source = "reasoning-gym"
dataset = "chain_sum"
[workflow]
policies = ["p"]
"""
FILTER = '[[policies.p.data.filters]]\nname = "{}"\nsettings = {}\n'
CURATOR = '[[run.curators]]\nname = "{}"\n'
SELECTOR = '[policies.p.data.replay]\nratio = 0.1\nselect = {{ name = "{}" }}\n'
FUNCTION = (
    'source = "reasoning-gym"\ndataset = "chain_sum"',
    'source = "python"\nreward = "exact"\nfunction = "{}"',
)
OWN = """
from scheduler.data.registry import AlgorithmSettings, filter_function
from scheduler.data.views import GroupView

print("hello")

class Short(AlgorithmSettings, frozen=True, kw_only=True):
    tokens: int

@filter_function("short", Short)
def short(group: GroupView, settings: Short) -> bool:
    return False

def items(seed, largest=99):
    yield {"prompt": "1 + 1 =", "answer": "2"}

async def flow(context, item):
    return []
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config.json").write_text("{}")
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    (tmp_path / "own_code_of_test.py").write_text(OWN)
    (tmp_path / "own_broken_of_test.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def check(folder: Path, text: str, *argv: str) -> Result:
    path = folder / "run.toml"
    path.write_text(text)
    return CliRunner().invoke(config_check, [str(path), *argv], catch_exceptions=False)


def with_task(function: str, more: str = "") -> str:
    return RUN.replace(FUNCTION[0], FUNCTION[1].format(function) + more)


SHORT = "own_code_of_test:short"


@pytest.mark.parametrize(
    "text",
    [
        RUN + FILTER.format(SHORT, "{ tokens = 3 }"),
        with_task("own_code_of_test:items", "\nsettings.largest = 3"),
        RUN + 'reference = "own_code_of_test:flow"\n',
        '[agent]\nworkflows = ["own_code_of_test:flow"]\n',
        '[scheduler]\ndata_modules = ["own_code_of_test"]\n',
        RUN + FILTER.format(SHORT, "{ tokens = 3 }")
        + '[scheduler]\ndata_modules = ["own_code_of_test"]\n',
        '[agent]\nworkflows = ["multi_turn"]\n',
        RUN + 'reference = "program:mine"\n',
    ],
)  # fmt: skip
def test_what_can_be_imported_and_is_right_is_ok(folder: Path, text: str) -> None:
    result = check(folder, text, "--json")
    assert json.loads(result.stdout)["not_checked"] == []  # and what modules print is not there


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (RUN + FILTER.format(SHORT, "{ token = 3 }"), "filters[0].settings.token: unknown key"),
        (RUN + FILTER.format(SHORT, "{}"), "tokens"),
        (RUN + FILTER.format("own_code_of_test:nope", "{}"), "filters[0].name: 'own_code_of_te"),
        (RUN + CURATOR.format(SHORT), "run.curators[0].name: 'own_code_of_test:short' must be a"),
        (RUN + SELECTOR.format(SHORT), "replay.select.name: 'own_code_of_test:short' must be"),
        (
            RUN + FILTER.format(SHORT, "{ tokens = 3 }") + "[scheduler]\n",
            "add it to [scheduler] data_modules",
        ),
        (with_task("own_code_of_test:nope"), "task.function: module 'own_code_of_test' has no"),
        (
            with_task("own_code_of_test:items", "\nsettings.biggest = 3"),
            "task.settings: own_code_of_test:items does not take them: got an unexpected keyword",
        ),
        (with_task("own_code_of_test:items") + "[scheduler]\n", "[scheduler] task_modules"),
        (
            RUN + 'reference = "own_code_of_test:short"\n',
            "workflow.reference: workflow 'own_code_of_test:short': own_code_of_test has no async",
        ),
        ('[agent]\nworkflows = ["own_code_of_test:nope"]\n', "agent.workflows[0]: workflow 'own_"),
        ('[agent]\nworkflows = ["multi_turns"]\n', "agent.workflows[0]: workflow 'multi_turns' is"),
    ],
)
def test_what_can_be_imported_and_is_wrong_is_refused(folder: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(folder, text)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (RUN + FILTER.format("no_such_of_test:nope", "{ a = 1 }"), "no_such_of_test:nope"),
        (RUN + CURATOR.format("own_broken_of_test:nope"), "own_broken_of_test:nope"),
        (RUN + SELECTOR.format("no_such_of_test:nope"), "no_such_of_test:nope"),
        (with_task("no_such_of_test:items"), "no_such_of_test:items"),
        (RUN + 'reference = "no_such_of_test:flow"\n', "no_such_of_test:flow"),
        ('[agent]\nworkflows = ["shaped_of_test:shaped"]\n', "shaped_of_test:shaped"),
        ('[scheduler]\ndata_modules = ["no_such_of_test"]\n', "no_such_of_test"),
        ('[scheduler]\ntask_modules = ["no_such_of_test"]\n', "no_such_of_test"),
    ],
)
def test_what_cannot_be_imported_here_is_said_and_not_refused(
    folder: Path, text: str, name: str
) -> None:
    result = check(folder, text)
    assert result.exit_code == 0
    assert f"warning: not checked here: {name} (cannot import: " in result.stderr
    assert "ok, but for what was not checked here" in result.stdout
