"""One suite for every kind of link: memory, ZeroMQ on loopback, ZeroMQ with CURVE."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from transport.errors import (
    ConfigError,
    LinkClosed,
    LocalProtocolError,
    PeerUnreachable,
    SizeLimitExceeded,
    WindowFull,
)
from transport.keys import KeyPair, Peer
from transport.links import Hub, Inbound, Link, LinkOptions, Network
from transport.memory_links import MemoryNetwork
from transport.messages import Plane, Role
from transport.zmq_links import ZmqNetwork

pytestmark = pytest.mark.asyncio

OPTIONS = LinkOptions.for_plane(Plane.WEIGHTS)._replace(
    linger_s=0.2, reconnect_s=0.01, reconnect_max_s=0.05, window_messages=1000
)
HEAD = b"\x01\x66"


@dataclass
class World:
    """A network, one hub's key and the keys that it knows."""

    network: Network
    endpoint: str
    server: KeyPair | None
    known: dict[str, Peer] = field(default_factory=dict)
    keys: dict[str, KeyPair] = field(default_factory=dict)

    def hub(self, endpoint: str | None = None, options: LinkOptions = OPTIONS) -> Hub:
        return self.network.hub(
            endpoint or self.endpoint,
            options,
            key=self.server,
            authorise=self.known.get if self.server else None,
        )

    def link(self, hub: Hub | str, name: str = "a", options: LinkOptions = OPTIONS) -> Link:
        endpoint = hub if isinstance(hub, str) else hub.endpoint
        if self.server is None:
            return self.network.link(endpoint, options)
        key = self.keys.setdefault(name, KeyPair.generate(name, Role.AGENT))
        self.known.setdefault(key.public_key, Peer(name=name, role=Role.AGENT))
        return self.network.link(endpoint, options, key=key, server_key=self.server.public_key)

    def identity(self, name: str = "a") -> str:
        return self.keys[name].public_key if self.server else ""


