"""Bulk answers in turn, with a send that behaves like a hub's."""

import asyncio
import contextlib

import pytest

from transport.errors import PeerUnreachable, WindowFull
from transport.fair_sender import MAX_QUEUED, FairSender


class Wire:
    """A hub's ``send``: windows of messages per route, and routes that are gone."""

    def __init__(self, **windows: int) -> None:
        self.windows = {route.encode(): size for route, size in windows.items()}
        self.sent: list[tuple[str, str]] = []

    def send(self, route, frames) -> None:
        if route not in self.windows:
            raise PeerUnreachable("gone")
        if self.windows[route] == 0:
            raise WindowFull("full")
        self.windows[route] -= 1
        self.sent.append((route.decode(), frames[0].decode()))


@contextlib.asynccontextmanager
async def sending(wire: Wire):
    made: list[str] = []

    async def make(piece: str) -> list[bytes]:
        made.append(piece)
        await asyncio.sleep(0)
        return [] if piece == "nothing" else [piece.encode()]

    sender: FairSender[str] = FairSender(wire.send, make)
    task = asyncio.create_task(sender.run())
    try:
        yield sender, made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def done(sender: FairSender[str]) -> None:
    async with asyncio.timeout(5):
        while sender.queued:
            await asyncio.sleep(0.001)


@pytest.mark.asyncio
async def test_who_asks_for_little_waits_for_one_piece_of_each_other():
    wire = Wire(big=1000, small=1000)
    async with sending(wire) as (sender, _):
        for number in range(50):
            sender.ask(b"big", f"b{number}")
        sender.ask(b"small", "s0")
        sender.ask(b"small", "s1")
        await done(sender)
    assert wire.sent[:4] == [("big", "b0"), ("small", "s0"), ("big", "b1"), ("small", "s1")]
    assert [piece for route, piece in wire.sent if route == "big"] == [f"b{n}" for n in range(50)]


@pytest.mark.asyncio
async def test_a_full_window_delays_one_route_alone_and_nothing_is_lost_or_sent_twice():
    wire = Wire(slow=1, fast=1000)
    async with sending(wire) as (sender, made):
        for number in range(3):
            sender.ask(b"slow", f"s{number}")
            sender.ask(b"fast", f"f{number}")
        async with asyncio.timeout(5):
            while len(wire.sent) < 4 or sender.window_full < 2:
                await asyncio.sleep(0.001)
        assert len(made) < 12  # retried less and less often, not in a loop
        wire.windows[b"slow"] = 10
        await done(sender)
    assert [piece for route, piece in wire.sent if route == "slow"] == ["s0", "s1", "s2"]


@pytest.mark.asyncio
async def test_what_a_gone_peer_asked_for_is_forgotten_and_repeats_are_asked_once():
    wire = Wire(here=1000)
    async with sending(wire) as (sender, made):
        for _ in range(5):
            sender.ask(b"gone", "g")
            sender.ask(b"gone", "g2")
            sender.ask(b"here", "h")
            sender.ask(b"here", "nothing")
        await done(sender)
    assert wire.sent == [("here", "h")]
    assert made == ["g", "h", "nothing"]
    assert (sender.unreachable, sender.sent) == (1, 1)


@pytest.mark.asyncio
async def test_the_queue_of_a_peer_is_bounded():
    wire = Wire(peer=0)
    async with sending(wire) as (sender, _):
        for number in range(MAX_QUEUED + 10):
            sender.ask(b"peer", str(number))
        assert (sender.queued, sender.over_limit) == (MAX_QUEUED, 10)
