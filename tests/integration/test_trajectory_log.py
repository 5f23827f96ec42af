"""The trajectory log with real sockets, keys and files."""

import asyncio
import hashlib
import random
import signal
from pathlib import Path

import msgspec
import pytest
import structlog
from service_world import POLICY, service_world, until

from scheduler.core.settings import TRAJECTORY_LOG
from scheduler.lately_released import LatelyReleased
from scheduler.segments import BodyStore, Outcome
from scheduler.service import Surroundings
from scheduler.trajectory_log import TrajectoryLog, serve
from transport.envelope import CONTROL_FRAME_BYTES, encode
from transport.errors import LocalProtocolError
from transport.messages import (
    BodiesGone,
    BodiesReleased,
    Body,
    BodyRequest,
    GroupSummary,
    Message,
    Plane,
    SummariesAccepted,
    TrajectoriesStored,
    TrajectoryAck,
    TrajectoryPut,
    TrajectoryRefused,
)
from transport.runtime.clock import SystemClock
from transport.runtime.files import private_dir

PLANE = Plane.TRAJECTORIES


def made(number: int, size_bytes: int = 1000) -> tuple[GroupSummary, bytes]:
    body = hashlib.sha256(str(number).encode()).digest() * (size_bytes // 32)
    summary = GroupSummary(
        attempt=f"sums/t-{number:06d}#0",
        fence=(1, number),
        job=f"sums/t-{number:06d}",
        digest=hashlib.sha256(body).hexdigest(),
        size_bytes=len(body),
        rewards=(1.0, 0.0),
        lengths=(3, 4),
        versions={POLICY: (0, 1)},
        prompt_tokens=5,
        queued_s=0.1,
        generating_s=0.2,
        agent="somebody else",
    )
    return summary, body


def replaced(summary: GroupSummary, siblings: int) -> GroupSummary:
    return msgspec.structs.replace(summary, rewards=(1.0,) * siblings, lengths=(1,) * siblings)


def as_large_as_a_frame(summary: GroupSummary) -> GroupSummary:
    """One byte more, and the agent could not send it."""

    def padded(length: int) -> GroupSummary:
        job = "j" * length
        return msgspec.structs.replace(summary, job=job, attempt=f"{job}#1")

    size_bytes = len(encode(TrajectoryPut(summary=padded(100_000)), (b"",))[1])
    grown = padded(100_000 + (CONTROL_FRAME_BYTES - size_bytes) // 2)
    return msgspec.structs.replace(grown, agent="")


def announced(world) -> dict[str, GroupSummary]:
    messages = world.control.of(TrajectoriesStored)
    return {summary.digest: summary for message in messages for summary in message.summaries}


def accepted_by_scheduler(world, *summaries: GroupSummary) -> None:
    digests = tuple(summary.digest for summary in summaries)
    world.control.send(TRAJECTORY_LOG, SummariesAccepted(digests=digests))


async def put(link, *numbers: int, size_bytes: int = 1000) -> list[tuple[GroupSummary, bytes]]:
    things = [made(number, size_bytes) for number in numbers]
    for summary, body in things:
        await link.send(TrajectoryPut(summary=summary), (body,))
    return things


# ---- the service -----------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_body_is_acknowledged_announced_under_the_agents_name_and_served(tmp_path):
    async with service_world(tmp_path) as world, world.serving(serve, world.config()) as port:
        agent = world.link("a", PLANE, port)
        with structlog.testing.capture_logs() as logs:
            [(summary, body)] = await put(agent, 1)
            [ack] = await agent.expect(TrajectoryAck)
        stored = [line["attempt"] for line in logs if line["event"] == "body.stored"]
        assert stored == [summary.attempt], "an attempt can be followed"
        assert (ack.attempt, ack.digest) == (summary.attempt, summary.digest)
        await until(lambda: summary.digest in announced(world))
        assert announced(world)[summary.digest] == msgspec.structs.replace(summary, agent="a")

        trainer = world.link("trainer-sums-solver", PLANE, port)
        await trainer.send(BodyRequest(digests=(summary.digest, "0" * 64)))
        await until(lambda: len(trainer.received) == 2)
        (found, payload), (missing, nothing) = trainer.received
        assert (found, payload) == (Body(digest=summary.digest), [body])
        assert (missing, nothing) == (Body(digest="0" * 64, found=False), [])


@pytest.mark.asyncio
async def test_a_body_that_comes_again_is_acknowledged_and_stored_once(tmp_path):
    async with service_world(tmp_path) as world, world.serving(serve, world.config()) as port:
        first = world.link("a", PLANE, port)
        [(summary, _)] = await put(first, 1)
        await first.expect(TrajectoryAck)
        again = world.link("a", PLANE, port)
        for _ in range(3):
            await put(again, 1)
            await again.expect(TrajectoryAck)
        [segment] = (tmp_path / "scheduler" / TRAJECTORY_LOG / "bodies").glob("*.log")
        assert segment.stat().st_size < 2 * summary.size_bytes


@pytest.mark.asyncio
async def test_a_body_that_comes_after_its_release_is_acknowledged_and_kept_for_nobody(tmp_path):
    """Its acknowledgement was lost; an acceptance that was meant for the first one comes late."""
    async with service_world(tmp_path) as world, world.serving(serve, world.config()) as port:
        first = world.link("a", PLANE, port)
        [(summary, _)] = await put(first, 1)
        await until(lambda: summary.digest in announced(world))
        accepted_by_scheduler(world, summary)
        world.control.send(TRAJECTORY_LOG, BodiesReleased(digests=(summary.digest,)))
        await until(lambda: bool(world.control.of(BodiesGone)))
        again = world.link("a", PLANE, port)
        await put(again, 1)
        await again.expect(TrajectoryAck)
        accepted_by_scheduler(world, summary)
        trainer = world.link("trainer-sums-solver", PLANE, port)
        await trainer.send(BodyRequest(digests=(summary.digest,)))
        assert [body.found for body in await trainer.expect(Body)] == [False]
        assert len(world.control.of(TrajectoriesStored)) == 1


@pytest.mark.asyncio
async def test_bodies_that_are_not_what_they_say_are_refused(tmp_path):
    async with service_world(tmp_path) as world, world.serving(serve, world.config()) as port:
        agent = world.link("a", PLANE, port)
        summary, body = made(1)
        wrong = {
            "integrity.checksum": [(summary, bytes(len(body)))],
            "trajectory.malformed": [
                (summary, body + b"x"),
                (msgspec.structs.replace(summary, digest="../../etc/passwd"), body),
                (msgspec.structs.replace(summary, rewards=(float("nan"), 0.0)), body),
                (msgspec.structs.replace(summary, lengths=(1,)), body),
                (msgspec.structs.replace(summary, job="sums/t-000002"), body),
                (msgspec.structs.replace(summary, versions={POLICY: (3, 2)}), body),
                (msgspec.structs.replace(summary, lengths=(2**64 - 1, 2**64 - 1)), body),
                (msgspec.structs.replace(summary, prompt_tokens=2**63), body),
                (msgspec.structs.replace(summary, fence=(1, 2**63)), body),
                (msgspec.structs.replace(summary, rewards=(float("inf"), 0.0)), body),
                (msgspec.structs.replace(summary, generating_s=-1.0), body),
                (msgspec.structs.replace(summary, versions={POLICY: (0, 2**60)}), body),
                (msgspec.structs.replace(summary, versions={"p" * 40_000: (0, 1)}), body),
                (replaced(summary, 5000), body),
            ],
        }
        for code, cases in wrong.items():
            for bad, payload in cases:
                await agent.send(TrajectoryPut(summary=bad), (payload,))
                [refused] = await agent.expect(TrajectoryRefused)
                assert (refused.code, refused.digest) == (code, bad.digest)
        await put(agent, 2)
        await agent.expect(TrajectoryAck)
        await until(lambda: len(announced(world)) == 1)


@pytest.mark.asyncio
async def test_a_summary_as_large_as_a_frame_is_refused_and_stops_nobody(tmp_path):
    async with service_world(tmp_path) as world, world.serving(serve, world.config()) as port:
        agent = world.link("a", PLANE, port)
        summary, body = made(1)
        await agent.send(TrajectoryPut(summary=as_large_as_a_frame(summary)), (body,))
        [refused] = await agent.expect(TrajectoryRefused)
        assert refused.code == "trajectory.malformed"
        assert "longer than 200 characters" in refused.message
        await put(agent, 2)
        await until(lambda: len(announced(world)) == 1)


@pytest.mark.asyncio
async def test_a_store_with_a_summary_that_fits_no_message_heals(tmp_path):
    """As an older farflow stored it: acknowledged, and then too large to be announced."""
    folder = private_dir(tmp_path / "scheduler" / TRAJECTORY_LOG / "bodies")
    poisoned, good = made(1), made(2)
    huge = msgspec.structs.replace(poisoned[0], lengths=(2**63, 2**63))
    store = opened(folder)
    store.append([(as_large_as_a_frame(poisoned[0]), poisoned[1]), good])
    store.append([(msgspec.structs.replace(huge, digest="e" * 64), poisoned[1])])
    store.close()
    async with service_world(tmp_path) as world, world.serving(serve, world.config()):
        await until(lambda: bool(world.control.of(TrajectoriesStored)))
        assert list(announced(world)) == [good[0].digest]
    store = opened(folder)
    assert (len(store), store.settled(good[0].digest)) == (1, True)
    store.close()


@pytest.mark.asyncio
async def test_one_summary_that_cannot_be_told_does_not_silence_the_others(tmp_path):
    told: list[str] = []

    def tell(message: Message) -> bool:
        assert isinstance(message, TrajectoriesStored | BodiesGone)
        if isinstance(message, TrajectoriesStored):
            digests = [summary.digest for summary in message.summaries]
            if made(2)[0].digest in digests:
                raise LocalProtocolError("too large")
            told.extend(digests)
        return True

    store = opened(private_dir(tmp_path / "bodies"))
    store.append([made(number) for number in (1, 2, 3)])
    store.close()
    async with service_world(tmp_path) as world:
        surroundings = Surroundings(
            world.config(), tmp_path, world.control.hub, SystemClock(), random.Random(1), tell
        )
        log = TrajectoryLog(surroundings)
        log.welcomed()
        assert told == [made(number)[0].digest for number in (1, 3)]
        assert log.counters["dropped"] == 1
        await log.close()


@pytest.mark.asyncio
async def test_roles_may_say_only_their_own(tmp_path):
    async with service_world(tmp_path) as world, world.serving(serve, world.config()) as port:
        agent = world.link("a", PLANE, port)
        trainer = world.link("trainer-sums-solver", PLANE, port)
        [(summary, _)] = await put(agent, 1)
        await agent.expect(TrajectoryAck)
        await put(trainer, 2)
        await agent.send(BodyRequest(digests=(summary.digest,)))
        await trainer.send(BodyRequest(digests=(summary.digest,)))
        await trainer.expect(Body)
        await put(agent, 3)
        await agent.expect(TrajectoryAck)
        [answer] = await agent.expect(Body)  # results are not for agents
        assert not answer.found
        assert agent.received == []
        assert {message.code for message, _ in trainer.received} == {"role.not_allowed"}


@pytest.mark.asyncio
async def test_an_agent_gets_the_body_whose_rewards_it_is_to_find_again_until_it_is_released(
    tmp_path,
):
    async with service_world(tmp_path) as world, world.serving(serve, world.config()) as port:
        agent, other = world.link("a", PLANE, port), world.link("b", PLANE, port)
        [(summary, body), (kept, _)] = await put(agent, 1, 2)
        await agent.expect(TrajectoryAck, 2)
        said = SummariesAccepted(digests=(summary.digest,), rechecked=(summary.digest,))
        world.control.send(TRAJECTORY_LOG, said)

        async def asked(digest: str) -> tuple[bool, bytes]:
            await other.send(BodyRequest(digests=(digest,)))
            await until(lambda: other.received)
            [(answer, payload)] = other.received
            other.received = []
            return answer.found, b"".join(payload)

        found = (False, b"")
        async with asyncio.timeout(5.0):
            while not found[0]:
                found = await asked(summary.digest)
        assert found == (True, body)
        assert await asked(kept.digest) == (False, b"")
        world.control.send(TRAJECTORY_LOG, BodiesReleased(digests=(summary.digest,)))
        await until(lambda: world.control.of(BodiesGone))
        assert await asked(summary.digest) == (False, b"")


@pytest.mark.asyncio
async def test_released_bodies_are_gone_and_said_to_be(tmp_path):
    async with service_world(tmp_path) as world, world.serving(serve, world.config()) as port:
        agent = world.link("a", PLANE, port)
        things = await put(agent, 1, 2)
        await agent.expect(TrajectoryAck, 2)
        await until(lambda: len(announced(world)) == 2)
        first, second = (summary.digest for summary, _ in things)
        accepted_by_scheduler(world, things[0][0])
        world.control.send(TRAJECTORY_LOG, BodiesReleased(digests=(first, "f" * 64)))
        await until(lambda: bool(world.control.of(BodiesGone)))
        assert set(world.control.of(BodiesGone)[0].digests) == {first, "f" * 64}
        trainer = world.link("trainer-sums-solver", PLANE, port)
        await trainer.send(BodyRequest(digests=(first, second)))
        assert [body.found for body in await trainer.expect(Body, 2)] == [False, True]


@pytest.mark.asyncio
async def test_a_full_disk_leaves_bodies_with_the_agents(tmp_path):
    async with (
        service_world(tmp_path) as world,
        world.serving(serve, world.config(trajectory_disk_bytes=5000)) as port,
    ):
        agent = world.link("a", PLANE, port)
        things = await put(agent, 1, 2, size_bytes=3200)
        await agent.expect(TrajectoryAck)
        trainer = world.link("trainer-sums-solver", PLANE, port)
        digests = tuple(summary.digest for summary, _ in things)
        await trainer.send(BodyRequest(digests=digests))
        assert [body.found for body in await trainer.expect(Body, 2)] == [True, False]
        assert not agent.received


@pytest.mark.asyncio
async def test_after_kill_9_every_acknowledged_body_is_there_and_announced_again(tmp_path):
    async with service_world(tmp_path) as world:
        config = world.config()
        async with world.process("scheduler.trajectory_log", config) as (child, port):
            agent = world.link("a", PLANE, port)
            things = await put(agent, *range(20))
            acks = {ack.digest for ack in await agent.expect(TrajectoryAck, 20)}
            await until(lambda: len(announced(world)) == 20)
            accepted_by_scheduler(world, *(summary for summary, _ in things[:5]))
            world.control.send(TRAJECTORY_LOG, BodiesReleased(digests=(things[0][0].digest,)))
            await until(lambda: bool(world.control.of(BodiesGone)))
            child.send_signal(signal.SIGKILL)
            await child.wait()
        assert acks == {summary.digest for summary, _ in things}
        [segment] = (tmp_path / "scheduler" / TRAJECTORY_LOG / "bodies").glob("*.log")
        torn = segment.read_bytes()[:700]  # a record that death cut off
        segment.write_bytes(segment.read_bytes() + torn)
        world.control.received.clear()
        async with world.process("scheduler.trajectory_log", config) as (child, again):
            assert again == port
            await until(lambda: len(announced(world)) == 15)
            assert set(announced(world)) == {summary.digest for summary, _ in things[5:]}
            first, second = [hello.incarnation for hello in world.control.hellos]
            assert second > first
            trainer = world.link("trainer-sums-solver", PLANE, port)
            await trainer.send(BodyRequest(digests=tuple(s.digest for s, _ in things)))
            bodies = {b.digest: b.found for b in await trainer.expect(Body, 20)}
            assert [bodies[summary.digest] for summary, _ in things] == [False] + 19 * [True]
            agent = world.link("a", PLANE, port)
            await put(agent, 99)
            await agent.expect(TrajectoryAck)
            assert child.stdin is not None
            child.stdin.close()
            assert await child.wait() == 0


# ---- its files -------------------------------------------------------------------------------


def opened(folder: Path, segment_bytes: int = 4000, disk_bytes: int = 10**6) -> BodyStore:
    return BodyStore(folder, segment_bytes=segment_bytes, disk_bytes=disk_bytes)


def segments(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir())
    logs = [name for name in names if name.endswith(".log")]
    assert names == sorted([*logs, *(name.replace(".log", ".marks") for name in logs)])
    return logs


def test_segments_go_with_their_last_body_and_numbers_are_not_used_again(tmp_path):
    store = opened(tmp_path)
    things = [made(number) for number in range(12)]
    for thing in things:
        assert store.append([thing]) == [Outcome.STORED]
    assert segments(tmp_path) == [f"segment-0000000{n}.log" for n in (1, 2, 3)]
    digests = [summary.digest for summary, _ in things]
    assert store.release(digests[:4]) == digests[:4]
    assert segments(tmp_path) == [f"segment-0000000{n}.log" for n in (2, 3)]
    store.release(digests[4:])
    store.close()
    store = opened(tmp_path)
    assert (len(store), store.size_bytes, segments(tmp_path)) == (0, 0, [])
    store.close()


def test_a_body_that_comes_again_after_its_release_is_not_stored(tmp_path):
    """Also after an opening, while its segment is there; after that it is a body like any other."""
    store = opened(tmp_path)
    things = [made(number) for number in range(3)]
    store.append(things)
    digests = [summary.digest for summary, _ in things]
    unheard_of = made(99)
    assert store.release([digests[1], unheard_of[0].digest]) == [digests[1], unheard_of[0].digest]
    size_bytes = store.size_bytes
    assert store.append([things[1], unheard_of]) == [Outcome.DUPLICATE] * 2
    assert (len(store), store.size_bytes, store.settled(digests[1])) == (2, size_bytes, True)
    assert store.read(digests[1]) is None
    store.close()

    store = opened(tmp_path)
    assert store.append([things[1], unheard_of]) == [Outcome.DUPLICATE, Outcome.STORED]
    store.release([*digests, unheard_of[0].digest])
    store.close()
    store = opened(tmp_path)
    assert store.append([things[1]]) == [Outcome.DUPLICATE]  # the last segment is still there
    store.close()
    for path in list(tmp_path.iterdir()):
        path.unlink()
    store = opened(tmp_path)
    assert store.append([things[1]]) == [Outcome.STORED]
    assert [summary.digest for summary in store.unaccepted()] == [digests[1]]
    store.close()


def test_so_many_released_digests_are_remembered_and_no_more():
    released = LatelyReleased(most=3)
    released.add("abcd")
    assert [digest in released for digest in "abcd"] == [False, True, True, True]
    released.add("be")  # the one that came again is the latest but one
    assert [digest in released for digest in "abcde"] == [False, True, False, True, True]


def test_marks_survive_and_a_body_stored_again_after_its_release_lives(tmp_path):
    """As when it comes so late that its release is forgotten."""
    store = opened(tmp_path)
    things = [made(number) for number in range(3)]
    store.append(things)
    digests = [summary.digest for summary, _ in things]
    store.accept(digests[:2])
    store.release(digests[1:2])
    store._released = LatelyReleased()
    assert store.append([things[1]]) == [Outcome.STORED]
    store.close()
    store = opened(tmp_path)
    assert {summary.digest for summary in store.unaccepted()} == set(digests[1:])
    assert [store.read(digest) for digest in digests] == [body for _, body in things]
    store.close()


@pytest.mark.parametrize("cut", [1, 30, 500, 1100])
def test_a_torn_end_is_cut_off_and_everything_before_it_is_kept(tmp_path, cut):
    store = opened(tmp_path, segment_bytes=10**6)
    things = [made(number) for number in range(3)]
    store.append(things[:2])
    store.close()
    [path] = tmp_path.glob("*.log")
    sound, marks = path.stat().st_size, path.with_suffix(".marks").read_bytes()
    store = opened(tmp_path, segment_bytes=10**6)
    store.append(things[2:])
    store.close()
    with open(path, "rb+") as file:
        file.truncate(sound + cut)
    path.with_suffix(".marks").write_bytes(marks)  # they follow after the sync
    store = opened(tmp_path, segment_bytes=10**6)
    assert (store.torn_bytes, path.stat().st_size) == (cut, sound)
    assert [store.read(s.digest) for s, _ in things] == [things[0][1], things[1][1], None]
    assert store.append(things[2:]) == [Outcome.STORED]
    assert store.read(things[2][0].digest) == things[2][1]
    store.close()


def test_a_damaged_body_is_not_given_out_and_harms_no_other(tmp_path):
    store = opened(tmp_path, segment_bytes=10**6)
    things = [made(number) for number in range(3)]
    store.append(things)
    [path] = tmp_path.glob("*.log")
    data = bytearray(path.read_bytes())
    data[data.index(things[1][1]) + 7] ^= 1
    path.write_bytes(data)
    expected = [things[0][1], None, things[2][1]]
    assert [store.read(summary.digest) for summary, _ in things] == expected
    store.close()
    store = opened(tmp_path, segment_bytes=10**6)
    assert (len(store.damage), store.torn_bytes) == (1, 0)
    assert [store.read(summary.digest) for summary, _ in things] == expected
    store.close()


def test_one_batch_may_span_segments_and_hold_a_body_twice(tmp_path):
    store = opened(tmp_path)
    things = [made(number) for number in range(9)]
    outcomes = store.append([*things, things[0]])
    assert outcomes == 9 * [Outcome.STORED] + [Outcome.DUPLICATE]
    store.close()
    store = opened(tmp_path)
    assert all(store.read(summary.digest) == body for summary, body in things)
    store.close()
