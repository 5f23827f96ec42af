"""Verifiers score, fail, hang and crash; the agent always gets a number or a code."""

import asyncio
import io
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from edge_agent.reward_worker import ScoreReply, ScoreRequest, answer, serve
from edge_agent.rewards import (
    RewardCrashed,
    RewardFailed,
    RewardPool,
    RewardTimeout,
    available_rewards,
)
from transport.messages import Item, RewardSpec

EXACT = RewardSpec(name="exact")
MATH = RewardSpec(name="math-verify")
GYM = RewardSpec(name="reasoning-gym", dataset="chain_sum")

FAKE_WORKER = """
import sys, msgspec, time
from edge_agent.reward_worker import ScoreReply, ScoreRequest
while len(head := sys.stdin.buffer.read(4)) == 4:
    data = sys.stdin.buffer.read(int.from_bytes(head, "little"))
    request = msgspec.msgpack.decode(data, type=ScoreRequest)
    text = request.pairs[0][1]
    if text == "hang":
        sys.stderr.write("x" * 200_000)
        sys.stderr.flush()
        time.sleep(60)
    if text == "crash":
        sys.exit("verifier went up in smoke")
    if text == "nonsense":
        reply = b"\\xc1"
    elif text == "huge":
        reply = msgspec.msgpack.encode(ScoreReply(rewards=(1e16,) * len(request.pairs)))
    elif text == "few":
        reply = msgspec.msgpack.encode(ScoreReply(rewards=()))
    else:
        reply = msgspec.msgpack.encode(ScoreReply(rewards=(0.25,) * len(request.pairs)))
    sys.stdout.buffer.write(len(reply).to_bytes(4, "little") + reply)
    sys.stdout.buffer.flush()
"""


def item(answer: str = "2", **changes: Any) -> Item:
    return Item(index=7, prompt="1 + 1 =", answer=answer, **changes)


def gym_item() -> Item:
    meta = {"question": "q", "answer": "12", "metadata": {"source_dataset": "chain_sum"}}
    return item("12", meta=json.dumps(meta))


def scored(spec: RewardSpec, *pairs: tuple[Item, str]) -> ScoreReply:
    return answer(ScoreRequest(spec=spec, pairs=pairs))


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[RewardPool]:
    """A pool over a scripted verifier process that knows no limits."""
    made = RewardPool(5.0, workers=1, command=(sys.executable, "-c", FAKE_WORKER))
    yield made
    await made.close()


def test_exact_match_ignores_white_space_and_nothing_else() -> None:
    responses = ["2", " 2\n", "2.0", "", "2 2"]
    reply = scored(EXACT, *((item(), response) for response in responses))
    assert reply.rewards == (1.0, 1.0, 0.0, 0.0, 0.0)
    assert scored(EXACT, (item("a  b"), "a b")).rewards == (1.0,)


def test_a_data_set_scores_with_its_own_verifier() -> None:
    pytest.importorskip("reasoning_gym")
    reply = scored(GYM, (gym_item(), " 12 "), (gym_item(), "13"), (gym_item(), ""))
    assert reply.rewards[0] == 1.0
    assert max(reply.rewards[1:]) < 1.0


def test_math_verify_finds_equal_expressions() -> None:
    pytest.importorskip("math_verify")
    gold = item("$\\frac{1}{2}$")
    assert scored(MATH, (gold, "0.5"), (gold, "$\\frac{2}{4}$"), (gold, "3")).rewards == (1, 1, 0)


@pytest.mark.parametrize(
    ("spec", "broken", "words"),
    [
        (GYM, item(meta="{"), "item 7: JSONDecodeError"),
        (GYM, item(meta="{}"), "item 7: KeyError"),
        (RewardSpec(name="reasoning-gym", dataset="nowhere"), gym_item(), "'nowhere'"),
    ],
)
def test_a_verifier_that_fails_is_an_error_and_never_a_zero(
    spec: RewardSpec, broken: Item, words: str
) -> None:
    pytest.importorskip("reasoning_gym")
    reply = scored(spec, (gym_item(), "12"), (broken, "12"))
    assert reply.rewards == ()
    assert words in reply.error


