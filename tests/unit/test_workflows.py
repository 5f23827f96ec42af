"""Workflows: what they see, what they may return, and what happens when they misbehave."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog
from workflow_bench import JUDGE, SOLVER, Bench, crash, offer

from edge_agent.core.effects import RunAttempt
from edge_agent.core.events import GroupGenerated, GroupSpooled
from edge_agent.engines.fake_text import CHARACTERS
from edge_agent.rewards import RewardPool
from edge_agent.spool import Spool
from edge_agent.workflow import (
    Observed,
    Rollout,
    WorkflowContext,
    WorkflowFunction,
    load_workflow,
)
from transport.errors import GenerationFailed
from transport.messages import Item, RewardSpec


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.asyncio
async def test_single_turn_gives_a_scored_group_with_versions(bench: Bench) -> None:
    events = await bench.run(load_workflow("single_turn").function)
    assert [type(event) for event in events] == [GroupGenerated, GroupSpooled]
    spooled = events[1]
    assert isinstance(spooled, GroupSpooled)
    group, summary = bench.group(), spooled.summary
    assert len(group.sequences) == 6
    assert group.prompts == (bench.engine.encode(SOLVER, "3 + 4 ="),)
    assert group.policies == (SOLVER,)
    for sequence in group.sequences:
        text = bench.engine.decode(SOLVER, sequence.tokens)
        assert sequence.reward == float(text == "7")
        assert sequence.segments == ((len(sequence.tokens), 0, 3),)
    assert summary.versions == {SOLVER: (3, 3)}
    assert summary.rewards == tuple(sequence.reward for sequence in group.sequences)
    assert (summary.fence, summary.queued_s) == ((1, 1), 0.5)
    assert summary.generating_s > 0


@pytest.mark.asyncio
async def test_an_evaluation_holds_one_sequence_per_item_in_order(bench: Bench) -> None:
    items = tuple(Item(index=n, prompt=f"{n} + 1 =", answer=str(n + 1)) for n in range(12))
    changes = {"kind": "eval", "items": items, "group_size": 1, "temperature": 0.0}
    await bench.run(load_workflow("single_turn").function, **changes)
    group = bench.group()
    assert [s.prompt for s in group.sequences] == list(range(12))
    assert [bench.engine.decode(SOLVER, p) for p in group.prompts] == [i.prompt for i in items]


@pytest.mark.asyncio
async def test_the_same_offer_draws_the_same_tokens(bench: Bench, tmp_path: Path) -> None:
    single = load_workflow("single_turn").function
    await bench.run(single)
    again = Bench(tmp_path / "again")
    await again.run(single, attempt="run/t-000001#2")
    assert [s.tokens for s in again.group().sequences] == [
        s.tokens for s in bench.group().sequences
    ]


@pytest.mark.asyncio
async def test_several_turns_policies_and_tool_output_are_told_apart(bench: Bench) -> None:
    async def debate(context: WorkflowContext, item: Item) -> list[Rollout]:
        rollouts = []
        assert context.settings == {"turns": 2}
        (first,) = await context.policy("solver").generate(item.prompt)
        tool = Observed(tokens=(CHARACTERS + ord("!"),) * 3)
        prompt = (*first.prompt_tokens, *first.tokens, *tool.tokens)
        (second,) = await context.policy("judge").generate(prompt, max_new_tokens=4)
        (reward,) = await context.score(["7"])
        for _ in range(context.group_size):
            parts = (first, tool, second)
            rollouts.append(
                Rollout(
                    prompt_tokens=first.prompt_tokens,
                    parts=parts,
                    text=second.text,
                    finish_reason="stop",
                    reward=reward / 2,
                )
            )
        return rollouts

    await bench.run(debate, policies={"solver": SOLVER, "judge": JUDGE}, group_size=2)
    group = bench.group()
    assert group.policies == (JUDGE, SOLVER)
    first, tool, second = group.sequences[0].segments
    assert (first[1:], tool, second[1:]) == ((1, 3), (3, -1, 0), (0, 3))
    assert group.sequences[0].reward == 0.5
    assert np.all(group.sequences[0].logprobs[first[0] : first[0] + 3] == 0.0)


async def nothing(context: WorkflowContext, item: Item) -> Any:
    return None


async def too_few(context: WorkflowContext, item: Item) -> list[Rollout]:
    return [Rollout.of(one) for one in await context.policy().generate(item.prompt, n=2)]


async def strings(context: WorkflowContext, item: Item) -> Any:
    return ["7"] * context.group_size


async def infinite_reward(context: WorkflowContext, item: Item) -> list[Rollout]:
    (one,) = await context.policy().generate(item.prompt)
    return [Rollout.of(one, reward=float("inf"))] * context.group_size


async def nobody_spoke(context: WorkflowContext, item: Item) -> list[Rollout]:
    rollout = Rollout(prompt_tokens=(), parts=(), text="", finish_reason="stop", reward=0.0)
    return [rollout] * context.group_size


async def foreign_policy(context: WorkflowContext, item: Item) -> list[Rollout]:
    import msgspec

    (one,) = await context.policy().generate(item.prompt)
    foreign = msgspec.structs.replace(one, policy=JUDGE)
    return [Rollout.of(foreign, reward=1.0)] * context.group_size


async def wrong_lengths(context: WorkflowContext, item: Item) -> list[Rollout]:
    import msgspec

    (one,) = await context.policy().generate(item.prompt)
    completion = msgspec.structs.replace(one.completion, versions=(3,))
    broken = msgspec.structs.replace(one, completion=completion)
    return [Rollout.of(broken, reward=1.0)] * context.group_size


async def unknown_policy(context: WorkflowContext, item: Item) -> Any:
    return context.policy("critic")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (nothing, "NoneType"),
        (too_few, "2 rollouts for item 4, 6 were asked for"),
        (strings, "a str among"),
        (infinite_reward, "reward inf"),
        (nobody_spoke, "no policy generated"),
        (foreign_policy, JUDGE),
        (wrong_lengths, "does not add up"),
        (unknown_policy, "no policy 'critic'; the run has solver"),
    ],
)
@pytest.mark.asyncio
async def test_malformed_results_fail_the_attempt_by_name(
    bench: Bench, function: WorkflowFunction, words: str
) -> None:
    failed = crash(await bench.run(function))
    assert failed.code == "workflow.malformed"
    assert words in failed.detail
    assert bench.spool.size_bytes == 0


@pytest.mark.asyncio
async def test_an_unnamed_policy_among_several_is_malformed(bench: Bench) -> None:
    policies = {"solver": SOLVER, "judge": JUDGE}
    failed = crash(await bench.run(load_workflow("single_turn").function, policies=policies))
    assert failed.code == "workflow.malformed"
    assert "solver, judge" in failed.detail


@pytest.mark.asyncio
async def test_whatever_a_workflow_raises_ends_only_its_attempt(bench: Bench) -> None:
    async def broken(context: WorkflowContext, item: Item) -> Any:
        if item.index == 1:
            raise ZeroDivisionError("no way")
        await asyncio.Event().wait()

    items = tuple(Item(index=n, prompt="p", answer="a") for n in range(3))
    failed = crash(await bench.run(broken, items=items))
    assert (failed.code, failed.detail) == ("workflow.error", "ZeroDivisionError: no way")


@pytest.mark.asyncio
async def test_a_workflow_that_cancels_itself_is_an_error(bench: Bench) -> None:
    async def gives_up(context: WorkflowContext, item: Item) -> Any:
        raise asyncio.CancelledError

    assert crash(await bench.run(gives_up)).code == "workflow.error"


@pytest.mark.asyncio
async def test_engine_and_reward_errors_keep_their_codes(bench: Bench) -> None:
    async def no_engine(context: WorkflowContext, item: Item) -> Any:
        raise GenerationFailed("out of memory")

    assert crash(await bench.run(no_engine)).code == "engine.generation"
    bench.events.clear()
    spec = RewardSpec(name="reasoning-gym", dataset="no such data set")
    single = load_workflow("single_turn").function
    failed = crash(await bench.run(single, reward=spec, timeout_s=20.0))
    assert failed.code in {"reward.failed", "reward.timeout"}


@pytest.mark.asyncio
async def test_a_workflow_that_never_returns_is_bounded(bench: Bench) -> None:
    async def forever(context: WorkflowContext, item: Item) -> Any:
        await asyncio.Event().wait()

    failed = crash(await bench.run(forever, timeout_s=0.02))
    assert (failed.code, failed.detail) == ("attempt.timeout", "not done within 0.02 s")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("nested", [False, True], ids=["itself", "in a task of its own"])
@pytest.mark.asyncio
async def test_a_workflow_that_would_end_the_process_ends_its_attempt(
    bench: Bench, error: BaseException, nested: bool
) -> None:
    async def leaves() -> None:
        raise error

    async def leaving(context: WorkflowContext, item: Item) -> Any:
        if nested:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(leaves())
        await leaves()

    failed = crash(await bench.run(leaving))
    assert failed.code == "workflow.exit"
    assert failed.detail.startswith(type(error).__name__)


async def swallows(context: WorkflowContext, item: Item) -> Any:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


async def sleeps(context: WorkflowContext, item: Item) -> Any:
    await asyncio.Event().wait()


async def swallows_everything(context: WorkflowContext, item: Item) -> Any:
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.Event().wait()


async def swallows_below(context: WorkflowContext, item: Item) -> Any:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(swallows(context, item))


async def generates_for_ever(context: WorkflowContext, item: Item) -> Any:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await context.policy().generate(item.prompt)


@pytest.mark.parametrize(
    "function", [swallows, swallows_everything, swallows_below, generates_for_ever]
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.asyncio
async def test_a_workflow_that_swallows_its_cancellation_is_ended(
    bench: Bench, function: WorkflowFunction
) -> None:
    async with asyncio.timeout(10):
        failed = crash(await bench.run(function, timeout_s=0.02, unwind_s=0.02))
    assert failed.code == "workflow.stuck"
    assert "let CancelledError through" in failed.detail
    assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing runs on"


@pytest.mark.asyncio
async def test_runaway_workflows_are_counted_and_told_at_each_doubling(bench: Bench) -> None:
    await bench.start()
    runner = bench.runner(swallows, 0.001, unwind_s=0.001)
    with structlog.testing.capture_logs() as logs:
        for number in range(7):
            attempt = RunAttempt(offer=offer(attempt=f"run/t-1#{number}"), queued_s=0.0)
            async with asyncio.TaskGroup() as tasks:
                runner.start(attempt, tasks)
    assert runner.stuck == 7
    errors = [line for line in logs if line["log_level"] == "error"]
    assert [line["count"] for line in errors] == [3, 6]


@pytest.mark.asyncio
async def test_an_aborted_runaway_reports_nothing_and_closing_leaves_nothing(bench: Bench) -> None:
    left: list[asyncio.Task[Any]] = []
    started = asyncio.Event()

    async def leaves_a_task(context: WorkflowContext, item: Item) -> Any:
        left.append(asyncio.create_task(swallows(context, item)))
        await asyncio.sleep(0)
        started.set()
        return await swallows(context, item)

    await bench.start()
    runner = bench.runner(leaves_a_task, unwind_s=0.02)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        runner.start(RunAttempt(offer=offer(), queued_s=0.0), tasks)
        await started.wait()
        runner.abort("run/t-000001#1", (1, 1))
        await runner.close()
    assert (bench.events, runner.stuck) == ([], 1)
    assert left[0].done()


@pytest.mark.asyncio
@pytest.mark.parametrize("leave", [swallows, sleeps])
async def test_what_a_workflow_leaves_running_ends_with_it(
    bench: Bench, leave: WorkflowFunction
) -> None:
    left: list[asyncio.Task[Any]] = []
    single = load_workflow("single_turn").function

    async def leaves_a_task(context: WorkflowContext, item: Item) -> Any:
        left.append(asyncio.ensure_future(leave(context, item)))
        return await single(context, item)

    await bench.start()
    runner = bench.runner(leaves_a_task, unwind_s=0.02)
    async with asyncio.TaskGroup() as tasks:
        runner.start(RunAttempt(offer=offer(), queued_s=0.0), tasks)
    assert isinstance(bench.events[-1], GroupSpooled)
    assert left[0].done()
    assert runner.stuck == (leave is swallows)
    await runner.close()


@pytest.mark.asyncio
async def test_a_task_that_the_agent_starts_for_a_workflow_is_not_the_workflows(
    bench: Bench,
) -> None:
    started: list[asyncio.Task[Any]] = []

    class Pool(RewardPool):
        async def score(self, *_: object) -> list[float]:
            started.append(asyncio.create_task(asyncio.Event().wait()))
            return [1.0]

    bench.rewards = Pool(1.0)

    async def scores(context: WorkflowContext, item: Item) -> Any:
        await context.score(["x"])
        return await swallows(context, item)

    failed = crash(await bench.run(scores, timeout_s=0.02, unwind_s=0.02))
    assert failed.code == "workflow.stuck"
    assert not started[0].done()
    started[0].cancel()


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("\ud800 \x00"), "ValueError: \\ud800 \x00"),
        (ValueError("x" * 10**6), "ValueError: xxx"),
        (NoText(), "NoText: a NoText without a text"),
        (GenerationFailed("\udfff"), "\\udfff"),
    ],
)
@pytest.mark.asyncio
async def test_whatever_an_exception_says_can_be_sent(
    bench: Bench, error: Exception, words: str
) -> None:
    async def raises(context: WorkflowContext, item: Item) -> Any:
        raise error

    failed = crash(await bench.run(raises))
    assert failed.detail.startswith(words)
    assert len(failed.detail.encode()) <= 4000


@pytest.mark.asyncio
async def test_a_group_with_more_tokens_than_a_trainer_takes_is_malformed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_agent.attempt_group.MAX_GROUP_TOKENS", 20)
    failed = crash(await bench.run(load_workflow("single_turn").function))
    assert failed.code == "workflow.malformed"
    assert "has room for 20" in failed.detail


@pytest.mark.asyncio
async def test_what_the_scheduler_would_refuse_is_not_spooled(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.summaries.MAX_SUMMARY_BYTES", 10)
    failed = crash(await bench.run(load_workflow("single_turn").function))
    assert failed.code == "workflow.malformed"
    assert "the summary takes" in failed.detail
    assert bench.spool.size_bytes == 0


@pytest.mark.asyncio
async def test_a_wrong_signature_ends_its_attempt(bench: Bench) -> None:
    async def no_item(context: WorkflowContext) -> Any:
        return []

    failed = crash(await bench.run(no_item))  # type: ignore[arg-type]
    assert failed.code == "workflow.error"
    assert "positional argument" in failed.detail


@pytest.mark.parametrize(
    ("changed", "code", "words"),
    [
        ({"prompt_tokens": [[1]]}, "workflow.malformed", "does not add up"),
        ({"parts": 3}, "workflow.malformed", "the parts 3"),
        ({"prompt_tokens": ("a",)}, "workflow.malformed", "does not add up"),
        ({"prompt_tokens": 3}, "workflow.malformed", "does not add up"),
        ({"parts": ("a",)}, "workflow.malformed", "no policy generated"),
        ({"finish_reason": object()}, "workflow.malformed", "finish_reason is a object"),
    ],
)
@pytest.mark.asyncio
async def test_a_result_of_wrong_types_ends_its_attempt(
    bench: Bench, changed: dict[str, Any], code: str, words: str
) -> None:
    async def odd(context: WorkflowContext, item: Item) -> list[Rollout]:
        (one,) = await context.policy().generate(item.prompt)
        return [msgspec.structs.replace(Rollout.of(one, 0.0), **changed)]

    failed = crash(await bench.run(odd, group_size=1))
    assert failed.code == code
    assert words in failed.detail


@pytest.mark.asyncio
async def test_tokens_that_are_none_end_their_attempt(bench: Bench) -> None:
    async def odd(context: WorkflowContext, item: Item) -> list[Rollout]:
        (one,) = await context.policy().generate(item.prompt)
        parts = (one, Observed(tokens=(2**40,)))
        return [msgspec.structs.replace(Rollout.of(one, 0.0), parts=parts)]

    failed = crash(await bench.run(odd, group_size=1))
    assert failed.code == "workflow.malformed"
    assert "part 2.tokens are not all within 0 and 4294967295" in failed.detail


@pytest.mark.asyncio
async def test_a_group_that_fits_in_no_frame_says_what_to_lower(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_agent.attempt_runner.MAX_PACKED_BYTES", 2**20)
    rng = np.random.default_rng(0)

    async def huge(context: WorkflowContext, item: Item) -> list[Rollout]:
        (one,) = await context.policy().generate(item.prompt)
        noise = Observed(tokens=tuple(rng.integers(0, 2**32, 2**20).tolist()))
        rollout = Rollout(
            prompt_tokens=one.prompt_tokens,
            parts=(one, noise),
            text="",
            finish_reason="stop",
            reward=0.0,
        )
        return [rollout] * context.group_size

    failed = crash(await bench.run(huge, group_size=2, max_new_tokens=2**15))
    assert failed.code == "workflow.malformed"
    assert "lower group_size" in failed.detail


@pytest.mark.asyncio
async def test_a_full_spool_fails_the_attempt(bench: Bench, tmp_path: Path) -> None:
    bench.spool = Spool(tmp_path / "tiny", 10)
    assert crash(await bench.run(load_workflow("single_turn").function)).code == "store"


@pytest.mark.asyncio
async def test_an_aborted_attempt_reports_nothing(bench: Bench) -> None:
    started = asyncio.Event()

    async def forever(context: WorkflowContext, item: Item) -> Any:
        started.set()
        await asyncio.Event().wait()

    await bench.start()
    runner = bench.runner(forever)
    async with asyncio.TaskGroup() as tasks:
        runner.start(RunAttempt(offer=offer(), queued_s=0.0), tasks)
        await started.wait()
        runner.abort("run/t-000001#1", (9, 9))
        runner.abort("run/t-000001#1", (1, 1))
        await runner.close()
    assert bench.events == []


@pytest.mark.asyncio
async def test_an_abort_during_the_write_lets_it_finish_and_reports_it(bench: Bench) -> None:
    await bench.start()
    runner = bench.runner(load_workflow("single_turn").function)
    async with asyncio.TaskGroup() as tasks:
        runner.start(RunAttempt(offer=offer(), queued_s=0.0), tasks)
        await bench.generated.wait()
        while not runner._storing:
            await asyncio.sleep(0)
        await runner.close()
    assert isinstance(bench.events[-1], GroupSpooled)
