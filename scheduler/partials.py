"""Finished turns of running attempts in the trajectory log, for the agent that goes on from them.

What always holds: of an attempt the newest durable turns are kept, and the scheduler is told of
them after they are durable; they go when the attempt's result is here, when the scheduler releases
them, after ``MAX_AGE_S``, or for newer ones when there are too many: of the same agent first, so
that none takes the others' room; an agent gets turns by their digest, which only the scheduler's
offer tells it, and never a result's body, but for those whose rewards other agents are to find
again: of these the newest ``MAX_SHOWN``. All of this is worth less than results: what cannot be
kept is dropped, and its attempt begins anew where it must.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import structlog

from scheduler.body_intake import BodyIntake
from scheduler.partial_files import PartialFiles
from scheduler.service import Worker
from transport.envelope import MIB, encode
from transport.errors import StoreError
from transport.fair_sender import FairSender
from transport.messages import (
    Body,
    BodyRequest,
    Chunk,
    GroupSummary,
    Message,
    OfferedBody,
    PartialAck,
    PartialOffer,
    PartialPut,
    PartialStored,
    PartialSummary,
    Role,
)
from transport.plane_hub import Arrival, PlaneHub
from transport.runtime.clock import Clock
from transport.summaries import partial_fault

MAX_BYTES: Final = 2**30
MAX_PARTIALS: Final = 4096
AGENT_SHARE: Final = 8
"""One agent may have so much of all that there is room for, at most: an eighth."""
MAX_PENDING_BYTES: Final = 64 * MIB
"""Received and not yet on disk."""
MAX_AGE_S: Final = 3600.0
MAX_OFFERED: Final = 8192
MAX_SHOWN: Final = 1024
MAX_REQUESTED: Final = 16
ANNOUNCED_AT_ONCE: Final = 16
LOOK_S: Final = 5.0

_Attempt = tuple[str, str]
"""Agent and attempt."""

_log = structlog.get_logger()


class _Put(NamedTuple):
    route: bytes
    summary: PartialSummary
    data: bytes


class Partials:
    """``tell`` gives a message to the scheduler, False when it cannot take it now; ``results``
    reads the body of a result by its digest.

    Raises:
        StoreError: the disk refuses.
    """

    def __init__(
        self,
        folder: Path,
        hub: PlaneHub,
        clock: Clock,
        tell: Callable[[Message], bool],
        results: Callable[[str], Awaitable[bytes | None]],
    ) -> None:
        self._files = PartialFiles(folder / "turns")
        self._clock = clock
        self._tell = tell
        self._results = results
        self._shown: OrderedDict[str, None] = OrderedDict()
        self._disk = Worker("finished-turns")
        self._sender: FairSender[str | PartialAck] = FairSender(hub.send_frames, self._frames)
        self._intake = BodyIntake(
            folder / "turns-incoming",
            hub,
            clock,
            hand_on=self._whole,
            has_room=lambda _bytes: True,
            queued=lambda: None,
        )
        self._offered: OrderedDict[tuple[str, str], PartialSummary] = OrderedDict()
        self._pending: dict[_Attempt, _Put] = {}
        self._pending_bytes = 0
        self._kept: OrderedDict[_Attempt, tuple[PartialSummary, float]] = OrderedDict()
        self._by_digest: dict[str, _Attempt] = {}
        self._of_agent: dict[str, dict[_Attempt, None]] = {}
        self._bytes: Counter[str] = Counter()  # by agent, and of all
        self._to_tell: dict[_Attempt, None] = {}
        self._to_remove: list[PartialSummary] = []
        self._work = asyncio.Event()
        self.counters: Counter[str] = Counter()
        for summary in self._files.load():
            self._take(summary)

    def __len__(self) -> int:
        return len(self._kept)

    # ---- what arrives --------------------------------------------------------------------------

    def took(self, arrival: Arrival) -> bool:
        """Whether a message is about turns."""
        match arrival.message:
            case PartialPut() as message:
                self._put(arrival, message)
            case PartialOffer() as message:
                self._offer(arrival, message)
            case Chunk() as chunk if (arrival.peer.name, chunk.digest) in self._offered:
                self._intake.chunk_arrived(arrival.peer.name, chunk, arrival.payload)
            case BodyRequest(digests=digests) if arrival.peer.role is Role.AGENT:
                for digest in digests[:MAX_REQUESTED]:
                    self._sender.ask(arrival.route, digest)
            case _:
                return False
        return True

    def _put(self, arrival: Arrival, message: PartialPut) -> None:
        """Turns in one piece."""
        summary = msgspec.structs.replace(message.partial, agent=arrival.peer.name)
        size_bytes = sum(map(len, arrival.payload))
        if partial_fault(summary) or size_bytes != summary.size_bytes:
            self._refuse(arrival.route, summary, "malformed")
            return
        self._add(_Put(arrival.route, summary, b"".join(arrival.payload)))

    def _offer(self, arrival: Arrival, message: PartialOffer) -> None:
        """Turns that are asked for chunk by chunk, unless they are here."""
        summary = msgspec.structs.replace(message.partial, agent=arrival.peer.name)
        if self._by_digest.get(summary.digest) == (summary.agent, summary.attempt):
            self._acknowledge(arrival.route, summary, kept=True)
            return
        fault = partial_fault(summary) or self._intake.offered(
            arrival.peer.name, arrival.route, _as_body(message)
        )
        if fault:
            self._refuse(arrival.route, summary, "malformed")
            return
        self._offered[summary.agent, summary.digest] = summary
        while len(self._offered) > MAX_OFFERED:
            self._offered.popitem(last=False)

    def over(self, agent: str, attempt: str) -> None:
        """The attempt's result is here."""
        self._unqueue((agent, attempt))
        self._drop((agent, attempt))

    def release(self, digests: Sequence[str]) -> None:
        """The scheduler needs none of these; those that are of something else are no concern."""
        for digest in digests:
            self._shown.pop(digest, None)
            found = self._by_digest.get(digest)
            if found is not None:
                self._drop(found)

    def show(self, digests: Sequence[str]) -> None:
        """Agents may have these results' bodies until they are released."""
        self._shown.update(dict.fromkeys(digests))
        while len(self._shown) > MAX_SHOWN:
            self._shown.popitem(last=False)

    def announce_again(self) -> None:
        """The scheduler may have forgotten what it was told."""
        self._to_tell = dict.fromkeys(self._kept)
        self._announce()

    def _whole(self, name: str, route: bytes, body: GroupSummary, data: bytes) -> None:
        summary = self._offered.pop((name, body.digest), None)
        self._intake.settled(name, body.digest, keep=False)
        if summary is not None:
            self._add(_Put(route, summary, data))

    def _add(self, put: _Put) -> None:
        key = (put.summary.agent, put.summary.attempt)
        older = self._pending.pop(key, None)
        self._pending_bytes += len(put.data) - (0 if older is None else len(older.data))
        self._pending[key] = put
        if self._pending_bytes > MAX_PENDING_BYTES:
            self._unqueue(key)
            self._refuse(put.route, put.summary, "no_room")
        self._work.set()

    def _unqueue(self, key: _Attempt) -> _Put | None:
        put = self._pending.pop(key, None)
        if put is not None:
            self._pending_bytes -= len(put.data)
        return put

    def _refuse(self, route: bytes, summary: PartialSummary, why: str) -> None:
        self.counters[f"refused.{why}"] += 1
        self._acknowledge(route, summary, kept=False)

    def _acknowledge(self, route: bytes, summary: PartialSummary, *, kept: bool) -> None:
        ack = PartialAck(attempt=summary.attempt, digest=summary.digest, kept=kept)
        self._sender.ask(route, ack)

    # ---- the background ------------------------------------------------------------------------

    def parts(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What runs until cancelled."""
        intake = {f"turns {name}": part for name, part in self._intake.parts().items()}
        return {
            "turns": self._write(),
            "turns answers": self._sender.run(),
            "turns age": self._look(),
            **intake,
        }

    async def close(self) -> None:
        await self._intake.close()
        await asyncio.to_thread(self._disk.close)

    async def _write(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self._pending or self._to_remove:
                try:
                    while self._to_remove:  # one that cannot be removed holds up no other
                        await self._disk.run(self._files.remove, self._to_remove.pop(0))
                    if self._pending:
                        await self._write_one()
                except StoreError as error:  # nothing that was promised is lost
                    self.counters["disk"] += 1
                    _log.warning("turns.not_written", reason=str(error))

    async def _write_one(self) -> None:
        put = self._unqueue(next(iter(self._pending)))
        assert put is not None  # noqa: S101 - the caller has looked
        known = self._kept.get((put.summary.agent, put.summary.attempt))
        if known is not None and known[0].turns > put.summary.turns:
            self._refuse(put.route, put.summary, "older")
            return
        try:
            right = await self._disk.run(self._files.write, put.summary, put.data)
        except StoreError:
            self._refuse(put.route, put.summary, "disk")
            raise
        if not right:
            self._refuse(put.route, put.summary, "checksum")
            return
        self.counters["stored"] += 1
        self._take(put.summary)
        self._acknowledge(put.route, put.summary, kept=True)
        self._announce()

    def _take(self, summary: PartialSummary) -> None:
        """They are durable; make room for them."""
        key = (summary.agent, summary.attempt)
        self._forget(key)
        self._kept[key] = (summary, self._clock.monotonic_s())
        self._by_digest[summary.digest] = key
        self._to_tell[key] = None
        own = self._of_agent.setdefault(summary.agent, {})
        own[key] = None
        self._bytes[""] += summary.size_bytes
        self._bytes[summary.agent] += summary.size_bytes
        most, most_bytes = MAX_PARTIALS // AGENT_SHARE, MAX_BYTES // AGENT_SHARE
        while len(own) > most or self._bytes[summary.agent] > most_bytes:
            self._displace(next(iter(own)))
        while len(self._kept) > MAX_PARTIALS or self._bytes[""] > MAX_BYTES:
            self._displace(next(iter(self._kept)))

    def _displace(self, key: _Attempt) -> None:
        self.counters["displaced"] += 1
        self._drop(key)

    def _drop(self, key: _Attempt) -> None:
        found = self._forget(key)
        if found is not None:
            self._to_remove.append(found)
            self._work.set()

    def _forget(self, key: _Attempt) -> PartialSummary | None:
        self._to_tell.pop(key, None)
        found = self._kept.pop(key, None)
        if found is None:
            return None
        summary, (agent, _) = found[0], key
        self._by_digest.pop(summary.digest, None)
        own = self._of_agent[agent]
        del own[key]
        self._bytes[""] -= summary.size_bytes
        self._bytes[agent] -= summary.size_bytes
        if not own:
            del self._of_agent[agent], self._bytes[agent]
        return summary

    def _announce(self) -> None:
        while self._to_tell:
            keys = list(self._to_tell)[:ANNOUNCED_AT_ONCE]
            partials = tuple(self._kept[key][0] for key in keys)
            if not self._tell(PartialStored(partials=partials)):
                return
            for key in keys:
                del self._to_tell[key]

    async def _look(self) -> None:
        """Tell what could not be told, and drop what is old."""
        while True:
            await asyncio.sleep(LOOK_S)
            before = self._clock.monotonic_s() - MAX_AGE_S
            for key in [key for key, (_, since_s) in self._kept.items() if since_s <= before]:
                self.counters["expired"] += 1
                self._drop(key)
            self._announce()

    async def _frames(self, answer: str | PartialAck) -> Sequence[bytes]:
        if not isinstance(answer, str):
            return encode(answer)
        key = self._by_digest.get(answer)
        data = None
        if key is not None:
            data = await self._disk.run(self._files.read, self._kept[key][0])
        elif answer in self._shown:
            data = await self._results(answer)
        if data is None:
            self.counters["not_found"] += 1
            return encode(Body(digest=answer, found=False))
        frames = [data[start : start + MIB] for start in range(0, len(data), MIB)]
        return encode(Body(digest=answer), frames)


def _as_body(message: PartialOffer) -> OfferedBody:
    """Turns as something that is brought in like a body: what the intake looks at is the same."""
    partial = message.partial
    summary = GroupSummary(
        attempt=partial.attempt,
        fence=partial.fence,
        job=partial.job,
        digest=partial.digest,
        size_bytes=partial.size_bytes,
        rewards=(0.0,),
        lengths=(0,),
        versions={},
        prompt_tokens=0,
        queued_s=0.0,
        generating_s=0.0,
    )
    return OfferedBody(
        summary=summary, chunk_bytes=message.chunk_bytes, chunk_digests=message.chunk_digests
    )
