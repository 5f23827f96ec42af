"""The workflows of ``examples/workflows``: what they return, and files that can be run."""

import hashlib
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from scripted_engine import ScriptedEngine, script
from torch_models import EXAMPLE
from workflow_bench import Bench, crash

from edge_agent.core.events import GroupSpooled
from edge_agent.engine import GenerationRequest
from edge_agent.engines.fake_text import decode_text
from edge_agent.workflow import SHIPPED, Workflow, load_workflow
from farflow.cli import cli
from transport.messages import Item
from transport.trajectory import expand

FOLDER = Path(__file__).parents[2] / "examples" / "workflows"
FILES = sorted(path.name for path in FOLDER.glob("*.toml"))
IDS = {name: f"run/{name}" for name in ("solver", "tester", "selector")}
PAGED = ("solve_and_verify", "tool_use")
"""Whose settings the page lists; the others have pages of their own."""
ITEM = Item(index=4, prompt="3 + 4 =", answer="7")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def run(bench: Bench, workflow: Workflow, **changes: Any) -> Any:
    for policy in IDS.values():
        await bench.engine.load_policy(policy, bench.model, 3)
    values = {"settings": {}, "items": (ITEM,), "group_size": 1, "max_new_tokens": 64}
    return await bench.promising(workflow.rollouts).run(workflow.function, **{**values, **changes})


@pytest.mark.parametrize("name", [*FILES, "../solve_and_verify.toml"])
def test_every_file_is_accepted_as_it_is(name: str) -> None:
    result = CliRunner().invoke(cli, ["config", "check", str(FOLDER / name)])
    assert result.exit_code == 0, result.output


def test_every_workflow_has_a_file() -> None:
    assert {Path(name).stem for name in FILES} >= {"solve_and_select", "search", "guessing"}
    for name in ("solve_and_select", "search", "guessing"):
        assert load_workflow(f"{name}:{name}").reference in (FOLDER / f"{name}.toml").read_text()


