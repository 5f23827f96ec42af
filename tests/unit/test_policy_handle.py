"""What workflows have at hand: prompts of every kind, settings, calls side by side."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from scripted_engine import ScriptedEngine
from workflow_bench import JUDGE, SOLVER, Bench, offer

from edge_agent.engines.fake_text import END, encode_chat, encode_text
from edge_agent.workflow import (
    GenerationTime,
    MalformedWorkflow,
    Observed,
    WorkflowContext,
    side_by_side,
)
from transport.errors import GenerationFailed
from transport.messages import Item
from transport.runtime.clock import SystemClock

ASKED = [{"role": "user", "content": "3 + 4 ="}]
TOOLS = [{"type": "function", "function": {"name": "calculator"}}]


def context_of(bench: Bench, **changes: Any) -> WorkflowContext:
    item = Item(index=4, prompt="3 + 4 =", answer="7")
    values = {"policies": {"solver": SOLVER, "judge": JUDGE}, **changes}
    time = GenerationTime(SystemClock())
    return WorkflowContext(offer(**values), item, bench.engine, bench.rewards, time)


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> Bench:
    made = Bench(tmp_path)
    made.engine = ScriptedEngine(lambda *_: "7")
    await made.start()
    return made


@pytest.mark.asyncio
async def test_more_completions_than_a_group_can_hold_are_malformed(bench: Bench) -> None:
    policy = context_of(bench).policy("solver")
    with pytest.raises(MalformedWorkflow, match="n is 1025"):
        await policy.generate("a", n=1025)
    assert bench.engine.asked == []
    assert len(await policy.generate("a", n=1024)) == 1024


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("3 + 4 =", encode_text("3 + 4 =")),
        ([5, 6, 7], (5, 6, 7)),
        ((), ()),
        (ASKED, encode_chat(ASKED)),
        ((*ASKED, {"role": "tool", "content": "7"}), None),
    ],
)
@pytest.mark.asyncio
async def test_prompts_are_texts_tokens_or_messages(bench: Bench, prompt: Any, tokens: Any) -> None:
    [made] = await context_of(bench).policy("solver").generate(prompt)
    expected = encode_chat(prompt) if tokens is None else tokens
    assert made.prompt_tokens == bench.engine.asked[0].prompt_tokens == expected
    assert (made.policy, made.text, made.tokens[-1]) == (SOLVER, "7", END)


@pytest.mark.asyncio
async def test_tools_go_with_messages_only(bench: Bench) -> None:
    policy = context_of(bench).policy("solver")
    [made] = await policy.generate(ASKED, tools=TOOLS)
    assert made.prompt_tokens == encode_chat(ASKED, TOOLS)
    for prompt in ("3 + 4 =", (5, 6)):
        with pytest.raises(MalformedWorkflow, match="tools"):
            await policy.generate(prompt, tools=TOOLS)


@pytest.mark.asyncio
async def test_a_request_says_what_was_asked_for(bench: Bench) -> None:
    policy = context_of(bench, seed=3).policy("solver")
    await policy.generate("a", n=2, stop="x", label="named", temperature=0.0)
    await policy.generate("a", stop=["x", "yz"], max_new_tokens=5, stop_token_ids=(9,))
    await policy.generate("a")
    named, first, second = bench.engine.asked
    names = [request.request_id.rpartition("/")[2] for request in (named, first, second)]
    assert names == ["named", "1", "2"]
    assert (named.n, named.sampling.stop, named.sampling.temperature) == (2, ("x",), 0.0)
    assert (first.sampling.stop, first.sampling.max_new_tokens) == (("x", "yz"), 5)
    assert first.sampling.stop_token_ids == (9,)
    assert (second.sampling.stop, second.sampling.max_new_tokens) == ((), 10)
    assert {request.sampling.seed for request in bench.engine.asked} == {3}


@pytest.mark.asyncio
async def test_what_follows_an_answer_is_observed(bench: Bench) -> None:
    policy = context_of(bench).policy("judge")
    more = [{"role": "user", "content": "Sure?"}]
    ended, cut = policy.encode_next((5, END), more), policy.encode_next((5,), more)
    assert isinstance(ended, Observed)
    assert cut.tokens == (END, *ended.tokens)
    with pytest.raises(GenerationFailed):
        policy.encode_next((5,), [{"role": "robot", "content": "?"}])


@pytest.mark.asyncio
async def test_a_policys_template_has_the_arguments_of_the_offer_and_no_other(bench: Bench) -> None:
    off = {"enable_thinking": False}
    context = context_of(bench, chat_template_kwargs={SOLVER: off})
    for name, expected in (("solver", off), ("judge", {})):
        policy = context.policy(name)
        await policy.generate("a")
        await policy.generate(ASKED, tools=TOOLS)
        policy.encode_next((5,), ASKED)
        assert bench.engine.arguments == [expected] * 3
        bench.engine.arguments.clear()


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    turns: int = 1


def test_settings_are_checked_by_name(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert context_of(bench, settings={"turns": 4}).settings_as(Settings).turns == 4
    for settings, word in (({"turns": "4"}, "turns"), ({"truns": 4}, "truns")):
        with pytest.raises(MalformedWorkflow, match=word):
            context_of(bench, settings=settings).settings_as(Settings)


@pytest.mark.asyncio
async def test_calls_are_made_at_once_and_answered_in_order() -> None:
    here: list[int] = []
    all_here = asyncio.Event()

    async def call(number: int) -> int:
        here.append(number)
        if len(here) == 3:
            all_here.set()
        await all_here.wait()
        return number

    assert await side_by_side(call(n) for n in (1, 2, 3)) == [1, 2, 3]
    assert await side_by_side([]) == []


@pytest.mark.asyncio
async def test_a_call_that_fails_ends_the_others() -> None:
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise GenerationFailed("no")

    with pytest.raises(ExceptionGroup) as raised:
        await side_by_side([waits(), fails()])
    assert [type(one) for one in raised.value.exceptions] == [GenerationFailed]
    assert ended == ["cancelled"]
