"""The shipped workflow of a policy with tools."""

from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, script
from workflow_bench import SOLVER, Bench, crash, offer

from edge_agent.core.events import GroupSpooled
from edge_agent.engines.fake import FakeEngine
from edge_agent.engines.fake_text import decode_text, encode_chat
from edge_agent.workflow import GenerationTime, Sibling, WorkflowContext, load_workflow
from edge_agent.workflows.tool_use import HOW, tool_use
from transport.errors import ToolError
from transport.messages import Item
from transport.runtime.clock import SystemClock
from transport.trajectory import SequenceRecord, expand

FLOW = load_workflow("tool_use")
OFFER: dict[str, Any] = {"settings": {}, "max_new_tokens": 120, "group_size": 1}


def call(expression: str, name: str = "calculator", argument: str = "expression") -> str:
    return f'<tool_call>{{"name":"{name}","arguments":{{"{argument}":"{expression}"}}}}</tool_call>'


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def run(bench: Bench, *texts: str, shows_tools: bool = True, **changes: Any) -> Any:
    if texts:
        bench.engine = ScriptedEngine(script(*texts), shows_tools=shows_tools)
    return await bench.run(FLOW.function, **{**OFFER, **changes})


def stretches(sequence: SequenceRecord) -> list[tuple[int, str]]:
    """Texts by who drew them: policy index or -1."""
    found: list[tuple[int, list[int]]] = []
    for policy, token in zip(expand(sequence.segments)[0], sequence.tokens, strict=True):
        if not found or found[-1][0] != policy:
            found.append((policy, []))
        found[-1][1].append(token)
    return [(policy, decode_text(tokens)) for policy, tokens in found]


@pytest.mark.asyncio
async def test_a_policy_calls_reads_and_answers(bench: Bench) -> None:
    """With the fake engine, which calls the calculator where a template shows it."""
    await run(bench, group_size=8, settings={"turns": 2})
    sequences = bench.group().sequences
    for sequence in sequences:
        (_, called), (observed, said), (_, answered) = stretches(sequence)
        assert called in (call("3 + 4"), call("3 + 5"))
        assert (observed, said) == (-1, "7" if called == call("3 + 4") else "8")
        assert sequence.reward == float(answered == "7")
        tool = [n for n, p in enumerate(expand(sequence.segments)[0]) if p < 0]
        assert not sequence.logprobs[tool].any()
    assert {s.reward for s in sequences} == {0.0, 1.0}, "both cases came up"


@pytest.mark.asyncio
async def test_a_conversation_is_what_its_engine_was_asked(bench: Bench) -> None:
    await run(bench, f"Let me see. {call('12 * 34')}", f"Again {call('400 + 8')}", "It is 408")
    group = bench.group()
    (sequence,) = group.sequences
    assert stretches(sequence) == [
        (0, f"Let me see. {call('12 * 34')}"),
        (-1, "408"),
        (0, f"Again {call('400 + 8')}"),
        (-1, "408"),
        (0, "It is 408"),
    ]
    whole = (*group.prompts[0], *sequence.tokens)
    for request in bench.engine.asked:
        assert whole[: len(request.prompt_tokens)] == request.prompt_tokens
        assert request.sampling.stop == ("</tool_call>",)
    assert [r.request_id for r in bench.engine.asked] == [
        f"run/t-000001/4/turn-{n}.1" for n in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("<tool_call>{</tool_call>", "error: the call is not understood"),
        ("<tool_call>[1]</tool_call>", "error: the call is not understood"),
        (f"<tool_call>{'[' * 5000}</tool_call>", "error: the call is not understood"),
        (call("1 + 1", name="search"), "error: no tool 'search'; there are calculator"),
        (call("print(1)", name="python", argument="code"), "error: no tool 'python'"),
        (call("1 + 1", argument="code"), "error: calculator takes the text 'expression'"),
        (call("import os"), "error: 'import os' is not an expression"),
        (call("1 / 0"), "error: division by zero"),
        (call("1 + 1").replace("arguments", "parameters"), "2"),
    ],
)
@pytest.mark.asyncio
async def test_what_is_wrong_with_a_call_is_said_to_the_policy(
    bench: Bench, written: str, read: str
) -> None:
    await run(bench, written, "7", max_new_tokens=200)
    (_, said, answer) = stretches(bench.group().sequences[0])
    assert said[1].startswith(read)
    assert answer == (0, "7")
    assert bench.group().sequences[0].reward == 1.0


