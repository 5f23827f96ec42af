"""Answers the weight store's requests for chunks of the versions in the outbox.

What always holds: one chunk is in memory at a time; at most ``MAX_QUEUED`` are waiting, what is
beyond is asked for again; a link that is full is tried again, less and less often; a link that is
gone forgets what was asked on it.
"""

import asyncio
from concurrent.futures import Executor

from cloud_trainer.outbox import Outbox
from transport.chunks import MAX_INDICES
from transport.errors import LinkError, WindowFull
from transport.messages import Chunk, ChunkRequest, Plane
from transport.plane_links import PlaneLinks

MAX_QUEUED = 4096
FIRST_RETRY_S = 0.002
MAX_RETRY_S = 0.25


class ChunkService:
    """Reads in ``reader``, sends on the weights plane of ``links``."""

    def __init__(self, outbox: Outbox, links: PlaneLinks, reader: Executor) -> None:
        self._outbox = outbox
        self._links = links
        self._reader = reader
        self._wanted: dict[tuple[str, int], None] = {}
        self._asked = asyncio.Event()
        self.sent_bytes = 0

    def ask(self, request: ChunkRequest) -> None:
        for index in request.indices[:MAX_INDICES]:
            if len(self._wanted) < MAX_QUEUED:
                self._wanted[request.digest, index] = None
        self._asked.set()

    async def run(self) -> None:
        """Answer until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            if not self._wanted:
                self._asked.clear()
                await self._asked.wait()
            digest, index = next(iter(self._wanted))
            del self._wanted[digest, index]
            data = await loop.run_in_executor(self._reader, self._outbox.read_chunk, digest, index)
            await self._send(digest, index, data)

    async def _send(self, digest: str, index: int, data: bytes | None) -> None:
        message = Chunk(digest=digest, index=index, found=data is not None)
        retry_s = FIRST_RETRY_S
        while True:
            try:
                self._links.send_or_raise(Plane.WEIGHTS, message, () if data is None else (data,))
            except WindowFull:
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, MAX_RETRY_S)
                continue
            except LinkError:
                self._wanted.clear()
                return
            self.sent_bytes += 0 if data is None else len(data)
            return