@pytest.mark.asyncio
async def test_the_ten_lines_of_the_page_run(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (FOLDER.parents[1] / "docs" / "workflows.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    assert code.startswith("# debate.py")
    (tmp_path / "debate.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    workflow = load_workflow("debate:debate")
    events = await run(bench, workflow, group_size=3)
    assert isinstance(events[-1], GroupSpooled), events[-1]
    for sequence in bench.group().sequences:
        assert [policy for _, policy, _ in sequence.segments] == [0, -1, 0]


def test_the_page_names_every_shipped_workflow_and_its_settings() -> None:
    page = (FOLDER.parents[1] / "docs" / "workflows.md").read_text()
    for name in SHIPPED:
        [line] = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        struct = getattr(sys.modules[load_workflow(name).function.__module__], "Settings", None)
        for setting in struct.__struct_fields__ if struct else ():
            assert f"`{setting}`" in line or name not in PAGED, (name, setting)


# ---- solve and select --------------------------------------------------------------------------


def three(answers: list[str], test: str, choice: str) -> ScriptedEngine:
    """Answers by sibling of the solver's request, one test and one choice for all."""

    def say(request: GenerationRequest, sibling: int) -> str:
        role = request.policy.partition("/")[2]
        return {"solver": answers[sibling], "tester": test, "selector": choice}[role]

    return ScriptedEngine(say)


@pytest.mark.parametrize(
    ("answers", "test", "choice", "rewards"),
    [
        (["7", "8"], "3 + 4", "2", [1.0, 0.0, 1.0, 0.0]),
        (["7", "8"], "3 + 5", "Answer 1", [1.0, 0.0, 0.0, 1.0]),
        (["8", "7"], "8", "both", [0.0, 1.0, 0.0, 0.0]),
        (["7", "7"], "what?", "1", [1.0, 1.0, 0.0, 1.0]),
        (["8", "9"], "3 + 4 =", "3", [0.0, 0.0, 1.0, 0.0]),
    ],
)
@pytest.mark.asyncio
async def test_each_of_three_policies_has_a_reward_of_its_own(
    bench: Bench, answers: list[str], test: str, choice: str, rewards: list[float]
) -> None:
    bench.engine = three(answers, test, choice)
    await run(bench, load_workflow("solve_and_select:solve_and_select"), policies=IDS)
    group = bench.group()
    assert [s.reward for s in group.sequences] == rewards
    drawn = [group.policies[s.segments[0][1]].partition("/")[2] for s in group.sequences]
    assert drawn == ["solver", "solver", "tester", "selector"]
    read = decode_text(group.prompts[group.sequences[3].prompt])
    marks = ["passes" if reads == "passes" else "fails" for reads in _marks(read)]
    assert read.startswith(f"3 + 4 = Answer 1: {answers[0]} ({marks[0]} the test) Answer 2:")


def _marks(read: str) -> list[str]:
    return [part.partition(" ")[0] for part in read.split("(")[1:]]


@pytest.mark.parametrize(
    ("answers", "test", "choice", "picked"),
    [
        (["7", "8"], "3 + 4", "2", "8"),
        (["8", "7"], "3 + 4", "neither", "7"),
        (["8", "9"], "3 + 4", "neither", "8"),
    ],
)
@pytest.mark.asyncio
async def test_an_evaluation_measures_what_three_achieve_together(
    bench: Bench, answers: list[str], test: str, choice: str, picked: str
) -> None:
    bench.engine = three(answers, test, choice)
    workflow = load_workflow("solve_and_select:solve_and_select")
    await run(bench, workflow, policies=IDS, kind="eval", temperature=0.0)
    assert [decode_text(s.tokens) for s in bench.group().sequences] == [picked]
    solved = next(r for r in bench.engine.asked if r.policy == IDS["solver"])
    assert solved.sampling.temperature == 1.0


@pytest.mark.asyncio
async def test_answers_of_several_siblings_stay_with_their_sibling(bench: Bench) -> None:
    bench.engine = three(["7", "8", "8", "7"], "3 + 4", "1")
    workflow = load_workflow("solve_and_select:solve_and_select")
    await run(bench, workflow, policies=IDS, group_size=2)
    rewards = [s.reward for s in bench.group().sequences]
    assert rewards == [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0]


# ---- search ------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_search_is_read_and_not_trained_on(bench: Bench) -> None:
    bench.engine = ScriptedEngine(script("Hm. <search>capital Iceland</search>", "Reykjavik"))
    item = Item(index=0, prompt="What is the capital of Iceland?", answer="Reykjavik")
    await run(bench, load_workflow("search:search"), items=(item,), settings={"facts": 1})
    (sequence,) = bench.group().sequences
    by = expand(sequence.segments)[0]
    observed = [t for t, policy in zip(sequence.tokens, by, strict=True) if policy < 0]
    assert decode_text(observed) == "The capital of Iceland is Reykjavik."
    assert sequence.reward == 1.0
    whole = (*bench.group().prompts[0], *sequence.tokens)
    last = bench.engine.asked[-1].prompt_tokens
    assert whole[: len(last)] == last


@pytest.mark.parametrize(
    ("searches", "texts", "turns"),
    [
        (0, ("<search>x</search>",), 1),
        (1, ("<search>rivers</search>", "<search>rivers</search>"), 2),
        (2, ("no search",), 1),
    ],
)
@pytest.mark.asyncio
async def test_searches_are_bounded(
    bench: Bench, searches: int, texts: tuple[str, ...], turns: int
) -> None:
    bench.engine = ScriptedEngine(script(*texts))
    await run(bench, load_workflow("search:search"), settings={"searches": searches})
    assert len(bench.engine.asked) == turns


def test_whatever_is_searched_for_is_words() -> None:
    load_workflow("search:search")
    from search import find

    assert find("Danube", 1) == ["The Danube ends in the Black Sea."]
    assert find("legs spider", 2)[0] == "A spider has eight legs."
    assert find('capital" OR fact:x NEAR( *', 3)
    assert find("", 3) == find("?!", 3) == find("zzzz", 3) == []
    assert len(find("the " * 500, 20)) == 20


@pytest.mark.asyncio
async def test_another_corpus_than_the_runs_fails_the_attempt(bench: Bench) -> None:
    digest = hashlib.sha256((FOLDER / "corpus.txt").read_bytes()).hexdigest()
    bench.engine = ScriptedEngine(lambda *_: "no search")
    workflow = load_workflow("search:search")
    assert isinstance(
        (await run(bench, workflow, settings={"corpus_sha256": digest}))[-1], GroupSpooled
    )
    bench.events.clear()
    failed = crash(await run(bench, workflow, settings={"corpus_sha256": "0" * 64}))
    assert failed.code == "workflow.malformed"
    assert digest in failed.detail


def test_the_questions_have_their_answers_in_the_corpus() -> None:
    load_workflow("search:search")
    from search import find

    lines = [
        msgspec.json.decode(line) for line in (FOLDER / "search.jsonl").read_bytes().splitlines()
    ]
    assert len((FOLDER / "corpus.txt").read_text().splitlines()) >= 60
    for line in lines:
        assert any(line["answer"] in fact for fact in find(line["prompt"], 3)), line["prompt"]


# ---- with the model that their files name ------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [name for name in FILES if name != "guessing.toml"])
@pytest.mark.asyncio
async def test_the_small_model_runs_them(bench: Bench, name: str) -> None:
    from edge_agent.engines.torch_engine import TorchEngine
    from farflow.run_file import run_spec
    from transport.runtime.config import read_toml

    spec = run_spec(read_toml(FOLDER / name), FOLDER)
    bench.engine, bench.model = TorchEngine(16), EXAMPLE
    workflow = load_workflow(spec.workflow.reference)
    policies = {policy: f"run/{policy}" for policy in spec.workflow.policies}
    for policy in policies.values():
        await bench.engine.load_policy(policy, EXAMPLE, 3)
    question = "State the final answer to the following arithmetic problem: 12 + 34 ="
    changes = {
        "items": (Item(index=0, prompt=question, answer="46"),),
        "settings": spec.workflow.settings,
        "max_new_tokens": spec.workflow.max_new_tokens,
        "policies": policies,
    }
    for kind in ("train", "eval"):
        events = await bench.promising(workflow.rollouts).run(
            workflow.function, timeout_s=60.0, kind=kind, group_size=2, **changes
        )
        assert isinstance(events[-1], GroupSpooled), events[-1]
