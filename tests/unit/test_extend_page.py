"""``docs/extend.md`` as it stands: its Python is a module, its TOML names the functions in it."""

import re
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest
from core_builders import SOLVER, make_run, make_scene
from workflow_bench import Bench

from edge_agent.engines.fake_text import decode_text
from edge_agent.workflow import load_workflow
from scheduler.config import SchedulerTable
from transport.runs import AlgorithmSpec, DataSpec
from transport.runtime.config import convert

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"


REWARD = "from edge_agent.workflow"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def of_data() -> list[str]:
    """The Python that the scheduler imports."""
    return [block for block in blocks("python") if not block.startswith(REWARD)]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """The module can be imported; what the page's TOML says, all of it."""
    (tmp_path / "my_data.py").write_text("\n".join(of_data()))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_data", raising=False)
    found: dict = {"policies": {"solver": {"data": {}}}}
    for block in blocks("toml"):
        tables = tomllib.loads(block)
        found["policies"]["solver"]["data"] |= (
            tables.pop("policies", {}).get("solver", {}).get("data", {})
        )
        found |= tables
    return found


@pytest.fixture
def scene(settings):
    table = convert(settings["scheduler"], SchedulerTable, "scheduler")
    data = convert(settings["policies"]["solver"]["data"], DataSpec, "data")
    curators = msgspec.convert(settings["run"]["curators"], tuple[AlgorithmSpec, ...])
    spec = make_run(
        policy={"data": data, "batch_groups": 4, "steps": 20, "max_policy_lag": 3},
        workflow={"max_new_tokens": 64},
        curators=curators,
    )
    scene = make_scene(run=spec, modules=table.data_modules)
    scene.joined("a", slots=64)
    return scene


def test_the_filter_of_the_page_is_ten_lines_and_works(scene):
    lines = [line for line in of_data()[0].splitlines() if line.strip()]
    assert len(lines) <= 10
    short, long = scene.live_offers()[:2]
    scene.finished(short, lengths=(15, 16))
    scene.finished(long, lengths=(16, 16))
    assert scene.counter("filtered.my_data:short_answers") == 1
    assert (scene.books().filtered, scene.books().buffered) == (1, 1)


def test_the_selector_of_the_page_takes_the_best_first(scene):
    rewards = iter([(0.0, 1.0), (1.0, 1.0), (0.0, 0.0), (1.0, 1.0)])
    scene.requested(1, groups=4)
    for offer in scene.live_offers()[:4]:
        scene.finished(offer, lengths=(20, 20), rewards=next(rewards))
    best = {"r/t-000001", "r/t-000003"}
    scene.stepped(1)
    scene.requested(2, head=1, groups=4)
    for offer in scene.live_offers()[:4]:
        scene.finished(offer, lengths=(20, 20))
    kept = scene.core._ctx.policies[SOLVER].pool
    assert set(kept.taken[2]) == best


def test_the_curator_of_the_page_is_found(scene):
    assert scene.run().state == "running"
    assert scene.counter("data.failed.my_data:rarely_failed") == 0
    curators, missing = scene.data._curators_of(scene.core.run_spec("r"))
    assert ([one.name for one in curators], missing) == (["my_data:rarely_failed"], ())


@pytest.mark.asyncio
async def test_the_reward_of_the_page_is_what_its_formula_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [block] = [block for block in blocks("python") if block.startswith(REWARD)]
    (tmp_path / "my_rewards.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    [agent] = [one["agent"] for one in map(tomllib.loads, blocks("toml")) if "agent" in one]
    [name] = agent["workflows"]
    flow = load_workflow(name)
    bench = Bench(tmp_path / "agent").promising(flow.rollouts)
    await bench.run(flow.function, group_size=8)
    sequences = bench.group().sequences
    for sequence in sequences:
        text = decode_text(sequence.tokens)
        number = float(text) if text.strip().lstrip("-").isdigit() else None
        expected = 0.0 if number is None else 1.0 / (1.0 + abs(number - 7.0))
        assert sequence.reward == pytest.approx(expected), text
    assert len({sequence.reward for sequence in sequences}) > 1
