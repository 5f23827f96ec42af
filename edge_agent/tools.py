"""Tools that a workflow may give to a policy: arithmetic, and Python in the sandbox.

What always holds: nothing that a model wrote is evaluated in the agent's own process but arithmetic
on numbers, whose cost is bounded before it is done; Python runs in ``edge_agent.sandbox`` or not at
all. What a program does wrong (an exception, too much time) is the tool's answer, for the model to
read; a ``ToolError`` is about the call: a text that is no expression, or a box without a sandbox.
"""

import ast
import math
import operator
from collections.abc import Callable
from typing import ClassVar, Final

from edge_agent.sandbox import SandboxLimits, SandboxResult, run_python
from transport.errors import ToolError

__all__ = [
    "ArithmeticFailed",
    "NotUnderstood",
    "ToolError",
    "answer_of",
    "calculator",
    "python_tool",
]

MAX_EXPRESSION: Final = 1000
"""Characters of an expression."""
MAX_NODES: Final = 200
"""Numbers, operators and calls in an expression."""
MAX_BITS: Final = 4096
"""Size of a whole number anywhere in a calculation."""
MAX_PLACES: Final = 300
"""Decimal places that ``round`` takes; no float has more digits before its point."""
MAX_ANSWER: Final = 4000
"""Characters of a program's output that the model sees; the middle of a longer one is left out."""
_WHOLE: Final = 1e15
"""Floats below it that are whole are written as whole numbers."""

Number = int | float

_BINARY: Final[dict[type[ast.operator], Callable[[Number, Number], Number]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: Final[dict[type[ast.unaryop], Callable[[Number], Number]]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_FUNCTIONS: Final = ("abs", "max", "min", "round", "sqrt")


class NotUnderstood(ToolError):
    """What the tool was given is not what it takes."""

    code: ClassVar[str] = "tool.input"


class ArithmeticFailed(ToolError):
    """The expression has no value that can be given."""

    code: ClassVar[str] = "tool.arithmetic"


async def calculator(expression: str) -> str:
    """The value of an arithmetic expression: numbers, ``+ - * / // % **``, brackets, ``abs``,
    ``max``, ``min``, ``round`` and ``sqrt``. A float that is whole is given as a whole number.

    Raises:
        NotUnderstood: it is no such expression, or it is too long.
        ArithmeticFailed: division by zero, a result that is too large or not real.
    """
    if len(expression) > MAX_EXPRESSION:
        raise NotUnderstood(f"an expression has at most {MAX_EXPRESSION} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotUnderstood(f"{expression.strip()!r:.80} is not an expression") from error
    nodes = sum(isinstance(node, (ast.expr, ast.operator)) for node in ast.walk(tree))
    if nodes > MAX_NODES:
        raise NotUnderstood(f"an expression has at most {MAX_NODES} numbers and operators")
    try:
        value = _value(tree.body)
    except (ArithmeticError, ValueError) as error:
        raise ArithmeticFailed(f"{error}") from error
    if isinstance(value, float) and value.is_integer() and abs(value) < _WHOLE:
        value = int(value)
    return str(value)


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _bounded(_power(_value(left), _value(right)))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            return _bounded(_BINARY[type(sign)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_call(name, [_value(argument) for argument in args]))
        case _:
            raise NotUnderstood(
                f"{ast.unparse(node)!r:.80}: a calculation has numbers, + - * / // % **, brackets"
                f" and {', '.join(_FUNCTIONS)}"
            )


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        # Before it is computed: a power of two small numbers may fill the memory.
        if abs(base) > 1 and base.bit_length() * exponent > MAX_BITS:
            raise OverflowError("the power is too large")
        return int(base**exponent)
    value = base**exponent
    if not isinstance(value, (int, float)):
        raise ValueError("the power is not a real number")
    return value


def _call(name: str, arguments: list[Number]) -> Number:
    match name, arguments:
        case "abs", [number]:
            return abs(number)
        case "max" | "min", [_, _, *_]:
            return max(arguments) if name == "max" else min(arguments)
        case "round", [number]:
            return round(number)
        case "round", [number, int() as places] if abs(places) <= MAX_PLACES:
            return round(number, places)
        case "sqrt", [number]:
            return math.sqrt(number)
        case _:
            raise NotUnderstood(f"{name} does not take these arguments")


def _bounded(value: Number) -> Number:
    """Raises OverflowError for what is too large to go on with or to write down."""
    if isinstance(value, float) and not math.isfinite(value):
        raise OverflowError("the result is too large")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise OverflowError("the result is too large")
    return value


async def python_tool(code: str, *, limits: SandboxLimits | None = None) -> str:
    """What a Python program prints, run in the sandbox: standard output, then standard error, then
    a line that says how it ended unless all was well. At most ``MAX_ANSWER`` characters of each.

    Raises:
        ToolError: the program is too long (``sandbox.too_large``), or this box cannot run it
            (``sandbox.unavailable``, ``sandbox.failed``).
    """
    return answer_of(await run_python(code, limits=limits or SandboxLimits()))


def answer_of(result: SandboxResult) -> str:
    """A program's output and end as the model sees them."""
    said = [_shortened(text) for text in (result.stdout, result.stderr) if text.strip()]
    ended = _ended(result)
    return "\n".join([*said, ended] if ended else said) or "(no output)"


def _ended(result: SandboxResult) -> str:
    match result.status:
        case "ok":
            return ""
        case "error":
            return f"(exit status {result.exit_status})"
        case "timeout":
            return f"(ended: over the time limit, after {result.wall_s:.1f} s)"
        case "killed":
            return "(ended: over its limit of memory or processor time)"
        case "output_limit":
            return "(ended: too much output)"


def _shortened(text: str) -> str:
    text = text.strip("\n")
    if len(text) <= MAX_ANSWER:
        return text
    half = MAX_ANSWER // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters left out) ...\n{text[-half:]}"
