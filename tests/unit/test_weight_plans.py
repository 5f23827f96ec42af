"""Standing requests: what is worked out, when, and what agents' requests tell the store."""

import asyncio

import pytest
import pytest_asyncio
from version_store import POLICY, Publisher, add, filled, opened

from scheduler.service import Worker
from scheduler.weight_plans import ASKED_LATELY_S, FORGET_S, PlanFor, Planner
from scheduler.weight_upkeep import Asked
from transport.envelope import LIMITS, decode
from transport.messages import Plane, WeightsRequest
from transport.runtime.clock import ManualClock
from transport.weights.manifest import decode_manifest


class Desk:
    """A planner with its thread, and what it said."""

    def __init__(self, folder, upto, bridges=True):
        self.publisher = Publisher(folder / "model")
        self.store = filled(opened(folder / "store"), self.publisher, upto)
        self.clock = ManualClock()
        self.library = Worker("library")
        self.ready, self.trouble = [], []
        self.planner = Planner(
            self.store,
            self.library,
            self.clock,
            ready=self.ready.append,
            trouble=lambda *said: self.trouble.append(said),
            bridges=bridges,
        )

    def ask(self, route, have=None, **fields):
        digest = "" if have is None else self.publisher.publications[have].manifest.digest
        request = WeightsRequest(policy=POLICY, have_version=have, have_digest=digest, **fields)
        self.planner.request(route, route.decode(), request)
        return PlanFor(route, POLICY)

    async def until(self, condition):
        async with asyncio.timeout(10.0):
            while not condition():
                await asyncio.sleep(0.005)

    def version_of(self, key):
        plan, _ = decode(list(self.planner.frames(key)), LIMITS[Plane.WEIGHTS])
        return plan.version


@pytest_asyncio.fixture
async def at_desk(tmp_path):
    tasks, desks = [], []

    def make(upto, **options):
        desk = Desk(tmp_path, upto, **options)
        tasks.append(asyncio.create_task(desk.planner.run()))
        desks.append(desk)
        return desk

    yield make
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for desk in desks:
        desk.library.close()


@pytest.mark.asyncio
async def test_a_request_stands_until_its_plan_is_sent(at_desk):
    desk = at_desk(2)
    first, second = desk.ask(b"a", 1), desk.ask(b"b", 2)
    assert desk.planner.frames(first) == ()
    await desk.until(lambda: desk.ready == [first])
    assert desk.version_of(first) == 2
    desk.planner.sent(first)
    assert desk.planner.frames(first) == ()
    add(desk.store, desk.publisher.next(3))
    desk.planner.changed(POLICY)
    await desk.until(lambda: desk.ready == [first, second])
    assert desk.version_of(second) == 3
    assert desk.planner.holders(POLICY) == [1, 2]
    assert desk.trouble == []


@pytest.mark.asyncio
async def test_agents_of_about_the_same_speed_share_a_plan(at_desk):
    desk = at_desk(3)
    near = [desk.ask(b"a", 1, rate_bytes_s=1e6), desk.ask(b"b", 1, rate_bytes_s=1.1e6)]
    far = desk.ask(b"c", 1, rate_bytes_s=9e6)
    await desk.until(lambda: len(desk.ready) == 3)
    frames = [desk.planner.frames(key) for key in (*near, far)]
    assert frames[0] is frames[1]
    assert frames[0] is not frames[2]


@pytest.mark.asyncio
async def test_the_first_bytes_follow_a_plan_where_they_are_welcome(at_desk):
    desk = at_desk(3)
    welcome = {"ahead_bytes": 1 << 20, "ahead_piece_bytes": 1 << 16}
    some, none = desk.ask(b"a", 1, **welcome), desk.ask(b"b", 1)
    joiner, little = desk.ask(b"c", **welcome), desk.ask(b"d", 1, ahead_bytes=1)
    await desk.until(lambda: len(desk.ready) == 4)
    plan, _ = decode(list(desk.planner.frames(some)), LIMITS[Plane.WEIGHTS])
    files = [
        entry.digest
        for step in plan.steps
        for entry in decode_manifest(step.manifest).files
        if entry.name in step.files
    ]
    assert [ahead.digest for ahead in plan.ahead] == files
    assert files
    assert desk.planner.sent(some) == plan.ahead
    assert desk.planner.sent(some) == ()
    for other in (none, joiner, little):
        assert desk.planner.sent(other) == ()
    # The request is repeated while all that is on its way; then asks from the new version.
    for have, follows in ((1, False), (2, True)):
        desk.ready.clear()
        again = desk.ask(b"a", have, **welcome)
        await desk.until(lambda: len(desk.ready) == 1)
        assert bool(desk.planner.sent(again)) == follows
    desk.clock.advance(FORGET_S + 1)
    desk.planner.forget_silent()
    desk.ask(b"a", 2, **welcome)
    await desk.until(lambda: len(desk.ready) == 2)
    assert desk.planner.sent(again)


@pytest.mark.asyncio
async def test_what_agents_asked_for_is_remembered_for_a_while(at_desk):
    desk = at_desk(4)
    desk.ask(b"a", 1)
    desk.ask(b"b")
    await desk.until(lambda: len(desk.ready) == 2)
    assert desk.planner.asked_lately(POLICY) == [Asked(1, 4)]
    desk.clock.advance(FORGET_S + 1)
    desk.planner.forget_silent()
    assert desk.planner.holders(POLICY) == []
    assert desk.planner.frames(desk.ready[0]) == ()
    assert desk.planner.asked_lately(POLICY) == [Asked(1, 4)]
    desk.clock.advance(ASKED_LATELY_S)
    assert desk.planner.asked_lately(POLICY) == []
    assert desk.planner.asked_lately("r/q") == []


@pytest.mark.asyncio
async def test_only_where_bridges_are_made_the_abandoned_wait_for_one(at_desk, tmp_path):
    desk = at_desk(3)
    add(desk.store, desk.publisher.next(4, parent=1))
    stray = desk.ask(b"a", 3)
    await desk.until(lambda: desk.trouble == [(POLICY, True)])
    assert desk.planner.frames(stray) == ()
    assert desk.ready == []
    assert desk.store.next_job(POLICY, desk.planner.asked_lately(POLICY)).base.version == 3


@pytest.mark.asyncio
async def test_without_bridges_the_abandoned_start_again(at_desk):
    desk = at_desk(3, bridges=False)
    add(desk.store, desk.publisher.next(4, parent=1))
    stray = desk.ask(b"a", 3)
    await desk.until(lambda: desk.ready == [stray])
    assert desk.version_of(stray) == 4


@pytest.mark.asyncio
async def test_a_plan_that_cannot_be_made_is_upkeeps_business(at_desk):
    desk = at_desk(2)
    for version in (1, 2):
        entry = desk.publisher.publications[version].manifest.delta
        desk.store.blobs(POLICY).path(entry.digest).write_bytes(b"")
        assert desk.store.read_chunk(entry.digest, 0) is None
    desk.ask(b"a", 0, upto=1)
    desk.ask(b"b", 0)
    await desk.until(lambda: desk.trouble == [(POLICY, False)])
    desk.store.maintain(POLICY)
    desk.planner.changed(POLICY)
    await desk.until(lambda: desk.ready == [PlanFor(b"b", POLICY)])
    assert desk.version_of(desk.ready[0]) == 2
