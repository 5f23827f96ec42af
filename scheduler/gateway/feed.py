"""What everybody who looks at the scheduler shares: its status and its events, asked for once.

What always holds: the status is at most ``STATUS_S`` old, and asked for at most once in that time
however many want it, and once before each visit of who comes regularly; events are followed by one
request at a time, only while somebody listens; the last ``RING`` of them are kept, and who is
further behind is told how many are missing.
"""

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator
from itertools import islice
from typing import Final, NamedTuple

import msgspec
import structlog

from scheduler.gateway.habits import Habits
from scheduler.operator import Operator
from transport.errors import FarflowError, PeerUnreachable
from transport.messages import Events, Transition
from transport.runtime.clock import Clock
from transport.status import SchedulerStatus

STATUS_S: Final = 1.0
LEAD_S: Final = 0.5
"""So long before somebody is expected the status is asked for, which takes a while with a thousand
agents."""
WAIT_S: Final = 20.0
PACE_S: Final = 0.05
"""Between two requests for events: what happens meanwhile comes in one answer."""
AGAIN_S: Final = 1.0
RING: Final = 4096
_UNSTEADY: Final = ("control.", "loop.")
"""Counters that begin so change while nothing happens, the first with every request."""

_log = structlog.get_logger()


class Snapshot(NamedTuple):
    """A status, how often it had changed before in this life, its JSON, and when on our clock it
    came."""

    status: SchedulerStatus
    number: int
    encoded: bytes
    taken_s: float


class Told(NamedTuple):
    """A transition, or that ``missed`` of them were forgotten before us, as an event stream has
    it."""

    transition: Transition | None
    missed: int
    encoded: bytes


