"""Unit tests that an item of the reward ``code`` brings along, as JSON in its answer (or, where the
answer is something else, in its meta):

    {"tests": [{"input": "1 2\\n", "output": "3\\n"}, {"assert": "assert add(1, 2) == 3"}],
     "time_limit_s": 2.0}

What always holds: what ``tests_of`` returns can be run as it is; what is wrong with tests is known
before a model's answer has been looked at, so it never counts against the answer.
"""

import ast
from typing import Annotated

import msgspec
from msgspec import Meta

from transport.errors import TaskError
from transport.messages import Item

MAX_TESTS = 256


class CodeTest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Either ``input`` and ``output``: what the program prints when it reads the input; or
    ``assert``: statements that run after the program, in its name space, and raise if it is wrong.
    """

    input: str = ""
    output: str | None = None
    statements: str | None = msgspec.field(default=None, name="assert")


class CodeTests(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All tests of an item; ``time_limit_s`` is for each of them, None: the run's."""

    tests: Annotated[tuple[CodeTest, ...], Meta(min_length=1, max_length=MAX_TESTS)]
    time_limit_s: Annotated[float, Meta(gt=0.0, le=60.0)] | None = None


def tests_of(item: Item) -> CodeTests:
    """The tests of an item.

    Raises:
        TaskError: there are none, or they cannot be run; names the field.
    """
    field, text = ("answer", item.answer) if _is_object(item.answer) else ("meta", item.meta)
    if not _is_object(text):
        raise TaskError('answer: no tests; the reward "code" needs {"tests": [...]} there')
    try:
        found = msgspec.json.decode(text, type=CodeTests)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TaskError(f"{field}: {error}") from error
    for number, test in enumerate(found.tests):
        where = f"{field}: tests[{number}]"
        if (test.output is None) == (test.statements is None):
            raise TaskError(f"{where}: has either an output or an assert")
        if test.statements is not None:
            _check_statements(test, where)
    return found


def _is_object(text: str) -> bool:
    return text.lstrip().startswith("{")


def _check_statements(test: CodeTest, where: str) -> None:
    if test.input:
        raise TaskError(f"{where}: an assert takes no input")
    try:
        tree = ast.parse(test.statements or "")
        compile(tree, "assert", "exec", dont_inherit=True)  # a return, a break out of its place
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TaskError(f"{where}: assert: {error}") from error
    if not tree.body:
        raise TaskError(f"{where}: assert: is empty, so anything would pass")
