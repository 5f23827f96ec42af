"""The bodies that leave an agent.

What always holds: small bodies are put in the order asked for, each read from the spool, in a
thread, when its turn comes; larger ones are offered, and of these one chunk is in memory at a time,
when the log asks for it; what does not work out comes back as an event. Finished turns of running
attempts go the same ways (``partials``).
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import structlog

from edge_agent.core.events import BodyLost, Event, SendFailed
from edge_agent.partials import Partials
from edge_agent.spool import Spool
from transport.chunk_service import ChunkService
from transport.errors import FarflowError, LinkError
from transport.messages import (
    ChunkRequest,
    GroupSummary,
    Message,
    OfferedBody,
    Plane,
    TrajectoryOffer,
    TrajectoryPut,
)
from transport.plane_links import PlaneLinks

MAX_OFFER_BYTES = 128 << 10
"""Of one offer; a frame's header may have twice that."""

_log = structlog.get_logger()


class Uploader:
    """Sends and offers spooled bodies, and answers the log's requests for their chunks.

    The core never has more than its window under way, so the queue is bounded by that.
    """

    def __init__(self, links: PlaneLinks, spool: Spool, feed: Callable[[Event], None]) -> None:
        self._links = links
        self._spool = spool
        self._feed = feed
        self._queue: deque[GroupSummary] = deque()
        self._filled = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._offered: dict[str, str] = {}  # digest -> attempt
        self._chunks = ChunkService(self, links, None, Plane.TRAJECTORIES)
        self.partials = Partials(links, self._loop.time)

    def put(self, summary: GroupSummary) -> None:
        """Send this body in its turn."""
        self._queue.append(summary)
        self._filled.set()

    def offer(self, summaries: Sequence[GroupSummary]) -> None:
        """Tell the log of these bodies; those that were dropped meanwhile are left out."""
        bodies: list[OfferedBody] = []
        size_bytes = 0
        for summary in summaries:
            body = self._spool.offer(summary)
            if body is None:
                continue
            self._offered[summary.digest] = summary.attempt
            body_bytes = len(msgspec.msgpack.encode(body))
            if bodies and size_bytes + body_bytes > MAX_OFFER_BYTES:
                self._send_offer(bodies)
                bodies, size_bytes = [], 0
            bodies.append(body)
            size_bytes += body_bytes
        if bodies:
            self._send_offer(bodies)

    def asked(self, request: ChunkRequest) -> None:
        """The log wants these chunks of an offered body."""
        self._chunks.ask(request)

    def took(self, message: Message, payload: list[bytes]) -> bool:
        """Whether something that the log said is of no concern to the core."""
        if isinstance(message, ChunkRequest):
            self.asked(message)
            return self.partials.chunk_bytes(message.digest) is not None
        return self.partials.took(message, payload)

    def link_changed(self, up: bool) -> None:
        """The link is new, or gone."""
        self.clear()
        self.partials.link_changed(up)

    def dropped(self, digest: str) -> None:
        """A body is not in the spool any more."""
        self._offered.pop(digest, None)

    def clear(self) -> None:
        """The link is new: what was to be sent is asked for again."""
        self._queue.clear()
        self._chunks.clear()
        self._offered.clear()

    async def run(self) -> None:
        """Send, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._chunks.run(), name="chunks of bodies")
            tasks.create_task(self._put_all(), name="bodies")

    async def _put_all(self) -> None:
        while True:
            self._filled.clear()
            while self._queue:
                await self._send(self._queue.popleft())
            await self._filled.wait()

    async def _send(self, summary: GroupSummary) -> None:
        message = TrajectoryPut(summary=summary, cumulative=True)
        try:
            body = await asyncio.to_thread(self._spool.read, summary.digest)
            self._links.send_or_raise(Plane.TRAJECTORIES, message, (body,))
        except LinkError:
            self._feed(SendFailed(plane=Plane.TRAJECTORIES, message=message))
        except FarflowError as error:
            if not self._spool.has(summary.digest):
                return  # dropped while it waited here
            self._lost(summary.attempt, summary.digest, error)

    def _send_offer(self, bodies: Sequence[OfferedBody]) -> None:
        message = TrajectoryOffer(bodies=tuple(bodies))
        if not self._links.send(Plane.TRAJECTORIES, message):
            self._feed(SendFailed(plane=Plane.TRAJECTORIES, message=message))

    def _lost(self, attempt: str, digest: str, error: FarflowError) -> None:
        _log.error("spool.body_lost", attempt=attempt, reason=str(error))
        self._feed(BodyLost(attempt=attempt, digest=digest, code=error.code, detail=str(error)))

    # ---- what the chunk service asks -----------------------------------------------------------

    def chunk_bytes(self, digest: str) -> int | None:
        """Of bodies that were offered over this link, and of no others."""
        if digest in self._offered:
            return self._spool.chunk_bytes(digest)
        return self.partials.chunk_bytes(digest)

    def read_chunk(self, digest: str, index: int) -> bytes | None:
        """In a thread; a damaged body is reported on the loop."""
        if digest not in self._offered:
            return self.partials.read_chunk(digest, index)
        try:
            return self._spool.read_chunk(digest, index)
        except FarflowError as error:
            self._loop.call_soon_threadsafe(self._damaged, digest, error)
            return None

    def _damaged(self, digest: str, error: FarflowError) -> None:
        attempt = self._offered.pop(digest, None)
        if attempt is not None:
            self._lost(attempt, digest, error)
