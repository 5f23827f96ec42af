"""What docs/evaluation.md shows can be used as it stands."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from farflow.run_file import run_spec
from scheduler.tasks import open_source
from transport.run_faults import module_faults
from transport.runs import RunSpec
from transport.runtime.config import collect

PAGE = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
TASK = """
[task]
source = "reasoning-gym"
dataset = "chain_sum"
"""
REST = """
[run]
name = "r"
[policies.p]
model = "."
[workflow]
policies = ["p"]
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def run_of(folder: Path, tables: str) -> RunSpec:
    for name in ("config.json", "competition.jsonl", "facts.jsonl"):
        (folder / name).touch()
    path = folder / "run.toml"
    path.write_text(tables + REST + ("" if "[task]" in tables else TASK), encoding="utf-8")
    return run_spec(collect([path], (), {})[0], folder)


def test_the_tables_make_a_run(tmp_path: Path) -> None:
    evaluated, mixed, told, own = (run_of(tmp_path, block) for block in blocks("toml"))
    assert list(evaluated.all_evaluations()) == ["held-out", "competition", "with-tools"]
    competition = evaluated.evaluations["competition"]
    assert (competition.reported_k(), competition.items_of_job()) == ((1, 4, 16), 4)
    assert [part.name for part in mixed.task.parts] == ["chain_sum", "facts"]
    assert (told.task.answer, told.task.instruction[-10:]) == ("tags", "</answer>.")
    assert not list(module_faults(own, ["my_tasks"]))


def test_the_function_makes_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("my_tasks")
    (text,) = blocks("python")
    exec(text, module.__dict__)  # noqa: S102 - our own page
    monkeypatch.setitem(sys.modules, "my_tasks", module)
    run = run_of(tmp_path, blocks("toml")[-1])
    source = open_source(run.task, run.seed, ("my_tasks",))
    for item in source.items("train", 0, 50):
        a, b = (int(number) for number in item.prompt.removesuffix(" =").split(" * "))
        assert int(item.answer) == a * b <= 900
