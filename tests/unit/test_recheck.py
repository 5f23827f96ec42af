"""An agent finds the rewards of another agent's group again."""

import asyncio

import msgspec
import pytest
from workflow_bench import Bench, crash, offer

from edge_agent import recheck
from edge_agent.core.effects import RunAttempt
from edge_agent.core.events import GroupGenerated, GroupSpooled
from edge_agent.workflows.single_turn import single_turn
from transport.messages import Item, PartialSummary
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
