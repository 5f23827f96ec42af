"""An agent finds the rewards of another agent's group again."""

import asyncio

import msgspec
import pytest
from workflow_bench import JUDGE, SOLVER, Bench, crash, offer

from edge_agent import code_reward, recheck
from edge_agent.core.effects import RunAttempt
from edge_agent.core.events import GroupGenerated, GroupSpooled
from edge_agent.core.settings import AgentSettings
from edge_agent.rewards import RewardPool
from edge_agent.workflows.multi_turn import multi_turn
from edge_agent.workflows.single_turn import single_turn
from edge_agent.workflows.solve_and_verify import solve_and_verify
from scheduler.core import rechecks
from transport.code_tests import CodeTest, CodeTests
from transport.messages import Item, PartialSummary, RewardSpec
from transport.runs import CodeReward
from transport.trajectory import TrajectoryGroup, body_digest, pack

pytestmark = pytest.mark.asyncio


class Log:
    """The trajectory log: it has one body, after ``missing`` times of not having it."""

    def __init__(self, data: bytes | None, missing: int = 0) -> None:
        self.data = data
        self.missing = missing
        self.asked = 0

    def keep(self, summary: PartialSummary, data: bytes) -> None:
        raise AssertionError("a recheck has no turns")

    def forget(self, attempt: str) -> None:
        raise AssertionError("a recheck has no turns")

    async def fetch(self, digest: str) -> bytes | None:
        self.asked += 1
        return None if self.asked <= self.missing else self.data


async def made(bench: Bench) -> TrajectoryGroup:
    """A group as another agent made it, of an item whose answer some responses give."""
    await bench.run(single_turn, settings={}, group_size=8)
    return bench.group()


def lied(group: TrajectoryGroup) -> bytes:
    sequences = tuple(msgspec.structs.replace(s, reward=1.0) for s in group.sequences)
    return pack(msgspec.structs.replace(group, sequences=sequences))


async def rechecked(bench: Bench, log: Log, **changes: object) -> None:
    """Run a recheck of what the log has on a fresh engine."""
    await bench.start()
    runner = bench.runner(single_turn)
    runner._keeper = log
    values = {
        "attempt": "run/x-~.1.1#1",
        "job": "run/x-~.1.1",
        "kind": "external",
        "group_size": 8,
        "recheck": "" if log.data is None else body_digest(log.data),
        "workflow": "single_turn",
        **changes,
    }
    async with asyncio.TaskGroup() as tasks:
        runner.start(RunAttempt(offer=offer(**values), queued_s=0.0), tasks)
    await bench.engine.close()


async def test_the_same_group_comes_back_with_the_rewards_that_are_found(tmp_path):
    group = await made(Bench(tmp_path / "a"))
    bench = Bench(tmp_path / "b")
    await rechecked(bench, Log(lied(group)))
    again = bench.group()
    assert (again.job, again.attempt) == ("run/x-~.1.1", "run/x-~.1.1#1")
    assert again.sequences == group.sequences  # with the true rewards
    assert 0.0 in {s.reward for s in again.sequences}
    assert [type(event) for event in bench.events] == [GroupGenerated, GroupSpooled]
    assert bench.engine.stats().tokens_generated == 0
    assert bench.events[-1].summary.generating_s == 0.0


async def test_the_reward_is_of_the_response_that_its_tokens_spell(tmp_path):
    bench = Bench(tmp_path / "a")
    group = await made(bench)
    texts = [bench.engine.decode(group.policies[0], s.tokens) for s in group.sequences]
    other = Bench(tmp_path / "b")
    items = (Item(index=4, prompt="3 + 4 =", answer=texts[3]),)
    await rechecked(other, Log(pack(group)), items=items)
    rewards = [s.reward for s in other.group().sequences]
    assert rewards[3] == 1.0
    assert rewards == [float(text.strip() == texts[3].strip()) for text in texts]


async def test_a_log_that_hears_of_it_later_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr(recheck, "AGAIN_S", 0.01)
    group = await made(Bench(tmp_path / "a"))
    log = Log(pack(group), missing=2)
    bench = Bench(tmp_path / "b")
    await rechecked(bench, log)
    assert log.asked == 3
    assert bench.group().sequences == group.sequences


@pytest.mark.parametrize(
    ("data", "changes", "reason"),
    [
        (None, {"recheck": "0" * 64}, "has no body"),
        ("group", {"recheck": "0" * 64}, "another body"),
        ("group", {"group_size": 4}, "8 sequences"),
        ("group", {"workflow": "tool_use"}, "rewards of tool_use"),
        ("group", {"workflow": "solve_and_verify", "group_size": 7}, "with 7 sequences"),
    ],
)
async def test_what_cannot_be_found_again_fails_the_attempt(
    tmp_path, monkeypatch, data, changes, reason
):
    monkeypatch.setattr(recheck, "AGAIN_S", 0.01)
    group = await made(Bench(tmp_path / "a"))
    bench = Bench(tmp_path / "b")
    await rechecked(bench, Log(None if data is None else pack(group)), **changes)
    failed = crash(bench.events)
    assert failed.code == "recheck.failed"
    assert reason in failed.detail


