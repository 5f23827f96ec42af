"""Trajectory log and weight store under fire from peers with real keys, over real sockets: they
go on, a healthy peer is served, and what is wrong is counted or refused by name.
"""

import hashlib
import random
import tracemalloc
from collections.abc import Iterator

import golden
import msgpack
import msgspec
import pytest
from chaos_messages import Absurd, Names
from publisher import Trainer
from service_world import POLICY, PlaneLink, service_world, until

from cloud_trainer.bodies import check_body
from scheduler.trajectory_log import serve as serve_log
from scheduler.weight_store import serve as serve_store
from transport.compression import compress
from transport.envelope import LIMITS, encode
from transport.errors import LinkError, LocalProtocolError
from transport.keys import trainer_name
from transport.messages import (
    KINDS,
    PROTOCOL_VERSION,
    Body,
    BodyRequest,
    GroupSummary,
    Message,
    Plane,
    Refuse,
    Role,
    TrajectoryAck,
    TrajectoryPut,
    WeightsPlan,
    WeightsRequest,
)
from transport.permissions import PERMISSIONS

ROUNDS = 150


def hostile(rng: random.Random, role: Role, plane: Plane) -> Iterator[list[bytes]]:
    """Frames of every kind there is, worked on, and senseless messages of what the role may say."""
    said = sorted(PERMISSIONS[role, plane], key=lambda kind: kind.__name__)
    names = Names([POLICY, "sums", "sums/t-000001#0", "0" * 64, hashlib.sha256(b"x").hexdigest()])
    for _ in range(ROUNDS):
        message, payload = rng.choice(golden.SAMPLES)
        frames = encode(message, payload)
        match rng.randrange(5):
            case 0:
                frames[1] = rng.randbytes(rng.randrange(60))
            case 1:
                header = msgpack.unpackb(frames[1])
                for name in list(header):
                    if rng.random() < 0.3:
                        header[name] = rng.choice([None, -1, 2**63, "x" * 300, [[]], b"\0", 1e300])
                frames[1] = msgpack.packb(header)
            case 2:
                frames[0] = bytes([rng.choice([0, PROTOCOL_VERSION, 9]), rng.choice(sorted(KINDS))])
            case 3:
                frames = [*frames, *[rng.randbytes(10)] * rng.randrange(1, 4)]
            case _:
                absurd = Absurd(rng, names).message(rng.choice(said), plane)
                if absurd is not None:
                    # Whether its kind has a payload or not.
                    frames = [*encode(absurd), *(payload if rng.random() < 0.5 else ())]
        yield frames


async def fire(link: PlaneLink, frames: list[bytes]) -> None:
    """Send frames as they are; the link's own checks may be in the way."""

    def sent() -> bool:
        try:
            link.link.send(frames)
        except LocalProtocolError:
            return True
        except LinkError:
            return False
        return True

    await link.link.wait_connected()
    await until(sent, "sent")


def put(number: int) -> tuple[TrajectoryPut, bytes]:
    body = f"body {number}".encode() * 20
    summary = GroupSummary(
        attempt=f"sums/t-{number:06d}#1",
        fence=(1, number),
        job=f"sums/t-{number:06d}",
        digest=hashlib.sha256(body).hexdigest(),
        size_bytes=len(body),
        rewards=(1.0,),
        lengths=(3,),
        versions={POLICY: (0, 0)},
        prompt_tokens=5,
        queued_s=0.0,
        generating_s=0.1,
    )
    return TrajectoryPut(summary=summary), body


def refusals(link: PlaneLink) -> set[str]:
    return {message.code for message, _ in link.received if isinstance(message, Refuse)}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "role"), [("a", Role.AGENT), (trainer_name(POLICY), Role.TRAINER)]
)
async def test_the_trajectory_log_bears_every_kind_and_serves_the_others(tmp_path, name, role):
    plane = Plane.TRAJECTORIES
    async with service_world(tmp_path) as world, world.serving(serve_log, world.config()) as port:
        enemy, friend = world.link(name, plane, port), world.link("b", plane, port)
        reader = world.link(trainer_name(POLICY), plane, port)
        for number, frames in enumerate(hostile(random.Random(3), role, plane)):
            await fire(enemy, frames)
            if number % 50 == 0:
                good, body = put(number)
                await friend.send(good, (body,))
                [ack] = await friend.expect(TrajectoryAck)
                assert isinstance(ack, TrajectoryAck)
                assert ack.digest == good.summary.digest
        await reader.send(BodyRequest(digests=(put(0)[0].summary.digest,)))
        await until(lambda: any(_whole(m, p) for m, p in reader.received), "the friend's body")
        await until(lambda: {"role.not_allowed", "protocol.version"} <= refusals(enemy))


def _whole(message: Message, payload: list[bytes]) -> bool:
    return isinstance(message, Body) and message.found and b"".join(payload) == put(0)[1]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "role"), [("b", Role.AGENT), (trainer_name(POLICY), Role.TRAINER)]
)
async def test_the_weight_store_bears_every_kind_and_serves_the_others(tmp_path, name, role):
    plane = Plane.WEIGHTS
    async with service_world(tmp_path) as world, world.serving(serve_store, world.config()) as port:
        trainer = Trainer(tmp_path)
        publisher = world.link(trainer_name(POLICY), plane, port)
        await trainer.publish(publisher, trainer.first)
        enemy, friend = world.link(name, plane, port), world.link("a", plane, port)
        for frames in hostile(random.Random(4), role, plane):
            await fire(enemy, frames)
        await friend.send(WeightsRequest(policy=POLICY, have_version=None))
        [plan] = await friend.expect(WeightsPlan)
        assert isinstance(plan, WeightsPlan)
        assert plan.version == 0
        second = trainer.next(1, 0)
        await trainer.publish(publisher, second)
        await friend.send(
            WeightsRequest(policy=POLICY, have_version=0, have_digest=trainer.first.manifest.digest)
        )
        [plan] = await friend.expect(WeightsPlan)
        assert isinstance(plan, WeightsPlan)
        assert plan.version == 1
        await until(lambda: {"role.not_allowed", "protocol.version"} <= refusals(enemy))


@pytest.mark.parametrize("says", [1000, 2**31, 2**32 - 1], ids=["small", "two GiB", "most"])
def test_a_bomb_for_a_body_costs_its_reader_no_memory(says):
    """What the log stores without looking is looked at by the trainer: with the body's own digest,
    whatever size it says that it unpacks to."""
    bomb = b"fftg\x01" + says.to_bytes(4, "little") + compress("zstd", bytes(300_000_000))
    assert len(bomb) < 64_000
    digest = hashlib.sha256(bomb).hexdigest()
    tracemalloc.start()
    try:
        checked = check_body(digest, bomb, POLICY)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert checked.event.code == "body.malformed"
    assert checked.group == ()
    assert peak_bytes < 16 * 2**20


def test_frames_of_this_file_are_within_the_planes_limits():
    """So that it is the service that refuses them, and not our own link."""
    for plane in (Plane.TRAJECTORIES, Plane.WEIGHTS):
        limits = LIMITS[plane]
        for frames in hostile(random.Random(3), Role.AGENT, plane):
            assert len(frames[1]) <= limits.header_bytes
            assert all(len(frame) <= limits.frame_bytes for frame in frames)
    assert msgspec.msgpack.decode(encode(put(1)[0])[1])["summary"]["job"] == "sums/t-000001"
