"""The weight store with real sockets, keys and files."""

import asyncio
import hashlib
import signal

import pytest
from publisher import Trainer, weights
from service_world import POLICY, PlaneLink, service_world, until
from signing import signing_key

from scheduler import weight_keeper
from scheduler.core.settings import WEIGHT_STORE
from scheduler.weight_store import serve
from transport.chunk_parts import ChunkSource
from transport.chunks import ChunkFetcher
from transport.delivery_window import DeliveryWindow
from transport.keys import trainer_name
from transport.messages import (
    Chunk,
    ChunkRequest,
    Plane,
    Refuse,
    VersionAccepted,
    VersionRejected,
    VersionStored,
    WeightsPlan,
    WeightsRequest,
)
from transport.weights.manifest import decode_manifest

PLANE = Plane.WEIGHTS


async def fetch(link: PlaneLink, plan: WeightsPlan) -> dict[str, bytes]:
    """An agent's side: every file of a plan, by name, verified chunk by chunk."""
    entries = []
    for step in plan.steps:
        listed = decode_manifest(step.manifest)
        entries += [entry for entry in listed.files if entry.name in step.files]
    fetcher = ChunkFetcher(entries, sources=[ChunkSource("store", DeliveryWindow())])
    parts: dict[tuple[str, int], bytes] = {}
    now = 0.0
    while not fetcher.done:
        for _, request in fetcher.next_requests(now):
            await link.send(request)
        await until(lambda: any(isinstance(m, Chunk) for m, _ in link.received), "a chunk")
        now += 0.01
        for message, payload in [(m, p) for m, p in link.received if isinstance(m, Chunk)]:
            link.received.remove((message, payload))
            accepted = fetcher.chunk_arrived(
                "store", message.digest, message.index, message.part_bytes, payload[0], now
            )
            if accepted is not None:
                parts[accepted.entry.digest, accepted.index] = bytes(accepted.data)
    return {
        entry.name: b"".join(parts[entry.digest, i] for i in range(len(entry.chunk_digests)))
        for entry in entries
    }


def stored(world) -> list[int]:
    return [message.version for message in world.control.of(VersionStored)]


@pytest.mark.asyncio
async def test_a_version_flows_from_its_trainer_to_an_agent_that_was_waiting(tmp_path):
    async with service_world(tmp_path) as world, world.serving(serve, world.config()) as port:
        trainer = Trainer(tmp_path)
        agent = world.link("a", PLANE, port)
        await agent.send(WeightsRequest(policy=POLICY, have_version=None))
        publisher = world.link(trainer_name(POLICY), PLANE, port)
        await trainer.publish(publisher, trainer.first)
        [plan] = await agent.expect(WeightsPlan)
        assert (plan.policy, plan.version) == (POLICY, 0)
        files = await fetch(agent, plan)
        assert files == {name: bytes(data) for name, data in trainer.first.files.items()}

        await agent.send(
            WeightsRequest(policy=POLICY, have_version=0, have_digest=trainer.first.manifest.digest)
        )
        second = trainer.next(1, 0)
        await trainer.publish(publisher, second)
        [plan] = await agent.expect(WeightsPlan)
        assert plan.version == 1
        assert await fetch(agent, plan) == {n: bytes(d) for n, d in second.files.items()}
        await until(lambda: stored(world) == [0, 1])
        [first, last] = world.control.of(VersionStored)
        assert (first.parent, last.parent, last.step) == (None, 0, 1)
        assert last.delta_bytes == len(second.files["delta.safetensors"])


@pytest.mark.asyncio
async def test_the_first_bytes_follow_the_plan_unasked(tmp_path):
    async with service_world(tmp_path) as world, world.serving(serve, world.config()) as port:
        trainer = Trainer(tmp_path)
        publisher = world.link(trainer_name(POLICY), PLANE, port)
        await trainer.publish(publisher, trainer.first)
        agent = world.link("a", PLANE, port)
        await agent.send(
            WeightsRequest(
                policy=POLICY,
                have_version=0,
                have_digest=trainer.first.manifest.digest,
                ahead_bytes=1 << 20,
                ahead_piece_bytes=1 << 16,
            )
        )
        second = trainer.next(1, 0)
        await trainer.publish(publisher, second)
        [plan] = await agent.expect(WeightsPlan)
        (entry,) = second.manifest.files
        assert {ahead.digest for ahead in plan.ahead} == {entry.digest}
        named = [(ahead.digest, i, ahead.part_bytes) for ahead in plan.ahead for i in ahead.indices]
        assert len(named) == len(entry.chunk_digests)

        def chunks_of(link: PlaneLink) -> list[tuple[Chunk, list[bytes]]]:
            return [(m, p) for m, p in link.received if isinstance(m, Chunk)]

        await until(lambda: len(chunks_of(agent)) == len(named), "what was named")
        chunks = chunks_of(agent)
        assert [(m.digest, m.index, m.part_bytes) for m, _ in chunks] == named
        data = b"".join(payload[0] for _, payload in chunks)
        assert data == second.files["delta.safetensors"]


