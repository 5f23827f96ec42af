"""A policy that may call tools: it asks for a calculation or runs a program, reads what comes back,
and goes on until it answers.

A call is JSON between two marks, as many chat templates have it, with ``parameters`` for
``arguments`` if the model prefers that:

    <tool_call>{"name": "calculator", "arguments": {"expression": "12 * 34"}}</tool_call>

Tools are shown by the model's chat template where it shows any, otherwise described in a system
message. A turn ends with the call (or with the answer); what the tool says is the next message, of
the role ``tool``, and belongs to no policy, so it is never trained on. A call that is not
understood gets an error to read, like one that fails. The reward is the run's verifier's, of the
last turn's text without its call. No sequence becomes longer than a run's workflow allows.

``[workflow.settings]``: ``tools`` are those that may be called, ``calculator`` or ``python``;
``turns`` is how often the policy may speak (4); ``output_characters`` bounds what it sees of a
tool's output (1000); ``system`` is said before everything else.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from edge_agent.workflow import (
    Chat,
    Observed,
    PolicyHandle,
    Rollout,
    Sibling,
    Tools,
    WorkflowContext,
    side_by_side,
    workflow,
)
from transport.errors import GenerationFailed, ToolError
from transport.messages import Item
from transport.runs import MAX_TURNS

CALL_BEGINS: Final = "<tool_call>"
CALL_ENDS: Final = "</tool_call>"
HOW: Final = (
    "To use a tool, write " + CALL_BEGINS + '{"name": NAME, "arguments": {...}}' + CALL_ENDS
)
_CALL = re.compile(f"{CALL_BEGINS}(.*?){CALL_ENDS}", re.DOTALL)


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module."""

    tools: Annotated[tuple[Literal["calculator", "python"], ...], Meta(min_length=1)] = (
        "calculator",
    )
    turns: Annotated[int, Meta(ge=1, le=MAX_TURNS)] = 4
    output_characters: Annotated[int, Meta(ge=16, le=100_000)] = 1000
    system: Annotated[str, Meta(max_length=8000)] = ""


class _Call(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: dict[str, Any] | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool with one argument, a text."""

    argument: str
    about: str
    says: str
    run: Callable[[str], Awaitable[str]]

    def schema(self, name: str) -> dict[str, Any]:
        """As chat templates take it."""
        parameters = {
            "type": "object",
            "properties": {self.argument: {"type": "string", "description": self.says}},
            "required": [self.argument],
        }
        function = {"name": name, "description": self.about, "parameters": parameters}
        return {"type": "function", "function": function}


async def _calculate(expression: str) -> str:
    from edge_agent.tools import calculator

    return await calculator(expression)


async def _run_python(code: str) -> str:
    from edge_agent.tools import python_tool

    return await python_tool(code)


_TOOLS: Final = {
    "calculator": _Tool(
        argument="expression",
        about="Gives the value of an arithmetic expression.",
        says="Numbers, + - * / // % **, brackets, abs, max, min, round, sqrt.",
        run=_calculate,
    ),
    "python": _Tool(
        argument="code",
        about="Runs a Python program and gives what it prints.",
        says="The program.",
        run=_run_python,
    ),
}


@workflow("tool_use", settings=Settings)
async def tool_use(context: WorkflowContext, item: Item) -> list[Rollout]:
    """One conversation of the run's only policy with its tools per sibling."""
    settings = context.settings_as(Settings)
    policy = context.policy()
    siblings = list(context.resumed)
    if not siblings:
        prompt = _prompt(policy, item, settings)
        begun = Rollout(prompt_tokens=prompt, parts=(), text="", finish_reason="stop")
        siblings = [Sibling(rollout=begun, turns=0)] * context.group_size

    async def converse(number: int) -> Rollout:
        while _goes_on(siblings[number], settings):
            siblings[number] = await _next_turn(context, policy, siblings, number, settings)
            context.turn_finished(siblings)
        return siblings[number].rollout

    return await side_by_side(converse(number) for number in range(context.group_size))


def _prompt(policy: PolicyHandle, item: Item, settings: Settings) -> tuple[int, ...]:
    """The question with the tools shown by the template, or else described before it."""
    shown = [_TOOLS[name].schema(name) for name in settings.tools]
    try:
        return policy.encode(_messages(settings.system, item), shown)
    except GenerationFailed:  # the template shows none
        described = "\n".join((*filter(None, [settings.system]), *_described(shown), HOW))
        return policy.encode(_messages(described, item))


def _messages(system: str, item: Item) -> Chat:
    said = [{"role": "system", "content": system}] if system else []
    return [*said, {"role": "user", "content": item.prompt}]


def _described(tools: Tools) -> list[str]:
    return ["Tools:", *(msgspec.json.encode(tool["function"]).decode() for tool in tools)]


def _goes_on(sibling: Sibling, settings: Settings) -> bool:
    """Whether a tool has said something, or nobody has said anything yet."""
    parts = sibling.rollout.parts
    return sibling.turns < settings.turns and (not parts or isinstance(parts[-1], Observed))


async def _next_turn(
    context: WorkflowContext,
    policy: PolicyHandle,
    siblings: list[Sibling],
    number: int,
    settings: Settings,
) -> Sibling:
    """What the policy says, and what the tool that it called says then."""
    before, turn = siblings[number].rollout, siblings[number].turns + 1
    said = [token for part in before.parts for token in part.tokens]
    [generated] = await policy.generate(
        (*before.prompt_tokens, *said), stop=CALL_ENDS, label=f"turn-{turn}.{number + 1}"
    )
    parts = [*before.parts, generated]
    call = _CALL.search(generated.text)
    if call is not None and turn < settings.turns:
        output = (await _called(call.group(1), settings))[: settings.output_characters]
        observed = _observed(policy, generated.tokens, output)
        count = len(said) + len(generated.tokens) + len(observed.tokens)
        if count + context.max_new_tokens <= MAX_TURNS * context.max_new_tokens:
            parts.append(observed)
    rollout = Rollout(
        prompt_tokens=before.prompt_tokens,
        parts=tuple(parts),
        text=_CALL.sub("", generated.text).strip(),
        finish_reason=generated.completion.finish_reason,
    )
    return Sibling(rollout=rollout, turns=turn)


def _observed(policy: PolicyHandle, answer: Sequence[int], output: str) -> Observed:
    """What the tool said, as a tool's message, or as the user's where the template has none."""
    try:
        return policy.encode_next(answer, [{"role": "tool", "content": output}])
    except GenerationFailed:
        return policy.encode_next(answer, [{"role": "user", "content": output}])


async def _called(text: str, settings: Settings) -> str:
    """What a call gives, or what is wrong with it. A box that cannot run programs is no answer to
    the policy: that ends the attempt."""
    try:
        call = msgspec.json.decode(text, type=_Call)
    except (msgspec.DecodeError, RecursionError) as error:
        return f"error: the call is not understood: {error}"
    if call.name not in settings.tools:
        return f"error: no tool {call.name!r}; there are {', '.join(settings.tools)}"
    tool = _TOOLS[call.name]
    argument = (call.arguments or call.parameters or {}).get(tool.argument)
    if not isinstance(argument, str):
        return f"error: {call.name} takes the text {tool.argument!r}"
    try:
        return await tool.run(argument)
    except ToolError as error:
        if error.code in ("sandbox.unavailable", "sandbox.failed"):
            raise
        return f"error: {error}"
