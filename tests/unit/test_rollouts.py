"""What workflows may return: several rollouts per sibling, views for one policy, nothing empty."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from workflow_bench import JUDGE, SOLVER, Bench, crash

from edge_agent.engine import Completion
from edge_agent.rollouts import Generated, MalformedWorkflow, Observed, Rollout, checked
from edge_agent.workflow import WorkflowContext, load_workflow, workflow
from transport.messages import Item
from transport.runs import MAX_ROLLOUTS
from transport.trajectory import expand

BOTH = {"solver": SOLVER, "judge": JUDGE}
ITEM = Item(index=4, prompt="p", answer="a")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def drawn(policy: str = SOLVER, *tokens: int) -> Generated:
    completion = Completion(
        tokens=tokens,
        logprobs=(-0.5,) * len(tokens),
        versions=(3,) * len(tokens),
        finish_reason="stop",
    )
    return Generated(policy=policy, prompt_tokens=(1,), completion=completion, text="t")


def rollout(*parts: Generated | Observed, reward: float | None = 1.0) -> Rollout:
    return Rollout(prompt_tokens=(1,), parts=parts, text="t", finish_reason="stop", reward=reward)


# ---- several per sibling -----------------------------------------------------------------------


@workflow("two_roles", rollouts=2)
async def two_roles(context: WorkflowContext, item: Item) -> list[Rollout]:
    """Rewards say which sibling and role a rollout is of: 10 x role + sibling."""
    roles = []
    for number, name in enumerate(("solver", "judge")):
        made = await context.policy(name).generate(item.prompt, n=context.group_size)
        roles.append([Rollout.of(one, 10.0 * number + n) for n, one in enumerate(made)])
    return roles[0] if context.kind == "eval" else [*roles[0], *roles[1]]


@pytest.mark.asyncio
async def test_rollouts_of_several_roles_go_role_by_role(bench: Bench) -> None:
    await bench.promising(2).run(two_roles, policies=BOTH, group_size=3)
    group = bench.group()
    assert [s.reward for s in group.sequences] == [0.0, 1.0, 2.0, 10.0, 11.0, 12.0]
    by = [group.policies[s.segments[0][1]] for s in group.sequences]
    assert by == [SOLVER] * 3 + [JUDGE] * 3


@pytest.mark.asyncio
async def test_an_evaluation_wants_one_rollout_per_sibling(bench: Bench) -> None:
    await bench.promising(2).run(two_roles, policies=BOTH, group_size=3, kind="eval")
    assert [s.reward for s in bench.group().sequences] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(("rollouts", "kind"), [(1, "train"), (3, "train"), (2, "eval")])
@pytest.mark.asyncio
async def test_another_number_than_was_promised_is_malformed(
    bench: Bench, rollouts: int, kind: str
) -> None:
    async def always_both(context: WorkflowContext, item: Item) -> list[Rollout]:
        made = await context.policy("solver").generate(item.prompt, n=2 * context.group_size)
        return [Rollout.of(one, 0.0) for one in made]

    events = await bench.promising(rollouts).run(always_both, policies=BOTH, kind=kind)
    failed = crash(events)
    assert failed.code == "workflow.malformed"
    assert "returned 12 rollouts for item 4" in failed.detail


@pytest.mark.asyncio
async def test_more_rollouts_than_a_group_holds_are_malformed(bench: Bench) -> None:
    async def many(context: WorkflowContext, item: Item) -> list[Rollout]:
        (one,) = await context.policy("solver").generate(item.prompt)
        return [Rollout.of(one, 0.0)] * (context.group_size * 16)

    failed = crash(await bench.promising(16).run(many, group_size=65))
    assert failed.code == "workflow.malformed"
    assert "1040 rollouts" in failed.detail
    assert "lower group_size" in failed.detail


@pytest.mark.parametrize(("observed", "fits"), [(64 * 10 - 3, True), (64 * 10 - 2, False)])
@pytest.mark.asyncio
async def test_a_sequence_longer_than_the_run_allows_is_malformed(
    bench: Bench, observed: int, fits: bool
) -> None:
    async def long(context: WorkflowContext, item: Item) -> list[Rollout]:
        return [rollout(drawn(SOLVER, 1, 2, 3), Observed(tokens=(7,) * observed))]

    events = await bench.run(long, group_size=1, max_new_tokens=10)
    if fits:
        assert len(bench.group().sequences[0].tokens) == 640
    else:
        assert "a sequence of 641 tokens" in crash(events).detail
        assert "64 x max_new_tokens 10" in crash(events).detail


def test_the_number_of_rollouts_comes_with_the_workflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "farflow_test_roles.py").write_text(
        "from edge_agent.workflow import workflow\n"
        "@workflow('named', rollouts=3)\n"
        "async def three(context, item):\n    return []\n"
        "async def plain(context, item):\n    return []\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {name: load_workflow(f"farflow_test_roles:{name}") for name in ("named", "three")}
    assert [one.rollouts for one in found.values()] == [3, 3]
    assert load_workflow("farflow_test_roles:plain").rollouts == 1
    assert load_workflow("single_turn").rollouts == 1
    assert load_workflow("solve_and_verify").rollouts == 2


@pytest.mark.parametrize("rollouts", [0, -1, MAX_ROLLOUTS + 1])
def test_a_workflow_promises_a_bounded_number(rollouts: int) -> None:
    with pytest.raises(ValueError, match="rollouts"):
        workflow("x", rollouts=rollouts)


# ---- for one policy ----------------------------------------------------------------------------


def test_only_keeps_the_tokens_and_what_one_policy_drew() -> None:
    whole = rollout(drawn(SOLVER, 5, 6), Observed(tokens=(7,)), drawn(JUDGE, 8), reward=0.25)
    ours = whole.only(JUDGE, reward=1.0)
    assert [part.tokens for part in ours.parts] == [(5, 6), (7,), (8,)]
    assert [type(part) for part in ours.parts] == [Observed, Observed, Generated]
    assert (ours.reward, ours.text, ours.prompt_tokens) == (1.0, "t", (1,))
    assert whole.only(SOLVER).reward == 0.25
    assert whole.only(SOLVER, reward=0.0).reward == 0.0
    assert whole.only(SOLVER).parts[0] == whole.parts[0]


@pytest.mark.asyncio
async def test_a_conversation_is_returned_once_for_each_of_its_policies(bench: Bench) -> None:
    async def talk(context: WorkflowContext, item: Item) -> list[Rollout]:
        solver, judge = context.policy("solver"), context.policy("judge")
        (first,) = await solver.generate(item.prompt)
        (second,) = await judge.generate((*first.prompt_tokens, *first.tokens))
        whole = msgspec.structs.replace(Rollout.of(first), parts=(first, second))
        return [whole.only(solver.id, reward=1.0), whole.only(judge.id, reward=0.0)]

    await bench.promising(2).run(talk, policies=BOTH, group_size=1)
    group = bench.group()
    ours, theirs = group.sequences
    assert ours.tokens == theirs.tokens
    for one, two in zip(expand(ours.segments)[0], expand(theirs.segments)[0], strict=True):
        assert sorted((one, two)) in ([-1, 0], [-1, 1])
    assert (ours.reward, theirs.reward) == (1.0, 0.0)


# ---- nothing empty -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (rollout(drawn(SOLVER)), "no policy generated"),
        (rollout(drawn(SOLVER), Observed(tokens=(1, 2))), "no policy generated"),
        (rollout(drawn(JUDGE, 3)).only(SOLVER), "no policy generated"),
        (rollout(), "no policy generated"),
        (msgspec.structs.replace(rollout(drawn(SOLVER, 3)), prompt_tokens=()), "without a prompt"),
    ],
)
def test_a_rollout_without_tokens_to_learn_from_is_malformed(broken: Rollout, words: str) -> None:
    whole = rollout(drawn(SOLVER, 3))
    with pytest.raises(MalformedWorkflow, match=words):
        checked([whole, broken], ITEM, 1, 2)
    assert checked([whole, rollout(drawn(SOLVER), drawn(SOLVER, 4))], ITEM, 2)


@pytest.mark.parametrize("between", [(), (Observed(tokens=(9,)),)])
def test_what_was_drawn_after_other_tokens_cannot_be_learnt_from(
    between: tuple[Observed, ...],
) -> None:
    first, second = drawn(SOLVER, 5), drawn(SOLVER, 6)
    with pytest.raises(MalformedWorkflow, match=f"part {2 + len(between)} was drawn after other"):
        checked([rollout(first, *between, second)], ITEM, 1)
    seen = (1, 5, *(token for part in between for token in part.tokens))
    right = msgspec.structs.replace(second, prompt_tokens=seen)
    assert checked([rollout(first, *between, right)], ITEM, 1)
    elsewhere = rollout(first, *between, second).only(JUDGE).parts
    judged = msgspec.structs.replace(drawn(JUDGE, 7), prompt_tokens=(*seen, 6))
    assert checked([rollout(*elsewhere, judged)], ITEM, 1), "observed: no matter after what"


@pytest.mark.asyncio
async def test_an_empty_sequence_fails_its_attempt_and_leaves_nothing(bench: Bench) -> None:
    async def empty(context: WorkflowContext, item: Item) -> list[Rollout]:
        (one,) = await context.policy("solver").generate(item.prompt)
        return [Rollout.of(one, 0.0), rollout(drawn(SOLVER))]

    failed = crash(await bench.promising(2).run(empty, group_size=1))
    assert failed.code == "workflow.malformed"
    assert bench.spool.size_bytes == 0


# ---- types and bounds ---------------------------------------------------------------------------


def with_drawn(**changes: Any) -> Rollout:
    part = drawn(SOLVER, 5, 6)
    completion = msgspec.structs.replace(part.completion, **changes)
    return rollout(msgspec.structs.replace(part, completion=completion))


def observed(*tokens: Any) -> Rollout:
    return rollout(drawn(SOLVER, 5), Observed(tokens=tokens))


GOOD = rollout(drawn(SOLVER, 5))


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (msgspec.structs.replace(GOOD, finish_reason=None), "finish_reason is a NoneType"),
        (msgspec.structs.replace(GOOD, finish_reason="x" * 65), "65 characters, at most 64"),
        (msgspec.structs.replace(GOOD, finish_reason="\ud800"), "finish_reason: 'utf-8'"),
        (msgspec.structs.replace(GOOD, text=None), "text is a NoneType"),
        (msgspec.structs.replace(GOOD, text="\ud800"), "errors='replace'"),
        (msgspec.structs.replace(GOOD, prompt_tokens=(True,)), "prompt_tokens has a bool"),
        (msgspec.structs.replace(GOOD, prompt_tokens=np.array([1])), "is a ndarray, not a tuple"),
        (msgspec.structs.replace(GOOD, reward=1.1e15), "the reward 1100000000000000.0"),
        (msgspec.structs.replace(GOOD, reward=-1e38), "the reward -1e+38"),
        (msgspec.structs.replace(GOOD, reward=10**400), "between -1e+15 and 1e+15"),
        (msgspec.structs.replace(GOOD, reward=float("nan")), "the reward nan"),
        (msgspec.structs.replace(GOOD, reward="1"), "the reward '1'"),
        (with_drawn(tokens=(np.int64(5), 6)), "part 1.tokens has a int64"),
        (with_drawn(tokens=(5, -1)), "part 1.tokens are not all within 0"),
        (with_drawn(tokens=(5, 2**32)), "part 1.tokens are not all within 0"),
        (with_drawn(versions=(np.int64(3), 3)), "part 1.versions has a int64"),
        (with_drawn(versions=(-1, 3)), "part 1.versions are not all within 0"),
        (with_drawn(versions=(3, 2**53 + 1)), "part 1.versions are not all within 0"),
        (with_drawn(logprobs=(0.0, 5.0)), "part 1.logprobs are not all logarithms"),
        (with_drawn(logprobs=(0.0, float("nan"))), "part 1.logprobs are not all logarithms"),
        (with_drawn(logprobs=(0.0, float("-inf"))), "part 1.logprobs are not all logarithms"),
        (with_drawn(logprobs=(0.0, "a")), "part 1.logprobs are not all numbers"),
        (with_drawn(logprobs=(0.0,)), "2 tokens, 1 log-probabilities and 2 versions"),
        (rollout(msgspec.structs.replace(drawn(SOLVER, 5), policy=7)), "part 1.policy is a int"),
        (rollout(msgspec.structs.replace(drawn(SOLVER, 5), completion=None)), "does not add up"),
        (rollout(drawn(SOLVER, 5), None), "part 2 is a NoneType"),  # type: ignore[arg-type]
        (observed(1.5), "part 2.tokens has a float"),
        (observed("a"), "part 2.tokens has a str"),
        (observed(-1, 2**40), "part 2.tokens are not all within 0"),
    ],
)
def test_types_and_bounds_are_looked_at_before_anything_is_sent(odd: Rollout, words: str) -> None:
    with pytest.raises(MalformedWorkflow) as raised:
        checked([odd], ITEM, 1)
    assert words in str(raised.value)


def test_what_engines_and_verifiers_give_is_taken() -> None:
    taken = [
        msgspec.structs.replace(GOOD, reward=None),
        msgspec.structs.replace(GOOD, reward=1e15),
        msgspec.structs.replace(GOOD, reward=np.float64(0.5)),
        with_drawn(logprobs=(np.float32(-0.5), 1e-4)),
        observed(),
    ]
    assert checked(taken, ITEM, len(taken)) == taken
