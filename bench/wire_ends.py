"""The two ends of the wire bench: a sending process and a receiving one, by real link or bare.

What always holds: the clock runs in the receiver, from the first message to the last; every
message of the count arrives, or the bench fails.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import zmq

from transport.errors import WindowFull
from transport.keys import KeyPair, Peer
from transport.links import LinkOptions
from transport.messages import Plane, Role
from transport.zmq_hub import ZmqHub
from transport.zmq_links import ZmqLink, ZmqNetwork

WAIT_S: Final = 60.0
FULL_PAUSE_S: Final = 0.0005
"""How long a sender waits for a window of 1000 messages, some 10 ms of traffic, to empty."""

READY: Final = b"ready"
_SPAWN: Final = multiprocessing.get_context("spawn")


class Way(NamedTuple):
    """How messages travel. ``outward`` ones go from the hub to the link."""

    kind: Literal["link", "blocking"]
    curve: bool
    outward: bool = False


class Keys(NamedTuple):
    server: KeyPair
    agent: KeyPair


def messages_s(way: Way, frames: Sequence[bytes], count: int) -> float:
    """Messages per second; the sender is a process of its own."""
    keys = Keys(KeyPair.generate("server", Role.SCHEDULER), KeyPair.generate("a", Role.AGENT))
    mine, theirs = _SPAWN.Pipe()
    run = _link_sender if way.kind == "link" else _blocking_sender
    child = _SPAWN.Process(target=run, args=(theirs, way, keys, list(frames), count), daemon=True)
    child.start()
    try:
        if way.kind == "link":
            return asyncio.run(_link_rate(mine, way, keys, count))
        return _blocking_rate(mine, way, keys, count)
    finally:
        child.join(WAIT_S)
        if child.is_alive():
            child.kill()


# ---- the daemons' links ----------------------------------------------------------------------


def _options() -> LinkOptions:
    return LinkOptions.for_plane(Plane.CONTROL)


def _hub(network: ZmqNetwork, way: Way, keys: Keys) -> ZmqHub:
    peer = Peer(name=keys.agent.name, role=Role.AGENT)
    if not way.curve:
        return network.hub("tcp://127.0.0.1:0", _options())
    return network.hub(
        "tcp://127.0.0.1:0",
        _options(),
        key=keys.server,
        authorise=lambda key: peer if key == keys.agent.public_key else None,
    )


def _link(network: ZmqNetwork, way: Way, keys: Keys, endpoint: str) -> ZmqLink:
    if not way.curve:
        return network.link(endpoint, _options())
    return network.link(endpoint, _options(), key=keys.agent, server_key=keys.server.public_key)


async def _link_rate(pipe: Any, way: Way, keys: Keys, count: int) -> float:
    network = ZmqNetwork()
    end: ZmqHub | ZmqLink
    try:
        if way.outward:
            end = _link(network, way, keys, await _received(pipe))
            await end.wait_connected()
            end.send([READY])  # tells the hub its route
        else:
            end = _hub(network, way, keys)
            pipe.send(end.endpoint)
        async with asyncio.timeout(WAIT_S):
            first = len(await end.recv())
            began = time.perf_counter()
            seen = first
            while seen < count:
                seen += len(await end.recv())
            return (count - first) / (time.perf_counter() - began)
    finally:
        pipe.send("done")
        await network.close()


def _link_sender(pipe: Any, way: Way, keys: Keys, frames: list[bytes], count: int) -> None:
    asyncio.run(_send_by_link(pipe, way, keys, frames, count))


async def _send_by_link(pipe: Any, way: Way, keys: Keys, frames: list[bytes], count: int) -> None:
    network = ZmqNetwork()
    try:
        if way.outward:
            hub = _hub(network, way, keys)
            pipe.send(hub.endpoint)
            route = (await hub.recv())[0].route
            await _send_all(lambda: hub.send(route, frames), count)
        else:
            link = _link(network, way, keys, await _received(pipe))
            await link.wait_connected()
            await _send_all(lambda: link.send(frames), count)
        assert await _received(pipe) == "done"
    finally:
        await network.close()


async def _send_all(send: Any, count: int) -> None:
    for _ in range(count):
        while True:
            try:
                send()
                break
            except WindowFull:
                await asyncio.sleep(FULL_PAUSE_S)


async def _received(pipe: Any) -> Any:
    return await asyncio.to_thread(pipe.recv)


# ---- bare sockets ----------------------------------------------------------------------------


def _blocking_rate(pipe: Any, way: Way, keys: Keys, count: int) -> float:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
    if way.curve:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server.secret_key.encode())
    try:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        pipe.send(f"tcp://127.0.0.1:{port}")
        socket.recv_multipart()
        began = time.perf_counter()
        for _ in range(count - 1):
            socket.recv_multipart()
        return (count - 1) / (time.perf_counter() - began)
    finally:
        pipe.send("done")
        context.destroy(0)


def _blocking_sender(pipe: Any, way: Way, keys: Keys, frames: list[bytes], count: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    if way.curve:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.public_key.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.agent.public_key.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.agent.secret_key.encode())
    socket.connect(pipe.recv())
    for _ in range(count):
        socket.send_multipart(frames)
    assert pipe.recv() == "done"
    context.destroy(0)