class Feed:
    """Status and events. ``asking`` answers at once, ``following`` is kept waiting."""

    def __init__(self, asking: Operator, following: Operator, clock: Clock) -> None:
        self._asking = asking
        self._following = following
        self._clock = clock
        self._snapshot: Snapshot | None = None
        self._compared = b""
        self._habits = Habits()
        self._expected: dict[str, asyncio.TimerHandle] = {}
        self._status_task: asyncio.Task[Snapshot] | None = None
        self._ring: deque[Told] = deque(maxlen=RING)
        self._changed = asyncio.Event()
        self._listeners = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._started: asyncio.Future[None] | None = None
        self.position = 0
        """How many entries the ring got so far."""
        self.last = 0
        """Number of the last transition that was looked at; 0 before the first answer."""
        self.trouble: PeerUnreachable | None = None
        """Why the status could not be had the last time, if so."""

    # ---- status --------------------------------------------------------------------------------

    async def status(self) -> Snapshot:
        """The status, at most ``STATUS_S`` old; raises as ``Operator.status``."""
        if self._snapshot is not None and self._age_s() < STATUS_S:
            return self._snapshot
        return await asyncio.shield(self._asked_for())

    def expect(self, who: str) -> None:
        """``who`` has just come for the status, and may come regularly: have it there then."""
        pending = self._expected.pop(who, None)
        if pending is not None:
            pending.cancel()
        again_s = self._habits.came(who, self._clock.monotonic_s())
        if again_s is not None:
            loop = asyncio.get_running_loop()
            self._expected[who] = loop.call_later(max(0.0, again_s - LEAD_S), self._ahead, who)

    def _ahead(self, who: str) -> None:
        del self._expected[who]
        if self._age_s() > STATUS_S / 4:
            self._asked_for()

    def _age_s(self) -> float:
        """Of the latest status."""
        if self._snapshot is None:
            return math.inf
        return self._clock.monotonic_s() - self._snapshot.taken_s

    def _asked_for(self) -> asyncio.Task[Snapshot]:
        if self._status_task is None:
            self._status_task = asyncio.create_task(self._take())
            self._status_task.add_done_callback(self._taken)
        return self._status_task

    async def _take(self) -> Snapshot:
        status = await self._asking.status()
        steady = {k: v for k, v in status.counters.items() if not k.startswith(_UNSTEADY)}
        compared = msgspec.json.encode(
            msgspec.structs.replace(status, uptime_s=0.0, counters=steady)
        )
        number = 1 if self._snapshot is None else self._snapshot.number
        if self._snapshot is not None and compared != self._compared:
            number += 1
        self._compared = compared
        encoded = msgspec.json.encode(status)
        self._snapshot = Snapshot(status, number, encoded, self._clock.monotonic_s())
        return self._snapshot

    def _taken(self, task: asyncio.Task[Snapshot]) -> None:
        self._status_task = None
        error = None if task.cancelled() else task.exception()
        was = self.trouble
        self.trouble = error if isinstance(error, PeerUnreachable) else None
        if (was is None) != (self.trouble is None):
            self._notify()

    # ---- events --------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Events are followed, and the status is looked at, while anybody is in here; enters once
        ``last`` is known.

        Raises:
            FarflowError: the scheduler cannot be asked.
        """
        self._listeners += 1
        try:
            if self._started is None:
                for task in self._tasks:  # they could not ask, and somebody still waits to leave
                    task.cancel()
                self._started = asyncio.get_running_loop().create_future()
                self._started.add_done_callback(_looked_at)
                self._tasks = [
                    asyncio.create_task(self._follow(self._started)),
                    asyncio.create_task(self._look()),
                ]
            await asyncio.shield(self._started)
            yield
        finally:
            self._listeners -= 1
            if not self._listeners:
                await self.close()

    async def close(self) -> None:
        """Stop following, and expect nobody; idempotent."""
        tasks, self._tasks = self._tasks, []
        started, self._started = self._started, None
        for pending in self._expected.values():
            pending.cancel()
        self._expected.clear()
        self._ring.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if started is not None:
            started.cancel()

    def mark(self) -> asyncio.Event:
        """The present, for ``changed``."""
        return self._changed

    async def changed(self, mark: asyncio.Event, timeout_s: float) -> None:
        """Returns when something was new since ``mark``, or after a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await mark.wait()

    def after(self, position: int) -> tuple[list[Told], int]:
        """What the ring got after ``position`` entries, and how many it has lost of them."""
        lost = max(0, self.position - len(self._ring) - position)
        wanted = min(self.position - position, len(self._ring))
        newest = list(islice(reversed(self._ring), wanted))
        newest.reverse()
        return newest, lost

    @property
    def snapshot(self) -> Snapshot | None:
        """The latest status."""
        return self._snapshot

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _look(self) -> None:
        """Take the status again and again."""
        number = 0
        while True:
            try:
                snapshot = await self.status()
            except FarflowError as error:
                _log.info("http.no_status", reason=str(error))
            except Exception:  # noqa: BLE001 - nobody else would hear of it
                _log.exception("http.no_status")
            else:
                if snapshot.number != number:
                    number = snapshot.number
                    self._notify()
            await asyncio.sleep(STATUS_S)

    async def _follow(self, started: asyncio.Future[None]) -> None:
        after: int | None = None
        while True:
            try:
                wait_s = 0.0 if after is None else WAIT_S
                page = await self._following.events(after, wait_s=wait_s)
                after = self.last = page.last
                if started.done():
                    self._add(page)
                else:
                    started.set_result(None)
            except Exception as error:  # noqa: BLE001 - as above
                if not isinstance(error, FarflowError):
                    _log.exception("http.no_events")
                if not started.done():
                    started.set_exception(error)
                    self._started = None  # the next one who comes tries again
                    return
                _log.info("http.no_events", reason=str(error))
                await asyncio.sleep(AGAIN_S)
                continue
            await asyncio.sleep(PACE_S)

    def _add(self, page: Events) -> None:
        if page.missed:
            self._ring.append(Told(None, page.missed, missed_event(page.missed)))
            self.position += 1
        lead_s = clock_lead_s(page, self._clock)
        for transition in page.transitions:
            self._ring.append(Told(transition, 0, transition_event(transition, lead_s)))
            self.position += 1
        if page.missed or page.transitions:
            self._notify()


def clock_lead_s(page: Events, clock: Clock) -> float | None:
    """What our wall clock is ahead of the scheduler's own seconds now; None where a page does not
    say what they are."""
    return clock.wall_s() - page.now_s if page.now_s else None


def transition_event(transition: Transition, lead_s: float | None) -> bytes:
    """As an event stream has it, with ``wall_s`` where ``lead_s`` is known; ``id`` is the number to
    go on after."""
    data = msgspec.json.encode(transition)
    if lead_s is not None:
        data = b'%b,"wall_s":%.3f}' % (data.removesuffix(b"}"), transition.at_s + lead_s)
    return b"id: %d\nevent: transition\ndata: %b\n\n" % (transition.number, data)


def missed_event(missed: int) -> bytes:
    """That transitions were left out."""
    return b'event: missed\ndata: {"missed":%d}\n\n' % missed


def _looked_at(started: asyncio.Future[None]) -> None:
    if not started.cancelled():
        started.exception()
