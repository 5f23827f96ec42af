"""What the fake engine reads and answers."""

import pytest

from edge_agent.engines.fake_text import (
    END,
    answer_to,
    decode_text,
    encode_chat,
    encode_next,
    encode_text,
    spoiled,
)

ASKED = {"role": "user", "content": "12 + 30 ="}
CALCULATOR = {"type": "function", "function": {"name": "calculator"}}
CALL = '<tool_call>{"name":"calculator","arguments":{"expression":"12 + 30"}}</tool_call>'


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("12 + 30 =", "42"),
        ("12 + 30 = 42? Answer Yes or No.", "Yes"),
        ("12 + 30 = 43? Answer Yes or No.", "No"),
        ("12 + 30 = ? Answer Yes or No.", "No"),
        ("1 - 3 = -2?", "Yes"),
        ("1 + 1 = 3 is wrong. 2 + 2 =", "4"),
        (f"1 + 1 = {'9' * 5000}?", "No"),
        ("how are you?", ""),
    ],
)
def test_sums_are_answered_and_claims_are_judged(prompt: str, answer: str) -> None:
    assert answer_to(encode_text(prompt)) == answer


def test_tools_that_are_shown_are_used_and_read() -> None:
    asked = encode_chat([ASKED], [CALCULATOR])
    assert answer_to(asked) == CALL
    assert answer_to(encode_chat([ASKED], [{"function": {"name": "python"}}])) == "42"
    said = (*asked, *encode_text(CALL))
    behind = encode_next(said[len(asked) :], [{"role": "tool", "content": "41"}])
    assert answer_to((*said, *behind)) == "41"
    more = encode_next((END,), [{"role": "user", "content": "1 + 1"}])
    assert answer_to((*said, *behind, END, *more)).startswith("<tool_call>")


def test_tool_calls_in_messages_read_like_those_that_were_drawn() -> None:
    function = {"name": "calculator", "arguments": {"expression": "12 + 30"}}
    calls = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    text = {"role": "assistant", "content": CALL}
    assert encode_chat([ASKED, calls]) == encode_chat([ASKED, text])
    assert decode_text(encode_chat([ASKED, text])) == f"12 + 30 ={CALL}"


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("42", "43"), ("9", "0"), ("Yes", "No"), ("No", "Yes"), ("", ""), ("a 1 b", "a 2 b")],
)
def test_an_answer_is_spoiled_in_its_last_digit(right: str, wrong: str) -> None:
    assert spoiled(right) == wrong


def test_a_spoiled_call_is_a_call_of_something_else() -> None:
    assert spoiled(CALL) == CALL.replace("30", "31")
