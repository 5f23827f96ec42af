"""The chat endpoint with the real ``openai`` package over real sockets."""

import asyncio
import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from chat_bench import chat_world, check_exact, client_of
from workflow_bench import JUDGE, SOLVER

from edge_agent import chat_endpoint, chat_session
from edge_agent.chat_record import NothingGenerated
from edge_agent.chat_session import ChatOptions
from edge_agent.workflow import Generated, Observed

QUESTION = [{"role": "user", "content": "3 + 4 ="}]
CALCULATOR: Any = {
    "type": "function",
    "function": {"name": "calculator", "parameters": {"type": "object"}},
}


@pytest.mark.asyncio
async def test_one_call_is_one_exact_sequence(tmp_path: Path) -> None:
    async with chat_world(tmp_path) as world, world.context().chat() as chat:
        async with client_of(chat) as client:
            answer = await client.chat.completions.create(model="solver", messages=QUESTION)
        [(request, [completion])] = world.engine.drawn
        assert answer.choices[0].message.content == world.engine.decode(SOLVER, completion.tokens)
        assert answer.choices[0].finish_reason == completion.finish_reason
        assert answer.model == "solver"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(request.prompt_tokens)
        assert answer.usage.completion_tokens == len(completion.tokens)
        rollout = chat.rollout()
    assert rollout.prompt_tokens == world.engine.encode(SOLVER, "3 + 4 =")
    assert [part.completion for part in rollout.parts] == [completion]  # type: ignore[union-attr]
    assert (rollout.text, rollout.reward) == (answer.choices[0].message.content, None)


@pytest.mark.asyncio
async def test_the_synchronous_client_works_from_a_thread(tmp_path: Path) -> None:
    async with chat_world(tmp_path) as world, world.context().chat() as chat:

        def ask() -> str | None:
            with openai.OpenAI(base_url=chat.base_url, api_key=chat.key, max_retries=0) as client:
                listed = [model.id for model in client.models.list()]
                answer = client.chat.completions.create(model=listed[0], messages=QUESTION)
                return answer.choices[0].message.content

        assert await asyncio.to_thread(ask) == chat.rollout().text


@pytest.mark.asyncio
async def test_a_conversation_becomes_one_sequence_of_several_parts(tmp_path: Path) -> None:
    async with chat_world(tmp_path) as world, world.context().chat() as chat:
        async with client_of(chat) as client:
            messages: list[Any] = list(QUESTION)
            for turn in range(3):
                answer = await client.chat.completions.create(model="solver", messages=messages)
                # As objects of the package, as plain dicts, and as a stripped text of one's own.
                said = answer.choices[0].message
                text = {"role": "assistant", "content": f" {said.content}\n"}
                messages += [(said, said.model_dump(), text)[turn]]
                messages += [{"role": "user", "content": f"And {turn} + 1 ="}]
        rollout = chat.rollout()
        assert [type(part) for part in rollout.parts] == [
            Generated, Observed, Generated, Observed, Generated,
        ]  # fmt: skip
        check_exact(rollout, world.engine)
        assert chat.cuts == 0
        assert len({request.request_id for request, _ in world.engine.drawn}) == 3


@pytest.mark.asyncio
async def test_what_is_no_continuation_is_another_conversation(tmp_path: Path) -> None:
    async with chat_world(tmp_path) as world, world.context().chat() as chat:
        async with client_of(chat) as client:
            create = client.chat.completions.create
            first = await create(model="solver", messages=QUESTION)
            changed = {"role": "assistant", "content": f"{first.choices[0].message.content}!"}
            more = {"role": "user", "content": "5 + 5 ="}
            await create(model="solver", messages=[*QUESTION, first.choices[0].message, more])
            last = await create(model="solver", messages=[*QUESTION, changed, more])
        longest, latest = chat.rollout(), chat.rollout(keep="last", reward=0.5)
    assert (len(longest.parts), len(latest.parts)) == (3, 1)
    assert longest.text == latest.text == last.choices[0].message.content
    assert latest.reward == 0.5
    check_exact(longest, world.engine)
    check_exact(latest, world.engine)


@pytest.mark.asyncio
async def test_a_stream_says_the_same(tmp_path: Path) -> None:
    async with chat_world(tmp_path) as world, world.context().chat() as chat:
        async with client_of(chat) as client:
            stream = await client.chat.completions.create(
                model="solver",
                messages=QUESTION,
                stream=True,
                stream_options={"include_usage": True},
            )
            pieces = [piece async for piece in stream]
        said = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
        assert said == chat.rollout().text
        assert [p.choices[0].finish_reason for p in pieces if p.choices][-1] in ("stop", "length")
        [usage] = [piece.usage for piece in pieces if piece.usage]
        assert usage.completion_tokens == len(world.engine.drawn[0][1][0].tokens)


