"""Relays and lanes over real CURVE sockets: an origin, agents, and what is between them."""

import asyncio
import contextlib
import json
import os
import sys
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from service_world import PlaneLink, until

from transport.chunk_exchange import WRONG_CHUNK
from transport.chunk_parts import place_of
from transport.chunks import ChunkFetcher
from transport.envelope import encode
from transport.errors import ConfigError, LinkError
from transport.fair_sender import FairSender
from transport.keys import KeyPair, create_keys
from transport.messages import Chunk, ChunkRequest, Plane, Refuse, WeightsRequest
from transport.permissions import may_send, may_send_at_relay
from transport.plane_hub import PlaneHub
from transport.plane_links import PlaneLinks, link_options
from transport.relay_config import RelayConfig, RelayTable
from transport.relay_daemon import run_daemon
from transport.runtime.clock import SystemClock
from transport.runtime.settings import RelayAddress, TransportConfig
from transport.source_links import ORIGIN, SourceLinks
from transport.weights.manifest import describe_file
from transport.zmq_links import ZmqNetwork

PLANE = Plane.WEIGHTS
CHUNK = 128 * 1024
DATA = np.random.default_rng(1).bytes(10 * CHUNK + 1000)
ENTRY = describe_file("delta.safetensors", "delta", DATA, chunk_bytes=CHUNK)
WAIT_S = 20.0


class Giver:
    """A hub that gives pieces of ``DATA``, or of other bytes when it lies."""

    def __init__(self, hub: PlaneHub, data: bytes = DATA) -> None:
        self.hub = hub
        self.data = data
        self.bytes_by_peer: Counter[str] = Counter()
        self.routes: dict[str, set[bytes]] = {}
        self._names: dict[bytes, str] = {}
        self._sender: FairSender[tuple[str, int, int, bytes]] = FairSender(
            hub.send_frames, self._make, self._count
        )
        self._tasks = [asyncio.create_task(part) for part in (self._receive(), self._sender.run())]

    async def _receive(self) -> None:
        while True:
            for arrival in await self.hub.recv():
                request = arrival.message
                assert isinstance(request, ChunkRequest)
                self._names[arrival.route] = arrival.peer.name
                self.routes.setdefault(arrival.peer.name, set()).add(arrival.route)
                for index in request.indices:
                    piece = (request.digest, index, request.part_bytes, arrival.route)
                    self._sender.ask(arrival.route, piece)

    async def _make(self, piece):
        digest, index, part_bytes, _ = piece
        if digest != ENTRY.digest:
            return encode(Chunk(digest=digest, index=index, part_bytes=part_bytes, found=False))
        return encode(Chunk(digest=digest, index=index, part_bytes=part_bytes), (self._cut(piece),))

    def _cut(self, piece) -> bytes:
        _, index, part_bytes, _ = piece
        place = place_of(index, part_bytes, CHUNK)
        return self.data[place.number * CHUNK :][:CHUNK][place.start : place.stop]

    def _count(self, piece) -> None:
        self.bytes_by_peer[self._names[piece[3]]] += len(self._cut(piece))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.hub.close()


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        create_keys(folder / "keys", agents=["a", "b", "c"], relays=["eu"])
        self.network = ZmqNetwork()
        self.clock = SystemClock()
        self.origin = self.giver(may_send)
        self.relays: tuple[RelayAddress, ...] = ()
        self._stack = contextlib.AsyncExitStack()

    def giver(self, may_say, data: bytes = DATA, key: KeyPair | None = None) -> Giver:
        hub = PlaneHub(
            self.network,
            PLANE,
            TransportConfig(keys=str(self.folder / "keys")),
            port=0,
            port_file=self.folder / f"port-{'origin' if key is None else key.name}",
            clock=self.clock,
            key=key,
            may_say=may_say,
        )
        return Giver(hub, data)

    def transport(self, **changes: object) -> TransportConfig:
        return TransportConfig(
            weights_port=self.origin.hub.port,
            keys=str(self.folder / "keys"),
            relays=self.relays,
            **changes,
        )

    def key(self, name: str) -> KeyPair:
        return KeyPair.load(self.folder / "keys" / f"{name}.toml")

    def at(self, port: int) -> None:
        self.relays = (RelayAddress(name="eu", host="127.0.0.1", port=port),)

    def relay_config(self) -> RelayConfig:
        return RelayConfig(
            transport=msgspec.structs.replace(self.transport(), relays=()),
            relay=RelayTable(
                folder=str(self.folder / "relay"),
                key=str(self.folder / "keys" / "eu.toml"),
                port=0,
                cache_bytes=100 << 20,
            ),
        )

    @contextlib.asynccontextmanager
    async def relay(self):
        ready: asyncio.Future[dict] = asyncio.get_running_loop().create_future()
        stop = asyncio.Event()
        task = asyncio.create_task(
            run_daemon(self.relay_config(), stop=stop, on_ready=ready.set_result)
        )
        await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
        if task.done():
            task.result()
        self.at(ready.result()["port"])
        try:
            yield
            assert not task.done()
        finally:
            stop.set()
            assert await asyncio.wait_for(task, WAIT_S) == 0

    async def close(self) -> None:
        await self.origin.close()
        await self.network.close()


