"""Three policies: a solver answers twice, a tester writes a test, a selector picks an answer.

    solver's reward     what the run's verifier gives each of its answers
    tester's reward     share of the answers that its test tells rightly from wrong
    selector's reward   that of the answer it picked, 0 if it picked none

The test is an arithmetic expression; an answer passes if it is the value of the expression. So it
runs on any box and with the small model of ``examples/models``. For programs, let the tester write
assertions and run them with ``edge_agent.tools.python_tool``.

A sibling returns four rollouts: both answers, the test, the choice. An evaluation returns the
answer that was picked (or the first that passed the test, or the first), so that it measures what
the three achieve together.
"""

import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from edge_agent.tools import ToolError, calculator
from edge_agent.workflow import Generated, Item, Rollout, WorkflowContext, side_by_side, workflow

ANSWERS: Final = 2
RIGHT: Final = 1.0
_NUMBER = re.compile(r"\d+")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Texts of the tester and the selector, and how warm the solver is in an evaluation, which is
    greedy otherwise: both of its answers would be the same."""

    test: str = "{prompt}"
    choose: str = "{prompt} Answer 1: {first} ({first_test}) Answer 2: {second} ({second_test})"
    evaluation_temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0


@workflow("solve_and_select", rollouts=ANSWERS + 2)
async def solve_and_select(context: WorkflowContext, item: Item) -> list[Rollout]:
    """``group_size`` times two answers, a test and a choice."""
    settings = context.settings_as(Settings)
    evaluated = context.kind == "eval"
    answers, tests = await side_by_side(
        (
            context.policy("solver").generate(
                item.prompt,
                n=ANSWERS * context.group_size,
                temperature=settings.evaluation_temperature if evaluated else None,
                label="solve",
            ),
            context.policy("tester").generate(
                settings.test.replace("{prompt}", item.prompt), n=context.group_size, label="test"
            ),
        )
    )
    firsts, seconds = answers[: context.group_size], answers[context.group_size :]
    pairs = list(zip(firsts, seconds, strict=True))
    passed = [
        [await passes(test.text, answer.text) for answer in pair]
        for test, pair in zip(tests, pairs, strict=True)
    ]
    choices = await side_by_side(
        _choose(context, settings, item, pair, marks, number)
        for number, (pair, marks) in enumerate(zip(pairs, passed, strict=True), 1)
    )
    picked = [_picked(choice.text) for choice in choices]
    if evaluated:
        return [
            Rollout.of(pair[marks.index(True) if place is None and any(marks) else place or 0])
            for pair, marks, place in zip(pairs, passed, picked, strict=True)
        ]
    rewards = await context.score([answer.text for answer in answers])
    truths = list(zip(rewards[: len(pairs)], rewards[len(pairs) :], strict=True))
    return [
        *(Rollout.of(answer, reward) for answer, reward in zip(answers, rewards, strict=True)),
        *(
            Rollout.of(test, _told(marks, truth))
            for test, marks, truth in zip(tests, passed, truths, strict=True)
        ),
        *(
            Rollout.of(choice, 0.0 if place is None else truth[place])
            for choice, place, truth in zip(choices, picked, truths, strict=True)
        ),
    ]


async def passes(test: str, answer: str) -> bool:
    """Whether an answer is the value of the test; a test that has none passes nothing."""
    try:
        return await calculator(test.strip().rstrip("=")) == answer.strip()
    except ToolError:
        return False


async def _choose(
    context: WorkflowContext,
    settings: Settings,
    item: Item,
    pair: tuple[Generated, Generated],
    marks: list[bool],
    number: int,
) -> Generated:
    said = ["passes the test" if mark else "fails the test" for mark in marks]
    texts = {
        "prompt": item.prompt,
        "first": pair[0].text.strip(),
        "first_test": said[0],
        "second": pair[1].text.strip(),
        "second_test": said[1],
    }
    question = re.sub(r"\{(\w+)\}", lambda found: texts.get(found[1], found[0]), settings.choose)
    [choice] = await context.policy("selector").generate(question, label=f"choose-{number}")
    return choice


def _picked(text: str) -> int | None:
    """Which answer was picked, from 0: the first number that the selector wrote."""
    found = _NUMBER.search(text)
    return int(found[0]) - 1 if found and found[0] in ("1", "2") else None


def _told(marks: list[bool], truth: tuple[float, float]) -> float:
    """Share of the answers of which a test said rightly whether they are right."""
    right = [mark == (reward >= RIGHT) for mark, reward in zip(marks, truth, strict=True)]
    return sum(right) / len(right)
