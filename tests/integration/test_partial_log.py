"""Finished turns in the trajectory log, over real sockets."""

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest
from service_world import POLICY, PlaneLink, ServiceWorld, service_world, until

from scheduler import partials
from scheduler.core.settings import TRAJECTORY_LOG
from scheduler.partial_files import PartialFiles
from scheduler.trajectory_log import serve
from transport.keys import trainer_name
from transport.messages import (
    BodiesGone,
    BodiesReleased,
    Body,
    BodyRequest,
    Chunk,
    ChunkRequest,
    GroupSummary,
    PartialAck,
    PartialOffer,
    PartialPut,
    PartialStored,
    PartialSummary,
    Plane,
    SummariesAccepted,
    TrajectoryAcks,
    TrajectoryPut,
)
from transport.weights.manifest import chunk_digest

PLANE = Plane.TRAJECTORIES
CHUNK = 256 << 10


def turns(data: bytes, number: int = 1, **changes: Any) -> PartialSummary:
    values = {
        "attempt": f"sums/t-{number:06d}#1",
        "fence": (1, number),
        "job": f"sums/t-{number:06d}",
        "turns": 2,
        "digest": hashlib.sha256(data).hexdigest(),
        "size_bytes": len(data),
        "oldest": {POLICY: 3},
    }
    return PartialSummary(**{**values, **changes})


async def put(agent: PlaneLink, summary: PartialSummary, data: bytes) -> bool:
    await agent.send(PartialPut(partial=summary), (data,))
    [ack] = await agent.expect(PartialAck)
    assert (ack.attempt, ack.digest) == (summary.attempt, summary.digest)
    return ack.kept


async def asked(peer: PlaneLink, digest: str) -> bytes | None:
    await peer.send(BodyRequest(digests=(digest,)))
    await until(lambda: any(isinstance(message, Body) for message, _ in peer.received))
    [(body, payload)] = peer.received
    peer.received = []
    assert isinstance(body, Body)
    assert body.digest == digest
    return b"".join(payload) if body.found else None


def announced(world: ServiceWorld) -> list[PartialSummary]:
    return [partial for m in world.control.of(PartialStored) for partial in m.partials]


def files(folder: Path) -> list[Path]:
    return list((folder / "scheduler" / TRAJECTORY_LOG / "turns").glob("*.turns"))


async def release(world: ServiceWorld, *digests: str) -> None:
    control = world.control
    control.hub.send(control.routes[TRAJECTORY_LOG], BodiesReleased(digests=digests))
    await until(lambda: any(set(digests) <= set(m.digests) for m in control.of(BodiesGone)))


@pytest.mark.asyncio
async def test_the_newest_turns_are_kept_announced_and_given_to_whoever_knows_them(
    tmp_path: Path,
) -> None:
    old, new = turns(b"old"), turns(b"new", turns=4)
    async with service_world(tmp_path) as world:
        async with world.serving(serve, world.config()) as port:
            a, b = world.link("a", PLANE, port), world.link("b", PLANE, port)
            assert await put(a, old, b"old")
            assert await put(a, new, b"new")
            assert not await put(a, old, b"old")  # late
            assert await put(b, turns(b"b's", turns=1), b"b's")  # another agent's, same attempt
            await until(lambda: len(announced(world)) == 3)
            assert [(p.agent, p.turns) for p in announced(world)] == [("a", 2), ("a", 4), ("b", 1)]
            assert await asked(b, new.digest) == b"new"
            assert await asked(b, old.digest) is None
            trainer = world.link(trainer_name(POLICY), PLANE, port)
            assert await asked(trainer, new.digest) is None
        async with world.serving(serve, world.config()) as port:  # restarted
            again = world.link("b", PLANE, port)
            assert await asked(again, new.digest) == b"new"
            await until(lambda: {p.digest for p in announced(world)[3:]} >= {new.digest})
            await release(world, new.digest)
            assert await asked(again, new.digest) is None
            assert len(files(tmp_path)) == 1


@pytest.mark.asyncio
async def test_an_agent_gets_no_result_and_a_result_ends_the_turns_of_its_attempt(
    tmp_path: Path,
) -> None:
    partial = turns(b"turns")
    body = b"a result"
    summary = GroupSummary(
        attempt=partial.attempt,
        fence=partial.fence,
        job=partial.job,
        digest=hashlib.sha256(body).hexdigest(),
        size_bytes=len(body),
        rewards=(1.0,),
        lengths=(3,),
        versions={POLICY: (0, 1)},
        prompt_tokens=5,
        queued_s=0.1,
        generating_s=0.2,
    )
    async with service_world(tmp_path) as world, world.serving(serve, world.config()) as port:
        agent = world.link("a", PLANE, port)
        assert await put(agent, partial, b"turns")
        await agent.send(TrajectoryPut(summary=summary, cumulative=True), (body,))
        await agent.expect(TrajectoryAcks)
        assert await asked(agent, summary.digest) is None
        assert await asked(agent, partial.digest) is None
        await until(lambda: files(tmp_path) == [], "the turns are dropped")
        trainer = world.link(trainer_name(POLICY), PLANE, port)
        assert await asked(trainer, summary.digest) == body
        control = world.control
        accepted = SummariesAccepted(digests=(summary.digest,))
        control.hub.send(control.routes[TRAJECTORY_LOG], accepted)


