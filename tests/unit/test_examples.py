"""Every file below ``examples/`` is what it says: accepted as it is, and the programs work."""

import json
import runpy
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from edge_agent.config import AgentConfig
from farflow.cli import cli
from farflow.run_file import run_spec
from scheduler.autoscaler import Autoscaler, AutoscalerTable
from scheduler.config import SchedulerConfig
from scheduler.tasks import evaluation_source, open_source
from transport.errors import ConfigError
from transport.run_faults import task_functions
from transport.runtime.clock import SystemClock
from transport.runtime.config import collect, load_config
from transport.status import DemandStatus

FOLDER = Path(__file__).parents[2] / "examples"
FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.toml"))


def text_of(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


PROMISED = {
    "arithmetic.toml",  # one machine
    "arithmetic-vllm.toml",  # vLLM on one agent
    "three-hosts/run.toml",
    "spot-pool/agent.toml",
    "gpu-boxes/run.toml",  # a real model with vLLM
    "solve_and_verify.toml",  # two policies
    "programs/second_try.toml",  # an agent of one's own
    "own-model/own.toml",
}


def test_the_examples_that_the_page_promises_are_here() -> None:
    assert set(FILES) >= PROMISED
    page = (FOLDER.parent / "docs" / "getting-started.md").read_text(encoding="utf-8")
    for name in PROMISED:
        top = name.split("/")[0]
        assert f"`examples/{top}" in page, name


DOWNLOADED = {"gpu-boxes/run.toml": "qwen3-0.6b"}
"""Files whose model is not in the tree, and the folder beside them that it is downloaded to."""


@pytest.mark.parametrize("name", sorted(DOWNLOADED))
def test_a_file_whose_model_is_downloaded_is_accepted_with_a_model(
    name: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text((FOLDER / name).read_text(encoding="utf-8"), encoding="utf-8")
    model = tmp_path / DOWNLOADED[name]
    missing = CliRunner().invoke(cli, ["config", "check", str(file)]).exception
    assert isinstance(missing, ConfigError)
    assert str(model) in str(missing)
    model.symlink_to(FOLDER / "models" / "arithmetic-1m", target_is_directory=True)
    result = CliRunner().invoke(cli, ["config", "check", str(file)])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("name", sorted({*FILES} - {*DOWNLOADED}))
def test_every_file_is_accepted_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str((FOLDER / name).parent))
    result = CliRunner().invoke(cli, ["config", "check", str(FOLDER / name)])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("name", [name for name in FILES if "[task]" in text_of(name)])
def test_the_task_sources_of_every_file_give_items(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str((FOLDER / name).parent))
    data, _ = collect([FOLDER / name], (), {})
    folder = (FOLDER / name).parent
    if name in DOWNLOADED:  # the model has no part in it
        for policy in data["policies"].values():
            policy["model"] = str(FOLDER / "models" / "arithmetic-1m")
    run = run_spec(data, folder)
    modules = [source.function.partition(":")[0] for _, source in task_functions(run)]
    source = open_source(run.task, run.seed, modules)
    assert len(source.items("train", 0, 2)) == 2
    for evaluation, spec in run.all_evaluations().items():
        own = evaluation_source(evaluation, spec, run.seed, modules) or source
        assert len(own.items("eval", 0, 1)) == 1


def demand(more_slots: int) -> DemandStatus:
    return DemandStatus(
        run="own",
        binds="generation",
        more_slots=more_slots,
        hardware="l40s",
        steps_hour=100.0,
        steps_hour_with=200.0,
        reason="",
    )


@pytest.mark.asyncio
async def test_the_spot_pools_hook_says_how_many_instances_the_schedulers_demand_makes(
    tmp_path: Path,
) -> None:
    pool = FOLDER / "spot-pool"
    table = load_config(SchedulerConfig, [pool / "deployment.toml"]).value.scheduler.autoscaler
    _, program, name = table.command
    out = tmp_path / name
    command = (sys.executable, str(pool / program), str(out))
    for slots, expected in ((8, 1), (64, 1), (65, 2), (100_000, 16)):
        live = AutoscalerTable(command=command, least_slots=table.least_slots, cool_down_s=0.0)
        scaler = Autoscaler(live, SystemClock(), lambda slots=slots: (demand(slots),))  # type: ignore[misc]
        await scaler.look()
        assert json.loads(out.read_text()) == {"more_instances": expected}


def test_the_hook_and_the_agent_of_the_pool_mean_the_same_slots() -> None:
    agent = load_config(AgentConfig, [FOLDER / "spot-pool" / "agent.toml"]).value.agent
    program = runpy.run_path(str(FOLDER / "spot-pool" / "rent.py"))
    assert agent.slots == program["SLOTS"]
    assert agent.token_file
    assert not agent.key, "an image must not hold a key: every instance makes its own"
    said = msgspec.json.decode(msgspec.json.encode({"demand": [demand(3)]}))
    assert program["instances"](said) == 1
