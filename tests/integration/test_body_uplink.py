"""Large bodies from an agent's spool into the trajectory log, over real sockets that are cut."""

import asyncio
import contextlib
import hashlib
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from service_world import POLICY, PlaneLink, ServiceWorld, service_world, until

from bench.uplink import SPOOL_BYTES, Uplink, fill
from edge_agent.spool import Spool
from scheduler.core.settings import TRAJECTORY_LOG
from scheduler.trajectory_log import serve
from sim.link_profile import LinkProfile
from sim.link_proxy import LinkProxy
from transport.keys import KeyPair, load_server_key
from transport.messages import (
    BodyRef,
    Chunk,
    ChunkRequest,
    GroupSummary,
    OfferedBody,
    Plane,
    TrajectoriesStored,
    TrajectoryAck,
    TrajectoryAcks,
    TrajectoryOffer,
    TrajectoryPut,
    TrajectoryRefused,
)
from transport.weights.manifest import chunk_digest

PLANE = Plane.TRAJECTORIES
CHUNK, LARGE_CHUNK = 256 << 10, 1 << 20


def uplink(world: ServiceWorld, spool: Spool, port: int, name: str = "a", **options) -> Uplink:
    keys = world.folder / "keys"
    return Uplink(
        world.network,
        msgspec.structs.replace(world.transport, trajectories_port=port, reconnect_max_s=0.2),
        spool,
        key=KeyPair.load(keys / f"{name}.toml"),
        server_key=load_server_key(keys),
        **options,
    )


def filled(folder: Path, bodies: int, size_bytes: int, seed: int = 0) -> Spool:
    fill(folder, bodies, size_bytes, seed=seed)
    return Spool(folder, SPOOL_BYTES)


def opened(folder: Path) -> Spool:
    return Spool(folder / "spool", SPOOL_BYTES)


def announced(world: ServiceWorld) -> dict[str, GroupSummary]:
    messages = world.control.of(TrajectoriesStored)
    return {summary.digest: summary for message in messages for summary in message.summaries}


@contextlib.asynccontextmanager
async def slow_link(port: int, bits_per_s: float) -> AsyncIterator[LinkProxy]:
    profile = LinkProfile(name="slow", rate_up_bits_per_s=bits_per_s, delay_up_s=0.005)
    proxy = LinkProxy(profile, {"log": ("127.0.0.1", port)}, rng=random.Random(1))
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()


@pytest.mark.asyncio
async def test_small_and_large_bodies_arrive_and_are_acknowledged_together(tmp_path: Path) -> None:
    fill(tmp_path / "spool", 5, 1000, seed=1)
    spool = filled(tmp_path / "spool", 3, 700_000, seed=2)
    heard = []
    async with service_world(tmp_path) as world, world.serving(serve, world.config()) as port:
        agent = uplink(world, spool, port, heard=heard.append)
        async with asyncio.timeout(10.0):
            await agent.empty.wait()
        await agent.close()
        await until(lambda: len(announced(world)) == 8)
        assert {summary.agent for summary in announced(world).values()} == {"a"}
        acks = [message for message in heard if isinstance(message, TrajectoryAcks)]
        assert sum(len(ack.bodies) for ack in acks) == 8
        assert not any(isinstance(message, TrajectoryAck) for message in heard)
        assert list((tmp_path / "scheduler" / TRAJECTORY_LOG / "partial").iterdir()) == []
    assert opened(tmp_path).entries() == []


