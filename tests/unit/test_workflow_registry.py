"""References to workflows: what they find, what they are worth, and how they fail."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_agent.workflow import WorkflowContext, load_workflow, workflow
from transport.errors import ConfigError
from transport.messages import Item


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "farflow_test_workflows.py"
    path.write_text(
        "from edge_agent.workflow import workflow\n"
        "@workflow('renamed')\n"
        "async def original(context, item):\n    return []\n"
        "async def plain(context, item):\n    return []\n"
        "def not_async(context, item):\n    return []\n"
    )
    (tmp_path / "farflow_broken_workflows.py").write_text("async def f(\n")
    (tmp_path / "farflow_leaving_workflows.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield path
    sys.modules.pop("farflow_test_workflows", None)


def test_references_find_registered_names_and_plain_functions(user_module: Path) -> None:
    renamed = load_workflow("farflow_test_workflows:renamed")
    plain = load_workflow("farflow_test_workflows:plain")
    assert renamed.function.__name__ == "original"
    assert plain.function.__name__ == "plain"
    assert renamed.fingerprint == plain.fingerprint
    assert renamed.reference == "farflow_test_workflows:renamed"


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("unheard_of", "shipped are single_turn"),
        ("no_such_module_here:f", "'no_such_module_here:f'.*pip install"),
        ("farflow_broken_workflows:f", "'farflow_broken_workflows:f'.*was never closed"),
        ("farflow_leaving_workflows:f", r"SystemExit\(3\)"),
        (":f", "module:function"),
        (".relative:f", "module:function"),
        ("farflow_test_workflows:", "module:function"),
        ("farflow_test_workflows:missing", "no async function 'missing'"),
        ("farflow_test_workflows:not_async", "no async function 'not_async'"),
    ],
)
def test_unknown_references_are_explained(user_module: Path, reference: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_workflow(reference)


def test_the_fingerprint_follows_the_source(user_module: Path) -> None:
    before = load_workflow("farflow_test_workflows:plain").fingerprint
    user_module.write_text(user_module.read_text() + "# changed\n")
    sys.modules.pop("farflow_test_workflows")
    assert load_workflow("farflow_test_workflows:plain").fingerprint != before
    assert load_workflow("single_turn").fingerprint == load_workflow("single_turn").fingerprint


def test_the_decorator_gives_the_function_back() -> None:
    async def nothing(context: WorkflowContext, item: Item) -> Any:
        return None

    assert workflow("x")(nothing) is nothing
