"""What ``config check`` and ``run submit`` find before there is a run."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from torch_models import EXAMPLE

from farflow.cli import cli
from transport.errors import ConfigError

RUN = """
[run]
name = "sums"
[policies.solver]
model = "model"
{policy}
[task]
source = "reasoning-gym"
dataset = "chain_sum"
{task}
[workflow]
policies = ["solver"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(EXAMPLE, tmp_path / "model")
    return tmp_path


def written(folder: Path, *, policy: str = "", task: str = "") -> str:
    file = folder / "run.toml"
    file.write_text(RUN.format(policy=policy, task=task), encoding="utf-8")
    return str(file)


def fault(*arguments: str) -> str:
    error = CliRunner().invoke(cli, arguments).exception
    assert isinstance(error, ConfigError), error
    return str(error)


TASKS = [
    ("settings = { size = 20000 }", "task.settings.size: is chosen by the scheduler; remove it"),
    ("settings = { min_term = 2 }", "task.settings.min_term: 'chain_sum' has no such setting"),
    ("settings = { min_terms = '2' }", "task.settings.min_terms: Expected `int`, got `str`"),
    ("settings = { min_terms = 9, max_terms = 2 }", "task.settings: 'chain_sum' refuses them"),
    ("[evaluation.task]\nsource = 'reasoning-gym'\ndataset = 'x'", "evaluation.task.dataset: "),
    (
        "[evaluations.y.task]\nsource = 'jsonl'\npath = 'y.jsonl'\nreward = 'exact'",
        "evaluations.y.task: {folder}/y.jsonl:2: Object missing required field `answer`",
    ),
    ("answer = 'box'", "task.answer: Invalid enum value 'box'; allowed are whole, tags, boxed"),
]


@pytest.mark.parametrize(("task", "words"), TASKS)
def test_what_a_task_source_would_refuse_is_refused_before_there_is_a_run(
    folder: Path, task: str, words: str
) -> None:
    (folder / "y.jsonl").write_text('{"prompt": "1", "answer": "1"}\n{"prompt": "2"}\n')
    file, words = written(folder, task=task), words.replace("{folder}", str(folder))
    assert words in fault("config", "check", file)
    # There is no scheduler: whoever gets so far fails otherwise.
    assert words in fault("run", "submit", file)


def test_a_good_file_is_accepted_with_arguments_of_its_chat_template(folder: Path) -> None:
    file = written(
        folder,
        policy="chat_template_kwargs = { enable_thinking = false }",
        task='answer = "tags"\ninstruction = "Answer in <answer> tags."',
    )
    assert CliRunner().invoke(cli, ["config", "check", file]).exit_code == 0
    shown = CliRunner().invoke(cli, ["config", "show", file]).output
    assert "policies.solver.chat_template_kwargs.enable_thinking = false" in shown
    bad = written(folder, policy="chat_template_kwargs = { tokenize = true }")
    assert "policies.solver.chat_template_kwargs.tokenize: is given by" in fault(
        "config", "check", bad
    )


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ("model.safetensors", "neither model.safetensors nor model.safetensors.index.json"),
        ("tokenizer.json", "no tokenizer; one of tokenizer.json"),
        ("config.json", "config.json is missing"),
    ],
)
def test_a_model_folder_that_is_not_whole_is_named_with_the_remedy(
    folder: Path, gone: str, words: str
) -> None:
    (folder / "model" / gone).unlink()
    said = fault("config", "check", written(folder))
    assert "policies.solver.model: " in said
    assert words in said
    assert f"hf download ORGANISATION/NAME --local-dir {folder / 'model'}" in said


def test_a_shard_that_is_missing_is_named(folder: Path) -> None:
    model = folder / "model"
    (model / "model.safetensors").unlink()
    shards = '{"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}'
    (model / "model.safetensors.index.json").write_text(shards)
    (model / "model-1-of-2.safetensors").touch()
    assert f"{model / 'model-2-of-2.safetensors'}: is missing" in fault(
        "config", "check", written(folder)
    )


def test_submitting_needs_no_weights_where_one_submits(folder: Path) -> None:
    """They are on the trainer's host: only the operator's key is missing here."""
    (folder / "model" / "model.safetensors").unlink()
    assert "keys" in fault("run", "submit", written(folder))
