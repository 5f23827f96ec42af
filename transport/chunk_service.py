"""Answers a hub's requests for chunks of what this end has to give: the weight store asks a trainer
for its versions, the trajectory log asks an agent for the bodies in its spool.

What always holds: one chunk is in memory at a time, read whole and verified, whatever parts of it
are asked for; at most ``MAX_QUEUED`` are waiting, what is beyond is asked for again; a link that is
full is tried again, less and less often; a link that is gone forgets what was asked on it.
"""

import asyncio
from concurrent.futures import Executor
from typing import NamedTuple, Protocol

from transport.chunk_parts import MAX_INDICES, ChunkKey, place_of
from transport.errors import LinkError, WindowFull
from transport.messages import Chunk, ChunkRequest, Plane
from transport.plane_links import PlaneLinks

MAX_QUEUED = 4096
FIRST_RETRY_S = 0.002
MAX_RETRY_S = 0.25


class _Piece(NamedTuple):
    digest: str
    number: int
    part_bytes: int


class ChunkFiles(Protocol):
    """What there is to give, by digest; both are None for what is not here (any more)."""

    def chunk_bytes(self, digest: str) -> int | None:
        """Size of a file's chunks; called on the event loop."""
        ...

    def read_chunk(self, digest: str, index: int) -> bytes | None:
        """One verified chunk; called in the reader's thread."""
        ...


class ChunkService:
    """Reads in ``reader``, None being the loop's own threads; sends on ``plane`` of ``links``."""

    def __init__(
        self,
        files: ChunkFiles,
        links: PlaneLinks,
        reader: Executor | None,
        plane: Plane = Plane.WEIGHTS,
    ) -> None:
        self._files = files
        self._links = links
        self._reader = reader
        self._plane = plane
        self._wanted: dict[_Piece, None] = {}
        self._last: tuple[ChunkKey, bytes] | None = None
        self._asked = asyncio.Event()
        self.sent_bytes = 0

    def ask(self, request: ChunkRequest) -> None:
        for index in request.indices[:MAX_INDICES]:
            if len(self._wanted) < MAX_QUEUED:
                self._wanted[_Piece(request.digest, index, request.part_bytes)] = None
        self._asked.set()

    def clear(self) -> None:
        """The link is new: what is still wanted is asked for again."""
        self._wanted.clear()

    async def run(self) -> None:
        """Answer until cancelled."""
        while True:
            if not self._wanted:
                self._asked.clear()
                self._last = None
                await self._asked.wait()
            piece = next(iter(self._wanted))
            del self._wanted[piece]
            await self._send(piece, await self._read(piece))

    async def _read(self, piece: _Piece) -> bytes:
        """The bytes of a piece, none when there is no such piece (any more)."""
        chunk_bytes = self._files.chunk_bytes(piece.digest)
        place = place_of(piece.number, piece.part_bytes, chunk_bytes or 0)
        if not chunk_bytes or place is None:
            return b""
        key = (piece.digest, place.number)
        if self._last is None or self._last[0] != key:
            self._last = None
            loop = asyncio.get_running_loop()
            data = await loop.run_in_executor(self._reader, self._files.read_chunk, *key)
            if data is None:
                return b""
            self._last = (key, data)
        data = self._last[1]
        return data[place.start : place.stop] if piece.part_bytes else data

    async def _send(self, piece: _Piece, data: bytes) -> None:
        message = Chunk(
            digest=piece.digest, index=piece.number, found=bool(data), part_bytes=piece.part_bytes
        )
        retry_s = FIRST_RETRY_S
        while True:
            try:
                self._links.send_or_raise(self._plane, message, (data,) if data else ())
            except WindowFull:
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, MAX_RETRY_S)
                continue
            except LinkError:
                self._wanted.clear()
                return
            self.sent_bytes += len(data)
            return