@pytest.mark.asyncio
@pytest.mark.parametrize("streamed", [False, True])
async def test_tool_calls_come_as_such_and_the_conversation_goes_on(
    tmp_path: Path, streamed: bool
) -> None:
    async with chat_world(tmp_path) as world, world.context(max_new_tokens=200).chat() as chat:
        async with client_of(chat) as client:
            ask: dict[str, Any] = {"model": "solver", "messages": QUESTION, "tools": [CALCULATOR]}
            if streamed:
                async with client.chat.completions.stream(**ask) as stream:
                    answer: Any = await stream.get_final_completion()
            else:
                answer = await client.chat.completions.create(**ask)
            message = answer.choices[0].message
            assert answer.choices[0].finish_reason == "tool_calls"
            assert message.content is None
            [call] = message.tool_calls
            assert call.function.name == "calculator"
            assert set(json.loads(call.function.arguments)) == {"expression"}
            result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
            ask["messages"] = [*QUESTION, message, result]
            await client.chat.completions.create(**ask)
        rollout = chat.rollout()
        assert len(rollout.parts) == 3
        check_exact(rollout, world.engine)


@pytest.mark.asyncio
async def test_stop_choices_and_logprobs(tmp_path: Path) -> None:
    async with (
        chat_world(tmp_path) as world,
        world.context().chat() as chat,
        client_of(chat) as client,
    ):
        answer = await client.chat.completions.create(
            model="solver",
            messages=[{"role": "user", "content": "120 + 3 ="}],
            n=3,
            stop=["2"],
            logprobs=True,
            max_completion_tokens=30,
        )
        [(request, completions)] = world.engine.drawn
        assert request.sampling.stop == ("2",)
        assert request.sampling.max_new_tokens == 30
        for choice, completion in zip(answer.choices, completions, strict=True):
            assert choice.message.content == "1"
            assert choice.finish_reason == "stop"
            assert choice.logprobs is not None
            assert [t.logprob for t in choice.logprobs.content or ()] == pytest.approx(
                completion.logprobs
            )
        # The stop text was drawn, so it stays in the sequence, and the conversation goes on.
        message = answer.choices[1].message
        more = {"role": "user", "content": "2 + 2 ="}
        first = {"role": "user", "content": "120 + 3 ="}
        await client.chat.completions.create(model="solver", messages=[first, message, more])
        rollout = chat.rollout()
        check_exact(rollout, world.engine)
        assert len(rollout.parts) == 3
        assert "12" in world.engine.decode(SOLVER, rollout.parts[0].tokens)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "kind", "expected"),
    [
        (ChatOptions(), "train", 1.0),
        (ChatOptions(temperature="program"), "train", 0.3),
        (ChatOptions(temperature="program"), "eval", 1.0),
    ],
)
async def test_whose_temperature_counts(
    tmp_path: Path, options: ChatOptions, kind: str, expected: float
) -> None:
    async with chat_world(tmp_path) as world:
        async with world.context(kind=kind).chat(options) as chat, client_of(chat) as client:
            await client.chat.completions.create(
                model="solver", messages=QUESTION, temperature=0.3, max_tokens=10**6
            )
        sampling = world.engine.drawn[0][0].sampling
        assert (sampling.temperature, sampling.max_new_tokens) == (expected, 40)


@pytest.mark.asyncio
async def test_policies_have_conversations_of_their_own_and_further_names(tmp_path: Path) -> None:
    policies = {"solver": SOLVER, "judge": JUDGE}
    options = ChatOptions(models={"gpt-4o": "judge"})
    async with (
        chat_world(tmp_path) as world,
        world.context(policies=policies).chat(options) as chat,
        client_of(chat) as client,
    ):
        create = client.chat.completions.create
        solved = await create(model="solver", messages=QUESTION)
        said = solved.choices[0].message
        more = [*QUESTION, said, {"role": "user", "content": "6 + 6 ="}]
        await create(model="gpt-4o", messages=more)
        await create(model="judge", messages=QUESTION)
        by_judge = chat.rollout(policy="judge")
        assert {part.policy for part in by_judge.parts if isinstance(part, Generated)} == {JUDGE}
        assert len(chat.rollout(policy="solver").parts) == 1
        listed = [model.id async for model in client.models.list()]
        assert listed == ["solver", "judge", "gpt-4o"]


@pytest.mark.asyncio
async def test_sessions_side_by_side_do_not_mix(tmp_path: Path) -> None:
    async with chat_world(tmp_path) as world:
        context = world.context()

        async def sibling(number: int) -> None:
            async with context.chat() as chat, client_of(chat) as client:
                question = {"role": "user", "content": f"{number} + 1 ="}
                answer: Any = await client.chat.completions.create(
                    model="solver", messages=[question]
                )
                more = [question, answer.choices[0].message, {"role": "user", "content": "2 + 2 ="}]
                await client.chat.completions.create(model="solver", messages=more)
                rollout = chat.rollout()
                assert rollout.prompt_tokens == world.engine.encode(SOLVER, question["content"])
                check_exact(rollout, world.engine)

        async with asyncio.TaskGroup() as tasks:
            for number in range(4):
                tasks.create_task(sibling(number))
        assert len({request.request_id for request, _ in world.engine.drawn}) == 8


