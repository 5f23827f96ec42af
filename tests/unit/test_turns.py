"""Finished turns on the agent: what a workflow hands over, what is sent, what comes back."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from workflow_bench import SOLVER, Bench, crash, offer

from edge_agent.attempt_runner import AttemptRunner
from edge_agent.core.effects import RunAttempt
from edge_agent.core.events import AttemptCrashed, GroupGenerated, GroupSpooled
from edge_agent.engine import Completion, GenerationRequest
from edge_agent.engines.fake import FakeEngine
from edge_agent.partials import AGAIN_S, CHUNK_BYTES, MAX_HELD_BYTES, Partials
from edge_agent.rewards import RewardPool
from edge_agent.workflow import Sibling, Workflow, WorkflowContext, load_workflow
from transport.envelope import KIND_OF
from transport.errors import WindowFull
from transport.messages import (
    KNOWN_KINDS,
    Body,
    BodyRequest,
    Item,
    Message,
    PartialAck,
    PartialOffer,
    PartialPut,
    PartialRef,
    PartialSummary,
    Plane,
)
from transport.partials import unpack_partial
from transport.runtime.clock import SystemClock
from transport.trajectory import body_digest, expand
from transport.weights.manifest import chunk_digest

MULTI = load_workflow("multi_turn")
NEVER = (Item(index=4, prompt="3 + 4 =", answer="never"),)


class Shelf:
    """A ``Keeper`` in memory."""

    def __init__(self) -> None:
        self.kept: list[tuple[PartialSummary, bytes]] = []
        self.forgotten: list[str] = []
        self.there: dict[str, bytes] = {}
        self.changed = asyncio.Event()

    def keep(self, summary: PartialSummary, data: bytes) -> None:
        self.kept.append((summary, data))
        self.changed.set()

    def forget(self, attempt: str) -> None:
        self.forgotten.append(attempt)

    async def fetch(self, digest: str) -> bytes | None:
        return self.there.get(digest)


class Counting(FakeEngine):
    """Draws nothing of turns after ``last``, and notes what it draws."""

    last = 99

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        turn = request.request_id.rpartition("/turn-")[2]
        if int(turn.partition(".")[0]) > self.last:
            await asyncio.Event().wait()
        self.drawn = [*getattr(self, "drawn", []), turn]
        return await super().generate(request)


async def attempt(
    bench: Bench, shelf: Shelf, code: str = "c", workflow: Any = MULTI.function, **changes: Any
) -> None:
    """One attempt, to its end or until its first turns are kept and its engine stands still."""
    runner = AttemptRunner(
        bench.engine,
        RewardPool(1.0),
        bench.spool,
        {"w": Workflow("w", code, workflow)},
        clock=SystemClock(),
        timeout_s=5.0,
        feed=bench.feed,
        keeper=shelf,
    )
    values = {"settings": {"turns": 3}, "items": NEVER, "group_size": 2, "max_new_tokens": 64}
    async with asyncio.TaskGroup() as tasks:
        effect = RunAttempt(offer=offer(**{**values, **changes}), queued_s=0.0)
        runner.start(effect, tasks)
        if getattr(bench.engine, "last", 99) < 3:
            await shelf.changed.wait()
            runner.abort(effect.offer.attempt, effect.offer.fence)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    made = Bench(tmp_path)
    made.engine = Counting(64, made.engine._table)
    return made


async def cut_off(bench: Bench) -> tuple[Shelf, PartialSummary, bytes]:
    """An attempt that ended after the first turn of three, at version 3."""
    await bench.start()
    shelf = Shelf()
    bench.engine.last = 1
    await attempt(bench, shelf)
    bench.engine.last = 99
    [(summary, data)] = shelf.kept
    return shelf, summary, data


def again(summary: PartialSummary, **changes: Any) -> dict[str, Any]:
    resume = PartialRef(digest=summary.digest, turns=summary.turns)
    return {"attempt": "run/t-000001#2", "fence": (1, 2), "resume": resume, **changes}


@pytest.mark.asyncio
async def test_a_second_attempt_goes_on_with_the_first_ones_tokens(bench: Bench) -> None:
    shelf, summary, data = await cut_off(bench)
    assert bench.events == []  # aborted
    assert (summary.turns, summary.oldest, summary.fence) == (2, {SOLVER: 3}, (1, 1))
    assert shelf.forgotten == ["run/t-000001#1"]
    shelf.there[summary.digest] = data
    bench.engine.drawn = []
    await bench.engine.load_policy(SOLVER, bench.model, 4)
    await attempt(bench, shelf, **again(summary))
    assert sorted(bench.engine.drawn) == ["2.1", "2.2", "3.1", "3.2"]
    group, before = bench.group(), unpack_partial(data).group
    assert group.attempt == "run/t-000001#2"
    for sequence, earlier in zip(group.sequences, before.sequences, strict=True):
        count = len(earlier.tokens)
        assert sequence.tokens[:count] == earlier.tokens
        assert sequence.logprobs[:count].tobytes() == earlier.logprobs.tobytes()
        policies, versions = expand(sequence.segments)
        assert set(versions[:count]) == {3}
        assert {v for p, v in zip(policies[count:], versions[count:], strict=True) if p >= 0} == {4}


@pytest.mark.asyncio
async def test_an_undisturbed_attempt_draws_the_same_as_a_resumed_one(
    bench: Bench, tmp_path: Path
) -> None:
    shelf, summary, data = await cut_off(bench)
    shelf.there[summary.digest] = data
    await attempt(bench, shelf, **again(summary))
    resumed = bench.group()
    await attempt(bench, Shelf(), attempt="run/t-000001#3", fence=(1, 3))
    assert bench.group().sequences == resumed.sequences


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, "another version of the code"),
        ({"group_size": 3}, "c"),
        ({"job": "run/t-000002", "attempt": "run/t-000002#2"}, "c"),
        ({"pinned": {SOLVER: 5}}, "c"),
        ({"policies": {"solver": SOLVER, "judge": "run/judge"}}, "c"),
    ],
)
async def test_turns_that_do_not_fit_the_offer_are_begun_anew(
    bench: Bench, changes: dict[str, Any], code: str
) -> None:
    shelf, summary, data = await cut_off(bench)
    shelf.there[summary.digest] = data
    bench.engine.drawn = []
    calls: list[tuple[Sibling, ...]] = []

    async def looks(context: WorkflowContext, item: Item) -> Any:
        calls.append(context.resumed)
        return []

    await attempt(bench, shelf, code=code, workflow=looks, **again(summary, **changes))
    assert calls == [()]


@pytest.mark.asyncio
@pytest.mark.parametrize("there", [None, b"something else", "damaged"])
async def test_turns_that_cannot_be_had_are_drawn_anew(bench: Bench, there: Any) -> None:
    shelf, summary, data = await cut_off(bench)
    if there == "damaged":
        data = bytes([*data[:-1], data[-1] ^ 1])
        summary = msgspec.structs.replace(summary, digest=body_digest(data))
        there = data
    if there is not None:
        shelf.there[summary.digest] = there
    bench.engine.drawn = []
    await attempt(bench, shelf, **again(summary))
    assert sorted(bench.engine.drawn) == ["1", "2.1", "2.2", "3.1", "3.2"]
    assert isinstance(bench.events[-1], GroupSpooled)


@pytest.mark.asyncio
async def test_state_comes_back_and_what_cannot_be_kept_does_not_end_the_attempt(
    bench: Bench,
) -> None:
    seen: list[Any] = []

    async def stateful(context: WorkflowContext, item: Item) -> Any:
        rollouts = await MULTI.function(context, item)
        seen.extend(sibling.state for sibling in context.resumed)
        for state in ({"messages": ["ä", 1, None]}, object()):
            context.turn_finished([Sibling(rollout=r, turns=9, state=state) for r in rollouts])
            await asyncio.wait([asyncio.ensure_future(shelf.changed.wait())], timeout=1.0)
        return rollouts

    await bench.start()
    shelf = Shelf()
    await attempt(bench, shelf, workflow=stateful, settings={"turns": 1})
    assert [type(event) for event in bench.events] == [GroupGenerated, GroupSpooled]
    summary, data = shelf.kept[-1]
    shelf.there[summary.digest] = data
    await attempt(bench, shelf, workflow=stateful, settings={"turns": 1}, **again(summary))
    assert isinstance(bench.events[-1], GroupSpooled)
    assert all(state in (None, {"messages": ["ä", 1, None]}) for state in seen)
    assert len(seen) == 2


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("settings", "said"),
    [({"turns": 0}, "$.turns"), ({"retry": 3}, "$.retry"), ({"retries": 3}, "retries")],
)
async def test_impossible_settings_of_multi_turn_are_named(
    bench: Bench, settings: dict[str, Any], said: str
) -> None:
    await bench.start()
    await attempt(bench, Shelf(), settings=settings)
    failed: AttemptCrashed = crash(bench.events)
    assert failed.code == "workflow.malformed"
    assert said in failed.detail


@pytest.mark.asyncio
async def test_a_right_answer_ends_a_siblings_turns(bench: Bench) -> None:
    await bench.start()
    items = (Item(index=4, prompt="3 + 4 =", answer="7"),)
    await attempt(bench, Shelf(), items=items, settings={"turns": 6}, group_size=8)
    group = bench.group()
    assert any(sequence.reward == 1.0 for sequence in group.sequences)
    for sequence in group.sequences:
        turns = sum(policy < 0 for _, policy, _ in sequence.segments) + 1
        assert sequence.reward == 1.0 or turns == 6
        assert bench.engine.decode(SOLVER, sequence.tokens).count("7") == int(sequence.reward)


# ---- on their way to the log -----------------------------------------------------------------


class Link:
    """What ``Partials`` sees of the links."""

    def __init__(self) -> None:
        self.sent: list[tuple[Message, tuple[bytes, ...]]] = []
        self.full = False

    def send(self, plane: Plane, message: Message) -> bool:
        self.sent.append((message, ()))
        return True

    def send_or_raise(self, plane: Plane, message: Message, payload: Any = ()) -> None:
        assert plane is Plane.TRAJECTORIES
        if self.full:
            raise WindowFull("full")
        self.sent.append((message, payload))


class Way:
    def __init__(self) -> None:
        self.link, self.now = Link(), 100.0
        self.partials = Partials(self.link, lambda: self.now)

    def keep(self, turns: int, data: bytes, attempt: str = "r/t-1#1") -> PartialSummary:
        summary = PartialSummary(
            attempt=attempt,
            fence=(1, 1),
            job="r/t-1",
            turns=turns,
            digest=body_digest(data),
            size_bytes=len(data),
            oldest={SOLVER: 1},
        )
        self.partials.keep(summary, data)
        return summary

    def done(self, summary: PartialSummary) -> None:
        ack = PartialAck(attempt=summary.attempt, digest=summary.digest, kept=True)
        assert self.partials.took(ack, [])

    def turns(self) -> list[int]:
        return [message.partial.turns for message, _ in self.link.sent]


def test_one_is_under_way_at_a_time_and_the_newest_follows() -> None:
    way = Way()
    first = way.keep(1, b"one")
    way.keep(2, b"two")
    last = way.keep(3, b"three")
    assert way.turns() == [1]
    way.done(first)
    assert way.turns() == [1, 3]
    way.done(last)
    way.done(last)
    assert way.turns() == [1, 3]


def test_a_log_too_old_for_turns_is_sent_none() -> None:
    way = Way()
    way.partials.peer_knows(bytes(set(KNOWN_KINDS) - {KIND_OF[PartialPut]}))
    way.keep(1, b"one")
    assert way.turns() == []
    for turns, kinds in ((2, KNOWN_KINDS), (3, b"")):
        way.partials.peer_knows(kinds)
        way.done(way.keep(turns, b"more"))
    assert way.turns() == [2, 3]


def test_a_new_link_brings_the_newest_again_and_a_silent_log_is_asked_again_in_time() -> None:
    way = Way()
    way.keep(1, b"one")
    way.partials.link_changed(False)
    way.partials.link_changed(True)
    assert way.turns() == [1, 1]
    way.keep(2, b"two")
    way.now += AGAIN_S
    way.keep(3, b"three")
    assert way.turns() == [1, 1, 3]
    way.partials.forget("r/t-1#1")
    way.partials.link_changed(True)
    assert way.turns() == [1, 1, 3]


def test_a_full_link_costs_nothing_but_this_turn() -> None:
    way = Way()
    way.link.full = True
    way.keep(1, b"one")
    way.link.full = False
    way.keep(2, b"two")
    assert way.turns() == [2]


def test_large_ones_are_offered_and_given_in_chunks() -> None:
    way = Way()
    data = bytes(range(256)) * 1500
    summary = way.keep(1, data)
    [(offer_made, payload)] = way.link.sent
    assert isinstance(offer_made, PartialOffer)
    assert payload == ()
    chunks = [way.partials.read_chunk(summary.digest, index) for index in range(2)]
    assert b"".join(chunk for chunk in chunks if chunk) == data
    assert [chunk_digest(chunk) for chunk in chunks if chunk] == list(offer_made.chunk_digests)
    assert way.partials.chunk_bytes(summary.digest) == CHUNK_BYTES
    assert way.partials.read_chunk(summary.digest, 2) is None
    way.keep(2, b"small")
    assert way.partials.chunk_bytes(summary.digest) is None
    assert isinstance(way.link.sent[0][0], PartialOffer)


def test_what_is_held_is_bounded() -> None:
    way = Way()
    half = bytes(MAX_HELD_BYTES // 2)
    for number in range(3):
        way.keep(1, half, f"r/t-1#{number}")
    assert way.partials.counters["no_room"] == 1
    way.partials.forget("r/t-1#0")
    way.keep(1, half, "r/t-1#2")
    assert way.partials.counters["no_room"] == 1


@pytest.mark.asyncio
async def test_what_is_fetched_is_asked_for_again_over_a_new_link() -> None:
    way = Way()
    fetch = asyncio.create_task(way.partials.fetch("d" * 64))
    await asyncio.sleep(0)
    way.partials.link_changed(True)
    assert [m for m, _ in way.link.sent] == [BodyRequest(digests=("d" * 64,))] * 2
    assert way.partials.took(Body(digest="d" * 64), [b"ab", b"c"])
    assert await fetch == b"abc"
    gone = asyncio.create_task(way.partials.fetch("e" * 64))
    await asyncio.sleep(0)
    way.partials.took(Body(digest="e" * 64, found=False), [])
    assert await gone is None
    assert not way.partials.took(PartialPut(partial=way.keep(1, b"x")), [])