@contextlib.asynccontextmanager
async def world(folder: Path):
    made = World(folder)
    try:
        yield made
    finally:
        await made.close()


class Agent:
    """An agent's side of a fetch: links, sources and one fetcher."""

    def __init__(self, world: World, name: str, **transport: object) -> None:
        config = world.transport(**transport)
        key, server = world.key(name), world.key("server").public_key
        self.links = PlaneLinks(world.network, config, key=key, server_key=server, planes=[PLANE])
        self.wake = asyncio.Event()
        self.arrivals: list[tuple[object, Chunk, list[bytes]]] = []
        self.sources = SourceLinks(
            world.network,
            config,
            self.links,
            key=key,
            server_key=server,
            window_bytes=1 << 20,
            clock=world.clock,
            arrived=lambda *arrival: (self.arrivals.append(arrival), self.wake.set()),
            changed=lambda source, up: self.wake.set(),
        )
        self._clock = world.clock
        self._task = asyncio.create_task(
            self.links.receive(
                PLANE, lambda m, p: (self.arrivals.append((ORIGIN, m, p)), self.wake.set())
            )
        )

    async def fetch(self, wait_for_all: bool = True) -> tuple[bytes, ChunkFetcher]:
        fetcher = ChunkFetcher([ENTRY], sources=self.sources.sources())
        if wait_for_all:
            await until(lambda: all(self.sources.is_up(s.id) for s in self.sources.sources()))
        found: dict[int, bytes] = {}
        async with asyncio.timeout(WAIT_S):
            while not fetcher.done:
                for source in self.sources.sources():
                    if not self.sources.is_up(source.id):
                        fetcher.source_down(source.id)
                for name, request in fetcher.next_requests(self._clock.monotonic_s()):
                    with contextlib.suppress(LinkError):
                        self.sources.send(name, request)
                assert fetcher.failed is None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await self.wake.wait()
                self.wake.clear()
                arrivals, self.arrivals = self.arrivals, []
                for name, chunk, payload in arrivals:
                    where = (name, chunk.digest, chunk.index, chunk.part_bytes)
                    if not chunk.found:
                        fetcher.chunk_not_found(*where)
                        continue
                    done = fetcher.chunk_arrived(*where, payload[0], self._clock.monotonic_s())
                    if done is not None:
                        found[done.index] = bytes(done.data)
        return b"".join(found[index] for index in sorted(found)), fetcher

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.sources.close()
        await self.links.close()


@contextlib.asynccontextmanager
async def agents(world: World, *names: str, **transport: object):
    made = [Agent(world, name, **transport) for name in names]
    try:
        yield made
    finally:
        for agent in made:
            await agent.close()


@pytest.mark.asyncio
async def test_bytes_leave_the_origin_once_per_region_and_survive_a_restart_of_the_relay(tmp_path):
    async with world(tmp_path) as made:
        async with made.relay(), agents(made, "a", "b", "c") as all_three:
            fetched = await asyncio.gather(*(agent.fetch() for agent in all_three))
            assert [data == DATA for data, _ in fetched] == [True] * 3
            assert made.origin.bytes_by_peer == {"eu": len(DATA)}
        async with made.relay(), agents(made, "a") as [agent]:
            data, _ = await agent.fetch()
            assert data == DATA
        assert made.origin.bytes_by_peer == {"eu": len(DATA)}


