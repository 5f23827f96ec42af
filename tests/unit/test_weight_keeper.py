"""Upkeep of the weight store: what is made while nobody waits, and what happens when it fails."""

import asyncio

import pytest
import pytest_asyncio
from version_store import POLICY, Publisher, add, filled, opened

from scheduler import weight_keeper
from scheduler.service import Worker
from scheduler.weight_composites import perform
from scheduler.weight_keeper import Keeper
from scheduler.weight_plans import Planner
from transport.errors import StoreError
from transport.messages import WeightsRequest
from transport.runtime.clock import ManualClock

ASK = WeightsRequest(policy=POLICY, have_version=None, have_digest="")


class Shop:
    """A keeper over a store with four versions, of which every second gets a cumulative."""

    def __init__(self, folder):
        self.publisher = Publisher(folder / "model")
        self.store = filled(opened(folder / "store", cumulative_every=2), self.publisher, 4)
        self.library = Worker("library")
        self.clock = clock = ManualClock()
        self.planner = planner = Planner(
            self.store,
            self.library,
            clock,
            ready=lambda key: None,
            trouble=lambda policy, urgent: None,
            bridges=True,
        )
        self.keeper = Keeper(
            self.store,
            self.library,
            planner,
            clock,
            cpu_share=1.0,
            uploading=lambda policy: (),
        )

    async def add(self, *versions):
        for version in versions:
            await self.library.run(add, self.store, self.publisher.next(version))

    @property
    def composites(self):
        return set(self.store._policies[POLICY].composites)


@pytest_asyncio.fixture
async def shop(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_keeper, "MAINTAIN_S", 0.01)
    monkeypatch.setattr(weight_keeper, "SCRUB_BYTES", 0)
    shop = Shop(tmp_path)
    task = asyncio.create_task(shop.keeper.run())
    yield shop
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await shop.keeper.close()
    shop.library.close()


async def until(condition):
    async with asyncio.timeout(10.0):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.asyncio
async def test_what_failed_is_not_tried_again_until_something_changed(shop, monkeypatch):
    calls = []

    def failing(job, stop):
        calls.append(job.version.version)
        raise StoreError("disk full")

    turns = []
    maintain = shop.keeper._planner.forget_silent
    monkeypatch.setattr(
        shop.keeper._planner, "forget_silent", lambda: (turns.append(1), maintain())
    )
    monkeypatch.setattr(weight_keeper, "perform", failing)
    await until(lambda: calls == [4])
    seen = len(turns)
    await until(lambda: len(turns) > seen + 5)
    assert calls == [4]
    monkeypatch.setattr(weight_keeper, "perform", perform)
    await shop.add(5, 6)
    shop.keeper.has_changed(POLICY)
    await until(lambda: shop.composites == {(0, 6)})


@pytest.mark.asyncio
async def test_what_a_job_finds_damaged_is_avoided_and_the_rest_made(shop):
    shop.planner.request(b"route", "agent", ASK)  # so that new versions need no files
    policy = shop.store._policies[POLICY]
    await until(lambda: shop.composites == {(0, 4)} and policy.head is not None)
    (entry,) = shop.store._policies[POLICY].composites[0, 4].manifest.files
    shop.store.blobs(POLICY).path(entry.digest).write_bytes(b"x" * entry.size_bytes)
    await shop.add(5, 6)
    shop.keeper.has_changed(POLICY, urgent=True)
    await until(lambda: shop.composites == {(0, 6)})  # by way of the deltas
    assert not shop.store.blobs(POLICY).has(entry.digest)


@pytest.mark.asyncio
async def test_what_rots_unread_is_found_and_made_again(shop, monkeypatch):
    await until(lambda: shop.composites == {(0, 4)})
    (entry,) = shop.store._policies[POLICY].composites[0, 4].manifest.files
    path = shop.store.blobs(POLICY).path(entry.digest)
    path.write_bytes(b"x" * entry.size_bytes)
    monkeypatch.setattr(weight_keeper, "SCRUB_BYTES", 1 << 30)
    await until(lambda: path.exists() and path.read_bytes()[:1] != b"x")
    await until(lambda: not shop.store.is_damaged(entry.digest))


@pytest.mark.asyncio
async def test_stopping_does_not_wait_for_what_is_being_made(shop, monkeypatch):
    started = asyncio.Event()
    loop = asyncio.get_running_loop()
    seen = []

    def slow(job, stop):
        loop.call_soon_threadsafe(started.set)
        seen.append(stop.wait(10.0))
        raise StoreError("the weight store stops")

    monkeypatch.setattr(weight_keeper, "perform", slow)
    async with asyncio.timeout(10.0):
        await started.wait()
        await shop.keeper.close()
    assert seen == [True]


@pytest.mark.asyncio
async def test_weights_that_nobody_uses_are_not_kept_in_memory(shop):
    policy = shop.store._policies[POLICY]
    await until(lambda: policy.head is None)
    shop.planner.request(b"route", "agent", ASK)
    await until(lambda: policy.head is not None)
    assert policy.head.version == 4
    shop.clock.advance(weight_keeper.IDLE_S + 61.0)  # it is forgotten when it has been silent
    await until(lambda: policy.head is None)
    await shop.add(5)
    shop.keeper.used(POLICY)
    shop.keeper.has_changed(POLICY)
    await until(lambda: shop.composites and policy.head is not None)
    assert policy.head.version == 5


@pytest.mark.asyncio
async def test_a_turn_does_not_grow_with_the_runs_that_are_over(shop, monkeypatch):
    names = [f"over{number}/p" for number in range(5)]
    looked = []

    def look(what):
        return lambda policy, *_: looked.append((what, policy))

    monkeypatch.setattr(shop.store, "policies", lambda: [*names, POLICY])
    monkeypatch.setattr(shop.store, "scrub", look("scrub"))
    monkeypatch.setattr(shop.store, "next_job", lambda policy, *_, **__: look("job")(policy))
    monkeypatch.setattr(shop.store, "rest", lambda policy: None)
    shop.planner.request(b"route", "agent", ASK)
    await until(lambda: looked.count(("scrub", POLICY)) == 12)
    found = [policy for what, policy in looked if what == "scrub" and policy != POLICY]
    assert len(found) <= 13
    assert set(found) == set(names)
    assert [looked.count(("job", name)) for name in names] == [1] * 5
    assert looked.count(("job", POLICY)) > 5
