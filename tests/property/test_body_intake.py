"""Bodies arrive whole whatever the link does to their chunks: lost, twice, in any order, cut off,
with either end restarted in between. Seeded, in a clock of its own."""

import asyncio
import hashlib
import random
from pathlib import Path

import pytest

from scheduler.body_intake import BodyIntake
from transport.chunk_parts import place_of
from transport.envelope import LIMITS, decode
from transport.errors import PeerUnreachable, WindowFull
from transport.messages import Chunk, ChunkRequest, GroupSummary, OfferedBody, Plane
from transport.weights.manifest import chunk_digest

CHUNK = 64 << 10
SIZES = (CHUNK // 2, 3 * CHUNK, 7 * CHUNK + 1, CHUNK + 100)
MAX_ROUNDS = 400


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic_s(self) -> float:
        return self.now

    def wall_s(self) -> float:
        return self.now


def offered(number: int, body: bytes) -> OfferedBody:
    job = f"sums/t-{number:06d}"
    summary = GroupSummary(
        attempt=f"{job}#0",
        fence=(1, number),
        job=job,
        digest=hashlib.sha256(body).hexdigest(),
        size_bytes=len(body),
        rewards=(1.0,),
        lengths=(3,),
        versions={},
        prompt_tokens=5,
        queued_s=0.1,
        generating_s=0.2,
    )
    starts = range(0, len(body), CHUNK)
    digests = tuple(chunk_digest(body[start : start + CHUNK]) for start in starts)
    return OfferedBody(summary=summary, chunk_bytes=CHUNK, chunk_digests=digests)


class World:
    """Agents with bodies, a link that mistreats them, and one life of the intake after another."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.bodies: dict[str, tuple[str, OfferedBody, bytes]] = {}
        self.arrived: dict[str, bytes] = {}
        self.in_flight: list[tuple[str, Chunk, bytes]] = []
        self.lives: dict[str, int] = {}
        for number, size in enumerate(SIZES):
            body = self.rng.randbytes(size)
            one = offered(number, body)
            self.bodies[one.summary.digest] = (self.rng.choice("ab"), one, body)
        self.start()

    def start(self) -> None:
        self.in_flight.clear()
        self.intake = BodyIntake(
            self.folder,
            self,
            self.clock,
            hand_on=self.hand_on,
            has_room=lambda size_bytes: True,
            queued=lambda: None,
        )
        self.tasks = [asyncio.create_task(part) for part in self.intake.parts().values()]

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.intake.close()

    def hand_on(self, agent: str, route: bytes, summary: GroupSummary, body: bytes) -> None:
        wanted, _, right = self.bodies[summary.digest]
        assert (agent, body) == (wanted, right)
        self.arrived[summary.digest] = body
        asyncio.get_running_loop().call_soon(self.settle, agent, summary.digest)

    def settle(self, agent: str, digest: str) -> None:
        self.intake.settled(agent, digest, keep=False)

    def offer(self, name: str) -> None:
        """Over a new connection: what was on the way over the last one is lost."""
        self.lives[name] = self.lives.get(name, 0) + 1
        self.in_flight = [one for one in self.in_flight if one[0] != name]
        for digest, (agent, one, _) in self.bodies.items():
            if agent == name and digest not in self.arrived:
                assert self.intake.offered(name, self.route(name), one) == ""

    def route(self, name: str) -> bytes:
        return f"{name}{self.lives[name]}".encode()

    def send_frames(self, route: bytes, frames: list[bytes]) -> None:
        """As the hub's: requests come to the agent, who answers if the link lets it."""
        name = route[:1].decode()
        if route != self.route(name):
            raise PeerUnreachable("it has gone")
        if self.rng.random() < 0.05:
            raise WindowFull("it does not keep up")
        request, _ = decode(frames, LIMITS[Plane.TRAJECTORIES])
        assert isinstance(request, ChunkRequest)
        _, one, body = self.bodies[request.digest]
        for index in request.indices:
            place = place_of(index, request.part_bytes, one.chunk_bytes)
            assert place is not None
            start = place.number * CHUNK
            part = body[start + place.start : min(start + place.stop, start + CHUNK)]
            chunk = Chunk(digest=request.digest, index=index, part_bytes=request.part_bytes)
            for _ in range(self.rng.choice((0, 1, 1, 1, 2))):
                self.in_flight.append((name, chunk, part))

    def deliver(self) -> None:
        self.rng.shuffle(self.in_flight)
        for _ in range(self.rng.randint(0, len(self.in_flight))):
            name, chunk, part = self.in_flight.pop()
            self.intake.chunk_arrived(name, chunk, [part])


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(12))
async def test_every_body_arrives_once_whatever_happens_to_its_chunks(
    tmp_path: Path, seed: int
) -> None:
    world = World(tmp_path, seed)
    for name in "ab":
        world.offer(name)
    for _ in range(MAX_ROUNDS):
        if len(world.arrived) == len(world.bodies):
            break
        world.deliver()
        world.clock.now += world.rng.choice((0.01, 0.1, 1.0, 20.0))
        world.intake.look_again()
        for _ in range(3):
            await asyncio.sleep(0.001)  # its thread for the disk is a real one
        what = world.rng.random()
        if what < 0.05:
            await world.stop()
            world.start()
        if what < 0.1 or not world.in_flight:
            for name in "ab":
                world.offer(name)
    assert len(world.arrived) == len(world.bodies)
    await world.stop()
    assert world.intake.queued_bytes == 0