@pytest_asyncio.fixture(params=["memory", "plain", "curve"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "plain":
        made = World(ZmqNetwork(), "tcp://127.0.0.1:0", None)
    else:
        server = KeyPair.generate("server", Role.SCHEDULER)
        if request.param == "curve":
            made = World(ZmqNetwork(), "tcp://127.0.0.1:0", server)
        else:
            made = World(MemoryNetwork(), "memory://hub:0", server)
    yield made
    await made.network.close()


async def eventually(check: Callable[[], bool]) -> None:
    """For what the operating system does in its own time."""
    async with asyncio.timeout(5):
        while not check():
            await asyncio.sleep(0.002)


async def receive(end: Hub | Link, count: int) -> list:
    messages: list = []
    while len(messages) < count:
        messages += await end.recv()
    return messages


async def meet(hub: Hub, link: Link) -> bytes:
    """The link's route."""
    await link.wait_connected()
    link.send([HEAD, b"hello"])
    return (await receive(hub, 1))[0].route


async def test_a_message_arrives_whole_with_its_route_and_identity(world):
    hub = world.hub()
    link = world.link(hub)
    await link.wait_connected()
    link.send([HEAD, b"header", b"\0" * 100_000])
    (message,) = await receive(hub, 1)
    assert isinstance(message, Inbound)
    assert message.frames == [HEAD, b"header", b"\0" * 100_000]
    assert message.identity == world.identity()
    assert link.connected
    assert hub.port == int(hub.endpoint.rpartition(":")[2])


async def test_an_answer_reaches_the_link_behind_the_route(world):
    hub = world.hub()
    one, two = world.link(hub, "a"), world.link(hub, "b")
    route_one, route_two = await meet(hub, one), await meet(hub, two)
    assert route_one != route_two
    hub.send(route_two, [HEAD, b"for two"])
    hub.send(route_one, [HEAD, b"for one"])
    assert await receive(one, 1) == [[HEAD, b"for one"]]
    assert await receive(two, 1) == [[HEAD, b"for two"]]


async def test_order_is_kept_in_both_directions(world):
    hub = world.hub()
    link = world.link(hub)
    route = await meet(hub, link)
    for index in range(600):
        link.send([HEAD, b"%d" % index])
        hub.send(route, [HEAD, b"%d" % index])
    up, down = await receive(hub, 600), await receive(link, 600)
    assert [int(message.frames[1]) for message in up] == list(range(600))
    assert [int(frames[1]) for frames in down] == list(range(600))


async def test_a_batch_is_bounded_and_other_tasks_run_during_a_flood(world):
    hub = world.hub(options=OPTIONS._replace(max_batch=10))
    link = world.link(hub)
    await meet(hub, link)
    for _ in range(300):
        link.send([HEAD, b""])
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counter = asyncio.create_task(count_turns())
    received = 0
    batches = 0
    while received < 300:
        batch = await hub.recv()
        assert len(batch) <= 10
        received += len(batch)
        batches += 1
    assert turns >= batches >= 30
    counter.cancel()


async def test_a_route_that_never_was_is_unreachable(world):
    hub = world.hub()
    with pytest.raises(PeerUnreachable):
        hub.send(b"\0\0\0\0\x7f", [HEAD, b""])


async def test_a_closed_peer_becomes_unreachable(world):
    hub = world.hub()
    link = world.link(hub)
    route = await meet(hub, link)
    assert hub.peers == 1
    await link.close()
    await eventually(lambda: hub.peers == 0)
    with pytest.raises(PeerUnreachable):
        hub.send(route, [HEAD, b""])


async def test_a_hub_knows_whether_the_connection_of_a_route_is_up(world):
    hub = world.hub()
    link = world.link(hub)
    await link.wait_connected()
    link.send([HEAD, b"hello"])
    route = (await hub.recv())[0].route
    assert hub.reachable(route)
    assert not hub.reachable(b"\0none")
    await link.close()
    async with asyncio.timeout(5):
        while hub.reachable(route):
            await asyncio.sleep(0.002)


async def test_a_hub_may_put_a_peer_off_by_where_it_comes_from(world):
    if world.server is None:
        pytest.skip("an open hub asks nobody")
    asked: list[str] = []

    def admit(address: str) -> bool:
        asked.append(address)
        return len(asked) > 2

    hub = world.network.hub(
        world.endpoint, OPTIONS, key=world.server, authorise=world.known.get, admit=admit
    )
    link = world.link(hub)
    async with asyncio.timeout(5):
        await link.wait_connected()  # it tries again by itself
    assert len(asked) == 3
    assert link.handshake_failures == hub.handshake_failures == 2
    assert len(set(asked)) == 1


async def test_a_link_tries_every_server_key_that_it_may_find(world):
    if world.server is None:
        pytest.skip("an open hub has no key")

    class Keys:
        def __init__(self, *keys: str) -> None:
            self.keys = keys
            self.proved: list[str] = []

        def candidates(self) -> tuple[str, ...]:
            return self.keys

        def used(self, key: str) -> None:
            self.proved.append(key)

    others = [KeyPair.generate("server", Role.SCHEDULER).public_key for _ in range(2)]
    hub = world.hub()
    world.link(hub)  # makes the key of "a" known
    for place in range(3):
        keys = Keys(*others[:place], world.server.public_key, *others[place:])
        link = world.network.link(hub.endpoint, OPTIONS, key=world.keys["a"], server_key=keys)
        async with asyncio.timeout(5):
            await link.wait_connected()
        assert set(keys.proved) <= {world.server.public_key}
        await link.close()


async def test_a_link_without_a_hub_is_unreachable_and_connects_when_there_is_one(world):
    first = world.hub()
    endpoint = first.endpoint
    await first.close()
    link = world.link(endpoint)
    assert not link.connected
    with pytest.raises(PeerUnreachable):
        link.send([HEAD, b""])
    hub = world.hub(endpoint)
    assert await meet(hub, link)


async def test_a_link_finds_a_restarted_hub_on_the_same_endpoint(world):
    hub = world.hub()
    link = world.link(hub)
    await meet(hub, link)
    await hub.close()
    await link.wait_disconnected()
    with pytest.raises(PeerUnreachable):
        link.send([HEAD, b""])
    again = world.hub(hub.endpoint)
    route = await meet(again, link)
    again.send(route, [HEAD, b"back"])
    assert await receive(link, 1) == [[HEAD, b"back"]]


async def test_a_link_that_outruns_its_hub_is_told_so_and_loses_nothing(world):
    options = OPTIONS._replace(window_messages=4)
    hub = world.hub(options=options)
    link = world.link(hub, options=options)
    await link.wait_connected()
    sent = fill(lambda index: link.send([HEAD, b"%d" % index, b"x" * 200_000]))
    received = await receive(hub, sent)
    assert [int(message.frames[1]) for message in received] == list(range(sent))


async def test_a_hub_that_outruns_a_link_is_told_so_and_loses_nothing(world):
    options = OPTIONS._replace(window_messages=4)
    hub = world.hub(options=options)
    link = world.link(hub, options=options)
    route = await meet(hub, link)
    sent = fill(lambda index: hub.send(route, [HEAD, b"%d" % index, b"x" * 200_000]))
    received = await receive(link, sent)
    assert [int(frames[1]) for frames in received] == list(range(sent))


def fill(send: Callable[[int], None]) -> int:
    """Messages sent until the window was full; the operating system's buffers count as well."""
    for index in range(10_000):
        try:
            send(index)
        except WindowFull:
            return index
    raise AssertionError("the window is never full")


async def test_one_slow_peer_does_not_fill_the_window_of_another(world):
    options = OPTIONS._replace(window_messages=4)
    hub = world.hub(options=options)
    slow, quick = world.link(hub, "a", options), world.link(hub, "b", options)
    slow_route, quick_route = await meet(hub, slow), await meet(hub, quick)
    fill(lambda _: hub.send(slow_route, [HEAD, b"", b"x" * 200_000]))
    hub.send(quick_route, [HEAD, b"through"])
    assert await receive(quick, 1) == [[HEAD, b"through"]]


async def test_a_cancelled_receive_loses_nothing(world):
    hub = world.hub()
    link = world.link(hub)
    await meet(hub, link)
    received: list[Inbound] = []
    for index in range(60):
        waiting = asyncio.create_task(hub.recv())
        for _ in range(index % 4):
            await asyncio.sleep(0)
        link.send([HEAD, b"%d" % index])
        for _ in range(index % 7):
            await asyncio.sleep(0)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            received += await waiting
    received += await receive(hub, 60 - len(received))
    assert [int(message.frames[1]) for message in received] == list(range(60))


async def test_a_send_does_not_swallow_the_wake_up_of_a_waiting_receive(world):
    hub = world.hub()
    link = world.link(hub)
    route = await meet(hub, link)

    async def echo() -> None:
        for message in await receive(hub, 200):
            hub.send(message.route, [HEAD, b"echo"])

    async def chatter() -> None:
        for _ in range(200):
            hub.send(route, [HEAD, b"push"])
            link.send([HEAD, b"ask"])
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        group.create_task(echo())
        group.create_task(chatter())
        group.create_task(receive(link, 400))


async def test_two_tasks_may_not_receive_on_one_end(world):
    hub = world.hub()
    first = asyncio.create_task(hub.recv())
    await asyncio.sleep(0)
    with pytest.raises(LocalProtocolError):
        await hub.recv()
    first.cancel()


async def test_closing_ends_a_waiting_receive_and_every_later_call(world):
    hub = world.hub()
    link = world.link(hub)
    route = await meet(hub, link)
    waiting = asyncio.create_task(link.recv()), asyncio.create_task(hub.recv())
    await asyncio.sleep(0)
    await link.close()
    await link.close()
    await hub.close()
    await hub.close()
    for task in waiting:
        with pytest.raises(LinkClosed):
            await task
    assert not link.connected
    with pytest.raises(LinkClosed):
        link.send([HEAD])
    with pytest.raises(LinkClosed):
        hub.send(route, [HEAD])
    with pytest.raises(LinkClosed):
        await link.recv()
    with pytest.raises(LinkClosed):
        await hub.recv()
    with pytest.raises(LinkClosed):
        await link.wait_connected()


async def test_what_was_sent_before_close_still_arrives(world):
    hub = world.hub()
    link = world.link(hub)
    await meet(hub, link)
    for index in range(50):
        link.send([HEAD, b"%d" % index])
    await link.close()
    assert len(await receive(hub, 50)) == 50


async def test_a_message_that_the_other_end_would_refuse_is_refused_here(world):
    options = OPTIONS._replace(max_frame_bytes=1000, max_frames=3)
    hub = world.hub(options=options)
    link = world.link(hub, options=options)
    route = await meet(hub, link)
    for send in (link.send, lambda frames: hub.send(route, frames)):
        with pytest.raises(SizeLimitExceeded):
            send([HEAD, b"x" * 1001])
        with pytest.raises(LocalProtocolError):
            send([])
        with pytest.raises(LocalProtocolError):
            send([HEAD, b"", b"", b""])
        with pytest.raises(TypeError):
            send([HEAD, "text", b""])
        send([HEAD, b"x" * 1000, memoryview(b"view")])
    assert [m.frames[1:] for m in await receive(hub, 1)] == [[b"x" * 1000, b"view"]]
    assert await receive(link, 1) == [[HEAD, b"x" * 1000, b"view"]]


async def test_a_disconnected_peer_comes_back_under_another_route(world):
    hub = world.hub()
    link = world.link(hub)
    route = await meet(hub, link)
    hub.disconnect(world.identity())
    await link.wait_disconnected()
    assert await meet(hub, link) != route


@pytest.mark.parametrize("world", ["memory", "curve"], indirect=True)
async def test_a_key_that_is_no_longer_known_is_not_heard_again(world):
    hub = world.hub()
    link = world.link(hub)
    await meet(hub, link)
    for _ in range(20):
        link.send([HEAD, b"on its way"])
    del world.known[world.identity()]
    hub.disconnect(world.identity())
    await link.wait_disconnected()
    await eventually(lambda: link.handshake_failures > 0)
    assert hub.handshake_failures > 0
    assert world.identity() in hub.last_failure
    assert link.last_failure
    # The other peer's message is the first that the hub hears.
    other = world.link(hub, "b")
    await other.wait_connected()
    other.send([HEAD, b"from b"])
    assert [message.frames[1] for message in await hub.recv()] == [b"from b"]
    assert hub.dropped <= 20
    # And once it is known again it gets in by itself.
    world.known[world.identity()] = Peer(name="a", role=Role.AGENT)
    assert await meet(hub, link)


async def test_an_endpoint_in_use_is_refused_with_a_remedy(world):
    hub = world.hub()
    with pytest.raises(ConfigError, match="choose another"):
        world.hub(hub.endpoint)


async def test_half_a_set_of_keys_is_refused(world):
    key = KeyPair.generate("a", Role.AGENT)
    with pytest.raises(ConfigError, match="key and authorise"):
        world.network.hub(world.endpoint, OPTIONS, key=key)
    with pytest.raises(ConfigError, match="key and server_key"):
        world.network.link("tcp://127.0.0.1:1", OPTIONS, key=key)
