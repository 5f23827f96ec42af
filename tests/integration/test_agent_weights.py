"""The agent daemon and its weights when something is wrong with them: engine, copy, relays."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import structlog
from agent_cloud import POLICY, AgentCloud

from edge_agent import home, leftovers
from edge_agent.engines.fake import FakeEngine
from edge_agent.weight_copy import WeightCopies
from edge_agent.weight_staging import StagedVersion
from transport.chunk_parts import place_of
from transport.envelope import LIMITS, decode, encode
from transport.errors import LinkClosed
from transport.keys import Peer, create_keys
from transport.links import LinkOptions
from transport.memory_links import MemoryNetwork
from transport.messages import (
    AttemptFailed,
    Chunk,
    ChunkRequest,
    Heartbeat,
    LeaseReply,
    Plane,
    Role,
    VersionServing,
    WeightsRequest,
)
from transport.runtime.settings import RelayAddress
from transport.weights.digest import state_digest
from transport.weights.patch import CellList, Patch

WAIT_S = 20.0
Serve = Callable[[ChunkRequest, int], bytes | None]


@pytest_asyncio.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[AgentCloud]:
    async with AgentCloud(tmp_path, MemoryNetwork()) as made, asyncio.timeout(WAIT_S):
        yield made


class Life:
    """One life of the agent with an engine that the test can look into."""

    def __init__(self, cloud: AgentCloud, engine: FakeEngine, **table: Any) -> None:
        self.stop = asyncio.Event()
        self.task = cloud.start(self.stop, engines=lambda config, clock: engine, **table)

    async def end(self) -> int:
        self.stop.set()
        return await asyncio.wait_for(self.task, WAIT_S)


class Forgetful(FakeEngine):
    """Says that it has taken the next change of its weights, and has not."""

    forgets = 1

    async def apply(self, policy: str, version: int, patch: Patch) -> float:
        if self.forgets:
            self.forgets -= 1
            patch = {}
        return await super().apply(policy, version, patch)


@pytest.mark.asyncio
async def test_an_engine_with_other_weights_is_found_and_healed(cloud: AgentCloud) -> None:
    cloud.publish()
    engine = Forgetful(16)
    life = Life(cloud, engine)
    await cloud.hear(VersionServing)
    with structlog.testing.capture_logs() as logs:
        cloud.publish()
        assert (await cloud.hear(VersionServing, 2)).version == 1
        await cloud.until(lambda: cloud.all(WeightsRequest)[-1].have_version is None)
        cloud.offer(1)
        assert (await cloud.hear(LeaseReply)).reason == "weights_unavailable"
        serving = await cloud.hear(VersionServing, 3)
    assert (serving.version, serving.digest) == (1, cloud.digest())
    assert state_digest(dict(engine.read_weights(POLICY))) == cloud.digest()
    assert "engine.weights" in [log["code"] for log in logs if log["event"] == "weights.drifted"]
    cloud.offer(2)
    assert (await cloud.hear(LeaseReply, 2)).accepted
    assert await life.end() == 0


@pytest.mark.asyncio
async def test_a_policy_that_the_engine_lost_is_loaded_again_from_the_copy(
    cloud: AgentCloud,
) -> None:
    cloud.publish()
    engine = FakeEngine(16)
    life = Life(cloud, engine)
    await cloud.hear(VersionServing)
    cloud.publish()
    await cloud.hear(VersionServing, 2)
    fetched = len(cloud.all(ChunkRequest))
    await engine.unload_policy(POLICY)
    assert engine.when_lost is not None
    engine.when_lost(POLICY)
    serving = await cloud.hear(VersionServing, 3)
    assert (serving.version, serving.digest) == (1, cloud.digest())
    assert len(cloud.all(ChunkRequest)) == fetched
    assert state_digest(dict(engine.read_weights(POLICY))) == cloud.digest()
    cloud.offer(1)
    assert (await cloud.hear(LeaseReply)).accepted
    assert await life.end() == 0


@pytest.mark.asyncio
async def test_what_is_hosted_no_more_since_the_last_life_goes_from_the_disk(
    cloud: AgentCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "LOOK_S", 0.05)
    monkeypatch.setattr(leftovers, "AFTER_S", 0.2)
    cloud.publish()
    life = Life(cloud, FakeEngine(16))
    await cloud.hear(VersionServing)
    assert await life.end() == 0
    weights = cloud.folder / "agent" / "weights"
    (own,) = weights.iterdir()
    unfinished = weights / "over%2Fsolver" / "blobs"
    unfinished.mkdir(parents=True)
    (unfinished / "0.part").write_bytes(b"x")
    life = Life(cloud, FakeEngine(16))
    await cloud.until(lambda: not unfinished.parent.exists())
    assert own.exists()
    assert await life.end() == 0
    cloud.policies = ()
    life = Life(cloud, FakeEngine(16))
    await cloud.until(lambda: not own.exists())
    assert await life.end() == 0


class Decaying(WeightCopies):
    """Its memory loses a bit after version 1 came in."""

    decays = 1

    def commit(self, staged: StagedVersion) -> None:
        super().commit(staged)
        if staged.version == 1 and self.decays:
            self.decays -= 1
            cells = staged.arena.tensors["bias"].cells()[3:4] ^ np.uint16(1)
            flipped = {"bias": (CellList(np.array([3]), cells),)}
            staged.arena.apply(flipped, staged.version, staged.arena.digests)


@pytest.mark.asyncio
async def test_a_copy_that_lost_a_bit_is_found_and_fetched_anew(
    cloud: AgentCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home, "WeightCopies", Decaying)
    cloud.publish()
    engine = FakeEngine(16)
    life = Life(cloud, engine, verify_every_swaps=2, read_back_every_swaps=0)
    await cloud.hear(VersionServing)
    cloud.publish()
    serving = await cloud.hear(VersionServing, 3)
    assert (serving.version, serving.digest) == (1, cloud.digest())
    assert serving.fetched_bytes > 0
    cloud.publish()
    assert (await cloud.hear(VersionServing, 4)).digest == cloud.digest()
    assert state_digest(dict(engine.read_weights(POLICY))) == cloud.digest()
    assert cloud.all(AttemptFailed) == []
    assert await life.end() == 0


@pytest.mark.asyncio
async def test_what_was_measured_is_stated_in_later_requests(cloud: AgentCloud) -> None:
    cloud.publish()
    life = Life(cloud, FakeEngine(16))
    await cloud.hear(VersionServing)
    cloud.publish()
    await cloud.hear(VersionServing, 2)
    await cloud.until(lambda: cloud.all(WeightsRequest)[-1].have_version == 1)
    first, *_, last = cloud.all(WeightsRequest)
    assert (first.rate_bytes_s, first.decode_cells_s) == (0.0, 0.0)
    assert last.rate_bytes_s > 0
    assert last.decode_cells_s > 0
    assert await life.end() == 0


class RelayHub:
    """A relay's hub that answers with what ``serve`` gives for a request and index."""

    def __init__(self, cloud: AgentCloud, serve: Serve) -> None:
        keys = create_keys(cloud.folder / "keys", agents=["near"], relays=["region"])
        agent = Peer(name="near", role=Role.AGENT)
        public = keys.agents["near"].public_key
        self.served = 0
        self._serve = serve
        self._hub = cloud.network.hub(
            "tcp://127.0.0.1:0",
            LinkOptions.for_plane(Plane.WEIGHTS),
            key=keys.relays["region"],
            authorise=lambda key: agent if key == public else None,
        )
        cloud.relays = (RelayAddress(name="region", host="127.0.0.1", port=self._hub.port),)
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            try:
                batch = await self._hub.recv()
            except LinkClosed:
                return
            for inbound in batch:
                request, _ = decode(inbound.frames, LIMITS[Plane.WEIGHTS])
                assert isinstance(request, ChunkRequest)
                for index in request.indices:
                    data = self._serve(request, index)
                    self.served += data is not None
                    chunk = Chunk(
                        digest=request.digest,
                        index=index,
                        part_bytes=request.part_bytes,
                        found=data is not None,
                    )
                    payload = [] if data is None else [data]
                    self._hub.send(inbound.route, encode(chunk, payload))

    async def close(self) -> None:
        await self._hub.close()
        await self.task


