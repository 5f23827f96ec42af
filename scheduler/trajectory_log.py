"""The trajectory log: bodies from agents to disk, their summaries to the scheduler, bodies to
trainers. A process of its own, so that no body ever holds up a decision.

What always holds: an agent hears ``TrajectoryAck`` or ``TrajectoryAcks`` after its body survives a
power cut, and not otherwise, one message for all of a connection's bodies that one sync settled;
large bodies are asked for in chunks (``scheduler.body_intake``); the scheduler is told of a stored
body until it has the summary in its own store; a summary says which agent's key sent it, whatever
the agent wrote, and keeps the bounds of ``summary_fault``: one that does not (an older farflow
stored it) is dropped; a body that is there, or was lately released, is acknowledged and not stored;
when the disk bound is reached nothing is acknowledged, so that agents keep their spools. Finished
turns of running attempts are kept apart (``scheduler.partials``).

What waits for the disk is bounded; beyond that no more is received, and the agents' links fill up.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import msgspec
import structlog

from scheduler.announcements import ANNOUNCE_AGAIN_S, Announcements
from scheduler.body_intake import BodyIntake
from scheduler.body_puts import Put, check_and_append, is_digest, put_fault
from scheduler.config import SchedulerConfig
from scheduler.core.settings import TRAJECTORY_LOG
from scheduler.partials import Partials
from scheduler.segment_damage import DAMAGE_REMEDY, MAX_DAMAGE_LINES, told
from scheduler.segments import BodyStore, Outcome
from scheduler.service import Surroundings, Worker, run_service
from scheduler.service_main import service_command
from transport.envelope import BULK_FRAME_BYTES, encode
from transport.fair_sender import FairSender
from transport.links import Network
from transport.messages import (
    MAX_ID_LENGTH,
    BodiesGone,
    BodiesReleased,
    Body,
    BodyRef,
    BodyRequest,
    Chunk,
    GroupSummary,
    Message,
    Plane,
    SummariesAccepted,
    TrajectoryAck,
    TrajectoryAcks,
    TrajectoryOffer,
    TrajectoryPut,
    TrajectoryRefused,
)
from transport.plane_hub import Arrival
from transport.runtime.clock import Clock
from transport.summaries import summary_fault

MAX_PENDING_BYTES: Final = 128 * 2**20
"""Received and not yet on disk."""

MAX_BATCH_BYTES: Final = 32 * 2**20
"""Written with one sync."""

MAX_ACKS: Final = 512
"""In one message; a frame of the plane holds more."""

MAX_REQUESTED: Final = 4096
MAX_RELEASES: Final = 100_000

_log = structlog.get_logger()

_Answer = str | TrajectoryAck | TrajectoryAcks | TrajectoryRefused
"""A body by its digest, or a message as it is. All wait for their turn: one sync may settle more
than a link takes at once."""


class TrajectoryLog:
    """The service's work; see ``scheduler.service``."""

    def __init__(self, surroundings: Surroundings) -> None:
        """Rebuild the index from disk, which may take a while.

        Raises:
            StoreError: the disk refuses.
        """
        table = surroundings.config.scheduler
        self._hub = surroundings.hub
        self._clock = surroundings.clock
        self._tell = surroundings.tell
        self._store = BodyStore(
            surroundings.folder / "bodies",
            segment_bytes=table.trajectory_segment_bytes,
            disk_bytes=table.trajectory_disk_bytes,
        )
        self._writer = Worker("trajectory-writer")
        self._reader = Worker("trajectory-reader")
        self._sender: FairSender[_Answer] = FairSender(self._hub.send_frames, self._frames)
        self._pending: list[Put] = []
        self._pending_bytes = 0
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._announcements = Announcements(surroundings.tell, self._clock, self._drop)
        self._intake = BodyIntake(
            surroundings.folder / "partial",
            self._hub,
            self._clock,
            hand_on=self._whole,
            has_room=self._store.fits,
            queued=self._look_at_room,
        )
        self._partials = Partials(
            surroundings.folder, self._hub, self._clock, surroundings.tell, self._read
        )
        self._full = False
        self._to_accept: list[str] = []
        self._to_release: dict[str, None] = {}
        self.counters: Counter[str] = Counter()
        for summary in self._store.unaccepted():
            fault = summary_fault(summary)
            if fault:
                self._drop(summary, fault)
            else:
                self._announcements.add(summary)
        _log.info(
            "trajectory_log.opened",
            bodies=len(self._store),
            unaccepted=len(self._announcements),
            size_bytes=self._store.size_bytes,
            torn_bytes=self._store.torn_bytes,
            damaged=len(self._store.damage),
            damaged_bytes=self._store.damage.size_bytes,
        )
        self._tell_damage()

    # ---- what arrives -------------------------------------------------------------------------

    def arrived(self, arrival: Arrival) -> None:
        if self._partials.took(arrival):
            return
        match arrival.message:
            case TrajectoryPut():
                self._put(arrival, arrival.message)
            case TrajectoryOffer():
                self._offered(arrival, arrival.message)
            case Chunk():
                self._intake.chunk_arrived(arrival.peer.name, arrival.message, arrival.payload)
            case BodyRequest():
                for digest in arrival.message.digests[:MAX_REQUESTED]:
                    self._sender.ask(arrival.route, digest)
            case _:
                self.counters["not_understood"] += 1

    async def has_room(self) -> None:
        await self._room.wait()

    def welcomed(self) -> None:
        self._announcements.start_again()
        self._partials.announce_again()

    def from_scheduler(self, message: Message) -> None:
        match message:
            case SummariesAccepted():
                self._to_accept += self._announcements.accepted(message.digests)
                self._announcements.announce()
                self._partials.show(message.rechecked)
            case BodiesReleased():
                # What does not fit is released again by the scheduler.
                for digest in message.digests[: MAX_RELEASES - len(self._to_release)]:
                    if is_digest(digest):
                        self._to_release[digest] = None
            case _:
                self.counters["not_understood"] += 1
        if self._to_accept or self._to_release:
            self._work.set()

    def _put(self, arrival: Arrival, put: TrajectoryPut) -> None:
        problem = put_fault(put.summary, arrival.payload)
        if problem:
            self._refuse(arrival.route, put.summary, "trajectory.malformed", problem)
            return
        summary = msgspec.structs.replace(put.summary, agent=arrival.peer.name)
        self._append(Put(arrival.route, summary, arrival.payload[0], put.cumulative))

    def _offered(self, arrival: Arrival, offer: TrajectoryOffer) -> None:
        """Acknowledge what is here, ask for what is not."""
        known = []
        for body in offer.bodies:
            summary = body.summary
            if self._store.settled(summary.digest):
                known.append(BodyRef(attempt=summary.attempt, digest=summary.digest))
                continue
            fault = self._intake.offered(arrival.peer.name, arrival.route, body)
            if fault:
                self._refuse(arrival.route, summary, "trajectory.malformed", fault)
        self._acknowledge(arrival.route, known)

    def _whole(self, name: str, route: bytes, summary: GroupSummary, body: bytes) -> None:
        summary = msgspec.structs.replace(summary, agent=name)
        self._append(Put(route, summary, body, cumulative=True))

    def _append(self, put: Put) -> None:
        self._pending.append(put)
        self._pending_bytes += len(put.body)
        self._look_at_room()
        self._work.set()

    def _look_at_room(self) -> None:
        if self._pending_bytes + self._intake.queued_bytes > MAX_PENDING_BYTES:
            self._room.clear()
        else:
            self._room.set()

    def _refuse(self, route: bytes, summary: GroupSummary, code: str, message: str) -> None:
        self.counters[f"refused.{code}"] += 1
        attempt, digest = summary.attempt[:MAX_ID_LENGTH], summary.digest[:MAX_ID_LENGTH]
        _log.warning("trajectory.refused", attempt=attempt, code=code, reason=message)
        refused = TrajectoryRefused(attempt=attempt, digest=digest, code=code, message=message)
        self._sender.ask(route, refused)

    def _drop(self, summary: GroupSummary, reason: str) -> None:
        """Forget a stored body of which the scheduler can never be told."""
        self.counters["dropped"] += 1
        _log.error("trajectory.dropped", attempt=summary.attempt[:MAX_ID_LENGTH], reason=reason)
        self._announcements.forget(summary.digest)
        self._to_release[summary.digest] = None
        self._work.set()

    # ---- the background -----------------------------------------------------------------------

    def parts(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {
            "bodies": self._sender.run(),
            "announcements": self._announce_again(),
            "writer": self._write(),
            **self._intake.parts(),
            **self._partials.parts(),
        }

    async def close(self) -> None:
        await self._intake.close()
        await self._partials.close()
        await asyncio.to_thread(self._writer.close)
        await asyncio.to_thread(self._reader.close)
        self._store.close()

    async def _write(self) -> None:
        while True:
            await self._work.wait()
            if self._pending:
                await self._write_batch()
            accepted, self._to_accept = self._to_accept, []
            released, self._to_release = list(self._to_release), {}
            if accepted:
                await self._writer.run(self._store.accept, accepted)
            if released:
                await self._release(released)
            if not (self._pending or self._to_accept or self._to_release):
                self._work.clear()

    async def _write_batch(self) -> None:
        """One sync for everything that came in since the last one, up to a bound."""
        count = size_bytes = 0
        while count < len(self._pending) and size_bytes < MAX_BATCH_BYTES:
            size_bytes += len(self._pending[count].body)
            count += 1
        batch, self._pending = self._pending[:count], self._pending[count:]
        outcomes = await self._writer.run(check_and_append, self._store, batch)
        self._pending_bytes -= size_bytes
        self._look_at_room()
        durable: dict[bytes, list[BodyRef]] = {}
        for put, outcome in zip(batch, outcomes, strict=True):
            full = outcome is Outcome.FULL
            route = self._intake.settled(put.summary.agent, put.summary.digest, keep=full)
            put = put if route is None else put._replace(route=route)
            if self._is_durable(put, outcome):
                ref = BodyRef(attempt=put.summary.attempt, digest=put.summary.digest)
                if put.cumulative:
                    durable.setdefault(put.route, []).append(ref)
                else:
                    self._sender.ask(
                        put.route, TrajectoryAck(attempt=ref.attempt, digest=ref.digest)
                    )
        for route, refs in durable.items():
            self._acknowledge(route, refs)
        self._announcements.announce()

    def _is_durable(self, put: Put, outcome: Outcome | None) -> bool:
        """Whether its agent may forget a body, of which this became."""
        summary = put.summary
        if outcome is None:
            self._refuse(
                put.route, summary, "integrity.checksum", "the body has another SHA-256 digest"
            )
            return False
        self.counters[outcome.value] += 1
        if outcome is Outcome.FULL:
            if not self._full:
                _log.warning("trajectory_log.full", size_bytes=self._store.size_bytes)
            self._full = True
            return False
        if outcome is Outcome.STORED:
            self._full = False
            _log.debug("body.stored", attempt=summary.attempt, digest=summary.digest[:16])
            self._announcements.add(summary)
            self._partials.over(summary.agent, summary.attempt)
        return True

    def _acknowledge(self, route: bytes, refs: Sequence[BodyRef]) -> None:
        for first in range(0, len(refs), MAX_ACKS):
            acks = TrajectoryAcks(bodies=tuple(refs[first : first + MAX_ACKS]))
            self._sender.ask(route, acks)

    async def _release(self, digests: Sequence[str]) -> None:
        for digest in digests:
            self._announcements.forget(digest)
        self._partials.release(digests)
        gone = await self._writer.run(self._store.release, digests)
        for first in range(0, len(gone), 1024):
            self._tell(BodiesGone(digests=tuple(gone[first : first + 1024])))
        self._intake.look_again()

    async def _announce_again(self) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_AGAIN_S)
            self._announcements.expire()

    async def _read(self, digest: str) -> bytes | None:
        data = await self._reader.run(self._store.read, digest)
        if data is None and self._tell_damage():
            await self._reader.run(self._store.damage.write)
        return data

    def _tell_damage(self) -> bool:
        """Log what was found damaged since the last time; whether anything was."""
        new = self._store.damage.take_new()
        self.counters["damaged"] += len(new)
        for segment, gap in new[:MAX_DAMAGE_LINES]:
            _log.error("trajectory_log.damaged", what=told(segment, gap), remedy=DAMAGE_REMEDY)
        if len(new) > MAX_DAMAGE_LINES:
            _log.error("trajectory_log.damaged_more", ranges=len(new) - MAX_DAMAGE_LINES)
        return bool(new)

    async def _frames(self, answer: _Answer) -> Sequence[bytes]:
        if not isinstance(answer, str):
            return encode(answer)
        data = await self._read(answer)
        if data is None:
            self.counters["body_not_found"] += 1
            return encode(Body(digest=answer, found=False))
        starts = range(0, len(data), BULK_FRAME_BYTES)
        frames = [data[start : start + BULK_FRAME_BYTES] for start in starts]
        return encode(Body(digest=answer), frames)


async def serve(
    config: SchedulerConfig,
    *,
    network: Network,
    clock: Clock,
    rng: random.Random,
    stop: asyncio.Event,
    on_ready: Callable[[dict[str, Any]], None],
) -> int:
    """Run the trajectory log until ``stop``; see ``run_service``."""
    return await run_service(
        TRAJECTORY_LOG,
        Plane.TRAJECTORIES,
        config,
        TrajectoryLog,
        port=config.transport.trajectories_port,
        network=network,
        clock=clock,
        rng=rng,
        stop=stop,
        on_ready=on_ready,
    )


if __name__ == "__main__":
    service_command(TRAJECTORY_LOG, serve)()
