"""The shipped workflow of a solver and its verifier."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scripted_engine import ScriptedEngine
from workflow_bench import JUDGE, SOLVER, Bench, crash

from edge_agent.engine import Completion, GenerationRequest
from edge_agent.engines.fake import FakeEngine
from edge_agent.engines.fake_text import decode_text
from edge_agent.workflow import load_workflow
from transport.messages import Item

FLOW = load_workflow("solve_and_verify")
OFFER = {"policies": {"solver": SOLVER, "verifier": JUDGE}, "settings": {}, "max_new_tokens": 16}
NAMES = {"solver": "author", "verifier": "critic"}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path).promising(FLOW.rollouts)


async def run(bench: Bench, **changes: Any) -> Any:
    return await bench.run(FLOW.function, **{**OFFER, **changes})


def said(bench: Bench, prompts: bool = False) -> list[str]:
    group = bench.group()
    return [decode_text(group.prompts[s.prompt] if prompts else s.tokens) for s in group.sequences]


@pytest.mark.asyncio
async def test_both_learn_from_rewards_of_their_own(bench: Bench) -> None:
    await run(bench, group_size=8)
    group = bench.group()
    assert group.policies == (JUDGE, SOLVER)
    texts, read = said(bench), said(bench, prompts=True)
    verdicts = set()
    for number in range(8):
        answer, verdict = group.sequences[number], group.sequences[8 + number]
        assert {policy for _, policy, _ in answer.segments} == {1}
        assert {policy for _, policy, _ in verdict.segments} == {0}
        assert answer.reward == float(texts[number] == "7")
        assert read[8 + number] == f"3 + 4 = {texts[number]}? Answer Yes or No."
        right = (texts[8 + number] == "Yes") == (texts[number] == "7")
        assert verdict.reward == float(right)
        verdicts.add(verdict.reward)
    assert {s.reward for s in group.sequences[:8]} == verdicts == {0.0, 1.0}, "all cases came up"


@pytest.mark.asyncio
async def test_an_evaluation_returns_the_answers_alone(bench: Bench) -> None:
    items = tuple(Item(index=n, prompt=f"{n} + 1 =", answer=str(n + 1)) for n in range(5))
    await run(bench, kind="eval", items=items, group_size=1, temperature=0.0)
    group = bench.group()
    assert [s.prompt for s in group.sequences] == list(range(5))
    assert {policy for s in group.sequences for _, policy, _ in s.segments} == {1}


@pytest.mark.asyncio
async def test_names_and_words_are_settings(bench: Bench) -> None:
    words = {"yes": "NO", "no": "yes", "question": "Is it {answer}? {prompt} {answer}?"}
    policies = {"author": SOLVER, "critic": JUDGE}
    settings = {**NAMES, **words, "verdict_tokens": 16}
    await run(bench, policies=policies, settings=settings, group_size=4)
    texts, read = said(bench), said(bench, prompts=True)
    for number in range(4):
        answer, verdict = texts[number], texts[4 + number]
        assert read[4 + number] == f"Is it {answer}? 3 + 4 = {answer}?"
        assert bench.group().sequences[4 + number].reward == float(
            (verdict == "No") == (answer == "7")
        )


@pytest.mark.asyncio
async def test_a_prompt_is_not_read_as_a_template(bench: Bench) -> None:
    items = (Item(index=0, prompt="{answer} {prompt} 1 + 1 =", answer="2"),)
    await run(bench, items=items, group_size=1)
    answer, _ = said(bench)
    assert said(bench, prompts=True)[1].startswith(f"{{answer}} {{prompt}} 1 + 1 = {answer}?")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"yes": ""}, "yes"),
        ({"verdict": 3}, "verdict"),
        ({"best_of": 0}, "best_of"),
        ({"choose": "best"}, "choose"),
        ({"verifier": "critic"}, "no policy 'critic'"),
    ],
)
@pytest.mark.asyncio
async def test_wrong_settings_are_named(
    bench: Bench, settings: dict[str, object], words: str
) -> None:
    failed = crash(await run(bench, settings=settings))
    assert failed.code == "workflow.malformed"
    assert words in failed.detail


Verdicts = Mapping[str, str | tuple[str, float]]
"""What is said of each answer, and with which probability its first word."""


def choosing(answers: list[str], verdicts: Verdicts) -> ScriptedEngine:
    """A solver with these answers, by sibling, and a verifier with a verdict for each of them."""

    def say(request: GenerationRequest, sibling: int) -> str | tuple[str, float]:
        if request.policy == SOLVER:
            return answers[sibling]
        claim = decode_text(request.prompt_tokens)
        told = verdicts[claim.partition("=")[2].partition("?")[0].strip()]
        text, probability = told if isinstance(told, tuple) else (told, 1.0)
        # The scripted engine gives every token, one a character and the end, the same share of it.
        return text, probability ** ((len(text) + 1) / len(text.partition(",")[0]))

    return ScriptedEngine(say)


@pytest.mark.parametrize(
    ("verdicts", "chosen"),
    [
        ({"1": ("No", 0.9), "2": ("Yes", 0.6), "3": ("Yes", 0.8)}, "3"),
        ({"1": ("Yes", 0.7), "2": ("Yes", 0.7), "3": ("No", 0.9)}, "1"),
        ({"1": ("No", 0.9), "2": ("Perhaps", 0.9), "3": ("No", 0.1)}, "2"),
        ({"1": ("No", 0.9), "2": ("No", 0.5), "3": ("No", 0.6)}, "2"),
    ],
)
@pytest.mark.asyncio
async def test_the_best_of_several_is_the_verifiers_choice(
    bench: Bench, verdicts: Verdicts, chosen: str
) -> None:
    bench.engine = choosing(["1", "2", "3"], verdicts)
    settings = {"best_of": 3}
    await run(bench, kind="eval", group_size=1, settings=settings, temperature=0.0)
    assert said(bench) == [chosen]


@pytest.mark.parametrize(
    ("answers", "verdicts", "chosen"),
    [
        # 3 x 0.4 beats 0.9; the likeliest alone is 2.
        (["1", "2", "1", "1"], {"1": ("No", 0.6), "2": ("Yes", 0.9)}, "1"),
        (["1", "2", "1"], {"1": ("No", 0.6), "2": ("Yes", 0.9)}, "2"),
        # Blanks around an answer are none of it: 0.6 + 0.6 against 0.9.
        (["1 ", "2", " 1"], {"1": ("Yes", 0.6), "2": ("Yes", 0.9)}, "1"),
        # No verdict weighs 1/2: 2 x 0.5 against 0.9, and against 2 x 0.6.
        (["1", "2", "1"], {"1": "Perhaps", "2": ("Yes", 0.9)}, "1"),
        (["1", "2", "1", "2"], {"1": "Perhaps", "2": ("Yes", 0.6)}, "2"),
        # Who says nothing of all of them leaves it to the majority.
        (["1", "2", "2"], {"1": "Perhaps", "2": "Perhaps"}, "2"),
        # A verifier that knows more words: no unlikely "Yes" weighs less than an unlikely "No".
        (["1", "2"], {"1": ("No", 0.2), "2": ("Yes", 0.3)}, "1"),
        (["1", "2"], {"1": ("No", 0.7), "2": ("Yes", 0.3)}, "2"),
        (["2", "1"], {"1": ("Yes", 0.8), "2": ("Yes", 0.8)}, "2"),  # the first of equals
        (["1", "2"], {"1": ("No", 1.0), "2": ("No", 1.0)}, "1"),
    ],
)
@pytest.mark.asyncio
async def test_weights_of_equal_answers_are_added(
    bench: Bench, answers: list[str], verdicts: Verdicts, chosen: str
) -> None:
    bench.engine = choosing(answers, verdicts)
    settings = {"best_of": len(answers), "choose": "weighted"}
    await run(bench, kind="eval", group_size=1, settings=settings, temperature=0.0)
    assert [text.strip() for text in said(bench)] == [chosen]


@pytest.mark.asyncio
async def test_each_different_answer_is_judged_once(bench: Bench) -> None:
    bench.engine = choosing(["1", "2", "1", " 1"] * 2, {"1": ("Yes", 0.6), "2": ("Yes", 0.7)})
    settings = {"best_of": 4, "choose": "weighted"}
    await run(bench, kind="eval", group_size=2, settings=settings, temperature=0.0)
    assert said(bench) == ["1", "1"]
    assert [request.policy for request in bench.engine.asked] == [SOLVER, JUDGE, JUDGE]


@pytest.mark.asyncio
async def test_a_majority_asks_no_verifier(bench: Bench) -> None:
    bench.engine = choosing(["1", "2", "3", "2 "], {})
    settings = {"best_of": 4, "choose": "majority"}
    await run(bench, kind="eval", group_size=1, settings=settings, temperature=0.0)
    assert said(bench) == ["2"]
    assert [request.policy for request in bench.engine.asked] == [SOLVER]


@pytest.mark.asyncio
async def test_words_behind_a_verdict_do_not_change_its_probability(bench: Bench) -> None:
    """As a whole it is less likely than the other ``No``, but its first word is certain."""
    verdicts: Verdicts = {"1": ("No, and this is said at length", 0.9), "2": ("No", 0.6)}
    bench.engine = choosing(["1", "2", "1"], verdicts)
    for choose, chosen in (("weighted", "2"), ("likeliest", "2")):
        settings = {"best_of": 3, "choose": choose, "verdict_tokens": 64}
        await run(bench, kind="eval", group_size=1, settings=settings, temperature=0.0)
        assert said(bench) == [chosen], choose


@pytest.mark.asyncio
async def test_the_best_of_several_is_chosen_for_each_sibling_at_its_temperature(
    bench: Bench,
) -> None:
    temperatures: dict[str, float] = {}

    class Noting(FakeEngine):
        async def generate(self, request: GenerationRequest) -> list[Completion]:
            temperatures[request.policy] = request.sampling.temperature
            return await super().generate(request)

    bench.engine = Noting(64, msgspec.structs.replace(bench.engine._table))
    settings = {"best_of": 4, "best_of_temperature": 0.7}
    await run(bench, kind="eval", group_size=3, settings=settings, temperature=0.0)
    assert len(bench.group().sequences) == 3
    assert temperatures == {SOLVER: 0.7, JUDGE: 0.0}


# ---- verdicts on a mixture that is balanced -----------------------------------------------------


def judging(answers: list[str]) -> ScriptedEngine:
    """A solver with these answers, by sibling, and a verifier that always agrees."""

    def say(request: GenerationRequest, sibling: int) -> str:
        return answers[sibling] if request.policy == SOLVER else "Yes"

    return ScriptedEngine(say)


def claimed(bench: Bench) -> list[str]:
    """The answers in what the verifier read, in the order of its rollouts."""
    read = [text for text in said(bench, prompts=True) if "Answer Yes or No" in text]
    return [text.partition("= ")[2].partition("?")[0] for text in read]


@pytest.mark.parametrize(
    ("answers", "judged"),
    [
        (["8", "9", "7", "6"], ["7", "8", "7", "9"]),
        (["7", "7", "7", "8"], ["7", "8", "7", "8"]),
        (["8", "9", "8", "9"], ["7", "8", "7", "9"]),  # none right: the item's own
    ],
)
@pytest.mark.asyncio
async def test_right_and_wrong_answers_are_judged_in_turn(
    bench: Bench, answers: list[str], judged: list[str]
) -> None:
    bench.engine = judging(answers)
    await run(bench, settings={"balanced": True}, group_size=4)
    rewards = [s.reward for s in bench.group().sequences]
    assert said(bench)[:4] == answers
    assert rewards[:4] == [float(answer == "7") for answer in answers]
    assert claimed(bench) == judged
    assert rewards[4:] == [float(answer == "7") for answer in judged], "it always agrees"


@pytest.mark.asyncio
async def test_verdicts_that_cannot_be_balanced_teach_nothing(bench: Bench) -> None:
    bench.engine = judging(["7", "7"])
    await run(bench, settings={"balanced": True}, group_size=2)
    assert claimed(bench) == ["7", "7"]
    assert [s.reward for s in bench.group().sequences] == [1.0, 1.0, 0.5, 0.5]


@pytest.mark.asyncio
async def test_a_verifier_is_measured_on_claims_as_a_solver(bench: Bench) -> None:
    bench.engine = judging([])
    items = tuple(Item(index=n, prompt=f"{n}?", answer=a) for n, a in enumerate(("Yes", "No")))
    settings = {"solver": "verifier"}
    await run(bench, kind="eval", items=items, settings=settings, temperature=0.0, group_size=1)
    assert said(bench, prompts=True) == ["0?", "1?"]
    assert [s.reward for s in bench.group().sequences] == [1.0, 0.0]
