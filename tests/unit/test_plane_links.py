"""A daemon's links: what they hand on, what they drop, and how they start afresh."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from transport.envelope import encode
from transport.errors import LinkError, PeerUnreachable
from transport.links import Hub, LinkOptions
from transport.memory_links import MemoryNetwork
from transport.messages import (
    Goodbye,
    Heartbeat,
    HelloRequired,
    HostedPolicies,
    Message,
    Plane,
)
from transport.plane_links import PlaneLinks, bracketed
from transport.runtime.settings import TransportConfig

CONTROL = Plane.CONTROL
BEAT = Heartbeat(
    sequence=1,
    sent_s=0.0,
    held=(),
    running_sequences=0,
    waiting_sequences=0,
    tokens_generated=0,
    versions={},
)


class World:
    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.hub: Hub = self.network.hub("tcp://127.0.0.1:0", LinkOptions.for_plane(CONTROL))
        ports = dict.fromkeys(("control_port", "trajectories_port", "weights_port"), self.hub.port)
        self.links = PlaneLinks(self.network, TransportConfig(**ports), key=None, server_key=None)
        self.got: list[Message] = []
        self.more = asyncio.Event()

    def arrived(self, message: Message, payload: list[bytes]) -> None:
        self.got.append(message)
        self.more.set()

    async def until(self, count: int) -> None:
        while len(self.got) < count:
            self.more.clear()
            await self.more.wait()


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    async with asyncio.timeout(5.0):
        yield made
    await made.links.close()
    await made.network.close()


@pytest.mark.asyncio
async def test_only_what_the_hub_may_say_is_handed_on(world: World) -> None:
    receiving = asyncio.create_task(world.links.receive(CONTROL, world.arrived))
    assert world.links.send(CONTROL, BEAT)
    (inbound,) = await world.hub.recv()
    said = [encode(HelloRequired()), encode(BEAT), [b"\xff\xff"], encode(Goodbye(reason="r"))]
    for frames in [*said, encode(HostedPolicies(policies=()))]:
        world.hub.send(inbound.route, frames)
    await world.until(2)
    assert world.got == [HelloRequired(), HostedPolicies(policies=())]
    assert world.links.counters == {"received.not_allowed": 2, "received.malformed": 1}
    assert world.links.bytes_up == sum(map(len, encode(BEAT)))
    assert world.links.bytes_down > 0
    await world.links.close()
    await receiving


@pytest.mark.asyncio
async def test_a_renewed_link_goes_on_under_the_same_receiver(world: World) -> None:
    receiving = asyncio.create_task(world.links.receive(CONTROL, world.arrived))
    changes: list[bool] = []
    up = asyncio.Event()

    def changed(plane: Plane, connected: bool) -> None:
        changes.append(connected)
        if connected:
            up.set()

    watching = asyncio.create_task(world.links.watch(CONTROL, changed))
    world.links.send(CONTROL, BEAT)
    (first,) = await world.hub.recv()
    await up.wait()
    up.clear()
    world.links.renew(CONTROL)
    world.links.send(CONTROL, BEAT)
    (second,) = await world.hub.recv()
    assert second.route != first.route
    await up.wait()
    state = HostedPolicies(policies=("r/p",))
    world.hub.send(second.route, encode(state))
    await world.until(1)
    assert world.got == [state]
    await world.links.close()
    await asyncio.gather(receiving, watching)
    assert changes[-1]


@pytest.mark.asyncio
async def test_what_cannot_be_sent_is_reported_or_raised_and_counted(world: World) -> None:
    await world.hub.close()
    assert not world.links.send(CONTROL, BEAT)
    with pytest.raises(LinkError):
        world.links.send_or_raise(CONTROL, BEAT)
    assert world.links.counters == {f"send.{PeerUnreachable.code}": 1}


def test_ipv6_addresses_stand_in_brackets() -> None:
    assert [bracketed(h) for h in ("::1", "[::1]", "a.b")] == ["[::1]", "[::1]", "a.b"]
