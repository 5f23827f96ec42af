"""The wheel that boxes install farflow from: the one file that ``http.wheel`` names.

What always holds: no other file is given out, whatever the path says; a file is read piece by
piece as its reader takes it, by few readers at once, and one that takes nothing is cut off.
"""

import asyncio
import contextlib
import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

from aiohttp import web

from scheduler.gateway.calls import ANYBODY, Call, Route, busy
from scheduler.http_server import HttpRefused, write

MAX_BYTES: Final = 256 * 2**20
PIECE_BYTES: Final = 256 * 1024


async def _wheel(call: Call) -> web.StreamResponse:
    world = call.world
    path = Path(world.config.http.wheel)
    if not world.config.http.wheel or call.names["wheel"] != path.name:
        raise HttpRefused(404, "wheel.unknown", "http.wheel names the one wheel that is given out")
    most = max(1, world.config.http.max_connections // 4)
    if world.downloads >= most:
        raise busy(f"{most} boxes fetch the wheel now; try again")
    world.downloads += 1
    try:
        file = await asyncio.to_thread(_opened, path)
        with contextlib.closing(file):
            return await _send(call, file)
    finally:
        world.downloads -= 1


async def _send(call: Call, file: BinaryIO) -> web.StreamResponse:
    facts = os.fstat(file.fileno())
    etag = f'"{facts.st_mtime_ns:x}-{facts.st_size:x}"'
    headers = {
        "ETag": etag,
        "Cache-Control": "no-cache",
        "X-Content-Type-Options": "nosniff",
        "Server": "farflow",
    }
    if etag in (one.strip() for one in call.request.headers.get("If-None-Match", "").split(",")):
        return web.Response(status=304, headers=headers)
    response = web.StreamResponse(headers=headers)
    response.content_type = "application/zip"
    response.content_length = left = facts.st_size
    await response.prepare(call.request)
    with contextlib.suppress(ConnectionError):
        while left:
            piece = await asyncio.to_thread(file.read, min(PIECE_BYTES, left))
            left -= len(piece)
            if not piece and call.request.transport is not None:
                call.request.transport.abort()  # it became shorter: the length was a promise
            if not piece or not await write(response, call.request, piece):
                break
    return response


def _opened(path: Path) -> BinaryIO:
    """Raises HttpRefused when it cannot be given out."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise _unusable(error.strerror or str(error)) from error
    facts = os.fstat(file.fileno())
    if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_BYTES:
        file.close()
        raise _unusable(f"no file, or of more than {MAX_BYTES >> 20} MiB")
    return file


def _unusable(reason: str) -> HttpRefused:
    text = f"the file that http.wheel names cannot be read: {reason}"
    return HttpRefused(503, "wheel.unreadable", text)


WHEELS: Final = (
    Route(method="GET", path="/v1/wheel/{wheel}", roles=ANYBODY, answer=_wheel, result=str,
          content_type="application/zip",
          summary="The wheel that boxes install farflow from (http.wheel)."),
)  # fmt: skip
