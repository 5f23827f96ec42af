"""How an agent's life ends: in order, by an error, by tasks of its own that somebody cancelled."""

import asyncio

import pytest

from edge_agent.core.effects import Exit
from edge_agent.life import Life, OwnTasksCancelled

pytestmark = pytest.mark.asyncio


def life() -> Life:
    return Life(lambda: ("run/t-000001#1",))


async def test_the_first_word_counts_and_ends_what_is_watched() -> None:
    one = life()
    task = asyncio.create_task(asyncio.Event().wait())
    one.watch([task])
    one.end(Exit(reason="asked", status=0))
    one.fail(ValueError("later"))
    assert await one.ended() == Exit(reason="asked", status=0)
    await asyncio.wait([task])
    assert task.cancelled()
    assert one.why_cancelled() is None


async def test_an_error_is_what_it_ended_with() -> None:
    one, error = life(), ValueError("no")
    one.fail(error)
    one.end(Exit(reason="asked", status=0))
    assert await one.ended() is error


async def test_a_watched_task_that_somebody_cancels_ends_it_with_what_ran() -> None:
    one = life()
    task = asyncio.create_task(asyncio.Event().wait())
    one.watch([task])
    await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(5):
        error = await one.ended()
    assert isinstance(error, OwnTasksCancelled)
    assert "while run/t-000001#1 ran" in str(error)
    assert "shares the agent's event loop" in str(error)


async def test_all_tasks_cancelled_is_told_from_a_caller_who_cancels() -> None:
    for all_of_them in (True, False):
        one = life()
        task = asyncio.create_task(asyncio.Event().wait())
        one.watch([task])
        main = asyncio.create_task(one.ended())
        await asyncio.sleep(0)
        if all_of_them:
            task.cancel()
        main.cancel()
        await asyncio.wait([main, task])
        assert main.cancelled()
        assert isinstance(one.why_cancelled(), OwnTasksCancelled) == all_of_them
