"""The trajectory log: bodies from agents to disk, their summaries to the scheduler, bodies to
trainers. A process of its own, so that no body ever holds up a decision.

What always holds: an agent hears ``TrajectoryAck`` after its body survives a power cut, and not
otherwise; the scheduler is told of a stored body until it has the summary in its own store; a
summary says which agent's key sent it, whatever the agent wrote, and keeps the bounds of
``summary_fault``: one that does not (an older farflow stored it) is dropped; a body that is already
there is acknowledged again and stored once; when the disk bound is reached nothing is acknowledged,
so that agents keep their spools. Bodies are not unpacked here.

What waits for the disk is bounded; beyond that no more is received, and the agents' links fill up.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import msgspec
import structlog

from scheduler.config import SchedulerConfig
from scheduler.segments import BodyStore, Outcome
from scheduler.service import Surroundings, Worker, run_service
from scheduler.service_main import service_command
from transport.envelope import encode
from transport.errors import LocalProtocolError
from transport.fair_sender import FairSender
from transport.links import Network
from transport.messages import (
    MAX_ID_LENGTH,
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
from transport.plane_hub import Arrival
from transport.runtime.clock import Clock
from transport.trajectory import body_digest, summary_fault

NAME: Final = "trajectory-log"

MAX_PENDING_BYTES: Final = 128 * 2**20
"""Received and not yet on disk."""

MAX_BATCH_BYTES: Final = 32 * 2**20
"""Written with one sync."""

ANNOUNCE_BYTES: Final = 128 * 1024
"""Summaries in one message; a control frame holds twice that."""

ANNOUNCE_WINDOW: Final = 4096
"""Summaries on their way to the scheduler; the others wait for a confirmation."""

ANNOUNCE_AGAIN_S: Final = 5.0
MAX_REQUESTED: Final = 4096
MAX_RELEASES: Final = 100_000

_HEX: Final = frozenset("0123456789abcdef")
_log = structlog.get_logger()


_Answer = str | TrajectoryAck | TrajectoryRefused
"""A body by its digest, or a message as it is. All wait for their turn: one sync may settle more
than a link takes at once."""


class _Put(NamedTuple):
    route: bytes
    summary: GroupSummary
    body: bytes


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
        self._pending: list[_Put] = []
        self._pending_bytes = 0
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._unaccepted: dict[str, GroupSummary] = {}
        self._announced: dict[str, float] = {}
        self._full = False
        self._to_accept: list[str] = []
        self._to_release: dict[str, None] = {}
        self.counters: Counter[str] = Counter()
        for summary in self._store.unaccepted():
            fault = summary_fault(summary)
            if fault:
                self._drop(summary, fault)
            else:
                self._unaccepted[summary.digest] = summary
        _log.info(
            "trajectory_log.opened",
            bodies=len(self._store),
            unaccepted=len(self._unaccepted),
            size_bytes=self._store.size_bytes,
            torn_bytes=self._store.torn_bytes,
            damaged=self._store.damaged,
        )

    # ---- what arrives -------------------------------------------------------------------------

    def arrived(self, arrival: Arrival) -> None:
        match arrival.message:
            case TrajectoryPut():
                self._put(arrival, arrival.message)
            case BodyRequest():
                for digest in arrival.message.digests[:MAX_REQUESTED]:
                    self._sender.ask(arrival.route, digest)
            case _:
                self.counters["not_understood"] += 1

    async def has_room(self) -> None:
        await self._room.wait()

    def welcomed(self) -> None:
        self._announced.clear()
        self._announce()

    def from_scheduler(self, message: Message) -> None:
        match message:
            case SummariesAccepted():
                for digest in message.digests:
                    self._announced.pop(digest, None)
                    if self._unaccepted.pop(digest, None) is not None:
                        self._to_accept.append(digest)
                self._announce()
            case BodiesReleased():
                # What does not fit is released again by the scheduler.
                for digest in message.digests[: MAX_RELEASES - len(self._to_release)]:
                    if _is_digest(digest):
                        self._to_release[digest] = None
            case _:
                self.counters["not_understood"] += 1
        if self._to_accept or self._to_release:
            self._work.set()

    def _put(self, arrival: Arrival, put: TrajectoryPut) -> None:
        problem = _problem(put.summary, arrival.payload)
        if problem:
            self._refuse(arrival.route, put.summary, "trajectory.malformed", problem)
            return
        summary = msgspec.structs.replace(put.summary, agent=arrival.peer.name)
        self._pending.append(_Put(arrival.route, summary, arrival.payload[0]))
        self._pending_bytes += len(arrival.payload[0])
        if self._pending_bytes > MAX_PENDING_BYTES:
            self._room.clear()
        self._work.set()

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
        self._unaccepted.pop(summary.digest, None)
        self._to_release[summary.digest] = None
        self._work.set()

    # ---- the background -----------------------------------------------------------------------

    def parts(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {
            "bodies": self._sender.run(),
            "announcements": self._announce_again(),
            "writer": self._write(),
        }

    async def close(self) -> None:
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
        outcomes = await self._writer.run(_check_and_append, self._store, batch)
        self._pending_bytes -= size_bytes
        if self._pending_bytes <= MAX_PENDING_BYTES:
            self._room.set()
        for put, outcome in zip(batch, outcomes, strict=True):
            self._settled(put, outcome)
        self._announce()

    def _settled(self, put: _Put, outcome: Outcome | None) -> None:
        summary = put.summary
        if outcome is None:
            self._refuse(
                put.route, summary, "integrity.checksum", "the body has another SHA-256 digest"
            )
            return
        self.counters[outcome.value] += 1
        if outcome is Outcome.FULL:
            if not self._full:
                _log.warning("trajectory_log.full", size_bytes=self._store.size_bytes)
            self._full = True
            return
        if outcome is Outcome.STORED:
            self._full = False
            self._unaccepted[summary.digest] = summary
        ack = TrajectoryAck(attempt=summary.attempt, digest=summary.digest)
        self._sender.ask(put.route, ack)

    async def _release(self, digests: Sequence[str]) -> None:
        for digest in digests:
            self._unaccepted.pop(digest, None)
            self._announced.pop(digest, None)
        gone = await self._writer.run(self._store.release, digests)
        for first in range(0, len(gone), 1024):
            self._tell(BodiesGone(digests=tuple(gone[first : first + 1024])))

    async def _announce_again(self) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_AGAIN_S)
            before = self._clock.monotonic_s() - ANNOUNCE_AGAIN_S
            for digest in [d for d, at in self._announced.items() if at <= before]:
                del self._announced[digest]
            self._announce()

    def _announce(self) -> None:
        """Tell the scheduler of what it does not have, in frames of bounded size."""
        chosen: list[GroupSummary] = []
        size_bytes = 0
        room = ANNOUNCE_WINDOW - len(self._announced)
        for digest, summary in list(islice(self._unaccepted.items(), 2 * ANNOUNCE_WINDOW)):
            if room <= 0:
                break
            if digest in self._announced:
                continue
            room -= 1
            summary_bytes = len(msgspec.msgpack.encode(summary))
            if chosen and size_bytes + summary_bytes > ANNOUNCE_BYTES:
                if not self._tell_stored(chosen):
                    return
                chosen, size_bytes = [], 0
            chosen.append(summary)
            size_bytes += summary_bytes
        if chosen:
            self._tell_stored(chosen)

    def _tell_stored(self, summaries: list[GroupSummary]) -> bool:
        try:
            if not self._tell(TrajectoriesStored(summaries=tuple(summaries))):
                return False
        except LocalProtocolError as error:  # one of them must not silence the others
            if len(summaries) > 1:
                return all(self._tell_stored([summary]) for summary in summaries)
            self._drop(summaries[0], str(error))
            return True
        now = self._clock.monotonic_s()
        self._announced.update((summary.digest, now) for summary in summaries)
        return True

    async def _frames(self, answer: _Answer) -> Sequence[bytes]:
        if not isinstance(answer, str):
            return encode(answer)
        digest = answer
        data = await self._reader.run(self._store.read, digest)
        if data is None:
            self.counters["body_not_found"] += 1
            return encode(Body(digest=digest, found=False))
        return encode(Body(digest=digest), (data,))


def _check_and_append(store: BodyStore, batch: Sequence[_Put]) -> list[Outcome | None]:
    """In the writer's thread; None for a body whose digest is not the promised one."""
    sound = [body_digest(put.body) == put.summary.digest for put in batch]
    stored = iter(
        store.append(
            [(put.summary, put.body) for put, good in zip(batch, sound, strict=True) if good]
        )
    )
    return [next(stored) if good else None for good in sound]


def _is_digest(text: str) -> bool:
    return len(text) == 64 and _HEX.issuperset(text)


def _problem(summary: GroupSummary, payload: Sequence[bytes]) -> str:
    """What makes a summary unusable without looking into the body, or nothing."""
    if len(payload) != 1:
        return f"{len(payload)} payload frames, one body expected"
    if len(payload[0]) != summary.size_bytes:
        return f"size_bytes: {summary.size_bytes}, the body has {len(payload[0])}"
    return summary_fault(summary)


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
        NAME,
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
    service_command(NAME, serve)()
