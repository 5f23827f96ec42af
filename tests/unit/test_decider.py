"""The loop between core and disk, with a core that does as it is told."""

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from scheduler.core.effects import Effect, Reply, Send
from scheduler.core.events import Event, FromAgent, FromOperator, Tick
from scheduler.core.state import Change
from scheduler.decider import EFFECTS_PER_TURN, MAX_TURN_S, Decider
from scheduler.event_log import EventLog
from scheduler.service import Worker
from scheduler.store import SchedulerStore
from transport.messages import (
    CommandReply,
    Heartbeat,
    Item,
    LeaseOffer,
    LeaseOffers,
    RewardSpec,
    StatusRequest,
)
from transport.runtime.clock import ManualClock

WAIT_S = 10.0
ITEMS = (Item(index=1, prompt="1 + 1 =", answer="2"),)


class ScriptedCore:
    """Answers each event with what ``script`` says: effects, and changes that wait to be taken."""

    def __init__(self) -> None:
        self.script: Callable[[Event, float], tuple[list[Effect], list[Change]]] = (
            lambda event, now: ([], [])
        )
        self.handled: list[tuple[Event, float]] = []
        self.waiting: dict[tuple[str, str], bytes | None] = {}
        self.taken: list[list[Change]] = []
        self.deadline: float | None = None

    def handle(self, event: Event, now: float) -> list[Effect]:
        self.handled.append((event, now))
        effects, changes = self.script(event, now)
        self.waiting.update({(table, key): value for table, key, value in changes})
        return effects

    def take_changes(self) -> list[Change]:
        changes = [(table, key, value) for (table, key), value in self.waiting.items()]
        self.waiting.clear()
        if changes:
            self.taken.append(changes)
        return changes

    def next_deadline(self) -> float | None:
        return self.deadline


class Loop:
    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock(monotonic_s=50.0, wall_s=1.7e9)
        self.core = ScriptedCore()
        self.store = SchedulerStore.open(folder)
        self.writer = Worker("test-writer")
        self.executed: list[Effect] = []
        self.decider = Decider(
            self.core,  # type: ignore[arg-type]
            self.store,
            self.writer,
            EventLog(folder / "events"),
            self.clock,
            self.executed.append,
            lambda peer: peer == "many",
            lambda event: self.prepare(event),
        )
        self.prepare: Callable[[Event], Event] = lambda event: event
        self.tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self.tasks = [asyncio.create_task(part) for part in self.decider.parts().values()]

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks = []

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.002)


@pytest_asyncio.fixture
async def loop(tmp_path: Path) -> AsyncIterator[Loop]:
    made = Loop(tmp_path)
    yield made
    await made.stop()
    made.writer.close()
    made.store.close()


def beat(number: int) -> FromAgent:
    return FromAgent("a", Heartbeat(sequence=number, sent_s=0.0))


def make_offer(number: int, items: tuple[Item, ...] = ITEMS) -> LeaseOffer:
    return LeaseOffer(
        attempt=f"j{number}#1",
        fence=(1, number),
        job=f"j{number}",
        kind="external",
        items=items,
        group_size=1,
        workflow="single_turn",
        settings={},
        policies={},
        reward=RewardSpec(name="exact"),
        max_new_tokens=1,
        temperature=1.0,
        seed=0,
        lease_s=1.0,
    )


@pytest.mark.asyncio
async def test_a_row_that_changes_often_between_two_commits_is_taken_once(loop):
    loop.core.script = lambda event, now: ([], [("job", "a", b"%d" % len(loop.core.handled))])
    for number in range(100):
        loop.decider.put(beat(number))
    loop.start()
    await loop.until(lambda: len(loop.core.handled) == 100 and not loop.core.waiting)
    await loop.until(lambda: loop.store.prompts([]) == {} and bool(list(loop.store.rows())))
    await loop.writer.run(int)
    assert list(loop.store.rows()) == [("job", "a", b"100")]
    assert len(loop.core.taken) < 10


@pytest.mark.asyncio
async def test_the_core_hears_an_event_as_it_was_prepared_in_the_order_of_arrival(loop):
    """What is prepared may depend on what the core has handled before."""
    loop.prepare = lambda event: beat(10 * len(loop.core.handled))
    loop.decider.put(beat(0))
    loop.decider.put(beat(1))
    loop.start()
    await loop.until(lambda: len(loop.core.handled) == 2)
    assert [event for event, _ in loop.core.handled] == [beat(0), beat(10)]