@pytest.mark.asyncio
async def test_a_lying_relay_is_dropped_and_the_weights_come_from_the_origin(tmp_path):
    async with world(tmp_path) as made:
        liar = made.giver(may_send_at_relay, bytes(len(DATA)), made.key("eu"))
        made.at(liar.hub.port)
        async with agents(made, "a") as [agent]:
            data, fetcher = await agent.fetch()
            assert data == DATA
            assert fetcher.dropped == {"relay eu": WRONG_CHUNK}
            assert made.origin.bytes_by_peer["a"] == len(DATA)
        await liar.close()


@pytest.mark.asyncio
async def test_a_relay_that_is_not_there_costs_nothing(tmp_path):
    async with world(tmp_path) as made:
        made.at(9)
        async with agents(made, "a") as [agent]:
            await until(lambda: agent.sources.is_up(ORIGIN))
            data, fetcher = await agent.fetch(wait_for_all=False)
            assert (data, dict(fetcher.dropped)) == (DATA, {})


@pytest.mark.asyncio
async def test_several_lanes_of_one_key_carry_one_fetch(tmp_path):
    async with world(tmp_path) as made, agents(made, "a", weights_lanes=3) as [agent]:
        agent.sources._keep_lanes(3)
        assert [source.id for source in agent.sources.sources()] == [ORIGIN, "lane 1", "lane 2"]
        data, _ = await agent.fetch()
        assert data == DATA
        assert len(made.origin.routes["a"]) == 3
        assert made.origin.bytes_by_peer == {"a": len(DATA)}
        agent.sources._keep_lanes(1)
        assert [source.id for source in agent.sources.sources()] == [ORIGIN]
        assert (await agent.fetch())[0] == DATA


@pytest.mark.asyncio
async def test_a_relay_hears_nothing_but_requests_for_chunks_and_from_its_own_list_only(tmp_path):
    async with world(tmp_path) as made, made.relay():
        stranger = KeyPair.generate("stranger", made.key("a").role)
        options = link_options(made.transport(), PLANE)._replace(reconnect_s=0.05)
        endpoint = f"tcp://127.0.0.1:{made.relays[0].port}"
        server_key = made.key("eu").public_key
        links = [
            PlaneLink(made.network.link(endpoint, options, key=key, server_key=server_key), PLANE)
            for key in (made.key("a"), made.key("eu"), stranger)
        ]
        agent, itself, unknown = links
        await until(lambda: unknown.link.handshake_failures > 0)
        assert not unknown.link.connected
        request = ChunkRequest(digest=ENTRY.digest, indices=(0,))
        await itself.send(request)
        await agent.send(WeightsRequest(policy="r/p", have_version=None))
        await agent.send(request)  # without what it must hash to
        [answer] = await agent.expect(Chunk)
        assert (answer.index, answer.found) == (0, False)
        for one in (itself, agent):
            [refused] = await one.expect(Refuse)
            assert refused.code == "role.not_allowed"
            assert one.received == []
        for link in links:
            await link.close()


@pytest.mark.asyncio
async def test_the_command_says_where_it_listens_and_stops_in_order(tmp_path):
    async with world(tmp_path) as made:
        overrides = []
        for name in ("transport", "relay"):
            table = msgspec.to_builtins(getattr(made.relay_config(), name))
            for key, value in table.items():
                overrides += ["--set", f"{name}.{key}={json.dumps(value)}"]
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "farflow", "relay", "run", *overrides),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        try:
            async with asyncio.timeout(WAIT_S):
                ready = json.loads(await child.stdout.readline())
                assert (ready["ready"], ready["relay"]) == (True, "eu")
                made.at(ready["port"])
                async with agents(made, "a") as [agent]:
                    assert (await agent.fetch())[0] == DATA
                child.terminate()
                assert await child.wait() == 0
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
            child._transport.close()


@pytest.mark.asyncio
async def test_a_folder_that_cannot_be_made_is_a_wrong_setting(tmp_path):
    async with world(tmp_path) as made:
        config = made.relay_config()
        table = msgspec.structs.replace(config.relay, folder="/proc/nothing")
        with pytest.raises(ConfigError, match=r"relay\.folder: cannot create /proc/nothing"):
            await run_daemon(
                msgspec.structs.replace(config, relay=table),
                stop=asyncio.Event(),
                on_ready=lambda _: None,
                network=made.network,
            )
