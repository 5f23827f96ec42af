"""Finished turns on their way to the trajectory log, and earlier ones on their way here.

What always holds: of an attempt only the newest turns are held, in memory, and at most one packing
of them is under way: the next goes when the log is done with it, over a new connection, or after
``AGAIN_S`` without an answer; ``MAX_HELD_BYTES`` bound all of them, and what does not fit is not
kept. They are worth less than results: nothing is reported when they are lost.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from transport.envelope import KIND_OF
from transport.errors import LinkError
from transport.messages import (
    Body,
    BodyRequest,
    Message,
    PartialAck,
    PartialOffer,
    PartialPut,
    PartialSummary,
    Plane,
)
from transport.plane_links import PlaneLinks
from transport.summaries import WHOLE_BODY_BYTES
from transport.weights.manifest import chunk_digest

MAX_HELD_BYTES: Final = 64 * 2**20
AGAIN_S: Final = 30.0
CHUNK_BYTES: Final = 256 << 10
PLANE: Final = Plane.TRAJECTORIES


@dataclass(slots=True)
class _Held:
    summary: PartialSummary
    data: bytes
    done: bool = False


class Partials:
    """The ``Keeper`` of an agent's attempts; ``time_s`` is a monotonic clock."""

    def __init__(self, links: PlaneLinks, time_s: Callable[[], float]) -> None:
        self._links = links
        self._time_s = time_s
        self._held: dict[str, _Held] = {}
        self._held_bytes = 0
        self._under_way: dict[str, tuple[str, float]] = {}  # attempt -> digest, since when
        self._fetches: dict[str, asyncio.Future[bytes | None]] = {}
        self.counters: Counter[str] = Counter()
        self._wanted = True

    # ---- what the attempts say -----------------------------------------------------------------

    def keep(self, summary: PartialSummary, data: bytes) -> None:
        """See ``Keeper``."""
        self._drop(summary.attempt)
        if not self._wanted:
            self.counters["not_wanted"] += 1
            return
        if self._held_bytes + len(data) > MAX_HELD_BYTES:
            self.counters["no_room"] += 1
            return
        self._held[summary.attempt] = _Held(summary, data)
        self._held_bytes += len(data)
        self._send(summary.attempt)

    def forget(self, attempt: str) -> None:
        """See ``Keeper``."""
        self._drop(attempt)
        self._under_way.pop(attempt, None)

    async def fetch(self, digest: str) -> bytes | None:
        """See ``Keeper``."""
        found = self._fetches.get(digest)
        if found is None:
            found = self._fetches[digest] = asyncio.get_running_loop().create_future()
            self._links.send(PLANE, BodyRequest(digests=(digest,)))  # if not, with the next link
        try:
            return await asyncio.shield(found)
        finally:
            self._fetches.pop(digest, None)

    # ---- what the log and the link say ---------------------------------------------------------

    def took(self, message: Message, payload: list[bytes]) -> bool:
        """Whether a message of the log was for here."""
        match message:
            case PartialAck(attempt=attempt, digest=digest):
                self._answered(attempt, digest)
            case Body(digest=digest, found=is_found):
                future = self._fetches.get(digest)
                if future is not None and not future.done():
                    future.set_result(b"".join(payload) if is_found else None)
            case _:
                return False
        return True

    def peer_knows(self, kinds: bytes) -> None:
        """Which kinds of messages the log knows (none: not said); one that is too old for turns is
        sent none."""
        self._wanted = not kinds or {KIND_OF[PartialPut], KIND_OF[PartialOffer]} <= set(kinds)

    def link_changed(self, up: bool) -> None:
        """What was under way over the last connection is lost."""
        self._under_way.clear()
        if not up:
            return
        for digest in self._fetches:
            self._links.send(PLANE, BodyRequest(digests=(digest,)))
        for attempt, held in tuple(self._held.items()):
            held.done = False  # the log may be another process
            self._send(attempt)

    def chunk_bytes(self, digest: str) -> int | None:
        """Size of the chunks of turns that are held; None for anything else."""
        return None if self._find(digest) is None else CHUNK_BYTES

    def read_chunk(self, digest: str, index: int) -> bytes | None:
        """One of these chunks; called in a thread."""
        held = self._find(digest)
        start = index * CHUNK_BYTES
        return None if held is None else held.data[start : start + CHUNK_BYTES] or None

    def _find(self, digest: str) -> _Held | None:
        held = tuple(self._held.values())
        return next((one for one in held if one.summary.digest == digest), None)

    def _answered(self, attempt: str, digest: str) -> None:
        if self._under_way.get(attempt, ("", 0.0))[0] == digest:
            del self._under_way[attempt]
        held = self._held.get(attempt)
        if held is not None and held.summary.digest == digest:
            held.done = True
        self._send(attempt)

    def _send(self, attempt: str) -> None:
        held, now = self._held.get(attempt), self._time_s()
        since_s = self._under_way.get(attempt, ("", now - AGAIN_S))[1]
        if held is None or held.done or now - since_s < AGAIN_S:
            return
        message, payload = _message(held)
        try:
            self._links.send_or_raise(PLANE, message, payload)
        except LinkError:
            self.counters["not_sent"] += 1
            self._under_way.pop(attempt, None)
            return
        self.counters["sent"] += 1
        self._under_way[attempt] = (held.summary.digest, now)

    def _drop(self, attempt: str) -> None:
        held = self._held.pop(attempt, None)
        if held is not None:
            self._held_bytes -= len(held.data)


def _message(held: _Held) -> tuple[Message, tuple[bytes, ...]]:
    summary, data = held.summary, held.data
    if len(data) <= WHOLE_BODY_BYTES:
        return PartialPut(partial=summary), (data,)
    starts = range(0, len(data), CHUNK_BYTES)
    digests = tuple(chunk_digest(data[start : start + CHUNK_BYTES]) for start in starts)
    offer = PartialOffer(partial=summary, chunk_bytes=CHUNK_BYTES, chunk_digests=digests)
    return offer, ()