async def refused(client: openai.AsyncOpenAI, **changes: Any) -> openai.APIStatusError:
    values: dict[str, Any] = {"model": "solver", "messages": QUESTION, **changes}
    with pytest.raises(openai.APIStatusError) as raised:
        await client.chat.completions.create(**values)
    return raised.value


@pytest.mark.asyncio
async def test_keys(tmp_path: Path) -> None:
    async with chat_world(tmp_path) as world:
        context = world.context()
        async with context.chat() as chat, context.chat() as other:
            assert chat.key != other.key
            wrong = f"{chat.key[:-1]}{'b' if chat.key.endswith('a') else 'a'}"
            swapped = chat.key.replace("farflow-1-", "farflow-2-")
            for key in (wrong, swapped, "x", "farflow-999-abc"):
                async with client_of(chat, api_key=key) as client:
                    error = await refused(client)
                    assert (error.status_code, error.code) == (401, "invalid_api_key")
            models = f"{chat.base_url}/models"
            async with aiohttp.ClientSession() as plain, plain.get(models) as reply:
                assert reply.status == 401
        async with client_of(chat) as client:
            assert (await refused(client)).status_code == 401  # it died with its block
        async with context.chat() as late, client_of(late) as client:
            world.chats.close()  # the attempt is over, whatever the workflow still does
            assert (await refused(client)).status_code == 401
        assert not world.engine.drawn
        with pytest.raises(NothingGenerated):
            chat.rollout()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("changes", "status", "code", "says"),
    [
        ({"model": "gpt"}, 404, "model_not_found", "name one of solver"),
        ({"top_p": 0.5}, 400, "unsupported_parameter", "top_p"),
        ({"seed": 3}, 400, "unsupported_parameter", "the run's seed"),
        ({"tool_choice": "required", "tools": [CALCULATOR]}, 400, "unsupported_parameter", "tool"),
        ({"reasoning_effort": "low"}, 400, "unsupported_parameter", "reasoning_effort"),
        ({"n": 17}, 400, "invalid_request", "$.n"),
        ({"messages": []}, 400, "invalid_request", "$.messages"),
        ({"stop": ""}, 400, "invalid_value", "stop"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "invalid_request", "robot"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, 413, "request_too_large", "2000"),
    ],
)
async def test_what_is_refused_says_why(
    tmp_path: Path, changes: dict[str, Any], status: int, code: str, says: str
) -> None:
    async with chat_world(tmp_path, max_body_bytes=2000) as world:
        async with world.context().chat() as chat, client_of(chat) as client:
            error = await refused(client, **changes)
        assert (error.status_code, error.code) == (status, code)
        assert says in error.message
        assert not world.engine.drawn


@pytest.mark.asyncio
async def test_what_has_no_bearing_is_taken(tmp_path: Path) -> None:
    async with chat_world(tmp_path) as world:
        async with world.context().chat() as chat, client_of(chat) as client:
            await client.chat.completions.create(
                model="solver",
                messages=[
                    {"role": "developer", "content": "Be brief."},
                    {"role": "user", "content": [{"type": "text", "text": "3 + 4 ="}]},
                ],
                top_p=1,
                frequency_penalty=0,
                presence_penalty=0,
                user="me",
                metadata={"a": "b"},
                store=False,
                response_format={"type": "text"},
                tool_choice="none",
                tools=[CALCULATOR],
            )
        text = world.engine.decode(SOLVER, world.engine.drawn[0][0].prompt_tokens)
        assert text == "Be brief.3 + 4 ="


@pytest.mark.asyncio
async def test_calls_and_tokens_of_a_rollout_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_session, "MAX_CALLS", 2)
    monkeypatch.setattr(chat_session, "MAX_TOKENS", 130)
    monkeypatch.setattr(chat_session, "MAX_AT_ONCE", 1)
    async with chat_world(tmp_path) as world:
        context = world.context()
        async with context.chat() as chat, client_of(chat) as client:
            for _ in range(2):
                await client.chat.completions.create(model="solver", messages=QUESTION)
            assert (await refused(client)).code == "calls_exhausted"
        async with context.chat() as chat, client_of(chat) as client:
            await client.chat.completions.create(model="solver", messages=QUESTION)
            long = [{"role": "user", "content": "x" * 100}]
            assert (await refused(client, messages=long)).code == "tokens_exhausted"
        async with context.chat() as chat, client_of(chat) as client:
            world.engine.held = asyncio.Event()
            world.engine.asked.clear()
            create = client.chat.completions.create(model="solver", messages=QUESTION)
            first = asyncio.create_task(create)
            await world.engine.asked.wait()
            error = await refused(client)
            assert (error.status_code, error.code) == (429, "rate_limit_exceeded")
            world.engine.held.set()
            await first


