"""The scheduler's loop: input to the core, its changes to disk, then its effects to the world.

What always holds:

1. Effects leave after the rows that they follow from are durable, and in the order in which the
   core gave them, also when some batches changed nothing.
2. Commits are made by one thread; while it waits for the disk the loop goes on collecting and
   deciding, and everything that was decided meanwhile is committed together next time. What may
   be ahead of the disk is bounded, and beyond that no more input is taken.
3. The core's clock continues from where the store says the last life stopped.
4. A disk that refuses ends the loop with its ``StoreError``: no effect of a lost commit leaves.
5. An event that raises out of the core ends the loop: nobody knows which half of its changes was
   made, so neither its rows nor any effect decided beside it may leave. The rows on disk are those
   before it, so the next life begins sound. Who sent it goes to the log and the event to the event
   log, so that a sender that says it again can be told apart and shut out by its key.

The core is called on the event loop and nowhere else. No decision is made here.

That a changed row encodes needs no handling: rows are Structs of texts, flags, floats and integers,
every integer of a peer is bounded where it is decoded (``transport.messages``) or looked at
(``transport.trajectory.summary_fault``, ``transport.runs``), and sums over a group or batch are of
at most 2**10 lengths and 2**10 groups of at most 2**31 each: 2**51.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import structlog

from scheduler.core.effects import Effect
from scheduler.core.events import (
    Event,
    FromAgent,
    FromOperator,
    FromService,
    FromTrainer,
    Tick,
)
from scheduler.core.machine import SchedulerCore
from scheduler.event_log import EventLog
from scheduler.offers import gathered, prompts_wanted
from scheduler.service import Worker
from scheduler.store import Change, SchedulerStore
from transport.runtime.clock import Clock

MAX_INPUT: Final = 20_000
"""Events that wait for the core; more are left in the sockets."""

MAX_BATCH: Final = 256
MAX_TURN_S: Final = 0.005
"""Events handled, and for how long, before sockets and commits have their turn: a bound on the
delay of the first effect."""

EFFECTS_PER_TURN: Final = 128
"""Effects carried out before the others on the loop have their turn."""

MAX_UNCOMMITTED: Final = 8192
"""Events whose changes are not on disk yet."""

MAX_UNLOGGED: Final = 256
"""Events that changed no row and wait to be written to the event log with the next commit."""

CLOCK_COMMIT_S: Final = 5.0
"""The core's clock is stored at least so often, also when no row changes."""

HELD_UP_S: Final = 0.1
"""A timer that is so late means that we were held up: what has arrived meanwhile goes first."""

LAG_PROBE_S: Final = 0.25
LAG_WARNING_S: Final = 0.5
LAG_WINDOW_S: Final = 60.0

_log = structlog.get_logger()