@pytest.mark.asyncio
async def test_turns_and_outputs_are_bounded(bench: Bench) -> None:
    long = call("2 ** 1000")
    await run(bench, long, long, settings={"turns": 2, "output_characters": 16})
    (_, said), *_ = [one for one in stretches(bench.group().sequences[0]) if one[0] < 0]
    assert len(said) == 16
    assert len(bench.engine.asked) == 2
    assert stretches(bench.group().sequences[0])[-1] == (0, long)


@pytest.mark.asyncio
async def test_a_sequence_never_becomes_longer_than_a_run_allows(bench: Bench) -> None:
    """64 answers of ``max_new_tokens`` are the most; a tool's output may not lead beyond."""
    long = call("2 ** 2000")
    events = await run(bench, long, "7", settings={"output_characters": 1200}, max_new_tokens=8)
    assert isinstance(events[-1], GroupSpooled)
    assert [policy for policy, _ in stretches(bench.group().sequences[0])] == [0]
    assert events[-1].summary.lengths[0] <= 64 * 8


@pytest.mark.asyncio
async def test_tools_are_described_where_the_template_shows_none(bench: Bench) -> None:
    settings = {"system": "Be brief."}
    await run(bench, "7", shows_tools=False, settings=settings)
    prompt = decode_text(bench.group().prompts[0])
    assert prompt.startswith("Be brief.\nTools:\n{")
    assert '"name":"calculator"' in prompt
    assert prompt.endswith(f"{HOW}3 + 4 =")
    shown = Bench(bench.spool._folder / "shown")
    await run(shown, "7", settings=settings)
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 4 ="}]
    assert shown.group().prompts[0][-len(encode_chat(asked)) :] == encode_chat(asked)


@pytest.mark.asyncio
async def test_a_box_without_a_sandbox_fails_the_attempt(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unavailable(ToolError):
        code = "sandbox.unavailable"

    async def refuses(code: str) -> str:
        raise Unavailable("no bubblewrap here")

    monkeypatch.setattr("edge_agent.tools.python_tool", refuses)
    written = call("print(1)", name="python", argument="code")
    failed = crash(await run(bench, written, "7", settings={"tools": ["python"]}))
    assert (failed.code, failed.detail) == ("sandbox.unavailable", "no bubblewrap here")


@pytest.mark.parametrize("settings", [{"tools": []}, {"tools": ["rm"]}, {"turns": 65}, {"tool": 1}])
@pytest.mark.asyncio
async def test_wrong_settings_are_named(bench: Bench, settings: dict[str, object]) -> None:
    failed = crash(await run(bench, "7", settings=settings))
    assert failed.code == "workflow.malformed"
    assert next(iter(settings)) in failed.detail


@pytest.mark.asyncio
async def test_a_conversation_goes_on_where_an_earlier_attempt_had_got_to(bench: Bench) -> None:
    texts = (call("12 * 34"), call("408 + 0"), "408")
    stood: list[Sibling] = []

    def context(engine: FakeEngine, resumed: tuple[Sibling, ...] = ()) -> WorkflowContext:
        return WorkflowContext(
            offer(**OFFER),
            Item(index=0, prompt="12 * 34 =", answer="408"),
            engine,
            bench.rewards,
            GenerationTime(SystemClock()),
            resumed,
            stood.extend,
        )

    bench.engine = ScriptedEngine(script(*texts))
    await bench.start()
    [whole] = await tool_use(context(bench.engine), Item(index=0, prompt="12 * 34 =", answer=""))
    assert [sibling.turns for sibling in stood] == [1, 2, 3]
    for done in (1, 2, 3):
        later = ScriptedEngine(script(*texts[done:]))
        await later.load_policy(SOLVER, bench.model, 3)
        before = (stood[done - 1],)
        [again] = await tool_use(context(later, before), Item(index=0, prompt="", answer=""))
        assert again == whole
        assert len(later.asked) == 3 - done