@pytest.mark.asyncio
async def test_over_links_nobody_knows_yet_chunks_come_in_and_go_out_in_parts(tmp_path):
    async with service_world(tmp_path) as world, world.serving(serve, world.config()) as port:
        trainer = Trainer(tmp_path, chunk_bytes=128 << 10)
        publisher = world.link(trainer_name(POLICY), PLANE, port)
        await trainer.publish(publisher, trainer.first)
        assert {request.part_bytes for request in trainer.asked} == {0, 64 << 10}
        agent = world.link("a", PLANE, port)
        await agent.send(WeightsRequest(policy=POLICY, have_version=None))
        [plan] = await agent.expect(WeightsPlan)
        files = await fetch(agent, plan)
        assert files == {name: bytes(data) for name, data in trainer.first.files.items()}
        [entry] = [e for e in trainer.first.manifest.files if e.name == "model.safetensors"]
        for part_bytes in (1, 32 << 10, 96 << 10, 1 << 20):
            bad = ChunkRequest(digest=entry.digest, indices=(0,), part_bytes=part_bytes)
            await agent.send(bad)
            [answer] = await agent.expect(Chunk)
            assert (answer.found, answer.part_bytes) == (False, part_bytes)


@pytest.mark.asyncio
async def test_only_the_policys_own_trainer_with_its_own_signature_may_publish(tmp_path):
    async with service_world(tmp_path) as world, world.serving(serve, world.config()) as port:
        trainer = Trainer(tmp_path)
        other = world.link(trainer_name("sums/judge"), PLANE, port)
        await trainer.offer(other, trainer.first)
        [rejected] = await other.expect(VersionRejected)
        assert (rejected.code, rejected.policy) == ("protocol.authentication", "sums/judge")
        own = world.link(trainer_name(POLICY), PLANE, port)
        await trainer.offer(own, trainer.first, key=signing_key("22" * 32))
        [rejected] = await own.expect(VersionRejected)
        assert (rejected.code, rejected.version) == ("protocol.authentication", 0)
        agent = world.link("a", PLANE, port)
        await trainer.offer(agent, trainer.first)
        await trainer.publish(own, trainer.first)
        [(refused, _)] = agent.received
        assert isinstance(refused, Refuse)


@pytest.mark.asyncio
async def test_a_used_number_is_rejected_and_a_repeated_offer_is_answered_again(tmp_path):
    async with service_world(tmp_path) as world, world.serving(serve, world.config()) as port:
        trainer = Trainer(tmp_path)
        publisher = world.link(trainer_name(POLICY), PLANE, port)
        await trainer.publish(publisher, trainer.first)
        first = trainer.next(1, 0)
        await trainer.publish(publisher, first)
        asked = len(trainer.asked)
        await trainer.publish(publisher, first)
        assert len(trainer.asked) == asked
        trainer.weights = weights(0)
        trainer.weights["b"] = weights(1)["b"]
        await trainer.offer(publisher, trainer.next(1, 0))
        [rejected] = await publisher.expect(VersionRejected)
        assert "the number is used; the next one is 2" in rejected.message


@pytest.mark.asyncio
async def test_an_interrupted_upload_goes_on_over_a_new_link_where_it_stopped(tmp_path):
    async with service_world(tmp_path) as world, world.serving(serve, world.config()) as port:
        trainer = Trainer(tmp_path)
        first = world.link(trainer_name(POLICY), PLANE, port)
        giving = asyncio.create_task(trainer.give(first, trainer.first))
        trainer.silent = True
        await trainer.offer(first, trainer.first)
        await until(lambda: bool(trainer.asked))
        giving.cancel()
        await asyncio.gather(giving, return_exceptions=True)
        trainer.silent = False
        again = world.link(trainer_name(POLICY), PLANE, port)
        await trainer.publish(again, trainer.first)
        counts: dict[tuple[str, int], int] = {}
        for request in trainer.asked:
            for index in request.indices:
                key = request.digest, index
                counts[key] = counts.get(key, 0) + 1
        assert max(counts.values()) == 2  # what was on the way when the link was left