# ---- other workflows ----------------------------------------------------------------------------


async def test_of_solve_and_verify_the_solvers_half_is_found_again(tmp_path):
    bench = Bench(tmp_path / "a").promising(2)
    settings = {"solver": "solver", "verifier": "verifier"}
    policies = {"solver": SOLVER, "verifier": JUDGE}
    await bench.run(solve_and_verify, settings=settings, policies=policies, group_size=6)
    group = bench.group()
    assert {s.reward for s in group.sequences[:6]} == {0.0, 1.0}
    again = Bench(tmp_path / "b")
    changes = {"workflow": "solve_and_verify", "policies": policies, "group_size": 12}
    await rechecked(again, Log(lied(group)), **changes)
    found = again.group().sequences
    assert found[:6] == group.sequences[:6]  # the true rewards
    assert [s.reward for s in found[6:]] == [1.0] * 6  # as they were recorded
    assert again.engine.stats().tokens_generated == 0


async def test_of_several_turns_the_last_one_is_found_again(tmp_path):
    bench = Bench(tmp_path / "a")
    await bench.run(multi_turn, settings={"turns": 2}, group_size=8)
    group = bench.group()
    turns = [sum(policy < 0 for _, policy, _ in s.segments) + 1 for s in group.sequences]
    assert set(turns) == {1, 2}
    again = Bench(tmp_path / "b")
    await rechecked(again, Log(lied(group)), workflow="multi_turn")
    assert again.group().sequences == group.sequences
    assert len({s.reward for s in group.sequences}) == 2


async def test_a_turn_that_no_policy_drew_is_none_to_be_scored(tmp_path):
    bench = Bench(tmp_path / "a")
    await bench.run(single_turn, settings={}, group_size=8)
    for at, workflow, reason in (
        (0, "single_turn", "not drawn by one policy"),
        (-1, "multi_turn", "its last tokens are of no policy"),
    ):
        group = bench.group()
        first = group.sequences[0]
        (count, *_), *_ = first.segments
        parts = [(1, -1, 0), (count - 1, 0, 3)]
        changed = msgspec.structs.replace(first, segments=tuple(parts[:: 1 if at == 0 else -1]))
        data = pack(msgspec.structs.replace(group, sequences=(changed, *group.sequences[1:])))
        again = Bench(tmp_path / workflow)
        await rechecked(again, Log(data), workflow=workflow)
        assert reason in crash(again.events).detail


async def test_what_an_agent_says_that_it_can_find_is_what_it_can():
    kinds = {*recheck.ROLLOUTS, *rechecks.WEIGHTS} - {*rechecks.PLAIN}
    assert {*AgentSettings(slots=1).recheck_kinds} == kinds
    assert {*rechecks.WORKFLOWS} == {*recheck.ROLLOUTS}


# ---- programs -----------------------------------------------------------------------------------

TESTS = CodeTests(tests=(CodeTest(output="7"), CodeTest(output="8")))
RIGHT, WRONG, LATE = (True, False), (False, False), (False, True)


@pytest.mark.parametrize(
    ("runs", "recorded", "found"),
    [
        ([[RIGHT, RIGHT]], 1.0, 1.0),
        ([[RIGHT, RIGHT]], 0.0, 0.0),  # a box without time, perhaps
        ([[WRONG], [WRONG]], 1.0, 0.0),
        ([[WRONG], [RIGHT, RIGHT]], 1.0, 1.0),  # it draws lots
        ([[RIGHT, WRONG], [WRONG]], 1.0, 0.0),
        ([[LATE]], 1.0, 1.0),  # a timeout is no evidence
        ([[WRONG], [LATE]], 1.0, 1.0),
        ([[WRONG]], 0.0, 0.0),
    ],
)
async def test_of_programs_only_a_reward_that_is_lower_for_sure_is_found(
    monkeypatch, runs, recorded, found
):
    left = [passes for run in runs for passes in run]

    async def passes(program: str, test: CodeTest, limits: object) -> tuple[bool, bool]:
        return left.pop(0)

    monkeypatch.setattr(code_reward, "_passes", passes)
    monkeypatch.setattr(code_reward, "_tests", lambda item: TESTS)
    pairs = [(Item(index=0, prompt="p", answer=""), "```python\nprint(7)\n```")]
    spec = RewardSpec(name="code", code=CodeReward())
    assert await RewardPool(1.0).score_again(spec, pairs, [recorded]) == [found]
    assert left == []


async def test_a_response_without_a_program_was_never_right(monkeypatch):
    monkeypatch.setattr(code_reward, "_tests", lambda item: TESTS)
    pairs = [(Item(index=0, prompt="p", answer=""), "seven")] * 2
    spec = RewardSpec(name="code", code=CodeReward())
    assert await RewardPool(1.0).score_again(spec, pairs, [1.0, 0.0]) == [0.0, 0.0]
