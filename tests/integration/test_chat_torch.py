"""The chat endpoint before a real model and a real chat template."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from chat_bench import client_of
from torch_models import EXAMPLE
from workflow_bench import SOLVER, offer

from edge_agent.chat_endpoint import AttemptChats, ChatEndpoint
from edge_agent.rewards import RewardPool
from edge_agent.rollouts import Generated
from edge_agent.workflow import GenerationTime, WorkflowContext
from transport.runtime.clock import SystemClock

TURNS = 4


@pytest.mark.slow
@pytest.mark.asyncio
async def test_conversations_of_a_real_model_are_exact(tmp_path: Path) -> None:
    from edge_agent.engines.torch_engine import TorchEngine

    engine, endpoint = TorchEngine(16), ChatEndpoint(SystemClock())
    await engine.start()
    try:
        await engine.load_policy(SOLVER, EXAMPLE, 5)
        made = offer(max_new_tokens=12, temperature=3.0)  # hot enough for odd tokens
        context = WorkflowContext(
            made,
            made.items[0],
            engine,
            RewardPool(1.0),
            GenerationTime(SystemClock()),
            chats=AttemptChats(endpoint),
        )

        async def sibling(number: int) -> tuple[Any, int]:
            async with context.chat() as chat, client_of(chat) as client:
                messages: list[Any] = [{"role": "user", "content": f"{number} + 4 ="}]
                for turn in range(TURNS):
                    answer = await client.chat.completions.create(model="solver", messages=messages)
                    more = {"role": "user", "content": f"And {turn} + 1 ="}
                    messages += [answer.choices[0].message, more]
                return chat.rollout(), chat.cuts

        for rollout, cuts in await asyncio.gather(*(sibling(number) for number in range(4))):
            assert cuts == 0
            before = rollout.prompt_tokens
            turns = 0
            for part in rollout.parts:
                if isinstance(part, Generated):
                    turns += 1
                    assert part.prompt_tokens == before
                    assert set(part.completion.versions) == {5}
                before += part.tokens
            assert turns == TURNS
            # What the model was shown is what its template makes of a conversation.
            text = engine.decode(SOLVER, before)
            assert text.startswith(engine.decode(SOLVER, rollout.prompt_tokens))
            assert "And 2 + 1 =" in text
    finally:
        await endpoint.close()
        await engine.close()


@pytest.mark.slow
@pytest.mark.asyncio
async def test_the_arguments_of_a_policys_template_reach_the_chat_endpoint(tmp_path: Path) -> None:
    from edge_agent.engines.torch_engine import TorchEngine

    model = shutil.copytree(EXAMPLE, tmp_path / "model")
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] += "{% if enable_thinking is false %}34{% endif %}"
    path.write_text(json.dumps(config))
    engine, endpoint = TorchEngine(16), ChatEndpoint(SystemClock())
    await engine.start()
    prompts = []
    try:
        await engine.load_policy(SOLVER, model, 5)
        for arguments in ({}, {SOLVER: {"enable_thinking": False}}):
            made = offer(max_new_tokens=2, chat_template_kwargs=arguments)
            time, chats = GenerationTime(SystemClock()), AttemptChats(endpoint)
            context = WorkflowContext(
                made, made.items[0], engine, RewardPool(1.0), time, chats=chats
            )
            async with context.chat() as chat, client_of(chat) as client:
                asked: Any = [{"role": "user", "content": "12 + 4 ="}]
                await client.chat.completions.create(model="solver", messages=asked)
                tokens = chat.rollout().prompt_tokens
            assert tokens == context.policy().encode("12 + 4 =")
            prompts.append(engine.decode(SOLVER, tokens))
    finally:
        await endpoint.close()
        await engine.close()
    assert prompts[1] == prompts[0] + "34"