@pytest.mark.slow
@pytest.mark.asyncio
async def test_after_kill_9_versions_are_served_and_announced_again(tmp_path):
    async with service_world(tmp_path) as world:
        config = world.config()
        trainer = Trainer(tmp_path)
        async with world.process("scheduler.weight_store", config) as (child, port):
            publisher = world.link(trainer_name(POLICY), PLANE, port)
            await trainer.publish(publisher, trainer.first)
            await trainer.publish(publisher, trainer.next(1, 0))
            await until(lambda: stored(world) == [0, 1])
            for version in (0, 1):
                world.control.send(WEIGHT_STORE, VersionAccepted(policy=POLICY, version=version))
            child.send_signal(signal.SIGKILL)
            await child.wait()
        world.control.received.clear()
        async with world.process("scheduler.weight_store", config) as (_, again):
            assert again == port
            await until(lambda: stored(world) == [0, 1])
            agent = world.link("a", PLANE, port)
            await agent.send(WeightsRequest(policy=POLICY, have_version=None))
            [plan] = await agent.expect(WeightsPlan)
            assert plan.version == 1
            assert set(await fetch(agent, plan)) >= {"delta.safetensors", "model.safetensors"}


@pytest.mark.asyncio
async def test_an_agent_that_does_not_read_delays_no_other(tmp_path):
    async with service_world(tmp_path) as world, world.serving(serve, world.config()) as port:
        trainer = Trainer(tmp_path)
        await trainer.publish(world.link(trainer_name(POLICY), PLANE, port), trainer.first)
        entry = next(e for e in trainer.first.manifest.files if e.kind == "snapshot")
        stuck = world.link("b", PLANE, port)
        stuck._task.cancel()
        for _ in range(200):
            await stuck.send(ChunkRequest(digest=entry.digest, indices=tuple(range(10))))
        agent = world.link("a", PLANE, port)
        await agent.send(WeightsRequest(policy=POLICY, have_version=None))
        [plan] = await agent.expect(WeightsPlan)
        assert set(await fetch(agent, plan)) == set(trainer.first.files)
        await agent.send(ChunkRequest(digest="0" * 64, indices=(0,)))
        assert [chunk.found for chunk in await agent.expect(Chunk)] == [False]


def names(plan: WeightsPlan) -> list[str]:
    return [name for step in plan.steps for name in step.files]


@pytest.mark.asyncio
async def test_after_a_rollback_an_agent_waits_for_the_bridge_and_moves_little(tmp_path):
    async with service_world(tmp_path) as world, world.serving(serve, world.config()) as port:
        trainer = Trainer(tmp_path)
        publisher = world.link(trainer_name(POLICY), PLANE, port)
        await trainer.publish(publisher, trainer.first)
        kept = trainer.weights
        abandoned = trainer.next(1, 0)
        await trainer.publish(publisher, abandoned)
        agent = world.link("a", PLANE, port)
        await agent.send(
            WeightsRequest(policy=POLICY, have_version=1, have_digest=abandoned.manifest.digest)
        )
        trainer.weights = kept
        await trainer.publish(publisher, trainer.next(2, 0))
        [plan] = await agent.expect(WeightsPlan)
        assert (plan.version, names(plan)) == (2, ["delta-from-00000001.safetensors"])
        assert set(await fetch(agent, plan)) == set(names(plan))


@pytest.mark.asyncio
async def test_what_is_found_damaged_is_planned_around_at_once_and_made_again(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(weight_keeper, "MAINTAIN_S", 0.05)
    async with service_world(tmp_path) as world:
        config = world.config(cumulative_every_versions=2)
        async with world.serving(serve, config) as port:
            trainer = Trainer(tmp_path)
            publisher = world.link(trainer_name(POLICY), PLANE, port)
            for made in (trainer.first, trainer.next(1, 0), trainer.next(2, 1)):
                await trainer.publish(publisher, made)
            agent = world.link("a", PLANE, port)
            request = WeightsRequest(
                policy=POLICY,
                have_version=0,
                have_digest=trainer.first.manifest.digest,
                rate_bytes_s=1e6,
                decode_cells_s=1e8,
            )
            shortcut = ["delta-from-00000000.safetensors"]

            async def planned(files: list[str]) -> WeightsPlan:
                async with asyncio.timeout(10.0):
                    while True:
                        await agent.send(request)
                        [plan] = await agent.expect(WeightsPlan)
                        if names(plan) == files:
                            return plan

            plan = await planned(shortcut)
            entry = decode_manifest(plan.steps[-1].manifest).files[0]
            (blob,) = tmp_path.glob(f"scheduler/**/{entry.digest}")
            blob.write_bytes(b"x" * entry.size_bytes)
            await agent.send(ChunkRequest(digest=entry.digest, indices=(0,)))
            assert [chunk.found for chunk in await agent.expect(Chunk)] == [False]
            plan = await planned(shortcut)
            assert set(await fetch(agent, plan)) == set(shortcut)
            assert hashlib.sha256(blob.read_bytes()).hexdigest() == entry.digest