@pytest.mark.asyncio
async def test_a_program_that_hangs_up_ends_its_generation(tmp_path: Path) -> None:
    async with chat_world(tmp_path) as world, world.context().chat() as chat:
        world.engine.held = asyncio.Event()
        async with client_of(chat) as client:
            create = client.chat.completions.create(model="solver", messages=QUESTION)
            call = asyncio.create_task(create)
            await world.engine.asked.wait()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        async with asyncio.timeout(5.0):
            await world.engine.cancelled.wait()


@pytest.mark.asyncio
async def test_the_end_of_a_rollout_ends_its_calls(tmp_path: Path) -> None:
    async with chat_world(tmp_path) as world:
        world.engine.held = asyncio.Event()
        context = world.context()
        async with context.chat() as chat, client_of(chat) as client:
            call = asyncio.create_task(refused(client))
            await world.engine.asked.wait()
            chat.close()
            assert (await call).status_code == 401
            assert world.engine.cancelled.is_set()


@pytest.mark.asyncio
async def test_the_engines_refusal_reaches_the_program(tmp_path: Path) -> None:
    async with chat_world(tmp_path) as world, world.context().chat() as chat:
        await world.engine.close()
        async with client_of(chat) as client:
            error = await refused(client)
        assert (error.status_code, error.code) == (400, "engine.generation")
        assert "not running" in error.message


@pytest.mark.asyncio
async def test_a_reward_is_posted_once(tmp_path: Path) -> None:
    async with chat_world(tmp_path) as world, world.context().chat() as chat:
        headers = {"Authorization": f"Bearer {chat.key}"}
        async with aiohttp.ClientSession(headers=headers) as plain, client_of(chat) as client:

            async def post(body: bytes) -> int:
                async with plain.post(f"{chat.base_url}/farflow/reward", data=body) as reply:
                    return reply.status

            await client.chat.completions.create(model="solver", messages=QUESTION)
            statuses = [
                await post(b'{"reward": %b}' % x)
                for x in (b'"x"', b"1e999", b"1e16", b"0.25", b"1")
            ]
            assert statuses == [400, 400, 400, 200, 409]
            async with plain.get(f"{chat.base_url}/elsewhere") as reply:
                assert reply.status == 404
                assert (await reply.json())["error"]["code"] == "not_found"
        assert chat.rollout().reward == 0.25
        assert chat.rollout(reward=2.0).reward == 2.0


@pytest.mark.asyncio
async def test_it_listens_on_the_loopback_alone_and_stops(tmp_path: Path) -> None:
    async with chat_world(tmp_path) as world:
        assert world.endpoint._starting is None  # nothing listens before somebody needs it
        async with world.context().chat() as chat:
            port = int(chat.base_url.rsplit(":", 1)[1].removesuffix("/v1"))
            assert chat.base_url.startswith("http://127.0.0.1:")
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            await writer.wait_closed()
            with pytest.raises(OSError, match="refused"):
                socket.create_connection(("127.0.0.2", port), timeout=1.0)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=1.0)


@pytest.mark.asyncio
async def test_a_conversation_that_grows_past_what_a_run_allows_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_session, "MAX_TURNS", 2)  # times 40 tokens
    async with chat_world(tmp_path) as world, world.context().chat() as chat:
        async with client_of(chat) as client:
            messages: list[Any] = list(QUESTION)
            for _ in range(2):
                answer = await client.chat.completions.create(model="solver", messages=messages)
                messages += [answer.choices[0].message, {"role": "user", "content": "x" * 60}]
        assert chat.cuts == 1
        rollout = chat.rollout()
        assert len(rollout.parts) == 1
        check_exact(rollout, world.engine)


@pytest.mark.asyncio
async def test_requests_and_connections_of_all_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_endpoint, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(chat_endpoint, "FIRST_REQUEST_S", 0.1)
    async with chat_world(tmp_path) as world, world.context().chat() as chat:
        port = int(chat.base_url.rsplit(":", 1)[1].removesuffix("/v1"))
        silent, writer = await asyncio.open_connection("127.0.0.1", port)
        one_more, other = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(5.0):
            for reader in (one_more, silent):
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
        writer.close()
        other.close()
        monkeypatch.setattr(chat_endpoint, "MAX_REQUESTS", 0)
        async with client_of(chat) as client:
            error = await refused(client)
        assert (error.status_code, error.code) == (503, "overloaded")
