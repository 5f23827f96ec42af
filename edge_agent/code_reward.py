"""The reward ``code``: the program in a response, run in the sandbox against its item's tests.

What always holds: a program that is wrong, hangs, crashes or is not there at all gets 0 for that; a
sandbox that fails and tests that cannot be run are errors, never a reward. A test with an output
compares outside of the sandbox, so a program cannot declare itself right there; one with statements
shares an interpreter with the program, and is passed if it came to its end and the process too.
"""

import asyncio
from collections.abc import Sequence
from typing import ClassVar, Final, NamedTuple

from edge_agent.sandbox import ProgramTooLarge, SandboxLimits, run_python
from transport.code_tests import CodeTest, CodeTests, tests_of
from transport.errors import RewardError, TaskError, ToolError
from transport.messages import Item
from transport.runs import CodeReward

_FENCE: Final = "```"
_LANGUAGES: Final = ("python", "py", "python3")


class CodeNotRun(RewardError):
    """A program could not be tested, through no fault of its own."""

    code: ClassVar[str] = "reward.code"


class SandboxBroken(CodeNotRun):
    """The box is at fault, not the item: its sandbox does not work, or not any more."""

    code: ClassVar[str] = "sandbox.reward"


async def code_rewards(spec: CodeReward, pairs: Sequence[tuple[Item, str]]) -> list[float]:
    """The reward of each (item, response): 1 or 0, or with ``share`` the part of the tests passed.

    Raises:
        CodeNotRun: tests that cannot be run; names the item.
        SandboxBroken: no working sandbox.
    """
    return [tested.reward for tested in await _all_tested(spec, pairs)]


async def surely_lower(
    spec: CodeReward, pairs: Sequence[tuple[Item, str]], recorded: Sequence[float]
) -> list[float]:
    """What another box ``recorded``, or the reward found here where it is lower for sure: the
    programs were run twice, with the same reward, and no test that failed was out of time or killed
    for what it used. A reward that was too low may be a box without time, so it is never found.

    Raises as ``code_rewards``.
    """
    found = list(recorded)
    first = await _all_tested(spec, pairs)
    low = [n for n, one in enumerate(first) if one.sure and one.reward < recorded[n]]
    second = await _all_tested(spec, [pairs[n] for n in low])
    for n, again in zip(low, second, strict=True):
        if again == first[n]:
            found[n] = again.reward
    return found


class _Tested(NamedTuple):
    """``sure``: no test ended for want of time or memory, which another box may have."""

    reward: float
    sure: bool


async def _all_tested(spec: CodeReward, pairs: Sequence[tuple[Item, str]]) -> list[_Tested]:
    tests = [_tests(item) for item, _ in pairs]
    tasks = [
        asyncio.create_task(_reward(spec, item, wanted, response))
        for (item, response), wanted in zip(pairs, tests, strict=True)
    ]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def last_program(response: str) -> str | None:
    """What the last closed ```` ```python ```` block of a text holds; None without one."""
    found: str | None = None
    block: list[str] | None = None
    python = False
    for line in response.splitlines():
        word = line.strip()
        if block is None:
            if word.startswith(_FENCE):
                block, python = [], word.removeprefix(_FENCE).strip().lower() in _LANGUAGES
        elif word == _FENCE:
            if python:
                found = "\n".join(block) + "\n"
            block = None
        else:
            block.append(line)
    return found


def _tests(item: Item) -> CodeTests:
    try:
        return tests_of(item)
    except TaskError as error:
        raise CodeNotRun(f"code, item {item.index}: {error}") from error


async def _reward(spec: CodeReward, item: Item, wanted: CodeTests, response: str) -> _Tested:
    program = last_program(response)
    if program is None:
        return _Tested(0.0, sure=True)
    limits = SandboxLimits(
        wall_s=wanted.time_limit_s or spec.time_limit_s,
        cpu_s=max(1, round(wanted.time_limit_s or spec.time_limit_s) + 1),
        memory_bytes=spec.memory_bytes,
    )
    passed, sure = 0, True
    for test in wanted.tests:
        try:
            right, over = await _passes(program, test, limits)
        except ProgramTooLarge:
            return _Tested(0.0, sure=True)
        except ToolError as error:
            raise SandboxBroken(f"code, item {item.index}: {error.code}: {error}") from error
        passed += right
        sure = sure and not over
        if over or not (right or spec.share):
            break
    reward = passed / len(wanted.tests) if spec.share else float(passed == len(wanted.tests))
    return _Tested(reward, sure)


async def _passes(program: str, test: CodeTest, limits: SandboxLimits) -> tuple[bool, bool]:
    """Whether a test is passed, and whether the program took all its time: then the tests that are
    left would cost as much, and count as failed."""
    result = await run_python(program, stdin=test.input, check=test.statements or "", limits=limits)
    right = result.status == "ok" and (
        result.checked if test.output is None else result.stdout.split() == test.output.split()
    )
    return right, result.status in ("timeout", "killed")