@pytest.mark.asyncio
async def test_offers_of_a_commit_leave_together_with_the_prompts_of_the_same_commit(loop):
    stored = (Item(index=1, prompt="long " * 50, answer="x"),)

    def script(event: Event, now: float) -> tuple[list[Effect], list[Change]]:
        effects: list[Effect] = [
            Send("many", make_offer(1), "p"),
            Send("one", make_offer(2), "p"),
            Send("many", make_offer(3)),
        ]
        return effects, [("job", "j1", b"row"), ("prompt", "p", msgspec.msgpack.encode(stored))]

    loop.core.script = script
    loop.decider.put(beat(1))
    loop.start()
    await loop.until(lambda: len(loop.executed) == 2)
    together, single = (effect.message for effect in loop.executed)
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(together), type=LeaseOffers)
    assert found.offers == (make_offer(1, stored), make_offer(3))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(single), type=LeaseOffer) == make_offer(
        2, stored
    )


@pytest.mark.asyncio
async def test_many_effects_leave_in_order_and_others_have_their_turn_in_between(loop):
    count = 3 * EFFECTS_PER_TURN + 5
    replies = [Reply("op", number, CommandReply(ok=True)) for number in range(count)]
    loop.core.script = lambda event, now: (list(replies), [("job", "a", b"")])
    turns: list[int] = []

    async def watch() -> None:
        while len(loop.executed) < count:
            turns.append(len(loop.executed))
            await asyncio.sleep(0)

    loop.decider.put(FromOperator("op", 1, StatusRequest()))
    loop.start()
    async with asyncio.timeout(WAIT_S):
        await watch()
    assert loop.executed == replies
    assert {EFFECTS_PER_TURN, 2 * EFFECTS_PER_TURN} <= set(turns)


@pytest.mark.asyncio
async def test_a_stop_in_between_still_sends_what_is_durable(loop):
    count = 2 * EFFECTS_PER_TURN
    loop.core.script = lambda event, now: (
        [Reply("op", number, CommandReply(ok=True)) for number in range(count)],
        [("job", "a", b"")],
    )
    loop.decider.put(FromOperator("op", 1, StatusRequest()))
    loop.start()
    async with asyncio.timeout(WAIT_S):
        while not loop.executed:
            await asyncio.sleep(0)
    assert len(loop.executed) < count
    await loop.stop()
    await loop.decider.flush()
    assert [effect.request for effect in loop.executed] == list(range(count))


@pytest.mark.asyncio
async def test_a_long_turn_ends_so_that_sockets_and_commits_have_theirs(loop):
    def script(event: Event, now: float) -> tuple[list[Effect], list[Change]]:
        loop.clock.advance(MAX_TURN_S)
        return [Reply("op", 1, CommandReply(ok=True))], [("job", "a", b"")]

    loop.core.script = script
    for number in range(200):
        loop.decider.put(beat(number))
    seen: list[int] = []
    loop.start()
    async with asyncio.timeout(WAIT_S):
        while len(loop.core.handled) < 200:
            seen.append(len(loop.core.handled))
            await asyncio.sleep(0)
    assert max(after - before for before, after in pairwise(seen)) <= 2


@pytest.mark.asyncio
@pytest.mark.parametrize("step_s", [-86_400.0, 86_400.0])
async def test_a_step_of_the_wall_clock_moves_neither_the_cores_time_nor_its_timers(loop, step_s):
    loop.core.deadline = 30.0
    loop.start()
    loop.decider.put(beat(1))
    await loop.until(lambda: len(loop.core.handled) == 1)
    loop.clock.set_wall(loop.clock.wall_s() + step_s)
    loop.decider.put(beat(2))
    await loop.until(lambda: len(loop.core.handled) == 2)
    assert [now for _, now in loop.core.handled] == [0.0, 0.0]
    assert not any(isinstance(event, Tick) for event, _ in loop.core.handled)
    loop.core.deadline = None
    loop.clock.advance(1.5)
    loop.decider.put(beat(3))
    await loop.until(lambda: len(loop.core.handled) == 3)
    assert loop.core.handled[-1][1] == 1.5
