"""An item's unit tests, and the program that a response holds."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent.code_reward import last_program
from scheduler.core.work import reward_of
from transport.code_tests import tests_of as read_tests
from transport.errors import TaskError
from transport.messages import Item, RewardSpec
from transport.runs import CodeReward, TaskSpec

ADD = {"assert": "assert add(1, 2) == 3"}
ECHO = {"input": "1\n", "output": "1\n"}


def item(answer: Any, meta: str = "") -> Item:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return Item(index=3, prompt="p", answer=text, meta=meta)


def test_tests_are_in_the_answer_or_else_in_the_meta() -> None:
    found = read_tests(item({"tests": [ADD, ECHO, {"output": ""}], "time_limit_s": 2}))
    assert found.time_limit_s == 2.0
    assert [test.statements for test in found.tests] == [ADD["assert"], None, None]
    assert [test.output for test in found.tests] == [None, "1\n", ""]
    assert len(read_tests(item("42", json.dumps({"tests": [ADD]}))).tests) == 1
    assert len(read_tests(item({"tests": [ADD]}, '{"id": 7}')).tests) == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("42", "answer: no tests"),
        ("{", "answer: .*truncated"),
        ("{" * 2, "answer: "),
        ('{"tests": ' + "[" * 10_000, "answer: "),
        ({}, "missing required field `tests`"),
        ({"tests": []}, "length >= 1"),
        ({"tests": [{"assert": "return 1"}]}, r"tests\[0\]: assert: "),
        ({"tests": [{"assert": "break"}]}, r"tests\[0\]: assert: "),
        ({"tests": [ADD] * 257}, "length <= 256"),
        ({"tests": [{"assert": 1}]}, r"tests\[0\]\.assert|tests\[...\]\.assert"),
        ({"tests": [{"assrt": "x"}]}, "unknown field `assrt`"),
        ({"tests": [ADD], "time_limit_s": 0}, "time_limit_s"),
        ({"tests": [ADD], "time_limit_s": 61}, "time_limit_s"),
        ({"tests": [ADD, {}]}, r"tests\[1\]: has either an output or an assert"),
        ({"tests": [{**ADD, "output": "x"}]}, r"tests\[0\]: has either"),
        ({"tests": [{**ADD, "input": "x"}]}, "takes no input"),
        ({"tests": [{"assert": "assert add("}]}, r"tests\[0\]: assert: .*never closed"),
        ({"tests": [{"assert": "a\0"}]}, r"tests\[0\]: assert: .*null"),
        ({"tests": [{"assert": " # nothing"}]}, "is empty"),
    ],
)
def test_what_is_wrong_with_tests_is_known_before_any_answer(answer: Any, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        read_tests(item(answer))


@given(st.text(max_size=80) | st.text(max_size=80).map(lambda text: "{" + text))
@settings(deadline=None, max_examples=200)
def test_any_answer_holds_tests_or_has_a_fault(answer: str) -> None:
    with contextlib.suppress(TaskError):
        assert read_tests(item(answer, answer)).tests


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("", None),
        ("def f(): pass", None),
        ("```python\na = 1\n```", "a = 1\n"),
        ("Text\n```py\na\n```\nmore\n  ```Python\n  b\n  ```\nend", "  b\n"),
        ("```python\r\na\r\n```\r\n", "a\n"),
        ("```python\na\n```\n```\nb\n```", "a\n"),
        ("```\n```python\na\n```", None),
        ("```python\na\n```\n```python\ncut off", "a\n"),
        ("```python\ncut off", None),
        ("```python\ns = '''\n```python\n'''\n```", "s = '''\n```python\n'''\n"),
        ("```javascript\na\n```", None),
        ("```python\n```", "\n"),
    ],
)
def test_the_last_closed_python_block_is_the_program(response: str, program: str | None) -> None:
    assert last_program(response) == program


def test_a_run_s_code_reward_reaches_its_agents() -> None:
    how = CodeReward(share=True, time_limit_s=1.5)
    task = TaskSpec(source="jsonl", path="x", reward="code", code=how)
    assert reward_of(task) == RewardSpec(name="code", code=how)
