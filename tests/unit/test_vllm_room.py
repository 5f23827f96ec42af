"""Who may be in vLLM: in turn, as many as fit, and nobody forgotten."""

import asyncio

import pytest

from edge_agent.engines.vllm_room import Admission, PolicyRoom, remember, remembered
from transport.errors import GenerationFailed

pytestmark = pytest.mark.asyncio


async def enter(admission, room, leave, entered=None, name=None):
    async with admission.place(room):
        if entered is not None:
            entered.append(name)
        await leave.wait()


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_room_follows_the_lengths():
    room = PolicyRoom(kv_tokens=12_500, most=64)
    assert (room.sequences, room.known) == (64, False)
    room.ended(1000)
    assert (room.sequences, room.known) == (10, True)
    for _ in range(500):
        room.ended(100)
    assert room.sequences == 64
    for _ in range(500):
        room.ended(10**6)
    assert room.sequences == 1


async def test_they_come_in_turn_and_a_full_policy_holds_up_no_other():
    freed, entered, leave = [], [], asyncio.Event()
    admission = Admission(3, lambda: freed.append(admission.running))
    small, large = PolicyRoom(100, 1), PolicyRoom(100, 8)
    order = [("a", small), ("b", small), ("c", large), ("d", large), ("e", large)]
    tasks = [
        asyncio.create_task(enter(admission, room, leave, entered, name)) for name, room in order
    ]
    await settle()
    assert entered == ["a", "c", "d"]
    assert (admission.running, admission.waiting) == (3, 2)
    leave.set()
    await asyncio.gather(*tasks)
    assert entered == ["a", "c", "d", "b", "e"]
    assert (admission.running, admission.waiting, freed[-1]) == (0, 0, 0)
    assert small.running == large.running == 0


async def test_who_is_cancelled_or_refused_takes_no_place():
    admission, room, leave = Admission(1, lambda: None), PolicyRoom(100, 8), asyncio.Event()
    first, second, third = [asyncio.create_task(enter(admission, room, leave)) for _ in range(3)]
    await settle()
    second.cancel()
    await settle()
    assert admission.waiting == 1
    first.cancel()
    third.cancel()  # at once, when its turn has just come
    await settle()
    assert (admission.running, admission.waiting, room.running) == (0, 0, 0)
    fourth = asyncio.create_task(enter(admission, room, leave))
    await settle()
    fifth = asyncio.create_task(enter(admission, room, leave))
    await settle()
    admission.refuse(GenerationFailed("closed"))
    with pytest.raises(GenerationFailed, match="closed"):
        await fifth
    leave.set()
    await fourth
    assert admission.running == 0


async def test_what_fits_is_remembered(tmp_path):
    path, rooms = tmp_path / "room.json", [PolicyRoom(1000, 64), PolicyRoom(1250, 64)]
    remember(path, rooms)
    assert remembered(path) == remembered(None) == 0
    rooms[1].ended(100)
    remember(path, rooms)
    assert remembered(path) == 10
    path.write_text("what?")
    assert remembered(path) == 0