class Decider:
    """``execute`` carries out one effect; it is called on the loop and must not block.
    ``takes_many`` says whether a peer understands several offers in one message, ``prepare`` gives
    an event as the core is to hear it."""

    def __init__(
        self,
        core: SchedulerCore,
        store: SchedulerStore,
        writer: Worker,
        event_log: EventLog,
        clock: Clock,
        execute: Callable[[Effect], None],
        takes_many: Callable[[str], bool] = lambda _peer: False,
        prepare: Callable[[Event], Event] = lambda event: event,
    ) -> None:
        self._core = core
        self._store = store
        self._writer = writer
        self._event_log = event_log
        self._clock = clock
        self._execute = execute
        self._takes_many = takes_many
        self._prepare = prepare
        self._start_s = clock.monotonic_s() - store.now
        self._input: deque[Event] = deque()
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._inputs: list[tuple[float, Event]] = []
        self._effects: list[Effect] = []
        self._leaving: deque[Effect] = deque()
        self._decided_s = store.now
        self._since_due = 0
        self._broken = False
        self._unlogged: list[tuple[float, Event]] = []
        self._unlogged_effects: list[Effect] = []
        self._to_commit = asyncio.Event()
        self._committed = asyncio.Event()
        self.loop_lag_s = 0.0
        """The longest that the event loop was held up within the last minute or so."""
        self.commits = 0

    def now(self) -> float:
        """The core's clock."""
        return self._clock.monotonic_s() - self._start_s

    def put(self, event: Event) -> None:
        """Queue an event for the core."""
        self._input.append(event)
        if len(self._input) >= MAX_INPUT:
            self._room.clear()
        self._wake.set()

    async def has_room(self) -> None:
        """Returns when more input may be taken."""
        await self._room.wait()

    def parts(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What runs until cancelled.

        Raises:
            StoreError: a commit failed.
            InvariantViolation: the core found itself inconsistent.
        """
        return {"decide": self._decide(), "commit": self._commit(), "lag": self._probe_lag()}

    async def flush(self) -> None:
        """Commit what was decided and execute it, for an orderly stop; the parts have ended."""
        self._leave(len(self._leaving))
        if self._inputs or self._unlogged:
            self._decided_s = self.now()
            await self._commit_once()

    # ---- deciding -----------------------------------------------------------------------------

    async def _decide(self) -> None:
        while True:
            await self._wait_for_work()
            while len(self._inputs) >= MAX_UNCOMMITTED:
                self._committed.clear()
                await self._committed.wait()
            try:
                self._handle_some()
            except BaseException as error:
                await self._record_failure(error)
                raise
            if len(self._input) < MAX_INPUT:
                self._room.set()
            self._to_commit.set()

    def _handle_some(self) -> None:
        until = self.now() + MAX_TURN_S
        for _ in range(min(len(self._input), MAX_BATCH)):
            self._handle(self._input.popleft())
            if self._decided_s >= until:
                break
        deadline = self._core.next_deadline()
        # Timers fire only when nothing waits: nobody is lost while their message is queued.
        if deadline is not None and deadline <= self.now():
            if not self._input or self._since_due >= MAX_INPUT:
                self._since_due = 0
                self._handle(Tick())
            else:
                self._since_due += MAX_BATCH

    async def _record_failure(self, error: BaseException) -> None:
        """Keep the evidence; nothing that was decided together with it may leave any more."""
        self._broken = True
        inputs, self._inputs = self._inputs, []
        effects, self._effects = self._effects, []
        _log.critical(
            "core.failed", error=repr(error)[:500], **_sender(inputs[-1][1] if inputs else Tick())
        )
        to_log = [*self._unlogged, *inputs]
        effects_to_log = [*self._unlogged_effects, *effects]
        self._unlogged, self._unlogged_effects = [], []
        await self._writer.run(self._event_log.append, to_log, effects_to_log)

    def _handle(self, event: Event) -> None:
        now = self._decided_s = self.now()
        event = self._prepare(event)
        self._inputs.append((now, event))
        self._effects += self._core.handle(event, now)

    async def _wait_for_work(self) -> None:
        if self._input:
            await asyncio.sleep(0)  # let the sockets and the commits have their turn
            return
        self._wake.clear()
        deadline = self._core.next_deadline()
        if deadline is None:
            await self._wake.wait()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, deadline - self.now())):
                await self._wake.wait()
        if self.now() - deadline > HELD_UP_S:
            for _ in range(4):
                await asyncio.sleep(0)

    # ---- committing ---------------------------------------------------------------------------

    async def _commit(self) -> None:
        while True:
            await self._to_commit.wait()
            self._to_commit.clear()
            if not self._broken:
                await self._commit_once()

    async def _commit_once(self) -> None:
        inputs, self._inputs = self._inputs, []
        # Only now: a row that changed several times since the last commit is written once.
        changes = self._core.take_changes()
        effects, self._effects = self._effects, []
        prompts: dict[str, bytes] = {}
        now = self._decided_s
        self._unlogged += inputs
        self._unlogged_effects += effects
        clock_due = now - self._store.now >= CLOCK_COMMIT_S
        wanted = prompts_wanted(effects)
        if changes or wanted or clock_due or len(self._unlogged) >= MAX_UNLOGGED:
            to_log, self._unlogged = self._unlogged, []
            effects_to_log, self._unlogged_effects = self._unlogged_effects, []
            prompts = await self._writer.run(
                self._write, to_log, effects_to_log, changes, now, wanted
            )
            self.commits += 1
        self._committed.set()
        self._leaving.extend(gathered(effects, prompts, self._takes_many))
        for _ in range(len(self._leaving) // EFFECTS_PER_TURN):
            self._leave(EFFECTS_PER_TURN)
            await asyncio.sleep(0)
        self._leave(EFFECTS_PER_TURN)

    def _leave(self, most: int) -> None:
        """Carry out durable effects."""
        for _ in range(min(most, len(self._leaving))):
            self._execute(self._leaving.popleft())

    def _write(
        self,
        inputs: Sequence[tuple[float, Event]],
        effects: Sequence[Effect],
        changes: Sequence[Change],
        now: float,
        wanted: Sequence[str],
    ) -> dict[str, bytes]:
        """In the writer's thread; gives the prompts of jobs. The log first: an input that broke us
        must be in it."""
        self._event_log.append(inputs, effects)
        self._store.commit(changes, now)
        return self._store.prompts(wanted)

    # ---- lag ----------------------------------------------------------------------------------

    async def _probe_lag(self) -> None:
        window_ends_s = self._clock.monotonic_s() + LAG_WINDOW_S
        worst_s = 0.0
        while True:
            before_s = self._clock.monotonic_s()
            await asyncio.sleep(LAG_PROBE_S)
            now_s = self._clock.monotonic_s()
            lag_s = max(0.0, now_s - before_s - LAG_PROBE_S)
            worst_s = max(worst_s, lag_s)
            self.loop_lag_s = max(self.loop_lag_s, lag_s)
            if lag_s >= LAG_WARNING_S:
                _log.warning("loop.held_up", lag_s=round(lag_s, 3))
            if now_s >= window_ends_s:
                self.loop_lag_s, worst_s = worst_s, 0.0
                window_ends_s = now_s + LAG_WINDOW_S


def _sender(event: Event) -> dict[str, str]:
    """Who said what, for the log."""
    match event:
        case FromAgent(peer, message) | FromTrainer(peer, message) | FromService(peer, message):
            return {"peer": peer, "message": type(message).__name__}
        case FromOperator(peer, _, message):
            return {"peer": peer, "message": type(message).__name__}
        case _:
            return {"event": type(event).__name__}
