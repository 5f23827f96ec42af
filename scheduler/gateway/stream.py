"""Events as a stream (server-sent events, the HTML standard's section 9.2).

    event: status       the whole status, first and when it has changed, at most once a second
    event: transition   id: its number; ``Last-Event-ID`` goes on after it
    event: missed       so many transitions were forgotten before they could be sent
    event: unreachable  the scheduler does not answer the gateway

What always holds: what a reader has not taken yet is bounded (one batch and a socket's buffer):
one that is slow loses the oldest events and is told so, one that takes nothing is cut off; a
stream ends within seconds of its token's revocation.
"""

import socket
from typing import Final

import msgspec
from aiohttp import web

from scheduler.core.transitions import names
from scheduler.gateway.calls import Call, busy
from scheduler.gateway.feed import STATUS_S, Told, clock_lead_s, missed_event, transition_event
from scheduler.http_server import write
from transport.messages import Transition

HEARTBEAT_S: Final = 15.0
SEND_BYTES: Final = 128 * 1024
"""What the kernel keeps for a reader; it takes twice as much."""
BATCH: Final = 256
"""Events that are written at once."""
MAX_PAGES: Final = 200
"""Of transitions that a reader has missed while it was away; the scheduler remembers fewer."""

_COMMENT: Final = b": still here\n\n"


async def stream(call: Call, after: int | None, subject: str) -> web.StreamResponse:
    """Answer with events after number ``after`` (None: from now on) of ``subject`` and what names
    it (all when it is empty), until the reader goes.

    Raises:
        HttpRefused: too many read already.
        FarflowError: the scheduler cannot be asked.
    """
    world = call.world
    most = world.config.http.max_connections // 2
    if world.streams >= most:
        raise busy(f"{most} streams are open; close some, or raise http.max_connections")
    world.streams += 1
    try:
        async with world.feed.listening():
            await world.feed.status()
            response = web.StreamResponse(
                headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            )
            response.content_type = "text/event-stream"
            _bound_socket(call.request)
            await response.prepare(call.request)
            await _Reader(call, response, subject).run(after)
            return response
    finally:
        world.streams -= 1


class _Reader:
    def __init__(self, call: Call, response: web.StreamResponse, subject: str) -> None:
        self._call = call
        self._world = call.world
        self._response = response
        self._subject = subject
        self._wrote_s = 0.0

    async def run(self, after: int | None) -> None:
        feed, clock = self._world.feed, self._world.clock
        position, reached = feed.position, feed.last
        going = await self._write(b"retry: 1000\n\n")
        if after is not None and after < reached:
            going = going and await self._catch_up(after, reached)
        number, trouble = 0, False
        while going and self._valid():
            parts: list[bytes] = []
            mark = feed.mark()
            told, lost = feed.after(position)
            position += lost
            if lost:
                parts.append(missed_event(lost))
            parts += [one.encoded for one in told[:BATCH] if self._wanted(one)]
            position += min(BATCH, len(told))
            if (feed.trouble is not None) is not trouble:
                trouble = not trouble
                if feed.trouble is not None:
                    parts.append(_unreachable(str(feed.trouble)))
                else:
                    number = -1  # the status says that it is over, though it be the same
            snapshot = feed.snapshot
            if snapshot is not None and snapshot.number != number:
                number = snapshot.number
                parts.append(b"event: status\ndata: %b\n\n" % snapshot.encoded)
            if not parts and clock.monotonic_s() - self._wrote_s >= HEARTBEAT_S:
                parts.append(_COMMENT)
            if parts:
                going = await self._write(b"".join(parts))
            if len(told) <= BATCH:
                await feed.changed(mark, STATUS_S)

    async def _catch_up(self, after: int, until: int) -> bool:
        """What happened before we listened, as far as the scheduler remembers it."""
        for _ in range(MAX_PAGES):
            async with self._world.orders.turn() as operator:
                page = await operator.events(after, subject=self._subject)
            parts = [missed_event(page.missed)] if page.missed else []
            lead_s = clock_lead_s(page, self._world.clock)
            found = [one for one in page.transitions if one.number <= until]
            parts += [transition_event(one, lead_s) for one in found]
            if parts and not await self._write(b"".join(parts)):
                return False
            if page.last >= until or page.last <= after:
                return True
            after = page.last
        return True

    def _valid(self) -> bool:
        token, transport = self._call.token, self._call.request.transport
        if transport is None or transport.is_closing():
            return False
        return token is not None and self._world.book.valid(token)

    def _wanted(self, told: Told) -> bool:
        one = told.transition
        return one is None or not self._subject or _about(one, self._subject)

    async def _write(self, data: bytes) -> bool:
        try:
            taken = await write(self._response, self._call.request, data)
        except ConnectionError:
            return False
        self._wrote_s = self._world.clock.monotonic_s()
        return taken


def _bound_socket(request: web.BaseRequest) -> None:
    """The kernel would take megabytes for one that reads slowly."""
    sock = None if request.transport is None else request.transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)


def _about(one: Transition, subject: str) -> bool:
    return names(one.subject, dict(one.facts), subject)


def _unreachable(reason: str) -> bytes:
    data = msgspec.json.encode({"message": reason})
    return b"event: unreachable\ndata: %b\n\n" % data
