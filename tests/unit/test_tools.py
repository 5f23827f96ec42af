"""The calculator: what it works out, and what it refuses before it costs anything."""

import ast
import contextlib
import math
import operator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent.sandbox import SandboxResult
from edge_agent.tools import (
    MAX_ANSWER,
    MAX_EXPRESSION,
    ArithmeticFailed,
    NotUnderstood,
    ToolError,
    answer_of,
    calculator,
)

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        (" (1 + 2) * -3 ", "-9"),
        ("6 / 2", "3"),
        ("1 / 8", "0.125"),
        ("7 // 2 + 7 % 4", "6"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("0 ** 0", "1"),
        ("(-1) ** 1000000000", "1"),
        ("10 ** 100 // 10 ** 98", "100"),
        ("max(1, 2.5, -3) + min(4, 5) - abs(-1)", "5.5"),
        ("round(2.71828, 2) + round(1.2)", "3.72"),
        ("sqrt(16)", "4"),
        ("0x10 + 1_000", "1016"),
        ("1e300", "1e+300"),
    ],
)
async def test_it_calculates(expression: str, value: str) -> None:
    assert await calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 +",
        "x",
        "True + 1",
        "'a' * 3",
        "[1] + [2]",
        "__import__('os').system('true')",
        "(1).__class__",
        "abs",
        "abs()",
        "max(1)",
        "round(1, 2, 3)",
        "round(5, -1000000000)",
        "round(5.5, 1.5)",
        "max(*(1, 2))",
        "max(1, 2, key=abs)",
        "1 if 1 else 2",
        "1 < 2",
        "1 << 1000000000",
        "1j",
        "lambda: 1",
        "(1\0)",
        "(" * 500 + "1" + ")" * 500,
        "1" + "+1" * 200,
        "1" * (MAX_EXPRESSION + 1),
        "-" * 900 + "1",
    ],
)
async def test_what_is_no_calculation_is_not_understood(expression: str) -> None:
    with pytest.raises(NotUnderstood):
        await calculator(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "1 / 0",
        "1 % 0",
        "0 ** -1",
        "(-8) ** 0.5",
        "sqrt(-1)",
        "9 ** 9 ** 9",
        "2 ** 10000",
        "(10 ** 900) * (10 ** 900)",
        "10 ** 1000 / 3",
        "1e308 * 10",
        "10.0 ** 400",
        "1e999",
        "1e999 - 1e999",
        "round(1e999)",
    ],
)
async def test_what_has_no_value_to_give_is_said(expression: str) -> None:
    with pytest.raises(ArithmeticFailed) as failed:
        await calculator(expression)
    assert isinstance(failed.value, ToolError)
    assert str(failed.value)


numbers = st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6).map(lambda x: round(x, 3))
expressions = st.recursive(
    numbers.map(lambda number: f"({number!r})"),
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(
        lambda parts: f"({' '.join(parts)})"
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=50)
@given(expressions)
async def test_it_agrees_with_python(expression: str) -> None:
    try:
        expected = _evaluated(ast.parse(expression, mode="eval").body)
    except ZeroDivisionError:
        with pytest.raises(ArithmeticFailed):
            await calculator(expression)
        return
    try:
        found = float(await calculator(expression))
    except ArithmeticFailed:
        assert not math.isfinite(expected)
        return
    assert found == expected


def _evaluated(node: ast.expr) -> float:
    operators = {"Add": "add", "Sub": "sub", "Mult": "mul", "Div": "truediv", "Mod": "mod"}
    match node:
        case ast.Constant(value=value):
            return value  # type: ignore[return-value]
        case ast.UnaryOp(operand=operand):
            return -_evaluated(operand)
        case ast.BinOp(left=left, op=sign, right=right):
            name = operators.get(type(sign).__name__, "floordiv")
            return getattr(operator, name)(_evaluated(left), _evaluated(right))
    raise AssertionError(node)


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=60))
async def test_any_text_has_a_value_or_a_reason(expression: str) -> None:
    with contextlib.suppress(NotUnderstood, ArithmeticFailed):
        assert await calculator(expression)


@pytest.mark.parametrize(
    ("result", "answer"),
    [
        ({"status": "ok", "stdout": "3\n"}, "3"),
        ({"status": "ok"}, "(no output)"),
        ({"status": "ok", "stdout": "a\n", "stderr": "b\n"}, "a\nb"),
        ({"status": "error", "exit_status": 1, "stderr": "Oops"}, "Oops\n(exit status 1)"),
        ({"status": "timeout", "stdout": "1\n"}, "1\n(ended: over the time limit, after 0.5 s)"),
        ({"status": "killed"}, "(ended: over its limit of memory or processor time)"),
        ({"status": "output_limit", "stdout": "x"}, "x\n(ended: too much output)"),
    ],
)
async def test_a_program_s_end_is_told_to_the_model(result: dict[str, str], answer: str) -> None:
    ended = SandboxResult(**{"stdout": "", "stderr": "", "wall_s": 0.5, **result})
    assert answer_of(ended) == answer


async def test_a_long_output_loses_its_middle() -> None:
    text = "".join(f"{number} " for number in range(9000))
    shown = answer_of(SandboxResult(status="ok", stdout=text, stderr="", wall_s=0.1))
    assert shown.startswith("0 1 2")
    assert shown.endswith("8999 ")
    assert f"({len(text) - MAX_ANSWER} characters left out)" in shown