def test_a_worker_answers_frame_by_frame_until_its_input_ends() -> None:
    request = msgspec.msgpack.encode(ScoreRequest(spec=EXACT, pairs=((item(), "2"),)))
    frame = len(request).to_bytes(4, "little") + request
    sink = io.BytesIO()
    serve(io.BytesIO(frame * 2), sink)
    reply = sink.getvalue()[: len(sink.getvalue()) // 2]
    assert sink.getvalue() == reply * 2
    assert msgspec.msgpack.decode(reply[4:], type=ScoreReply) == ScoreReply(rewards=(1.0,))


@pytest.mark.asyncio
async def test_plain_comparison_needs_no_process() -> None:
    pool = RewardPool(1.0, command=("/no/such/program",))
    assert await pool.score(EXACT, [(item(), "2"), (item(), "3")]) == [1.0, 0.0]
    with pytest.raises(RewardCrashed, match="cannot start"):
        await pool.score(MATH, [(item(), "2")])


@pytest.mark.asyncio
async def test_the_real_worker_scores_whatever_its_verifier_prints() -> None:
    pytest.importorskip("math_verify")
    pool = RewardPool(25.0, workers=1)
    try:
        pairs = [(item("1/2"), "0.5"), (item("1/2"), "0.6")]
        assert await pool.score(MATH, pairs) == [1.0, 0.0]
        assert await pool.score(MATH, pairs[:1]) == [1.0]
    finally:
        await pool.close()


@pytest.mark.asyncio
async def test_a_hanging_verifier_is_killed_and_the_next_request_is_served(
    pool: RewardPool,
) -> None:
    await pool.score(MATH, [(item(), "warm up")])
    pool._timeout_s = 0.05
    with pytest.raises(RewardTimeout, match=r"0\.05 s"):
        await pool.score(MATH, [(item(), "hang")])
    pool._timeout_s = 5.0
    assert await pool.score(MATH, [(item(), "x")] * 3) == [0.25] * 3


@pytest.mark.asyncio
async def test_a_verifier_that_hangs_in_a_child_of_its_own_gives_its_permit_back() -> None:
    pool = RewardPool(0.05, workers=1, command=("/bin/sh", "-c", "sleep 600; true"))
    async with asyncio.timeout(10):
        for _ in range(2):
            with pytest.raises(RewardTimeout):
                await pool.score(MATH, [(item(), "x")])
        await pool.close()


@pytest.mark.asyncio
async def test_a_crash_quotes_the_last_words(pool: RewardPool) -> None:
    with pytest.raises(RewardCrashed, match=r"status 1: .*went up in smoke"):
        await pool.score(MATH, [(item(), "crash")])
    assert await pool.score(MATH, [(item(), "x")]) == [0.25]


@pytest.mark.parametrize(("text", "words"), [("nonsense", "nonsense"), ("few", "0 rewards for 1")])
@pytest.mark.asyncio
async def test_wrong_answers_are_crashes(pool: RewardPool, text: str, words: str) -> None:
    with pytest.raises(RewardCrashed, match=words):
        await pool.score(MATH, [(item(), text)])


@pytest.mark.asyncio
async def test_a_cancelled_request_takes_its_worker_with_it(pool: RewardPool) -> None:
    await pool.score(MATH, [(item(), "warm up")])
    task = asyncio.create_task(pool.score(MATH, [(item(), "hang")]))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await pool.score(MATH, [(item(), "x")]) == [0.25]


@pytest.mark.asyncio
async def test_closing_fails_what_is_being_scored(pool: RewardPool) -> None:
    await pool.score(MATH, [(item(), "warm up")])
    task = asyncio.create_task(pool.score(MATH, [(item(), "hang")]))
    await asyncio.sleep(0.01)
    await pool.close()
    with pytest.raises(RewardCrashed):
        await task


@pytest.mark.asyncio
async def test_too_much_to_score_is_refused() -> None:
    pool = RewardPool(1.0)
    with pytest.raises(RewardFailed, match="bytes to score"):
        await pool.score(MATH, [(item(), "x" * (65 * 2**20))])


def test_installed_rewards_are_advertised() -> None:
    assert available_rewards()[0] == "exact"
    assert set(available_rewards()) <= {"exact", "reasoning-gym", "math-verify", "code"}
    assert RewardFailed.code == "reward.failed"
    assert RewardTimeout.code == "reward.timeout"


@pytest.mark.parametrize("reward", [1.1e15, -1e300, float("nan"), float("inf")])
def test_a_reward_that_nobody_takes_is_an_error(
    monkeypatch: pytest.MonkeyPatch, reward: float
) -> None:
    monkeypatch.setattr("edge_agent.reward_worker.exact", lambda item, response: reward)
    reply = answer(ScoreRequest(spec=EXACT, pairs=((item(), "2"),)))
    assert "item 7: gave" in reply.error
    assert "between -1e+15 and 1e+15" in reply.error


def test_whatever_a_verifier_raises_can_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(item: Item, response: str) -> float:
        raise ValueError("\ud800" * 10_000)

    monkeypatch.setattr("edge_agent.reward_worker.exact", odd)
    reply = answer(ScoreRequest(spec=EXACT, pairs=((item(), "2"),)))
    assert "ValueError: \\ud800" in msgspec.msgpack.decode(msgspec.msgpack.encode(reply))["error"]
    assert len(reply.error) <= 2000


@pytest.mark.asyncio
async def test_a_process_with_a_reward_that_nobody_takes_and_a_text_that_none_can_have() -> None:
    pool = RewardPool(10.0, command=(sys.executable, "-c", FAKE_WORKER))
    try:
        with pytest.raises(RewardFailed, match="beyond 1e"):
            await pool.score(GYM, [(item(), "huge")])
        with pytest.raises(RewardFailed, match="cannot be sent"):
            await pool.score(GYM, [(item(), "\ud800")])
    finally:
        await pool.close()
