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
from service_world import POLICY, ServiceWorld, service_world, until

from bench.uplink import Uplink, fill
from edge_agent.spool import Spool
from scheduler.trajectory_log import NAME, serve
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
CHUNK = 256 << 10


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
    spool = fill(tmp_path / "spool", 3, 700_000, seed=2)
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
        assert list((tmp_path / "scheduler" / NAME / "partial").iterdir()) == []
    assert Spool(tmp_path / "spool", 2**30).entries() == []


@pytest.mark.asyncio
async def test_after_a_cut_only_what_is_missing_is_asked_for(tmp_path: Path) -> None:
    size_bytes = 3 << 20
    spool = fill(tmp_path / "spool", 1, size_bytes)
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
    spool = fill(tmp_path / "spool", 1, size_bytes)
    partial = tmp_path / "scheduler" / NAME / "partial"
    async with service_world(tmp_path) as world:
        config = world.config()
        async with world.process("scheduler.trajectory_log", config) as (child, port):
            async with slow_link(port, 40e6) as proxy:
                agent = uplink(world, spool, proxy.addresses["log"][1])
                await until(lambda: sum(p.stat().st_blocks for p in partial.iterdir()) > 6000)
                child.send_signal(signal.SIGKILL)
                await child.wait()
                await agent.close()
        asked: list[int] = []

        def heard(message) -> None:
            if isinstance(message, ChunkRequest):
                asked.extend(i * (message.part_bytes or CHUNK) // CHUNK for i in message.indices)

        async with world.process("scheduler.trajectory_log", config) as (child, port):
            again = uplink(world, Spool(tmp_path / "spool", 2**30), port, heard=heard)
            async with asyncio.timeout(10.0):
                await again.empty.wait()
            await again.close()
            await until(lambda: len(announced(world)) == 1)
        assert 0 < len(set(asked)) <= 18  # of 24 chunks


@pytest.mark.asyncio
async def test_several_agents_at_once_share_the_log(tmp_path: Path) -> None:
    spools = {
        name: fill(tmp_path / f"spool-{name}", 4, 500_000, seed=number)
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
    spool = fill(tmp_path / "spool", 2, 700_000)
    async with service_world(tmp_path) as world:
        config = world.config(trajectory_disk_bytes=1_000_000)
        async with world.serving(serve, config) as port:
            agent = uplink(world, spool, port)
            await until(lambda: agent.core.status().spooled == 1)
            await agent.close()
        async with world.serving(serve, world.config()) as port:
            agent = uplink(world, Spool(tmp_path / "spool", 2**30), port)
            async with asyncio.timeout(10.0):
                await agent.empty.wait()
            await agent.close()
        await until(lambda: len(announced(world)) == 2)


@pytest.mark.asyncio
async def test_a_body_damaged_in_the_spool_is_lost_and_said_to_be(tmp_path: Path) -> None:
    spool = fill(tmp_path / "spool", 2, 700_000)
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


@pytest.mark.asyncio
async def test_offers_that_do_not_add_up_are_refused_and_wrong_chunks_are_not_believed(
    tmp_path: Path,
) -> None:
    good, body = offered()
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
        wrong = msgspec.structs.replace(
            good, summary=msgspec.structs.replace(good.summary, digest="ab" * 32)
        )
        for body_offer, code in ((wrong, "integrity.checksum"), (good, "")):
            await agent.send(TrajectoryOffer(bodies=(body_offer,)))
            digest = body_offer.summary.digest
            left = 2  # the first answer is damaged
            while left or not (
                code or any(isinstance(m, TrajectoryAcks) for m, _ in agent.received)
            ):
                if any(isinstance(m, TrajectoryRefused) for m, _ in agent.received):
                    break
                await until(lambda: bool(agent.received))
                if isinstance(agent.received[0][0], TrajectoryAcks):
                    break
                [asked] = await agent.expect(ChunkRequest)
                assert asked.digest == digest
                for index in asked.indices:
                    size = asked.part_bytes or CHUNK
                    part = body[index * size : (index + 1) * size]
                    if left == 2 and not code:
                        part = bytes(len(part))
                    for _ in range(2):  # everything comes twice
                        chunk = Chunk(digest=digest, index=index, part_bytes=asked.part_bytes)
                        await agent.send(chunk, (part,))
                left -= left > 0
                await until(lambda: bool(agent.received))
            if code:
                [refused] = await agent.expect(TrajectoryRefused)
                assert refused.code == code
            else:
                [acks] = await agent.expect(TrajectoryAcks)
                assert acks.bodies == (BodyRef(attempt=good.summary.attempt, digest=digest),)
        await agent.send(TrajectoryOffer(bodies=(good,)))  # durable already: asked for no more
        await agent.expect(TrajectoryAcks)
        await agent.send(TrajectoryPut(summary=good.summary), (body,))
        await agent.expect(TrajectoryAck)
        assert agent.received == []