@pytest.mark.asyncio
async def test_after_a_cut_only_what_is_missing_is_asked_for(tmp_path: Path) -> None:
    size_bytes = 3 << 20
    spool = filled(tmp_path / "spool", 1, size_bytes)
    async with (
        service_world(tmp_path) as world,
        world.serving(serve, world.config()) as port,
        slow_link(port, 16e6) as proxy,
    ):
        agent = uplink(world, spool, proxy.addresses["log"][1])
        await until(lambda: agent.links.bytes_up > size_bytes // 2)
        proxy.set_down(0.05, reset=True)
        async with asyncio.timeout(20.0):
            await agent.empty.wait()
        # What was in the buffers of the cut connection went twice, but not the whole body.
        assert agent.links.bytes_up < 1.8 * size_bytes
        await agent.close()
        await until(lambda: len(announced(world)) == 1)


@pytest.mark.asyncio
async def test_a_restarted_log_and_a_restarted_agent_go_on_where_they_were(tmp_path: Path) -> None:
    size_bytes = 6 << 20
    spool = filled(tmp_path / "spool", 1, size_bytes)
    partial = tmp_path / "scheduler" / TRAJECTORY_LOG / "partial"
    async with service_world(tmp_path) as world:
        config = world.config()
        async with (
            world.process("scheduler.trajectory_log", config) as (child, port),
            slow_link(port, 16e6) as proxy,
        ):
            agent = uplink(world, spool, proxy.addresses["log"][1])
            await until(lambda: sum(p.stat().st_blocks for p in partial.iterdir()) > 4000)
            child.send_signal(signal.SIGKILL)
            await child.wait()
            await agent.close()
        asked: list[int] = []

        def heard(message) -> None:
            if isinstance(message, ChunkRequest):
                asked.extend(
                    i * (message.part_bytes or LARGE_CHUNK) // LARGE_CHUNK for i in message.indices
                )

        async with world.process("scheduler.trajectory_log", config) as (child, port):
            again = uplink(world, opened(tmp_path), port, heard=heard)
            async with asyncio.timeout(10.0):
                await again.empty.wait()
            await again.close()
            await until(lambda: len(announced(world)) == 1)
        assert 0 < len(set(asked)) <= 4  # of 6 chunks


@pytest.mark.asyncio
async def test_several_agents_at_once_share_the_log(tmp_path: Path) -> None:
    spools = {
        name: filled(tmp_path / f"spool-{name}", 4, 500_000, seed=number)
        for number, name in enumerate("ab")
    }
    async with service_world(tmp_path) as world, world.serving(serve, world.config()) as port:
        agents = [uplink(world, spool, port, name) for name, spool in spools.items()]
        async with asyncio.timeout(10.0):
            await asyncio.gather(*(agent.empty.wait() for agent in agents))
        for agent in agents:
            await agent.close()
        await until(lambda: len(announced(world)) == 8)
        by_agent = [summary.agent for summary in announced(world).values()]
        assert (by_agent.count("a"), by_agent.count("b")) == (4, 4)


@pytest.mark.asyncio
async def test_a_full_log_keeps_what_came_and_takes_it_when_there_is_room(tmp_path: Path) -> None:
    spool = filled(tmp_path / "spool", 2, 700_000)
    async with service_world(tmp_path) as world:
        config = world.config(trajectory_disk_bytes=1_000_000)
        async with world.serving(serve, config) as port:
            agent = uplink(world, spool, port)
            await until(lambda: agent.core.status().spooled == 1)
            await agent.close()
        async with world.serving(serve, world.config()) as port:
            agent = uplink(world, opened(tmp_path), port)
            async with asyncio.timeout(10.0):
                await agent.empty.wait()
            await agent.close()
        await until(lambda: len(announced(world)) == 2)


@pytest.mark.asyncio
async def test_a_body_damaged_in_the_spool_is_lost_and_said_to_be(tmp_path: Path) -> None:
    spool = filled(tmp_path / "spool", 2, 700_000)
    [first, _] = sorted((tmp_path / "spool").glob("*.group"))
    data = bytearray(first.read_bytes())
    data[400_000] ^= 1
    first.write_bytes(data)
    async with service_world(tmp_path) as world, world.serving(serve, world.config()) as port:
        agent = uplink(world, spool, port)
        async with asyncio.timeout(10.0):
            await agent.empty.wait()
        await agent.close()
        assert agent.core.status().counters["failed"] == 1
        assert agent.core.status().counters["acknowledged"] == 1
        await until(lambda: len(announced(world)) == 1)


def offered(size_bytes: int = 200_000, **changes) -> tuple[OfferedBody, bytes]:
    body = random.Random(9).randbytes(size_bytes)
    summary = GroupSummary(
        attempt="sums/t-000009#0",
        fence=(1, 9),
        job="sums/t-000009",
        digest=hashlib.sha256(body).hexdigest(),
        size_bytes=size_bytes,
        rewards=(1.0,),
        lengths=(3,),
        versions={POLICY: (0, 1)},
        prompt_tokens=5,
        queued_s=0.1,
        generating_s=0.2,
    )
    values = {"summary": summary, "chunk_bytes": CHUNK, "chunk_digests": (chunk_digest(body),)}
    return OfferedBody(**{**values, **changes}), body


async def give(agent: PlaneLink, body: bytes) -> None:
    """Answer one request for chunks of ``body``, everything twice and the last first."""
    [asked] = await agent.expect(ChunkRequest)
    part_bytes = asked.part_bytes or CHUNK
    for index in (*reversed(asked.indices), *asked.indices):
        part = body[index * part_bytes : (index + 1) * part_bytes]
        chunk = Chunk(digest=asked.digest, index=index, part_bytes=asked.part_bytes)
        await agent.send(chunk, (part,))


@pytest.mark.asyncio
async def test_offers_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    good, _ = offered()
    bad = (
        {"chunk_bytes": 1},
        {"chunk_bytes": 2**40},
        {"chunk_digests": ()},
        {"chunk_digests": (b"short",)},
        {"chunk_digests": (bytes(16), bytes(16))},
        {"summary": msgspec.structs.replace(good.summary, size_bytes=2**40)},
        {"summary": msgspec.structs.replace(good.summary, digest="../../x")},
    )
    async with service_world(tmp_path) as world, world.serving(serve, world.config()) as port:
        agent = world.link("a", PLANE, port)
        for changes in bad:
            await agent.send(TrajectoryOffer(bodies=(msgspec.structs.replace(good, **changes),)))
            [refused] = await agent.expect(TrajectoryRefused)
            assert refused.code == "trajectory.malformed"
        stranger = Chunk(digest="ab" * 32, index=0)
        await agent.send(stranger, (b"x",))  # of nothing that was offered
        await agent.send(TrajectoryOffer(bodies=(good,)))
        await agent.expect(ChunkRequest)


@pytest.mark.asyncio
async def test_a_body_that_is_not_what_was_offered_is_refused_and_a_right_one_is_acknowledged_once(
    tmp_path: Path,
) -> None:
    good, body = offered()
    ref = BodyRef(attempt=good.summary.attempt, digest=good.summary.digest)
    async with service_world(tmp_path) as world, world.serving(serve, world.config()) as port:
        agent = world.link("a", PLANE, port)
        await agent.send(TrajectoryOffer(bodies=(good,)))
        await give(agent, bytes(len(body)))
        [refused] = await agent.expect(TrajectoryRefused)
        assert refused.code == "integrity.checksum"
        await agent.send(TrajectoryOffer(bodies=(good,)))
        await give(agent, body)
        assert await agent.expect(TrajectoryAcks) == [TrajectoryAcks(bodies=(ref,))]
        await agent.send(TrajectoryOffer(bodies=(good, good)))  # durable: asked for no more
        assert await agent.expect(TrajectoryAcks) == [TrajectoryAcks(bodies=(ref, ref))]
        await agent.send(TrajectoryPut(summary=good.summary), (body,))  # an older agent
        await agent.expect(TrajectoryAck)
        assert agent.received == []
        await until(lambda: len(announced(world)) == 1)
