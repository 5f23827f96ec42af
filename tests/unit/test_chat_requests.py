"""What the chat endpoint reads: requests of any kind, and tool calls in texts."""

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.chat_requests import ChatRefused, ChatRequest, chat_request
from edge_agent.chat_tools import MAX_CALLS, tool_calls

ASK = {"model": "solver", "messages": [{"role": "user", "content": "hi"}]}
NAMES = {"add", "look"}
CALL = '{"name": "add", "arguments": {"a": 1}}'
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
fields = st.sampled_from([field.name for field in msgspec.structs.fields(ChatRequest)])


@given(st.dictionaries(fields, values, max_size=4), st.booleans())
def test_any_request_is_taken_or_refused(more: dict[str, Any], whole: bool) -> None:
    body = json.dumps({**(ASK if whole else {}), **more}).encode()
    with contextlib.suppress(ChatRefused):
        assert isinstance(chat_request(body), ChatRequest)


@given(st.binary(max_size=60))
def test_any_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(ChatRefused):
        chat_request(body)


def test_deep_nesting_is_refused() -> None:
    deep = b'{"model":"m","messages":[{"role":"user","content":"x"}],"metadata":'
    with pytest.raises(ChatRefused):
        chat_request(deep + b"[" * 100_000 + b"]" * 100_000 + b"}")


def test_messages_as_templates_take_them() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    odd = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "not JSON"}}
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [call, odd], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "2", "name": "add"},
    ]
    request = chat_request(json.dumps({**ASK, "messages": messages}).encode())
    plain = [message.plain() for message in request.messages]
    assert plain[0] == {"role": "system", "content": "ab"}
    arguments = [one["function"]["arguments"] for one in plain[1]["tool_calls"]]
    assert (plain[1]["content"], arguments) == ("", [{"a": 1}, "not JSON"])
    assert plain[2] == {"role": "tool", "content": "2", "name": "add", "tool_call_id": "c1"}


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        (CALL, "", [("add", '{"a":1}')]),
        ('{"name": "look", "parameters": {}}', "", [("look", "{}")]),
        ('{"name": "look"}', "", [("look", "{}")]),
        (f"I add. <tool_call>\n{CALL}\n</tool_call>", "I add.", [("add", '{"a":1}')]),
        (
            f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>",
            "",
            [("add", '{"a":1}')] * 2,
        ),
    ],
)
def test_tool_calls_are_found(text: str, said: str, calls: list[tuple[str, str]]) -> None:
    assert tool_calls(text, NAMES) == (said, calls)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "add 1",
        "[1]",
        '{"name": "rm", "arguments": {}}',
        '{"name": "add", "arguments": [1]}',
        '{"name": 1, "arguments": {}}',
        f"<tool_call>{CALL}",
        f"<tool_call>{CALL}</tool_call><tool_call>{{</tool_call>",
        f"<tool_call>{CALL}</tool_call>" * (MAX_CALLS + 1),
    ],
)
def test_what_is_no_tool_call_stays_text(text: str) -> None:
    assert tool_calls(text, NAMES) == (text, [])
