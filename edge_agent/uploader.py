"""The bodies that leave an agent.

What always holds: a body is read from the spool, in a thread, when its turn comes, so that nothing
but the window is in memory.
"""

import asyncio
from collections import deque
from collections.abc import Callable

import structlog

from edge_agent.core.events import BodyLost, Event, SendFailed
from edge_agent.spool import Spool
from transport.errors import FarflowError, LinkError
from transport.messages import GroupSummary, Plane, TrajectoryPut
from transport.plane_links import PlaneLinks

_log = structlog.get_logger()


class Uploader:
    """Sends spooled bodies in the order asked for; what does not work out comes back as an event.

    The core never has more than its window under way, so the queue is bounded by that.
    """

    def __init__(self, links: PlaneLinks, spool: Spool, feed: Callable[[Event], None]) -> None:
        self._links = links
        self._spool = spool
        self._feed = feed
        self._queue: deque[GroupSummary] = deque()
        self._filled = asyncio.Event()

    def put(self, summary: GroupSummary) -> None:
        """Send this body in its turn."""
        self._queue.append(summary)
        self._filled.set()

    def clear(self) -> None:
        """The link is new: what was to be sent is asked for again."""
        self._queue.clear()

    async def run(self) -> None:
        """Send, until cancelled."""
        while True:
            self._filled.clear()
            while self._queue:
                await self._send(self._queue.popleft())
            await self._filled.wait()

    async def _send(self, summary: GroupSummary) -> None:
        message = TrajectoryPut(summary=summary)
        try:
            body = await asyncio.to_thread(self._spool.read, summary.digest)
            self._links.send_or_raise(Plane.TRAJECTORIES, message, (body,))
        except LinkError:
            self._feed(SendFailed(plane=Plane.TRAJECTORIES, message=message))
        except FarflowError as error:
            if not self._spool.has(summary.digest):
                return  # dropped while it waited here
            _log.error("spool.body_lost", attempt=summary.attempt, reason=str(error))
            self._feed(
                BodyLost(
                    attempt=summary.attempt,
                    digest=summary.digest,
                    code=error.code,
                    detail=str(error),
                )
            )
