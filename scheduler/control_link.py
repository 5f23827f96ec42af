"""A service's link to the rollout scheduler: it says hello, stays known and starts afresh.

What always holds: nothing but ``Hello`` is sent before the scheduler has said ``Welcome`` on this
connection; whoever hears nothing for ``lost_after_s`` makes a new connection; the user of this
class is told of every ``Welcome`` and announces again what the scheduler has not confirmed; the log
hears now and then why there is no connection.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Final

import structlog

from transport.envelope import LIMITS, decode, encode
from transport.errors import LinkClosed, LinkError, ProtocolError
from transport.links import Link
from transport.messages import (
    Goodbye,
    Hello,
    HelloRequired,
    Message,
    Ping,
    Plane,
    Pong,
    Refuse,
    Role,
    Welcome,
)
from transport.permissions import may_send
from transport.reaching import Reaching, address_of, what_to_look_at
from transport.runtime.clock import Clock

FIRST_HEARTBEAT_S: Final = 2.0
FIRST_LOST_AFTER_S: Final = 12.0
"""Until the scheduler has said its own."""

_LIMITS = LIMITS[Plane.CONTROL]
_log = structlog.get_logger()


class ControlLink:
    """``make_link`` connects to the control plane at ``endpoint``. ``on_welcome`` and
    ``on_message`` are called on the event loop and must not block."""

    def __init__(
        self,
        endpoint: str,
        make_link: Callable[[str], Link],
        *,
        incarnation: int,
        build: str,
        clock: Clock,
        rng: random.Random,
        on_welcome: Callable[[], None],
        on_message: Callable[[Message], None],
    ) -> None:
        self._endpoint = endpoint
        self._make_link = make_link
        self._reaching = Reaching(self._not_connected)
        self._hello = Hello(role=Role.SERVICE, incarnation=incarnation, build=build)
        self._clock = clock
        self._rng = rng
        self._on_welcome = on_welcome
        self._on_message = on_message
        self._link: Link | None = None
        self._heartbeat_s = FIRST_HEARTBEAT_S
        self._lost_after_s = FIRST_LOST_AFTER_S
        self._sequence = 0
        self._heard_s = 0.0
        self.welcomed = False
        self.relinked = 0

    async def run(self) -> None:
        """Keep the link up until cancelled."""
        while True:
            link = self._link = self._make_link(self._endpoint)
            self._heard_s = self._clock.monotonic_s()
            receiving = asyncio.create_task(self._receive(link))
            watching = asyncio.create_task(self._watch(link))
            try:
                await self._beat(link, receiving)
            except asyncio.CancelledError:
                self.send(Goodbye(reason="stopping"))
                raise
            finally:
                self.welcomed = False
                self._link = None
                had_connected = link.connected
                for task in (receiving, watching):
                    task.cancel()
                outcomes = await asyncio.gather(receiving, watching, return_exceptions=True)
                for error in outcomes:
                    if isinstance(error, Exception):  # nobody else would hear of it
                        _log.error("control.failed", exc_info=error)
                await link.close()
            self.relinked += 1
            if had_connected:
                _log.warning("control.silent", lost_after_s=self._lost_after_s)

    def send(self, message: Message) -> bool:
        """Hand a message to the link. False when it cannot take it now: whoever needs it to arrive
        says it again until it is confirmed.

        Raises:
            LocalProtocolError: the message is too large, and always will be.
        """
        if not self.welcomed or self._link is None:
            return False
        return self._send(self._link, message)

    def _send(self, link: Link, message: Message) -> bool:
        try:
            link.send(encode(message, limits=_LIMITS))
        except LinkError as error:
            _log.debug("control.not_sent", message=type(message).__name__, reason=str(error))
            return False
        return True

    async def _beat(self, link: Link, receiving: asyncio.Task[None]) -> None:
        """Hello until welcome, then signs of life; returns when the scheduler is silent."""
        while not receiving.done():
            now = self._clock.monotonic_s()
            if now - self._heard_s > self._lost_after_s:
                return
            if not link.connected:
                self.welcomed = False
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._heartbeat_s):
                        await link.wait_connected()
            if self.welcomed:
                self._sequence += 1
                self._send(link, Ping(sequence=self._sequence, sent_s=now))
                pause_s = self._heartbeat_s
            else:
                self._send(link, self._hello)
                pause_s = max(1.0, self._heartbeat_s)
            await asyncio.wait([receiving], timeout=pause_s * self._rng.uniform(0.9, 1.0))

    async def _watch(self, link: Link) -> None:
        with contextlib.suppress(LinkClosed):
            while True:
                await self._reaching.connected(link)
                await link.wait_disconnected()

    def _not_connected(self, reason: str) -> None:
        _log.warning(
            "control.not_connected",
            address=address_of(self._endpoint),
            reason=reason,
            remedy=what_to_look_at(reason, "transport.host", "transport.control_port"),
        )

    async def _receive(self, link: Link) -> None:
        try:
            while True:
                for frames in await link.recv():
                    self._take(link, frames)
        except LinkClosed:
            return

    def _take(self, link: Link, frames: list[bytes]) -> None:
        try:
            message, _ = decode(frames, _LIMITS)
        except ProtocolError as error:
            _log.warning("control.malformed", reason=str(error))
            return
        if not may_send(Role.SCHEDULER, Plane.CONTROL, type(message)):
            _log.warning("control.not_allowed", message=type(message).__name__)
            return
        self._heard_s = self._clock.monotonic_s()
        match message:
            case Welcome():
                self._heartbeat_s = message.heartbeat_s
                self._lost_after_s = message.lost_after_s
                if not self.welcomed:
                    self.welcomed = True
                    _log.info("control.welcome", term=message.term)
                self._on_welcome()
            case HelloRequired():
                self.welcomed = False
                self._send(link, self._hello)
            case Refuse():
                self.welcomed = False
                _log.warning("control.refused", code=message.code, reason=message.message)
            case Pong():
                pass
            case _:
                self._on_message(message)