def offer_of(summary: PartialSummary, data: bytes) -> PartialOffer:
    chunks = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
    digests = tuple(chunk_digest(chunk) for chunk in chunks)
    return PartialOffer(partial=summary, chunk_bytes=CHUNK, chunk_digests=digests)


async def give(agent: PlaneLink, data: bytes, until_kind: type) -> None:
    """Answer requests for chunks until something else comes."""
    while not any(isinstance(message, until_kind) for message, _ in agent.received):
        await until(lambda: bool(agent.received))
        requests = [m for m, _ in agent.received if isinstance(m, ChunkRequest)]
        agent.received = [(m, p) for m, p in agent.received if not isinstance(m, ChunkRequest)]
        for request in requests:
            part_bytes = request.part_bytes or CHUNK
            for index in request.indices:
                part = data[index * part_bytes : (index + 1) * part_bytes]
                chunk = Chunk(digest=request.digest, index=index, part_bytes=request.part_bytes)
                await agent.send(chunk, (part,))


@pytest.mark.asyncio
async def test_large_turns_come_in_chunks_and_wrong_ones_are_not_kept(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(1_300_000)
    summary = turns(data)
    async with service_world(tmp_path) as world, world.serving(serve, world.config()) as port:
        agent = world.link("a", PLANE, port)
        await agent.send(offer_of(summary, data))
        await give(agent, bytes(len(data)), PartialAck)
        assert [ack.kept for ack in await agent.expect(PartialAck)] == [False]
        await agent.send(offer_of(summary, data))
        await give(agent, data, PartialAck)
        assert [ack.kept for ack in await agent.expect(PartialAck)] == [True]
        await agent.send(offer_of(summary, data))  # there: asked for no more
        assert [ack.kept for ack in await agent.expect(PartialAck)] == [True]
        assert await asked(agent, summary.digest) == data


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "changes",
    [
        {"digest": "ab" * 32},
        {"digest": "../../x"},
        {"size_bytes": 3},
        {"turns": 0},
        {"job": "sums/t-000002"},
        {"oldest": {}},
    ],
)
async def test_turns_that_are_not_what_is_said_of_them_are_not_kept(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    async with service_world(tmp_path) as world, world.serving(serve, world.config()) as port:
        agent = world.link("a", PLANE, port)
        assert not await put(agent, turns(b"turns", **changes), b"turns")
        assert await put(agent, turns(b"turns"), b"turns")


@pytest.mark.asyncio
async def test_an_agent_displaces_its_own_oldest_turns_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partials, "MAX_PARTIALS", 2 * partials.AGENT_SHARE)
    async with service_world(tmp_path) as world, world.serving(serve, world.config()) as port:
        a, b = world.link("a", PLANE, port), world.link("b", PLANE, port)
        other = turns(b"b's", 99)
        assert await put(b, other, b"b's")
        every = [(turns(f"{n}".encode(), n), f"{n}".encode()) for n in range(1, 6)]
        for summary, data in every:
            assert await put(a, summary, data)
        assert [await asked(a, summary.digest) for summary, _ in every] == [
            *(None, None, None),
            *(data for _, data in every[3:]),
        ]
        assert await asked(b, other.digest) == b"b's"
        await until(lambda: len(files(tmp_path)) == 3)


def test_damaged_files_are_removed_when_the_folder_is_opened(tmp_path: Path) -> None:
    store = PartialFiles(tmp_path / "turns")
    for number in range(4):
        data = b"turns" * (number + 1)
        assert store.write(turns(data, number, agent="a"), data)
    first, second, third, _ = sorted((tmp_path / "turns").glob("*.turns"))
    first.write_bytes(first.read_bytes()[:-1])
    second.write_bytes(b"junk")
    (tmp_path / "turns" / "other.turns").write_bytes(third.read_bytes())
    again = PartialFiles(tmp_path / "turns")
    found = again.load()
    assert len(found) == len(list((tmp_path / "turns").iterdir())) == 2
    for summary in found:
        data = again.read(summary)
        assert data is not None
        assert hashlib.sha256(data).hexdigest() == summary.digest
        again.remove(summary)
        again.remove(summary)
        assert again.read(summary) is None


@pytest.mark.asyncio
async def test_turns_that_cannot_be_removed_leave_no_others_on_the_disk(tmp_path: Path) -> None:
    every = [turns(f"turns {number}".encode(), number) for number in range(1, 5)]
    async with (
        service_world(tmp_path) as world,
        world.serving(serve, world.config()) as port,
    ):
        agent = world.link("a", PLANE, port)
        for number, summary in enumerate(every, 1):
            assert await put(agent, summary, f"turns {number}".encode())
        damaged = next(path for path in files(tmp_path) if b"turns 1" in path.read_bytes())
        damaged.write_bytes(b"x")
        await release(world, *(summary.digest for summary in every))
        await until(lambda: files(tmp_path) == [damaged])