def honest(cloud: AgentCloud) -> Serve:
    def serve(request: ChunkRequest, index: int) -> bytes | None:
        place = place_of(index, request.part_bytes, request.chunk_bytes)
        assert place is not None
        data = cloud.versions.read_chunk(request.digest, place.number)
        return None if data is None else data[place.start : place.stop]

    return serve


async def connected(relay: RelayHub, cloud: AgentCloud) -> None:
    await cloud.until(lambda: relay._hub.peers and cloud.all(Heartbeat))


@pytest.mark.asyncio
async def test_a_relay_delivers_and_the_origin_only_plans(cloud: AgentCloud) -> None:
    relay = RelayHub(cloud, honest(cloud))
    life = Life(cloud, FakeEngine(16))
    await connected(relay, cloud)
    cloud.publish()
    assert (await cloud.hear(VersionServing)).digest == cloud.digest()
    cloud.publish()
    assert (await cloud.hear(VersionServing, 2)).digest == cloud.digest()
    assert relay.served > 0
    assert cloud.chunks_served == 0
    assert await life.end() == 0
    await relay.close()


@pytest.mark.asyncio
async def test_a_lying_relay_is_dropped_and_the_origin_serves(cloud: AgentCloud) -> None:
    truth = honest(cloud)

    def lie(request: ChunkRequest, index: int) -> bytes | None:
        data = truth(request, index)
        return None if data is None else bytes(len(data))

    relay = RelayHub(cloud, lie)
    life = Life(cloud, FakeEngine(16))
    await connected(relay, cloud)
    with structlog.testing.capture_logs() as logs:
        cloud.publish()
        assert (await cloud.hear(VersionServing)).digest == cloud.digest()
    (warning,) = [log for log in logs if log["event"] == "relay.left_alone"]
    assert (warning["source"], warning["reason"]) == ("relay region", "relay.wrong_chunk")
    told = relay.served
    cloud.publish()
    assert (await cloud.hear(VersionServing, 2)).digest == cloud.digest()
    assert relay.served == told
    assert await life.end() == 0
    await relay.close()
